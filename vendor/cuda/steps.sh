# shellcheck shell=bash disable=SC2034,SC2154 # read by ../../build_llama.sh --cuda, and uses its variables
#
# What is particular to the CUDA module: the choice of toolkit, the plan, and the steps whose result is cached.

toolkit_py() { PYTHONDONTWRITEBYTECODE=1 "$python" "$root/vendor/cuda/toolkit.py" "$@"; }

# choose_cuda: sets architectures, toolkit, cuda_version, host_compiler, passed_over[] and obstacles[].
choose_cuda() {
  local name value options=(--cache "$cache" --toolkit "${toolkit:-auto}")
  for value in "${asked[@]}"; do options+=(--arch "$value"); done
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
  done < <(toolkit_py choose "${options[@]}")
  [[ -n $toolkit || ${#obstacles[@]} -gt 0 ]] || obstacles+=("the search for a toolkit failed")
  host_compiler_id=''
  if [[ -n $host_compiler ]]; then
    host_compiler_id=$("$host_compiler" --version 2>/dev/null | sed -n 1p) || obstacles+=("$host_compiler does not answer --version")
  fi
  # Code for each, and PTX of the newest, which the driver can compile for devices that come later.
  local codes=()
  for value in $architectures; do codes+=("$value-real"); done
  if [[ ${#codes[@]} -gt 0 ]]; then codes[-1]=${codes[-1]%-real}; fi
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
  local maps
  maps=$(printf -- '-ffile-prefix-map=%q=. -ffile-prefix-map=%q=build' "$1" "$2")
  cmake -S "$root/vendor/cuda" -B "$2" -G Ninja "-DENGINE=$1" "-DLIB=$lib" "${cuda_flags[@]}" \
    "-DCMAKE_CUDA_COMPILER=$toolkit/bin/nvcc" "-DCMAKE_CUDA_HOST_COMPILER=$host_compiler" "-DCUDAToolkit_ROOT=$toolkit" \
    "-DCMAKE_CXX_FLAGS=${CXXFLAGS:+$CXXFLAGS }$maps" "-DCMAKE_CUDA_FLAGS=${CUDAFLAGS:+$CUDAFLAGS }-Xcompiler=\"$maps\""
}

# What is inside the module is read from the module: it must hold what was asked for, and load beside these libraries.
stage_cuda() {  # BUILD STAGE
  mkdir "$2" && cp "$1/bin/libggml-cuda.so" "$2/" || return
  "$python" - "$root" "$2" "$architectures" "${cuda_flags[@]}" <<'PYTHON'
import datetime, json, os, pathlib, sys

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
    "files": {module.name: module.stat().st_size},
    "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "key": env["KEY"],
}
pathlib.Path(stage, cuda.INFO).write_text(json.dumps(info, indent=2) + "\n")
PYTHON
}

# install_module DIR: into _lib, which is replaced as a whole, as every other change of it.
install_module() {
  rm -rf "$work/with-cuda"
  { cp -al "$lib" "$work/with-cuda" 2>>"$log" || { rm -rf "$work/with-cuda"; cp -R "$lib" "$work/with-cuda"; }; } &&
    cp --remove-destination "$1"/libggml-cuda.so "$1"/cuda-info.json "$work/with-cuda/" ||
    fail "cannot put the module into swarmkv_ll/_lib (disk full?)"
  replace_lib "$work/with-cuda"
}

# Measured for 61 alone, and rounded up. A toolkit from packages takes most while it is unpacked.
cuda_core_s=2100 cuda_work_mib=800 cuda_cache_mib=150 toolkit_mib=1800
expected_minutes() { echo $(( (cuda_core_s * $(wc -w <<<"$architectures") / jobs + 59) / 60 )); }

print_plan() {
  local text
  line() { printf '  %-14s %s\n' "$@"; }
  say "plan for the CUDA module of stamp $stamp"
  if [[ -n $architectures ]]; then
    line architectures "$architectures (and PTX of ${architectures##* }, for devices that come later)"
  fi
  for text in "${passed_over[@]}"; do line 'passed over' "$text"; done
  if [[ $assembled == yes ]]; then
    if [[ -d $toolkit ]]; then text='put together before'; else text='to be put together from packages, 455 MB to download'; fi
    line toolkit "CUDA $cuda_version in $toolkit ($text)"
  elif [[ -n $toolkit ]]; then
    line toolkit "CUDA $cuda_version in $toolkit"
  fi
  if [[ -n $host_compiler ]]; then line 'host compiler' "$host_compiler: $host_compiler_id"; fi
  if [[ -n $toolkit ]]; then
    line flags "${cuda_flags[*]}"
    key=$module_key
    if [[ $(state "$lib") == whole ]]; then
      line state "done: it is in swarmkv_ll/_lib"
    elif [[ $(state "$cached_module") == whole ]]; then
      line state "in the build cache: to be copied"
    else
      line state "to be compiled: about $(expected_minutes) minutes with $jobs jobs"
      needed_space
      line disk "$work_mib MiB in $work ($(free_mib "$work") MiB free), $cache_mib MiB in $cache ($(free_mib "$cache") MiB free)"
      text=$(lacking_space)
      if [[ -n $text ]]; then obstacles+=("$text"); fi
    fi
  fi
  for text in "${obstacles[@]}"; do line obstacle "$text"; done
  if [[ ${#obstacles[@]} -eq 0 ]]; then line obstacles none; fi
}
