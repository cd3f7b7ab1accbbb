"""`python -m swarmkv_ll` is the `swarmkv` command."""

from .cli import main

main()
