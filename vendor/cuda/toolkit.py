"""Finds a CUDA toolkit that can build what is asked for, or puts CUDA 12.4 together from packages.

    toolkit.py choose --cache DIR --toolkit DIR|auto --arch N ...   which toolkit, compiler, architectures; what is in the way
    toolkit.py assemble --cache DIR                                 CUDA 12.4 in DIR/cuda-12.4.131, whole or not at all

For ../../build_llama.sh --cuda. `choose` prints lines of `name=value`, and ends with 0 also if something is in the way.
Only the standard library and `swarmkv_ll.cuda`, which needs no built engine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from swarmkv_ll import cuda  # noqa: E402
from swarmkv_ll.errors import CudaUnavailableError  # noqa: E402

PASCAL = "61"
"""What is built where no driver tells of a GPU: the GTX 1080, which this library is at home on."""

# CUDA 12.4 is the last one that every part of can be had from packages; 12.9 is the last with Pascal.
ASSEMBLED = "12.4.131"
ASSEMBLED_CODES = ["50", "52", "53", "60", "61", "62", "70", "72", "75", "80", "86", "87", "89", "90"]
ASSEMBLED_MAX_GCC = 13
DEB_PATH = "pool/non-free/n/nvidia-cuda-toolkit/nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb"
DEB_SHA256 = "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"
DEB = DEB_PATH.rsplit("/", 1)[1]
FOLDER = f"cuda-{ASSEMBLED}"
WHEELS = HERE / "wheels.txt"


class Obstacle(Exception):  # noqa: N818 - it is what the plan calls it
    """Why it cannot be done: a line for each reason."""


# ── which toolkit ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Toolkit:
    """One on this machine: its compiler, version, and the architectures it makes code for."""

    nvcc: Path
    version: str
    codes: list[str]

    @classmethod
    def at(cls, folder: Path) -> Toolkit:
        nvcc = folder / "bin" / "nvcc"
        said = run([nvcc, "--version"]).stdout
        version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
        if not version:
            raise Obstacle(f"{nvcc} does not say its version")
        codes = sorted(set(re.findall(r"sm_(\d+)", run([nvcc, "--list-gpu-code"]).stdout)), key=int)
        if not codes:
            raise Obstacle(f"{nvcc} ({version[1]}) does not say which architectures it knows: CUDA 11.8 and newer do")
        # What is on the PATH may be a script that starts the one of another folder.
        top = re.search(r"^#\$ TOP=(.*)$", run([nvcc, "--dryrun", "-x", "cu", "-E", "/dev/null"]).stderr, re.M)
        real = Path(top[1], "bin/nvcc").resolve() if top else nvcc
        return cls(real if real.is_file() else nvcc, version[1], codes)

    def __str__(self) -> str:
        return f"CUDA {self.version} in {self.nvcc.parents[1]}"

    def lacks(self, architectures: list[str]) -> str | None:
        """Why it cannot make code for these."""
        missing = unknown(architectures, self.codes)
        if not missing:
            return None
        text = f"{self} has no {listed(missing, 'sm_')} (it has {' '.join(self.codes)})"
        if int(self.version.split(".")[0]) >= 13 and any(number(a) < 75 for a in missing):
            text += "; CUDA 13 dropped all before 7.5: use CUDA 12, or --toolkit auto, which gets CUDA 12.4 by itself"
        return text

    def host_compiler(self, architectures: list[str]) -> str:
        """The first host compiler with which it really compiles and links a program that uses cuBLAS."""
        reasons = []
        for compiler in host_compilers():
            reason = self._tried(compiler, architectures)
            if reason is None:
                return compiler
            reasons.append(reason)
        raise Obstacle(reasons[0])

    def _tried(self, compiler: str, architectures: list[str]) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "probe.cu")
            program.write_text(
                "#include <cublas_v2.h>\n#include <cstdio>\n__global__ void k() {}\n"
                "int main() { cublasHandle_t h; k<<<1, 1>>>(); return cublasCreate(&h); }\n"
            )
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
            command = [self.nvcc, "-ccbin", compiler, *codes, "-std=c++17", "-cudart", "shared", program]
            done = run([*command, "-lcublas", "-o", f"{folder}/probe"])
        said = done.stderr + done.stdout
        if done.returncode == 0:
            return None
        if "unsupported GNU version" in said or "unsupported clang version" in said:
            limit = re.search(r"(?:gcc|clang) versions? (?:later than|>=?) ?(\d+)|less than (\d+)", said)
            newest = f": at most {limit[1] or limit[2]}" if limit else ""
            return f"the compiler {compiler} is newer than {self} takes{newest}; install an older one (say g++-12), or set CUDAHOSTCXX to one"
        if "cublas" in said:
            return f"{self} has no cuBLAS to compile against (libcublas-dev or the like)"
        why = next((line for line in said.splitlines() if "error" in line.lower() or "cannot find" in line), said)
        return f"{self} with {compiler} does not compile a small program: {why.strip()[:200]}"


def candidates() -> list[Path]:
    """Folders where a toolkit may lie, the one the user points at first."""
    folders = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        folders.append(Path(on_path).resolve().parents[1])
    folders += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True), Path("/opt/cuda")]
    found = [folder.resolve() for folder in folders if (folder / "bin" / "nvcc").is_file()]
    return list(dict.fromkeys(found))


def host_compilers() -> list[str]:
    """C++ compilers to try: what the user set, or the usual one and older versions beside it."""
    if named := os.environ.get("CUDAHOSTCXX"):
        path = shutil.which(named)
        if path is None or " " in path:
            raise Obstacle(f"CUDAHOSTCXX={named}: nvcc takes the path of a compiler there, without arguments or spaces")
        return [path]
    launchers = ("ccache", "distcc", "sccache")
    usual = next((word for word in shlex.split(os.environ.get("CXX") or "") if word not in launchers), "c++")
    older = [f"g++-{n}" for n in range(15, 8, -1)]
    return list(dict.fromkeys(path for name in (usual, "g++", *older) if (path := shutil.which(name))))


def gcc_version(compiler: str) -> int:
    """Its major version; 0 if it is not gcc, or does not say."""
    said = run([compiler, "-dM", "-E", "-x", "c++", "/dev/null"]).stdout
    major = re.search(r"^#define __GNUC__ (\d+)$", said, re.M)
    return int(major[1]) if major and "__clang__" not in said else 0


def for_assembled(architectures: list[str], cache: Path) -> str:
    """The host compiler for the toolkit that would be assembled, or has been."""
    reasons = [] if (cache / FOLDER).exists() else against_assembling(cache / "downloads")
    if platform.machine() != "x86_64":
        reasons.append(
            f"the packages of CUDA {ASSEMBLED} are for x86_64, not {platform.machine()}: install CUDA 12, or give --toolkit DIR"
        )
    missing = [a for a in architectures if a not in (*ASSEMBLED_CODES, "90a")]
    if missing:
        reasons.append(
            f"CUDA {ASSEMBLED}, which would be got from packages, has no {listed(missing, 'sm_')} (it has {' '.join(ASSEMBLED_CODES)})"
        )
    found = {compiler: gcc_version(compiler) for compiler in host_compilers()}
    fitting = [compiler for compiler, version in found.items() if 6 <= version <= ASSEMBLED_MAX_GCC]
    if not fitting:
        have = ", ".join(f"{c} is gcc {v}" if v else f"{c} is not gcc" for c, v in found.items()) or "there is none"
        reasons.append(
            f"CUDA {ASSEMBLED} takes gcc 6 to {ASSEMBLED_MAX_GCC} as host compiler, but {have}: install g++-12, or set CUDAHOSTCXX to one"
        )
    if reasons:
        raise Obstacle(*reasons)
    return fitting[0]


def against_assembling(downloads: Path) -> list[str]:
    """What is missing to get the packages and to unpack them."""
    reasons = [
        f"{name} is missing, to unpack a .deb: install binutils, tar and xz-utils"
        for name in ("ar", "tar", "xz")
        if not shutil.which(name)
    ]
    if not (downloads / DEB).exists():
        try:
            debian_mirror()
        except Obstacle as obstacle:
            reasons += obstacle.args
    if run([sys.executable, "-m", "pip", "--version"]).returncode:
        reasons.append(
            f"{sys.executable} has no pip, to get NVIDIA's packages: install python3-pip, or use a virtual environment"
        )
    return reasons


def choose(asked: str, architectures: list[str], cache: Path) -> list[tuple[str, str]]:
    """What to build with, as names and values."""
    chosen: list[tuple[str, str]] = []
    try:
        architectures = resolved(architectures)
        chosen.append(("architectures", " ".join(architectures)))
        if asked != "auto":
            if not Path(asked, "bin/nvcc").is_file():
                raise Obstacle(f"--toolkit {asked}: there is no bin/nvcc in it")
            return chosen + described(Path(asked).resolve(), architectures)
        reasons: dict[str, None] = {}
        for folder in candidates():
            try:
                return [*chosen, *described(folder, architectures), *(("passed_over", reason) for reason in reasons)]
            except Obstacle as obstacle:
                reasons[str(obstacle).split(";")[0]] = None
        chosen += [("passed_over", reason) for reason in reasons]
        compiler = for_assembled(architectures, cache)
        return [
            *chosen,
            ("toolkit", str(cache / FOLDER)),
            ("version", ASSEMBLED),
            ("compiler", compiler),
            ("assembled", "yes"),
        ]
    except Obstacle as obstacle:
        return [*chosen, *(("obstacle", reason) for reason in obstacle.args)]


def described(folder: Path, architectures: list[str]) -> list[tuple[str, str]]:
    """The toolkit in a folder, if it can do what is asked for."""
    toolkit = Toolkit.at(folder)
    if reason := toolkit.lacks(architectures):
        raise Obstacle(reason)
    compiler = toolkit.host_compiler(architectures)
    return [("toolkit", str(toolkit.nvcc.parents[1])), ("version", toolkit.version), ("compiler", compiler)]


def resolved(architectures: list[str]) -> list[str]:
    """The architectures by number, in order, each once; `native` is what the driver says."""
    found = []
    if not architectures:
        try:
            architectures = native()
        except Obstacle:
            architectures = [PASCAL]
    for architecture in architectures:
        if architecture == "native":
            found += native()
        elif re.fullmatch(r"\d{2,3}[af]?", architecture):
            found.append(architecture)
        else:
            raise Obstacle(f"--arch {architecture}: give a number such as 61 (compute capability 6.1), or native")
    # ggml compiles 120 as 120a, whose matrix instructions it uses.
    found = [f"{a}a" if re.fullmatch(r"12\d", a) else a for a in found]
    return sorted(set(found), key=lambda a: (number(a), a))


def native() -> list[str]:
    """Of every GPU that the driver shows."""
    try:
        return [f"{major}{minor}" for major, minor in (gpu.capability for gpu in cuda.find_driver().gpus)]
    except CudaUnavailableError as error:
        raise Obstacle(f"--arch native: {error}; give the architecture as a number") from None


def unknown(architectures: list[str], codes: list[str]) -> list[str]:
    """Those that are not among `codes`. nvcc lists no variants such as 90a: whether it has one is seen in compiling."""
    return [a.rstrip("af") for a in architectures if a.rstrip("af") not in codes]


def number(architecture: str) -> int:
    return int(architecture.rstrip("af"))


def listed(architectures: list[str], prefix: str) -> str:
    return ", ".join(prefix + a for a in architectures)


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """Its output and exit status. It sees a plain environment: messages in English."""
    try:
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Obstacle(f"{command[0]} cannot be run: {error}") from None


# ── CUDA 12.4 from packages ──────────────────────────────────────────────────────────────────────────

PROFILE = """\
TOP              = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH             += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES         += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES        =+ $(_SPACE_) "-L$(TOP)/lib64"
CUDAFE_FLAGS     +=
PTXAS_FLAGS      +=
"""


def assemble(cache: Path) -> None:
    """Put the toolkit together in the cache and rename it when it works. The system is not touched."""
    target, downloads = cache / FOLDER, cache / "downloads"
    if target.is_dir():
        return
    downloads.mkdir(parents=True, exist_ok=True)
    # Of a run that was killed. The caller holds the lock.
    for left in (*cache.glob(f".{FOLDER}.*"), *downloads.glob(f".{DEB}.*"), *downloads.glob(".wheel.*")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    archives = [debian_package(downloads), *wheels(downloads)]
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        unpacked = stage / "unpacked"
        unpack_deb(archives[0], unpacked / "deb")
        for archive in archives[1:]:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked / "wheels")
        lay_out(unpacked / "deb", unpacked / "wheels/nvidia", stage, for_assembled([PASCAL], cache))
        shutil.rmtree(unpacked)
        made = Toolkit.at(stage)
        if made.version != ASSEMBLED or made.codes != ASSEMBLED_CODES:
            raise Obstacle(f"what was assembled is CUDA {made.version} for {' '.join(made.codes)}")
        stage.chmod(0o755)  # as a folder that is not a temporary one
        os.rename(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    for archive in archives:
        archive.unlink()


def lay_out(deb: Path, nvidia: Path, top: Path, host_compiler: str) -> None:
    """The folders of NVIDIA's own installer."""
    for name in ("bin", "include", "lib64", "nvvm/bin", "nvvm/libdevice", "licenses"):
        (top / name).mkdir(parents=True)
    own = deb / "usr/lib/nvidia-cuda-toolkit"
    for name in ("cudafe++", "ptxas", "fatbinary", "nvlink", "bin2c", "cuobjdump", "nvdisasm"):
        shutil.move(deb / "usr/bin" / name, top / "bin" / name)
    shutil.move(own / "bin/nvcc", top / "bin/nvcc")
    shutil.move(own / "bin/crt", top / "bin/crt")
    shutil.move(own / "bin/cicc", top / "nvvm/bin/cicc")
    shutil.move(own / "libdevice/libdevice.10.bc", top / "nvvm/libdevice/libdevice.10.bc")
    (top / "bin/nvcc.profile").write_text(PROFILE)  # Debian's names folders of an installed package
    for part in nvidia.iterdir():
        if (part / "include").is_dir():
            shutil.copytree(part / "include", top / "include", dirs_exist_ok=True)
    for info in nvidia.parent.glob("*.dist-info/License.txt"):
        shutil.move(info, top / "licenses" / f"{info.parent.name.split('-')[0]}.txt")
    lib = top / "lib64"
    for package, name in (
        ("cuda_runtime", "libcudart.so.12"),
        ("cublas", "libcublas.so.12"),
        ("cublas", "libcublasLt.so.12"),
    ):
        shutil.move(nvidia / package / "lib" / name, lib / name)
        (lib / name.removesuffix(".12")).symlink_to(name)
    # The packages have no static runtime, which CMake links its first test program to, and no device runtime.
    (lib / "libcudart_static.a").write_text("INPUT ( -lcudart )\n")
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder, "nothing.cu"), Path(folder, "nothing.o")
        source.write_text("__device__ void swarmkv_nothing() {}\n")
        done = run([top / "bin/nvcc", "-ccbin", host_compiler, f"-arch=sm_{PASCAL}", "-dc", source, "-o", compiled])
        if done.returncode or run(["ar", "rcs", lib / "libcudadevrt.a", compiled]).returncode:
            raise Obstacle(f"the assembled nvcc does not compile: {done.stderr.strip()[:300]}")


