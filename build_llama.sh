#!/usr/bin/env bash
# Builds the llama.cpp named in vendor/llama.cpp.lock and installs it into swarmkv_ll/_lib/.
# See `./build_llama.sh --help` and vendor/README.md.
set -Eeuo pipefail
shopt -s inherit_errexit nullglob
export LC_ALL=C                # sorting, number formats and compiler messages that don't depend on the user
unset CDPATH LD_RUN_PATH       # the second would add library paths of this machine to what we build

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
lock_file=$root/vendor/llama.cpp.lock
lib=$root/swarmkv_ll/_lib
unpacked=$root/vendor/llama.cpp
work=$root/vendor/build        # everything this script needs only while it works
log=$work/build.log
peers=(llama-batched-bench llama-server)
tool_names='llama-batched-bench and llama-server'

say()  { printf 'build_llama: %s\n' "$*"; }
fail() { printf 'build_llama: %s\n' "$*" >&2; exit 2; }
trap 'fail "line $LINENO failed unexpectedly: $BASH_COMMAND"' ERR

usage() {
  cat <<'HELP'
Usage: ./build_llama.sh [options]

Downloads the pinned llama.cpp, checks its hash, builds it for this machine's CPU and installs the libraries,
the headers and build-info.json into swarmkv_ll/_lib/. Does nothing when nothing changed.

  --portable     build the CPU code for every kind of processor and choose when loading (takes long)
  --cuda         build the CUDA backend too, as a module beside the CPU's (20 minutes on 2 cores; docs/cuda.md)
  --arch N       GPU architecture for --cuda, e.g. 61 for compute capability 6.1, or native: what the driver says.
                 May be repeated. Default: native where there is a driver with a device, else 61
  --toolkit DIR  CUDA toolkit for --cuda. Default auto: one on this machine that can, else CUDA 12.4 is put together
                 in the cache from packages (455 MB to download; x86_64); the system is not touched
  --plan         say what --cuda would use, need and take, and what is in its way; build nothing
  --source DIR   build a llama.cpp checkout of your own instead of the pinned one
  --again        use the --portable and --source of the last run here; this is what pip does
  --tools        build llama-batched-bench and llama-server of the same source instead, to measure against. They use
                 the libraries in swarmkv_ll/_lib, which are built first if absent, and are put into the cache
  --jobs N       compile N files at a time (default: one per processor, fewer if memory is short)
  --clean        remove everything built or unpacked here, and this configuration's cached build and tools, then stop
  --help         show this text

pip runs this script by itself, with --again or with the options in SWARMKV_BUILD_OPTIONS. CC, CXX, CFLAGS, CXXFLAGS,
LDFLAGS and PYTHON are respected. Downloads and finished builds are kept in
$XDG_CACHE_HOME/swarmkv-ll (default ~/.cache/swarmkv-ll), so that a second clone neither downloads nor compiles.
HELP
}

# ---------------------------------------------------------------- options

target=libraries portable=no source_dir='' jobs='' again=no clean=no cuda=no asked=() toolkit='' plan=no tools=no
needs_value() { [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value, see --help"; }
while [[ $# -gt 0 ]]; do
  case $1 in
    --portable) portable=yes ;;
    --cuda) cuda=yes ;;
    --arch) needs_value "$@"; asked+=("$2"); shift ;;
    --toolkit) needs_value "$@"; toolkit=$2; shift ;;
    --plan) plan=yes ;;
    --source) needs_value "$@"; source_dir=$2; shift ;;
    --tools) tools=yes ;;
    --jobs) needs_value "$@"; jobs=$2; shift ;;
    --again) again=yes ;;
    --clean) clean=yes ;;
    --help | -h) usage; exit 0 ;;
    *) fail "unknown option $1, see --help" ;;
  esac
  shift
done
[[ -z $jobs || $jobs =~ ^[1-9][0-9]*$ ]] || fail "--jobs needs a positive number, not '$jobs'"

if [[ $tools == yes ]]; then
  [[ $portable == no && -z $source_dir && $cuda == no ]] ||
    fail "--tools goes with neither --portable nor --source nor --cuda: it builds on the libraries that are in swarmkv_ll/_lib"
  target=tools log=$work/tools.log again=no
fi
if [[ $cuda == yes ]]; then
  target=cuda log=$work/cuda.log
  # The module goes beside the libraries that are there, whatever they were built with.
  if [[ $portable == no && -z $source_dir ]]; then again=yes; fi
