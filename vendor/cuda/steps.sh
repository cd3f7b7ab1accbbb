# shellcheck shell=bash disable=SC2034,SC2154 # read by ../../build_llama.sh --cuda, and uses its variables
#
# What is particular to the CUDA module: the choice of toolkit, the plan, and the steps whose result is cached.

toolkit_py() { PYTHONDONTWRITEBYTECODE=1 "$python" "$root/vendor/cuda/toolkit.py" "$@"; }

# choose_cuda: sets architectures, toolkit, cuda_version, host_compiler, passed_over[] and obstacles[].
choose_cuda() {
  local name value options=(--cache="$cache" --toolkit="${toolkit:-auto}")
  for value in "${asked[@]}"; do options+=(--arch="$value"); done
  architectures='' cuda_version='' host_compiler='' passed_over=() obstacles=() toolkit='' assembled=no
  while IFS='=' read -r name value; do
    case $name in
      architectures) architectures=$value ;;
      toolkit) toolkit=$value ;;
      version) cuda_version=$value ;;
      compiler) host_compiler=$value ;;
      passed_over) passed_over+=("$value") ;;
      assembled) assembled=$value ;;
      obstacle) obstacles+=("$value") ;;
    esac
  done < <(toolkit_py choose "${options[@]}" || true)
  if [[ "$root$cache$toolkit" =~ [^a-zA-Z0-9_./+:@%,=~\ -] ]]; then
    obstacles+=("nvcc does not get along with special characters in the folders of this clone ($root), the cache ($cache) or the toolkit ($toolkit): use others")
  fi
  [[ -n $toolkit || ${#obstacles[@]} -gt 0 ]] || obstacles+=("the search for a toolkit failed")
  host_compiler_id=''
  if [[ -n $host_compiler ]]; then
    host_compiler_id=$("$host_compiler" --version 2>/dev/null | sed -n 1p) || obstacles+=("$host_compiler does not answer --version")
  fi
  # Code for each, and PTX of the newest, which the driver can compile for devices that come later. That of a variant
  # such as 120a runs on no other.
  local codes=()
  for value in $architectures; do codes+=("$value-real"); done
  newest=''
  if [[ ${architectures##* } =~ [0-9]$ ]]; then newest=${architectures##* } codes[-1]=$newest; fi
  printf -v cuda_architectures '%s;' "${codes[@]}"
  cuda_flags=(
    -DCMAKE_BUILD_TYPE=Release
    "-DCMAKE_CUDA_ARCHITECTURES=${cuda_architectures%;}"
    -DCMAKE_CUDA_RUNTIME_LIBRARY=Shared
    "-DCMAKE_MODULE_LINKER_FLAGS=${LDFLAGS:+$LDFLAGS }-Wl,--build-id=sha1"
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
    '-DCMAKE_INSTALL_RPATH=$ORIGIN'
  )
  # What the objects depend on, and what the finished module does.
  module_objects=$(printf '%s\n' "$(declare -f configure_cuda)" "$(<"$root/vendor/cuda/CMakeLists.txt")" "$(uname -m)" \
    "$cuda_version" "$host_compiler_id" "${cuda_flags[@]}" "${CXXFLAGS:-}" "${CUDAFLAGS:-}" "${source_dir:-$sha256}")
  module_key=$(printf '%s\n' "$module_objects" "$(declare -f stage_cuda)" "$stamp" "${tree:-}" | digest)
  module_key=${module_key:0:32} cached_module=$cache/cuda/$module_key
}

configure_cuda() {  # SOURCE BUILD
  local maps='' for_nvcc=''
  if [[ "$1$2" != *' '* ]]; then            # nvcc hands a space on as the end of an argument
    maps="-ffile-prefix-map=$1=. -ffile-prefix-map=$2=build" for_nvcc=" -Xcompiler=\"$maps\""
  fi
  cmake -S "$root/vendor/cuda" -B "$2" -G Ninja "-DENGINE=$1" "-DLIB=$lib" "${cuda_flags[@]}" \
    "-DCMAKE_CUDA_COMPILER=$toolkit/bin/nvcc" "-DCMAKE_CUDA_HOST_COMPILER=$host_compiler" "-DCUDAToolkit_ROOT=$toolkit" \
    "-DCMAKE_CXX_FLAGS=${CXXFLAGS:+$CXXFLAGS }$maps" "-DCMAKE_CUDA_FLAGS=${CUDAFLAGS:-}$for_nvcc"
}

# What is inside the module is read from the module: it must hold what was asked for, and load beside these libraries.
stage_cuda() {  # BUILD STAGE
  mkdir "$2" && cp "$1/bin/libggml-cuda.so" "$2/" || return
  "$python" - "$root" "$2" "$architectures" "${cuda_flags[@]}" <<'PYTHON'
import datetime, hashlib, json, os, pathlib, sys

root, stage, asked, *flags = sys.argv[1:]
sys.path.insert(0, root)
from swarmkv_ll import cuda, elf, fatbin

env, module = os.environ, pathlib.Path(stage, cuda.MODULE)
code = fatbin.gpu_code(module)
inside = [architecture for kind, architecture in code if kind == "elf"]
if inside != asked.split():
    sys.exit(f"the module holds {cuda.in_words(code)}, which is not code for {asked}")
with elf.mapped(module) as data:
    build_id, needs = elf.build_id(data), elf.needed(data)
info = {
    "stamp": env["STAMP"],
    "build_id": build_id,
    "architectures": inside,
    "gpu_code": cuda.in_words(code),
    "needs": needs,
    "toolkit": env["TOOLKIT"],
    "compiler": env["COMPILER"],
    "flags": flags,
    "sha256": hashlib.sha256(module.read_bytes()).hexdigest(),
    "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "key": env["KEY"],
}
pathlib.Path(stage, cuda.INFO).write_text(json.dumps(info, indent=2) + "\n")
PYTHON
}

# module_state DIR: "whole" when DIR holds exactly this module, and what is said of it is true.
module_state() {
  "$python" - "$root" "$1" "$key" "$stamp" <<'PYTHON'
import hashlib, pathlib, sys

root, folder, key, stamp = sys.argv[1:]
sys.path.insert(0, root)
from swarmkv_ll import cuda, elf
from swarmkv_ll.errors import SwarmKVError

try:
    info, module = cuda.read_info(pathlib.Path(folder)), pathlib.Path(folder, cuda.MODULE)
    with elf.mapped(module) as data:
        build_id, sha256 = elf.build_id(data), hashlib.sha256(data).hexdigest()
    said = [info.get(name) for name in ("key", "stamp", "build_id", "sha256")]
    print("whole" if said == [key, stamp, build_id, sha256] and not module.is_symlink() else "other")
except SwarmKVError:
    print("other")
PYTHON
}

# install_module DIR: into _lib, which is replaced as a whole, as every other change of it.
install_module() {
  rm -rf "$work/with-cuda"
  { cp -al "$lib" "$work/with-cuda" || { rm -rf "$work/with-cuda"; cp -R "$lib" "$work/with-cuda"; }; } 2>>"$log" &&
    rm -rf "$work"/with-cuda/{libggml-cuda.so,cuda-info.json} &&
    cp "$1"/libggml-cuda.so "$1"/cuda-info.json "$work/with-cuda/" 2>>"$log" ||
    fail "cannot put the module into swarmkv_ll/_lib (disk full?): see $log"
  replace_lib "$work/with-cuda"
}

# Measured for 61, and rounded up: time, objects and copies of the module grow with the architectures. A toolkit from
# packages takes most while it is unpacked.
n_architectures() { wc -w <<<"$architectures"; }
expected_minutes() { echo $(((2400 * $(n_architectures) / jobs + 59) / 60)); }
cuda_space() {
  local n
  n=$(n_architectures)
  work_mib=$((work_mib + 100 + 500 * n)) cache_mib=$((cache_mib + 120 * n))
  if [[ $assembled == yes && ! -d $toolkit ]]; then cache_mib=$((cache_mib + 1800)); fi
}

print_plan() {
  local text
  line() { printf '  %-14s %s\n' "$@"; }
  say "plan for the CUDA module of stamp $stamp"
  if [[ -n $architectures ]]; then
    line architectures "$architectures${newest:+ (and PTX of $newest, for devices that come later)}"
  fi
  for text in "${passed_over[@]}"; do line 'passed over' "$text"; done
  if [[ -n $toolkit ]]; then
    text=''
    if [[ $assembled == yes && ! -d $toolkit ]]; then text=', put together from packages (455 MB to download)'; fi
    line toolkit "CUDA $cuda_version in $toolkit$text"
  fi
  if [[ -n $host_compiler ]]; then line 'host compiler' "$host_compiler: $host_compiler_id"; fi
  if [[ -n $toolkit ]]; then
    key=$module_key
    if [[ $(module_state "$lib") == whole ]]; then
      line state "done: it is in swarmkv_ll/_lib; nothing will be fetched or compiled"
    elif [[ $(module_state "$cached_module") == whole ]]; then
      line state "in the build cache: to be copied; nothing will be fetched or compiled"
    else
      line state "to be compiled: about $(expected_minutes) minutes with $jobs jobs"
      needed_space
      line disk "$work_mib MiB in $work ($(free_mib "$work") MiB free), $cache_mib MiB in $cache ($(free_mib "$cache") MiB free)"
      text=$(lacking_space)
      if [[ -n $text ]]; then obstacles+=("$text"); fi
      for text in "${cuda_flags[@]}"; do line flag "$text"; done
    fi
  fi
  for text in "${obstacles[@]}"; do line obstacle "$text"; done
  if [[ ${#obstacles[@]} -eq 0 ]]; then line obstacles none; fi
}