def debian_package(downloads: Path) -> Path:
    """The compiler itself, from a Debian mirror."""
    target = downloads / DEB
    if not target.exists():
        address = f"{debian_mirror().rstrip('/')}/{DEB_PATH}"
        say(f"downloading {target.name} (87 MB)")
        partial = downloads / f".{target.name}.{os.getpid()}"
        try:
            with urllib.request.urlopen(address, timeout=60) as source, open(partial, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            os.rename(partial, target)
        except (OSError, urllib.error.URLError) as error:
            raise Obstacle(f"cannot download {address}: {error}. Offline, put {target.name} into {downloads}") from None
        finally:
            partial.unlink(missing_ok=True)
    check(target, DEB_SHA256)
    return target


def debian_mirror() -> str:
    """DEBIAN_MIRROR, or the mirror that this machine's apt uses."""
    if mirror := os.environ.get("DEBIAN_MIRROR"):
        return mirror
    if shutil.which("apt-get"):
        asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"]
        for line in run(asked).stdout.splitlines():
            origin, _, address = line.partition(" ")
            if origin == "Debian" and address.startswith("http") and "security" not in address:
                return address
    raise Obstacle("no Debian mirror is known here: set DEBIAN_MIRROR to the address of one (the folder above pool/)")


def wheels(downloads: Path) -> list[Path]:
    """NVIDIA's packages, by pip, which compares the hashes before it opens them."""
    pins = re.findall(r"^([\w-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$", WHEELS.read_text(), re.M)
    found = []
    for name, version, sha256 in pins:
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(downloads.glob(pattern)):
            say(f"downloading {name} {version}")
            pip(name, version, sha256, downloads)
        (wheel,) = downloads.glob(pattern)
        check(wheel, sha256)
        found.append(wheel)
    return found


def pip(name: str, version: str, sha256: str, downloads: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".wheel.", dir=downloads) as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "download",
            "-q",
            "--no-deps",
        ]
        command += ["--no-cache-dir", "--only-binary=:all:", "--require-hashes", "-r", str(wanted), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            got = re.search(r"Expected sha256 (\w+)\s+Got\s+(\w+)", done.stderr)
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            reason = f"hash mismatch: expected sha256 {got[1]}, got {got[2]}" if got else lines[-1]
            raise Obstacle(f"cannot download {name} {version}: {reason}. Offline, put the wheel into {downloads}")
        for wheel in Path(folder).glob("*.whl"):
            os.rename(wheel, downloads / wheel.name)


def check(archive: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with open(archive, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != sha256:
        archive.unlink()
        raise Obstacle(
            f"hash mismatch in {archive.name}: expected sha256 {sha256}, got {digest.hexdigest()}; nothing was unpacked, the file was removed"
        )


def unpack_deb(package: Path, target: Path) -> None:
    """A .deb is an `ar` archive with a tar file in it."""
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        done = run(["ar", "x", "--output", folder, package])
        (data,) = Path(folder).glob("data.tar.*") if done.returncode == 0 else (None,)
        done = run(["tar", "-xf", data, "-C", target]) if data else done
    if done.returncode:
        raise Obstacle(f"cannot unpack {package.name}: {done.stderr.strip()[:200]}")


def say(text: str) -> None:
    print(f"build_llama: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("choose")
    command.add_argument("--cache", type=Path, required=True)
    command.add_argument("--toolkit", default="auto")
    command.add_argument("--arch", action="append", default=[])
    command = commands.add_parser("assemble")
    command.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    try:
        if options.command == "choose":
            for name, value in choose(options.toolkit, options.arch, options.cache):
                print(f"{name}={' '.join(value.split())}")
        else:
            assemble(options.cache)
    except Obstacle as obstacle:
        print(f"build_llama: {obstacle}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"build_llama: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