elif [[ ${#asked[@]} -gt 0 || -n $toolkit || $plan == yes ]]; then
  fail "--arch, --toolkit and --plan are about the CUDA backend: give --cuda with them"
fi

if [[ $again == yes && -f $work/options ]]; then
  { read -r portable; read -r source_dir; } <"$work/options"
fi

# ---------------------------------------------------------------- the pin, or a checkout of the user's own

pin() { sed -n "s/^$1 *= *\"\([^\"]*\)\".*/\1/p" "$lock_file"; }

[[ -r $lock_file ]] || fail "$lock_file is missing: this script runs from a clone or a source package"
package=$(pin package) version=$(pin version) sdist=$(pin sdist) sha256=$(pin sha256)
folder=$(pin folder) commit=$(pin commit)
[[ $sha256 =~ ^[0-9a-f]{64}$ && $commit =~ ^[0-9a-f]{40}$ && -n $package && -n $version && -n $sdist && -n $folder ]] ||
  fail "$lock_file lacks package, version, sdist, sha256, folder or commit"

# All that a build of the libraries, or of the CUDA module, reads.
engine_parts=(CMakeLists.txt LICENSE cmake ggml include licenses src vendor)

if [[ -n $source_dir ]]; then
  for part in CMakeLists.txt include/llama.h ggml/include/ggml.h src/CMakeLists.txt; do
    [[ -f $source_dir/$part ]] || fail "--source $source_dir is not a llama.cpp checkout: it has no $part"
  done
  source_dir=$(cd -- "$source_dir" && pwd -P)
  # A checkout changes under our hands, committed or not: what it holds is what identifies it.
  tree=$(cd "$source_dir" && find "${engine_parts[@]}" -type f -print0 2>/dev/null | sort -z |
    xargs -0 sha256sum | sha256sum | cut -c1-40) || true
  [[ $tree =~ ^[0-9a-f]{40}$ ]] || fail "--source $source_dir cannot be read"
  source_id=tree:${tree:0:12} engine=$source_dir identity=${tree:0:12}
else
  source_id=pin engine=$unpacked identity=${commit:0:12}
fi

# ---------------------------------------------------------------- Python and the compiler

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no Python found as '$python': install python3 or set PYTHON"

# find_compiler VARIABLE CANDIDATE...: what the user set (it may carry arguments: "ccache gcc"), or the first there is.
find_compiler() {
  local variable=$1 candidate; shift
  if [[ -n ${!variable:-} ]]; then
    set -- "${!variable}"
  fi
  for candidate; do
    if command -v "${candidate%% *}" >/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "no compiler found ($variable: $*): install one, e.g. apt-get install g++, or set CC and CXX"
}
CC=$(find_compiler CC cc gcc clang) || exit 2
CXX=$(find_compiler CXX c++ g++ clang++) || exit 2
export CC CXX
compiler_id=$({ $CC --version | sed -n 1p && $CXX --version | sed -n 1p && $CC -dumpmachine; } 2>/dev/null) ||
  fail "the compiler '$CC' or '$CXX' does not answer --version"

# ---------------------------------------------------------------- flags

# Everything here shapes libllama, libggml or libggml-base and is part of the stamp the extension is compiled against.
core_flags=(
  -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_C_FLAGS=${CFLAGS:-}"
  "-DCMAKE_CXX_FLAGS=${CXXFLAGS:-}"
  "-DCMAKE_SHARED_LINKER_FLAGS=${LDFLAGS:+$LDFLAGS }-Wl,--build-id=sha1"
  -DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON     # plain files: a wheel cannot carry symbolic links
  -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
  '-DCMAKE_INSTALL_RPATH=$ORIGIN'
  -DBUILD_SHARED_LIBS=ON
  -DGGML_BACKEND_DL=ON
  -DGGML_NATIVE=OFF                           # cannot go with loadable backends: instruction sets are named below
  -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_COMMON=OFF
  -DLLAMA_BUILD_EXAMPLES=OFF
  -DLLAMA_BUILD_SERVER=OFF
  -DLLAMA_BUILD_TESTS=OFF
  -DLLAMA_BUILD_TOOLS=OFF
)

# Option of ggml, flag of the compiler, and the names in /proc/cpuinfo that must all be there.
x86_sets='
SSE42       -msse4.2     sse4_2
AVX         -mavx        avx
AVX2        -mavx2       avx2
FMA         -mfma        fma
F16C        -mf16c       f16c
BMI2        -mbmi2       bmi2
AVX_VNNI    -mavxvnni    avx_vnni
AVX512      -mavx512f    avx512f avx512cd avx512vl avx512dq avx512bw
AVX512_VBMI -mavx512vbmi avx512vbmi avx512bw
AVX512_VNNI -mavx512vnni avx512_vnni avx512bw
AVX512_BF16 -mavx512bf16 avx512_bf16 avx512bw
AMX_TILE    -mamx-tile   amx_tile
AMX_INT8    -mamx-int8   amx_int8
AMX_BF16    -mamx-bf16   amx_bf16'

# Extension of GCC's -march=armv8.2-a, and the names in /proc/cpuinfo that must all be there.
arm_sets='
dotprod asimddp
fp16    asimdhp fphp
i8mm    i8mm
sve     sve
sve2    sve2'

compiler_takes() { $CC "$@" -E -x c /dev/null >/dev/null 2>&1; }

# has_all "NAMES OF THE MACHINE" NAME...
has_all() {
  local have=" $1 " name; shift
  for name; do
    [[ $have == *" $name "* ]] || return 1
  done
}

cpu_flags=() instruction_sets=()
cpu_features=$(sed -En '/^(flags|Features)[[:space:]]*:/{s/^[^:]*: *//p;q}' /proc/cpuinfo)
if [[ $portable == yes ]]; then
  cpu_flags=(-DGGML_CPU_ALL_VARIANTS=ON)
else
  case $(uname -m) in
    x86_64)
      while read -r option flag names; do
        # shellcheck disable=SC2086 # names are words
        if has_all "$cpu_features" $names && compiler_takes "$flag"; then
          cpu_flags+=("-DGGML_$option=ON") instruction_sets+=("$option")
        else
          cpu_flags+=("-DGGML_$option=OFF")
        fi
      done <<<"${x86_sets#?}" ;;
    aarch64)
      arm_arch=armv8-a
      if has_all "$cpu_features" asimddp; then arm_arch=armv8.2-a; fi
      while read -r extension names; do
        # shellcheck disable=SC2086
        if [[ $arm_arch != armv8-a ]] && has_all "$cpu_features" $names && compiler_takes "-march=$arm_arch+$extension"; then
          arm_arch+=+$extension instruction_sets+=("$extension")
        fi
      done <<<"${arm_sets#?}"
      cpu_flags=("-DGGML_CPU_ARM_ARCH=$arm_arch") ;;
    *) fail "this processor ($(uname -m)) is not supported: x86_64 and aarch64 are" ;;
  esac
