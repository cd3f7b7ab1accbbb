"""Source of the compiled binding (`swarmkv_ll._llama`): `cdef.h`, `shim.c` and the cffi builder."""
