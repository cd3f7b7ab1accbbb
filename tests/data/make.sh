#!/usr/bin/env bash
# Makes the fat binaries of this folder: one kernel of our own, written by two toolkits.
#   CUDA12=bin-folder-of-12.4 CUDA13=bin-folder-of-13.0 tests/data/make.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
here=$PWD
cd "$work"

# cuda12.fatbin: sm_61 twice, sm_90a, and PTX of both, some of it compressed; nothing of an ELF around it.
images=()
for arch in 61 90a; do
  sed "s/@ARCH@/$arch/" > $arch.ptx <<'PTX'
.version 8.0
.target sm_@ARCH@
.address_size 64
.visible .entry seven(.param .u64 to) {
  .reg .b64 %at<3>;
  .reg .b32 %seven;
  ld.param.u64 %at1, [to];
  cvta.to.global.u64 %at2, %at1;
  mov.u32 %seven, 7;
  st.global.u32 [%at2], %seven;
  ret;
}
PTX
  "$CUDA12/ptxas" -arch=sm_$arch $arch.ptx -o $arch.cubin
  images+=("--image3=kind=elf,sm=$arch,file=$arch.cubin" "--image3=kind=ptx,sm=$arch,file=$arch.ptx")
done
"$CUDA12/fatbinary" -64 --compress-all --create="$here/cuda12.fatbin" "${images[@]}" \
  --image3=kind=elf,sm=61,file=61.cubin

# cuda13.obj: what nvcc makes of one source file, for -rdc too; sm_75, sm_120f and PTX of 100f.
echo '__global__ void seven(int * to) { *to = 7; }' > seven.cu
"$CUDA13/nvcc" -dc -Xfatbin -compress-all -gencode arch=compute_75,code=sm_75 \
  -gencode arch=compute_120f,code=sm_120f -gencode arch=compute_100f,code=compute_100f seven.cu -o "$here/cuda13.obj"
strip --strip-debug "$here/cuda13.obj"