fi
flags=("${core_flags[@]}" "${cpu_flags[@]}")

digest() { sha256sum | cut -d' ' -f1; }
core_digest=$(printf '%s\n' "${core_flags[@]}" | digest)
stamp=$identity-${core_digest:0:8}

# ---------------------------------------------------------------- the steps whose result is cached
# A change in one of these functions makes a cached build stale, a change elsewhere in this file does not.

configure() {  # SOURCE BUILD
  # __FILE__ and the like must not depend on where this clone lies, so that every clone gets the same build ids.
  local maps
  maps=$(printf -- '-ffile-prefix-map=%q=. -ffile-prefix-map=%q=build' "$1" "$2")
  # Without GIT_EXE=OFF ggml would record the commit of the git repository it happens to lie in: this one.
  cmake -S "$1" -B "$2" -G Ninja "${flags[@]}" \
    "-DCMAKE_C_FLAGS=${CFLAGS:+$CFLAGS }$maps" "-DCMAKE_CXX_FLAGS=${CXXFLAGS:+$CXXFLAGS }$maps" \
    "-DCMAKE_MODULE_LINKER_FLAGS=${LDFLAGS:+$LDFLAGS }-Wl,--build-id=sha1" \
    -DGIT_EXE=OFF "-DLLAMA_BUILD_COMMIT=$stamp" "-DGGML_BUILD_COMMIT=$stamp" -DLLAMA_BUILD_NUMBER=0
}

stage() {  # SOURCE BUILD STAGE: lay out what goes into swarmkv_ll/_lib
  local file
  mkdir -p "$3/include" "$3/licenses"
  cp "$2"/bin/libllama.so "$2"/bin/libggml.so "$2"/bin/libggml-base.so "$2"/bin/libggml-cpu*.so "$3/"
  cp "$1/include/llama.h" "$1"/ggml/include/{ggml,ggml-alloc,ggml-backend,ggml-cpu,ggml-opt,gguf}.h "$3/include/"
  cp "$1/LICENSE" "$3/licenses/LICENSE.llama.cpp"
  for file in "$1"/licenses/*; do cp "$file" "$3/licenses/"; done
  file=$1/ggml/src/ggml-cpu/llamafile/sgemm.cpp   # compiled into the CPU backend under a notice of its own
  if [[ -f $file ]]; then
    sed -n '/^\/\//!q; s/^\/\/ \{0,1\}//p' "$file" >"$3/licenses/LICENSE.llamafile-sgemm"
  fi
}

# Checks the staged libraries by loading them, and writes build-info.json.
write_build_info() {  # STAGE
  "$python" - "$1" "${flags[@]}" <<'PYTHON'
import ctypes, datetime, json, os, pathlib, struct, sys

stage, flags, env = pathlib.Path(sys.argv[1]), sys.argv[2:], os.environ


def build_id(path):
    """The GNU build id of a little-endian 64-bit ELF file, from its notes."""
    data = path.read_bytes()
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, start + index * size)
        end = offset + length
        while kind == 4 and offset < end:  # PT_NOTE
            n_name, n_desc, note = struct.unpack_from("<III", data, offset)
            name, desc = offset + 12, offset + 12 + (n_name + 3) // 4 * 4
            if note == 3 and data[name:name + 4] == b"GNU\0":
                return data[desc:desc + n_desc].hex()
            offset = desc + (n_desc + 3) // 4 * 4
    sys.exit(f"{path.name} has no build id")


try:
    base = ctypes.CDLL(str(stage / "libggml-base.so"))
    ctypes.CDLL(str(stage / "libllama.so"))
    base.ggml_commit.restype = ctypes.c_char_p
    carried = base.ggml_commit().decode()
except (OSError, AttributeError) as error:
    sys.exit(f"the libraries cannot be used: {error}")
if carried != env["STAMP"]:
    sys.exit(f"libggml-base.so says it is {carried}, not {env['STAMP']}")

info = {
    "stamp": env["STAMP"],
    "source": env["SOURCE_ID"],
    "commit": env["COMMIT"],
    "package": env["PACKAGE"] or None,
    "version": env["VERSION"] or None,
    "sdist_sha256": env["SHA256"] or None,
    "flags": flags,
    "cpu": env["CPU"],
    "instruction_sets": env["INSTRUCTION_SETS"].split(),
    "compiler": env["COMPILER"],
    "build_ids": {name: build_id(stage / name) for name in ("libllama.so", "libggml.so", "libggml-base.so")},
    "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "key": env["KEY"],
    "files": {str(p.relative_to(stage)): p.stat().st_size for p in sorted(stage.rglob("*")) if p.is_file()},
}
(stage / "build-info.json").write_text(json.dumps(info, indent=2) + "\n")
PYTHON
}

recipe=$(declare -f configure stage write_build_info)
toolchain=$compiler_id$'\n'$(uname -m)$'\n'$(getconf GNU_LIBC_VERSION 2>/dev/null || true)
key=$(printf '%s\n' "$recipe" "$toolchain" "${flags[@]}" "${tree:-$sha256}" "$stamp" | digest)
key=${key:0:32}

# ---------------------------------------------------------------- the same for --tools

tools_parts=(common ggml/include include scripts/ui-assets.cmake src/llama-ext.h tools/{batched-bench,mtmd,server}
  tools/ui/{CMakeLists.txt,ui.cpp.in,ui.h.in} vendor)

configure_tools() {  # SOURCE BUILD
  local maps
  maps=$(printf -- '-ffile-prefix-map=%q=. -ffile-prefix-map=%q=build' "$1" "$2")
  cmake -S "$root/vendor/tools" -B "$2" -G Ninja "-DENGINE=$1" "-DLIB=$lib" "-DLLAMA_BUILD_COMMIT=$stamp" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_SKIP_RPATH=ON "-DCMAKE_EXE_LINKER_FLAGS=${LDFLAGS:-}" \
    "-DCMAKE_C_FLAGS=${CFLAGS:+$CFLAGS }$maps" "-DCMAKE_CXX_FLAGS=${CXXFLAGS:+$CXXFLAGS }$maps"
}

# Checks the tools by running them as they are meant to be run: LD_LIBRARY_PATH names the libraries, and the current
# folder is where the engine looks for its CPU backends.
stage_tools() {  # BUILD STAGE
  local tool said
  mkdir "$2"
  for tool in "${peers[@]}"; do
    cp "$1/bin/$tool" "$2/" || return
    said=$(cd "$lib" && LD_LIBRARY_PATH=$lib "$2/$tool" --version 2>&1) && [[ $said == *"$stamp"* ]] || {
      printf '%s does not run, or is not of %s:\n%s\n' "$tool" "$stamp" "$said"
      return 1
    }
  done
  "$python" - "$2" <<'PYTHON'
import datetime, json, os, pathlib, sys

stage, env = pathlib.Path(sys.argv[1]), os.environ
info = {
    "stamp": env["STAMP"],
    "commit": env["COMMIT"],
    "package": env["PACKAGE"],
    "version": env["VERSION"],
    "sdist_sha256": env["SHA256"],
    "compiler": env["COMPILER"],
    "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "key": env["KEY"],
    "files": {path.name: path.stat().st_size for path in sorted(stage.iterdir())},
}
(stage / "build-info.json").write_text(json.dumps(info, indent=2) + "\n")
PYTHON
}

# ---------------------------------------------------------------- folders, locks, space

# usable DIR: it exists or can be made, and a file can be written into it.
usable() {
  { mkdir -p "$1" && : >"$1/.writable" && rm -f "$1/.writable"; } 2>/dev/null
}

usable "$work" || fail "cannot write into $work: make this clone writable"
usable "${lib%/*}" || fail "cannot write into ${lib%/*}: make this clone writable"
[[ ! -e $lib || -d $lib ]] || fail "$lib is in the way: it is not a folder"
usable "${unpacked%/*}" || fail "cannot write into ${unpacked%/*}: make this clone writable"
[[ ! -e $unpacked || -d $unpacked ]] || fail "$unpacked is in the way: it is not a folder"

# state DIR: "whole" when DIR holds a finished build of exactly this $key, otherwise what is wrong with it.
state() {
  [[ -d $1 ]] || { echo absent; return; }
  if [[ $target == cuda ]]; then module_state "$1"; return; fi
  "$python" - "$1" "$key" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
try:
    info = json.loads((folder / "build-info.json").read_text())
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    damaged = any(sizes.get(name) != size for name, size in info["files"].items())
    print("damaged" if damaged else "whole" if info["key"] == sys.argv[2] else "other")
except (OSError, ValueError, KeyError):
    print("unfinished")
PYTHON
}

# libraries_stamp: of what is in _lib, as swarmkv_ll.runtime.STAMP has it; fails if that is not the pinned llama.cpp.
libraries_stamp() {
  "$python" - "$lib/build-info.json" "$commit" <<'PYTHON'
import json, sys

info = json.load(open(sys.argv[1]))
if info["source"] != "pin" or info["commit"] != sys.argv[2]:
    sys.exit(1)
print(info["stamp"], info["build_ids"]["libllama.so"][:16], sep="/")
PYTHON
}

cache=${XDG_CACHE_HOME:-${HOME:-/dev/null}/.cache}/swarmkv-ll
if ! usable "$cache"; then
  say "cannot write into the cache $cache: keeping downloads in this clone and going on without it"
  cache=$work/cache
fi

# Some files of llama.cpp need a gigabyte to compile: more compilers than memory would only bring the machine down.
if [[ -z $jobs ]]; then
  jobs=$(nproc)
  fitting=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
  if [[ -n $fitting && $fitting -lt $jobs ]]; then jobs=$((fitting > 0 ? fitting : 1)); fi
fi

mount_of() { df -P "$1" | awk 'NR == 2 { print $6 }'; }
free_mib() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1024) }'; }

# needed_space: sets work_mib and cache_mib. Measured, and rounded up: sources, objects and libraries here; cmake, the
# finished build and a CUDA toolkit in the cache.
needed_space() {
  work_mib=150 cache_mib=150
  if [[ $portable == yes ]]; then work_mib=250; fi
  if [[ -z $source_dir && ! -f $cache/downloads/$sdist ]]; then
    work_mib=$((work_mib + 400)) cache_mib=$((cache_mib + 200))   # pip unpacks the package to read its metadata
  fi
  if [[ $target == cuda ]]; then cuda_space; fi
}

# lacking_space: which folder has too little, in one line; nothing if there is enough.
lacking_space() {
  local work_mib cache_mib
  needed_space
  lacks() {  # DIR MIB
    [[ $(free_mib "$1") -ge $2 ]] || echo "not enough disk space in $1: $(free_mib "$1") MiB free, $2 MiB needed"
  }
  if [[ $(mount_of "$work") == "$(mount_of "$cache")" ]]; then
    lacks "$work" $((work_mib + cache_mib))
  else
    { lacks "$work" $work_mib; lacks "$cache" $cache_mib; } | sed -n 1p
  fi
}

if [[ $target == cuda ]]; then
  . "$root/vendor/cuda/steps.sh"
  choose_cuda                  # before anything is changed
  if [[ $plan == yes ]]; then
    print_plan
    exit $((${#obstacles[@]} > 0 ? 2 : 0))
  fi
  [[ ${#obstacles[@]} -eq 0 || $clean == yes ]] || fail "${obstacles[0]}; nothing was changed"
fi

# The libraries first, in a run of its own that has the lock to itself.
libraries_first() {
  "$BASH" "${BASH_SOURCE[0]}" ${jobs:+--jobs "$jobs"} "$@" || exit
}
if [[ $clean == no ]]; then
  if [[ $target == tools && ! $(state "$lib") =~ ^(whole|other)$ ]]; then
    libraries_first --again
  elif [[ $target == cuda ]]; then
    library_options=()
    if [[ $portable == yes ]]; then library_options=(--portable); fi
    libraries_first "${library_options[@]}" ${source_dir:+--source "$source_dir"}
  fi
fi

# hold_lock FD WHAT: wait for another run. The lock ends with this process and its compilers, however they end.
hold_lock() {
  if ! flock -n "$1"; then
    say "waiting for another build of $2"
    flock "$1"
  fi
}
exec 9>"$work/lock"
hold_lock 9 "this clone"

# ---------------------------------------------------------------- what is there already

remember_options() { printf '%s\n' "$portable" "$source_dir" >"$work/options"; }

cached=$cache/builds/$key

if [[ $clean == yes ]]; then
  rm -rf "$lib" "$unpacked" "$cached" "$cache/tools/$stamp" ${cached_module:+"$cached_module"}
  find "$work" -mindepth 1 -maxdepth 1 ! -name lock -exec rm -rf {} +
  say "removed what was built and unpacked here; downloads stay in $cache/downloads"
  exit 0
fi

# replace_lib DIR: put a complete DIR in the place of _lib. Whenever this is killed, _lib is either whole or absent, and
# a process that has the old libraries open keeps them.
replace_lib() {
  if [[ -d $lib ]]; then mv "$lib" "$work/old"; fi
  mv "$1" "$lib"
  rm -rf "$work/old"
}

install_lib() {  # DIR
  local had_cuda=no
  if [[ -f $lib/cuda-info.json ]]; then had_cuda=yes; fi
  replace_lib "$1"
  remember_options
  if [[ $had_cuda == yes ]]; then
    say "the CUDA module went with the libraries that were there: ./build_llama.sh --cuda adds it again"
  fi
}

# use_cached: $cached is whole.
use_cached() {
  if [[ $target == tools ]]; then
    say "nothing to do: $tool_names are in $cached"
    return
  elif [[ $target == cuda ]]; then
    install_module "$cached"
    say "swarmkv_ll/_lib/libggml-cuda.so is ready for $architectures, copied from the build cache"
    return
  fi
  cp -R "$cached" "$work/stage" 2>>"$log" || fail "cannot copy the cached build $cached (disk full?): see $log"
  install_lib "$work/stage"
  say "swarmkv_ll/_lib is ready: stamp $stamp, copied from the build cache"
}

if [[ $target == tools ]]; then
  # From here on this run is about the tools: what is unpacked and built, and where it ends up.
  stamp=$(libraries_stamp 2>/dev/null) ||
    fail "--tools builds on the pinned llama.cpp, but swarmkv_ll/_lib holds another: run ./build_llama.sh first"
  recipe=$(declare -f configure_tools stage_tools && cat "$root/vendor/tools/CMakeLists.txt")
  key=$(printf '%s\n' "$recipe" "${tools_parts[@]}" "$toolchain" "${CFLAGS:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}" \
    "$sha256" "$stamp" | digest)
  key=${key:0:32}
  cached=$cache/tools/$stamp build=$work/tools configuration=$key
  unpacked=$work/tools-source unpacked_id=$key engine=$work/tools-source parts=("${tools_parts[@]}")
  if [[ $(state "$cached") == whole ]]; then
    use_cached
    exit 0
  fi
elif [[ $target == cuda ]]; then
  key=$module_key cached=$cached_module build=$work/cuda unpacked_id=$sha256 parts=("${engine_parts[@]}")
  configuration=$(printf '%s\n' "$module_objects" "$toolkit" "$host_compiler" "$engine" | digest)
  if [[ $(state "$lib") == whole ]]; then
    say "nothing to do: swarmkv_ll/_lib/libggml-cuda.so is up to date ($architectures)"
    exit 0
  fi
else
  build=$work/tree unpacked_id=$sha256 parts=("${engine_parts[@]}")
  configuration=$(printf '%s\n' "$recipe" "$toolchain" "${flags[@]}" "$engine" "${source_dir:-$sha256}" | digest)
  lib_state=$(state "$lib")
  case $lib_state in
    whole)
      remember_options
      say "nothing to do: swarmkv_ll/_lib is up to date (stamp $stamp)"
      exit 0 ;;
    unfinished | damaged) say "swarmkv_ll/_lib is $lib_state (an interrupted build?): repairing it" ;;
  esac
fi

# Leftovers of a run that was killed.
rm -rf "$work"/{tmp,stage,old,unpack,with-cuda}
mkdir -p "$work/tmp"
export TMPDIR=$work/tmp        # pip and the compiler: one place to check for space, and to clean up
trap 'rm -rf "$work/tmp"' EXIT

: >"$log"
if [[ -z $source_dir ]]; then
  case $(state "$cached") in
    whole) use_cached; exit 0 ;;
    absent) ;;
    *) rm -rf "$cached" ;;
  esac
  if usable "${cached%/*}"; then
    exec 8>"$cached.lock"
    hold_lock 8 "this configuration"        # another clone may be compiling just this
    if [[ $(state "$cached") == whole ]]; then
      use_cached
      exit 0
    fi
  elif [[ $target == tools ]]; then
    fail "cannot write into ${cached%/*}"
  fi
fi

space=$(lacking_space)
[[ -z $space ]] || fail "$space"

echo 'int main() { return __cplusplus >= 201703L ? 0 : 1; }' >"$TMPDIR/probe.cpp"
$CXX -std=c++17 -c "$TMPDIR/probe.cpp" -o "$TMPDIR/probe.o" 2>>"$log" ||
  fail "the C++ compiler '$CXX' does not compile C++17 (see $log): install a newer one or set CXX"

# ---------------------------------------------------------------- pip, cmake, ninja

# When pip builds this package, it runs us in an environment that hides the interpreter's own pip through PYTHONPATH.
find_pip() {
  local python_alone=(env -u PYTHONPATH "$python")
  if "$python" -m pip --version >/dev/null 2>&1; then
    pip=("$python" -m pip)
  elif "${python_alone[@]}" -m pip --version >/dev/null 2>&1; then
    pip=("${python_alone[@]}" -m pip)
  else
    fail "'$python' has no pip, which is needed for downloads: install python3-pip or run this in a virtual environment"
  fi
  pip+=(--disable-pip-version-check --no-input)
}

cmake_is_usable() {
  local have
  have=$(cmake --version 2>/dev/null | sed -n '1s/^cmake version //p') || return 1
  [[ -n $have && $(printf '%s\n' 3.18 "$have" | sort -V | head -n1) == 3.18 ]]
}
ninja_is_usable() { ninja --version >/dev/null 2>&1; }

if ! cmake_is_usable || ! ninja_is_usable; then
  programs=$cache/tools-$(uname -m)
  if [[ ! -d $programs ]]; then
    say "getting cmake and ninja from the Python package index"
    find_pip
    "${pip[@]}" install -q --target "$work/tmp/tools" 'cmake>=3.18' ninja >>"$log" 2>&1 ||
      fail "cmake (3.18 or newer) and ninja are absent and pip could not get them: $(grep -m1 ERROR "$log" || true)"
    # Another clone may have been faster; its copy is as good.
    mv -T "$work/tmp/tools" "$programs" 2>/dev/null || [[ -d $programs ]]
  fi
  PATH=$programs/cmake/data/bin:$programs/bin:$PATH
  cmake_is_usable && ninja_is_usable || fail "the cmake or ninja in $programs does not run: remove that folder and try again"
fi

# ---------------------------------------------------------------- download, verify, unpack

download() {
  local reason
  find_pip
  say "downloading $package $version ($(pin size))"
  printf '%s==%s --hash=sha256:%s\n' "$package" "$version" "$sha256" >"$TMPDIR/requirements.txt"
  # With a hash in the requirement pip refuses another file before it opens it.
  if ! "${pip[@]}" download -q --no-deps --no-binary "$package" --require-hashes -r "$TMPDIR/requirements.txt" \
    -d "$TMPDIR/download" >>"$log" 2>&1; then
    reason=$(awk '/Expected sha256/ { e = $3 } /^ *Got / { print "hash mismatch: expected sha256 " e ", got " $2; exit }' "$log")
    [[ -n $reason ]] || reason=$(grep ERROR "$log" | tail -n1 || true)
    fail "cannot download $package $version: ${reason:-see $log}. Offline, put $sdist into $cache/downloads"
  fi
  mkdir -p "$cache/downloads"
  cp "$TMPDIR/download/$sdist" "$cache/downloads/.$sdist.$$" && mv "$cache/downloads/.$sdist.$$" "$cache/downloads/$sdist" ||
    fail "cannot write into $cache/downloads"
  rm -rf "$TMPDIR/download"
}

unpack() {
  local archive=$cache/downloads/$sdist actual
  [[ -f $archive ]] || download
  actual=$(digest <"$archive")
  if [[ $actual != "$sha256" ]]; then
    rm -f "$archive"
    fail "hash mismatch in $sdist: expected sha256 $sha256, got $actual; nothing was unpacked, the file was removed"
  fi
  mkdir "$work/unpack"
  # Unpacked aside and renamed when complete: vendor/llama.cpp is never half there.
  "$python" - "$archive" "$work/unpack" "${sdist%.tar.gz}/$folder" "${parts[@]}" \
    2>>"$log" <<'PYTHON' || fail "cannot unpack $archive: $(tail -n1 "$log")"
import sys, tarfile

archive, target, folder, *parts = sys.argv[1:]
wanted = [f"{folder}/{part}" for part in parts]
with tarfile.open(archive) as tar:
    for member in tar:
        if (member.isfile() or member.isdir()) and any(f"{member.name}/".startswith(f"{name}/") for name in wanted):
            member.name = member.name[len(folder) + 1:]
            tar.extract(member, target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
PYTHON
  printf '%s\n' "$unpacked_id" >"$work/unpack/.pin"
  rm -rf "$unpacked"
  mv "$work/unpack" "$unpacked"
}

if [[ -z $source_dir && ! ( -f $unpacked/.pin && $(<"$unpacked/.pin") == "$unpacked_id" ) ]]; then
  unpack
fi

# ---------------------------------------------------------------- build

# An unfinished build goes on where it stopped, unless it was one of something else.
if [[ -d $build ]]; then
  if [[ -f $build/.configuration && $(<"$build/.configuration") == "$configuration" ]]; then
    if [[ -z $source_dir ]]; then say "continuing an unfinished build"; fi
  else
    say "discarding an unfinished build with other settings"
    rm -rf "$build"
  fi
fi
mkdir -p "$build"
printf '%s\n' "$configuration" >"$build/.configuration"

failed_step() {
  {
    printf 'build_llama: %s failed; the last lines of %s:\n' "$1" "$log"
    tail -n 20 "$log" | sed 's/^/  /'
  } >&2
  exit 2
}

keep_in_cache() {
  { mkdir -p "${cached%/*}" && cp -R "$work/stage" "$cached.$$" && mv -T "$cached.$$" "$cached"; } 2>>"$log" ||
    { rm -rf "$cached.$$"; return 1; }
}

if [[ $target == tools ]]; then
  say "building $tool_names with $jobs jobs; log: vendor/build/tools.log"
  SECONDS=0
  configure_tools "$engine" "$build" >>"$log" 2>&1 || failed_step "configuring the tools"
  cmake --build "$build" --target "${peers[@]}" --parallel "$jobs" >>"$log" 2>&1 || failed_step "compiling the tools"
  STAMP=$stamp COMMIT=$commit PACKAGE=$package VERSION=$version SHA256=$sha256 KEY=$key \
    COMPILER=$(head -n1 <<<"$compiler_id") stage_tools "$build" "$work/stage" >>"$log" 2>&1 ||
    failed_step "checking the tools"
  keep_in_cache || fail "cannot write $cached (disk full?): see $log"
  rm -rf "$build" "$unpacked" "$work/stage"
  say "$tool_names are ready in $cached, built in $((SECONDS / 60)) min $((SECONDS % 60)) s"
  exit 0
fi

if [[ $target == cuda ]]; then
  if [[ $assembled == yes && ! -d $toolkit ]]; then
    exec 7>"$toolkit.lock"
    hold_lock 7 "the CUDA toolkit"
    if [[ ! -d $toolkit ]]; then
      say "putting CUDA $cuda_version together in $toolkit"
      toolkit_py assemble --cache "$cache" || exit 2
    fi
    exec 7>&-
  fi
  say "building the CUDA module for $architectures with CUDA $cuda_version, $host_compiler and $jobs jobs (about" \
    "$(expected_minutes) minutes); log: vendor/build/cuda.log"
  SECONDS=0
  configure_cuda "$engine" "$build" >>"$log" 2>&1 || failed_step "configuring the CUDA module"
  cmake --build "$build" --target ggml-cuda --parallel "$jobs" >>"$log" 2>&1 || failed_step "compiling the CUDA module"
  STAMP=$stamp TOOLKIT=$cuda_version COMPILER=$host_compiler_id KEY=$key stage_cuda "$build" "$work/stage" >>"$log" 2>&1 ||
    failed_step "checking the CUDA module"
  if [[ -z $source_dir ]]; then
    keep_in_cache || say "could not keep a copy in the cache $cache"
    rm -rf "$build"
  fi
  install_module "$work/stage"
  rm -rf "$work/stage"
  say "swarmkv_ll/_lib/libggml-cuda.so is ready for $architectures, built in $((SECONDS / 60)) min $((SECONDS % 60)) s"
  exit 0
fi

cpu=native
if [[ $portable == yes ]]; then cpu=portable; fi
say "building llama.cpp $identity ($cpu CPU backend${instruction_sets[*]:+: ${instruction_sets[*]}}) with $jobs jobs; log: vendor/build/build.log"
SECONDS=0
configure "$engine" "$build" >>"$log" 2>&1 || failed_step "configuring llama.cpp"
cmake --build "$build" --target llama --parallel "$jobs" >>"$log" 2>&1 || failed_step "compiling llama.cpp"

stage "$engine" "$build" "$work/stage" >>"$log" 2>&1 || failed_step "collecting the libraries"
if [[ $portable == yes ]]; then
  for module in "$work"/stage/libggml-cpu-*.so; do
    module=${module##*/libggml-cpu-} instruction_sets+=("${module%.so}")
  done
fi
if [[ -n $source_dir ]]; then
  package='' version='' sha256=''
  commit=$(git -C "$source_dir" describe --always --abbrev=40 --dirty --exclude='*' 2>/dev/null || echo unknown)
fi
STAMP=$stamp SOURCE_ID=$source_id COMMIT=$commit PACKAGE=$package VERSION=$version SHA256=$sha256 KEY=$key CPU=$cpu \
  INSTRUCTION_SETS="${instruction_sets[*]}" COMPILER=$(head -n1 <<<"$compiler_id") \
  write_build_info "$work/stage" >>"$log" 2>&1 || failed_step "checking the libraries"

if [[ -z $source_dir ]]; then
  # Into the cache for the next clone; a full or read-only cache is no reason to fail now.
  keep_in_cache || say "could not keep a copy in the cache $cache"
  rm -rf "$build"              # a --source build stays: it is compiled again, in part, after each edit
fi
install_lib "$work/stage"
say "swarmkv_ll/_lib is ready: stamp $stamp, built in $((SECONDS / 60)) min $((SECONDS % 60)) s"
