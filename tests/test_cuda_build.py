"""`build_llama.sh --cuda`: the choice of toolkit, the plan, and modules that are compiled for real.

As in `test_build`, a miniature of the engine is built, whose CUDA backend is two kernels. The toolkit is the real one,
in the user's cache; tests that need it are skipped where `build_llama.sh --cuda` did not put it together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from test_build import MINIATURE, REPOSITORY, SCRIPT, Clone, Workshop, snapshot, wait_for, write_tree

from swarmkv_ll.fatbin import gpu_code

VERSION = "12.4.131"
PACKAGE = "nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb"


class CudaClone(Clone):
    """A clone with what --cuda needs besides: its own files, and the modules that read what was built."""

    def __init__(self, folder: Path, index: Path, cache: Path, sha256: str) -> None:
        super().__init__(folder, index, cache, sha256)
        shutil.copytree(
            REPOSITORY / "vendor/cuda", folder / "vendor/cuda", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("__init__", "cuda", "elf", "errors", "fatbin"):
            shutil.copy(REPOSITORY / f"swarmkv_ll/{name}.py", folder / "swarmkv_ll")
        self.module = self.lib / "libggml-cuda.so"

    def cuda_info(self) -> dict[str, object]:
        info = json.loads((self.lib / "cuda-info.json").read_text())
        assert isinstance(info, dict)
        return info


def cuda_clone(workshop: Workshop, name: str = "clone", cache: str = "cache") -> CudaClone:
    return CudaClone(workshop.folder / name, workshop.index, workshop.folder / cache, workshop.sha256)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def clone(workshop: Workshop) -> CudaClone:
    return cuda_clone(workshop)


@pytest.fixture(scope="session")
def toolkit() -> Path:
    """CUDA 12.4 in the user's cache, where `build_llama.sh --cuda` puts it and finds it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", f"swarmkv-ll/cuda-{VERSION}")
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: ./build_llama.sh --cuda puts it together (455 MB)")
    return folder


def speaking_nvcc(folder: Path, version: str, codes: str, compiling: str = "exit 0") -> Path:
    """A toolkit that says what nvcc of this version says, and cannot compile."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    listed = "\\n".join(f"sm_{code}" for code in codes.split())
    nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in\n--version) echo "Cuda compilation tools, release x, V{version}";;\n'
        f'--list-gpu-code) printf "{listed}\\n";;\n*) {compiling};;\nesac\n'
    )
    nvcc.chmod(0o755)
    return folder


CUDA_13 = ("13.0.88", "75 80 86 87 88 89 90 100 103 110 120 121")


# ── what is asked ──


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--arch", "61"], "--arch, --toolkit and --plan are about the CUDA backend: give --cuda with them"),
        (["--plan"], "give --cuda with them"),
        (["--toolkit", "/usr"], "give --cuda with them"),
        (["--cuda", "--tools"], "--tools goes with neither --portable nor --source nor --cuda"),
        (["--cuda", "--arch"], "--arch needs a value"),
        (["--cuda", "--arch", "sm_61"], "--arch sm_61: give a number such as 61 (compute capability 6.1), or native"),
        (["--cuda", "--arch", "6.1"], "--arch 6.1: give a number"),
        (["--cuda", "--arch", "61a"], "has no sm_61a"),
        (["--cuda", "--arch", "--toolkit"], "--arch --toolkit: give a number"),
        (["--cuda", "--toolkit", "-x"], "--toolkit -x: there is no bin/nvcc in it"),
        (
            ["--cuda", "--arch", "61", "--arch", "999"],
            "has no sm_999 (it has 50 52 53 60 61 62 70 72 75 80 86 87 89 90)",
        ),
        (["--cuda", "--toolkit", "/nowhere"], "--toolkit /nowhere: there is no bin/nvcc in it"),
    ],
)
def test_refused_options_change_nothing(clone: CudaClone, options: list[str], expected: str) -> None:
    before = snapshot(clone.folder)
    assert expected in clone.refuse(*options)
    assert snapshot(clone.folder) == before
    assert not clone.lib.exists()


def test_native_without_a_driver(clone: CudaClone, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    assert "--arch native: no NVIDIA driver here" in clone.refuse("--cuda", "--arch", "native")
    assert "architectures  61 (" in clone.build("--cuda", "--plan")  # asked for none


def test_cuda_13_has_no_pascal_and_the_way_out_is_named(clone: CudaClone, tmp_path: Path) -> None:
    thirteen = speaking_nvcc(tmp_path / "cuda-13", *CUDA_13)
    line = clone.refuse("--cuda", "--arch", "61", "--toolkit", str(thirteen))
    assert f"CUDA 13.0.88 in {thirteen} has no sm_61 (it has 75 80" in line
    assert "CUDA 13 dropped all before 7.5: use CUDA 12, or --toolkit auto, which gets CUDA 12.4 by itself" in line


def test_nvcc_that_says_nothing_of_use(clone: CudaClone, tmp_path: Path) -> None:
    mute = speaking_nvcc(tmp_path / "mute", "11.4.1", "")
    assert "(11.4.1) does not say which architectures it knows" in clone.refuse("--cuda", "--toolkit", str(mute))
    (mute / "bin/nvcc").chmod(0o644)
    assert "cannot be run" in clone.refuse("--cuda", "--toolkit", str(mute))


def test_plan_tells_everything_and_builds_nothing(clone: CudaClone, tmp_path: Path) -> None:
    thirteen = speaking_nvcc(tmp_path / "cuda-13", *CUDA_13)
    plan = clone.build("--cuda", "--arch", "70", "--arch", "61", "--plan", CUDA_HOME=str(thirteen))
    lines = dict(line.split(maxsplit=1) for line in plan.splitlines()[1:] if not line.startswith("  passed"))
    assert lines["architectures"].startswith("61 70 (and PTX of 70")
    assert f"passed over    CUDA 13.0.88 in {thirteen} has no sm_61, sm_70" in plan
    assert lines["toolkit"] == (
        f"CUDA {VERSION} in {clone.cache}/cuda-{VERSION}, put together from packages (455 MB to download)"
    )
    assert "  flag           -DCMAKE_CUDA_ARCHITECTURES=61-real;70\n" in plan
    assert re.match(r"to be compiled: about \d+ minutes with \d+ jobs", lines["state"])
    assert re.search(r"\d+ MiB in .* \(\d+ MiB free\), 2\d\d\d MiB in .* \(\d+ MiB free\)", lines["disk"])
    assert lines["obstacles"] == "none"
    assert not clone.lib.exists()
    assert not any(clone.cache.iterdir())


def test_plan_names_every_obstacle(clone: CudaClone, tmp_path: Path) -> None:
    done = clone.run(
        *("--cuda", "--arch", "999", "--plan"),
        CUDAHOSTCXX=newer_compiler(tmp_path),
        PATH=f"{empty_apt(tmp_path)}:{clone.environment['PATH']}",
    )
    assert done.returncode == 2
    obstacles = re.findall(r"^  obstacle +(.*)$", done.stdout, re.M)
    for words, line in zip(("set DEBIAN_MIRROR", "has no sm_999", "is gcc 16"), obstacles, strict=True):
        assert words in line


def empty_apt(folder: Path) -> Path:
    """An apt-get that knows no mirror, as on a machine that is no Debian."""
    (folder / "apt").mkdir()
    (folder / "apt/apt-get").write_text("#!/bin/sh\n")
    (folder / "apt/apt-get").chmod(0o755)
    return folder / "apt"


def test_plan_with_an_obstacle_says_so_and_ends_with_2(clone: CudaClone, tmp_path: Path) -> None:
    done = clone.run("--cuda", "--arch", "61", "--plan", "--toolkit", str(speaking_nvcc(tmp_path / "t", *CUDA_13)))
    assert done.returncode == 2
    assert "obstacle" in done.stdout
    assert "has no sm_61" in done.stdout


def newer_compiler(folder: Path) -> str:
    """The machine's compiler, saying that it is gcc 16."""
    compiler = folder / "g++-16"
    compiler.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=16 "$@"\n')
    compiler.chmod(0o755)
    return str(compiler)


def test_compiler_newer_than_the_packages_take(clone: CudaClone, tmp_path: Path) -> None:
    line = clone.refuse("--cuda", "--arch", "61", CUDAHOSTCXX=newer_compiler(tmp_path))
    assert f"CUDA {VERSION} takes gcc 6 to 13 as host compiler, but {tmp_path}/g++-16 is gcc 16" in line
    assert "set CUDAHOSTCXX" in line


@pytest.mark.parametrize("named", ["ccache g++", "/nowhere/g++"])
def test_host_compiler_that_nvcc_cannot_take(clone: CudaClone, named: str) -> None:
    assert f"CUDAHOSTCXX={named}: nvcc takes the path" in clone.refuse("--cuda", "--arch", "61", CUDAHOSTCXX=named)


def test_compiler_newer_than_an_installed_toolkit_takes(clone: CudaClone, tmp_path: Path, toolkit: Path) -> None:
    line = clone.refuse("--cuda", "--arch", "61", "--toolkit", str(toolkit), CUDAHOSTCXX=newer_compiler(tmp_path))
    assert f"the compiler {tmp_path}/g++-16 is newer than CUDA {VERSION} in {toolkit} takes: at most 13" in line


def test_toolkit_without_cublas(clone: CudaClone, tmp_path: Path, toolkit: Path) -> None:
    shutil.copytree(
        toolkit, tmp_path / "toolkit", symlinks=True, ignore=shutil.ignore_patterns("libcublas*", "cublas*")
    )
    assert "has no cuBLAS to compile against" in clone.refuse(
        "--cuda", "--arch", "61", "--toolkit", f"{tmp_path}/toolkit"
    )


# ── what is downloaded, and room for it ──


def test_damaged_download_is_refused_and_removed(clone: CudaClone) -> None:
    package = clone.cache / "downloads" / PACKAGE
    package.parent.mkdir(parents=True)
    package.write_bytes(b"not what Debian made")
    left = [package.with_name(f".{PACKAGE}.123"), package.with_name(".wheel.abc"), clone.cache / f".cuda-{VERSION}.abc"]
    left[0].touch()  # by a run that was killed
    for folder in left[1:]:
        folder.mkdir()
    done = clone.run("--cuda", "--arch", "61")
    assert done.returncode == 2
    assert re.fullmatch(
        rf"build_llama: hash mismatch in {re.escape(PACKAGE)}: expected sha256 cd5fe8\w+, got \w{{64}};"
        r" nothing was unpacked, the file was removed\n",
        done.stderr,
    )
    assert not package.exists()
    assert not any(path.exists() for path in left)
    assert not (clone.cache / f"cuda-{VERSION}").exists()
    assert clone.is_whole()  # the libraries, which came first


def test_no_mirror_to_be_reached(clone: CudaClone) -> None:
    done = clone.run("--cuda", "--arch", "61", DEBIAN_MIRROR="http://127.0.0.1:9/debian")
    assert done.returncode == 2
    assert re.match(
        r"build_llama: cannot download http://127\.0\.0\.1:9/debian/pool/.*refused.*Offline, put", done.stderr
    )


def test_full_disk_is_seen_before_anything_is_fetched(clone: CudaClone, tmp_path: Path) -> None:
    clone.build()
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount of a small file system (unshare -rm)")
    inside = f"mount -t tmpfs -o size=900m none {small} && exec bash {clone.folder}/{SCRIPT.name} --cuda --arch 61"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside],
        env=clone.environment | {"XDG_CACHE_HOME": str(small)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert re.fullmatch(
        r"build_llama: not enough disk space in \S+: \d+ MiB free, 2\d\d\d MiB needed\n", done.stderr
    ), done.stderr
    assert "downloading nvidia" not in done.stdout


# ── modules that are compiled for real ──


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, toolkit: Path) -> CudaClone:
    """A clone with a module for two architectures: for tests that only look, or that work in a copy."""
    clone = cuda_clone(Workshop(tmp_path_factory.mktemp("cuda")))
    clone.build()
    before = snapshot(clone.lib)
    said = clone.build("--cuda", "--arch", "61", "--arch", "70", "--toolkit", str(toolkit))
    assert f"building the CUDA module for 61 70 with CUDA {VERSION}" in said
    after = snapshot(clone.lib)
    assert {name: after[name] for name in before} == before  # of the rest nothing was touched
    assert set(after) - set(before) == {"libggml-cuda.so", "cuda-info.json"}
    return clone


def copy_of(built: CudaClone, workshop: Workshop) -> CudaClone:
    clone = cuda_clone(workshop)
    shutil.copytree(built.cache, clone.cache)
    shutil.copytree(built.lib, clone.lib)
    return clone


def test_module_holds_what_was_asked_for(built: CudaClone, toolkit: Path) -> None:
    assert gpu_code(built.module) == {("elf", "61"): 2, ("elf", "70"): 2, ("ptx", "70"): 2}
    listed = subprocess.run(
        [toolkit / "bin/cuobjdump", "--list-elf", "--list-ptx", built.module],
        capture_output=True,
        text=True,
        check=True,
    )
    cubins = re.findall(r"sm_(\d+)\.(cubin|ptx)", listed.stdout)
    assert sorted(cubins) == [("61", "cubin")] * 2 + [("70", "cubin")] * 2 + [("70", "ptx")] * 2
    info = built.cuda_info()
    assert info["architectures"] == ["61", "70"]
    assert info["stamp"] == built.info()["stamp"]
    assert info["toolkit"] == VERSION
    assert "libcudart.so.12" in info["needs"]  # type: ignore[operator]
    assert str(built.folder).encode() not in built.module.read_bytes()


def test_second_time_does_nothing_and_another_clone_compiles_nothing(
    built: CudaClone, workshop: Workshop, toolkit: Path
) -> None:
    options = ["--cuda", "--arch", "70", "--arch", "61", "--arch", "61", "--toolkit", str(toolkit)]
    before = snapshot(built.lib)
    assert "libggml-cuda.so is up to date (61 70)" in built.build(*options)
    assert snapshot(built.lib) == before
    assert "done: it is in swarmkv_ll/_lib" in built.build(*options, "--plan")
    clone = copy_of(built, workshop)
    shutil.rmtree(clone.lib)
    assert "copied from the build cache" in clone.build(*options)
    assert clone.module.read_bytes() == built.module.read_bytes()


def test_damaged_module_is_replaced(built: CudaClone, workshop: Workshop, toolkit: Path) -> None:
    """Whatever is wrong with it: size, bytes, what is said of it, or that something else lies in its place."""
    clone = copy_of(built, workshop)
    module, info = clone.module, clone.lib / "cuda-info.json"

    def changed(name: str) -> None:
        info.write_text(json.dumps(clone.cuda_info() | {name: "0123"}))

    def flipped() -> None:
        data = bytearray(module.read_bytes())
        data[len(data) // 2] ^= 1
        module.write_bytes(data)

    def a_link() -> None:
        module.rename(clone.folder / "elsewhere.so")
        module.symlink_to(clone.folder / "elsewhere.so")

    def a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    for damage in (
        flipped,
        lambda: changed("stamp"),
        lambda: info.write_text("[" * 100_000),
        a_link,
        lambda: a_folder(module),
    ):
        damage()
        assert "copied" in clone.build("--cuda", "--arch", "61", "--arch", "70", "--toolkit", str(toolkit))
        assert module.read_bytes() == built.module.read_bytes()
        assert clone.cuda_info() == built.cuda_info()


def test_module_goes_beside_the_libraries_that_are_there(built: CudaClone, workshop: Workshop, toolkit: Path) -> None:
    clone = copy_of(built, workshop)
    assert "./build_llama.sh --cuda adds it again" in clone.build("--portable")
    assert not clone.module.exists()
    before = snapshot(clone.lib)
    clone.build("--cuda", "--arch", "61", "--arch", "70", "--toolkit", str(toolkit))
    assert clone.module.exists()
    assert {name: found for name, found in snapshot(clone.lib).items() if name in before} == before
    assert clone.info()["cpu"] == "portable"


def test_spaces_in_the_folders(workshop: Workshop, toolkit: Path) -> None:
    clone = cuda_clone(workshop, "my clone", "my cache")
    clone.build("--cuda", "--arch", "61", "--toolkit", str(toolkit))
    assert gpu_code(clone.module) == {("elf", "61"): 2, ("ptx", "61"): 2}
    assert not (clone.work / "stage").exists()


def test_special_characters_in_the_folders_are_refused(workshop: Workshop) -> None:
    clone = cuda_clone(workshop, cache="it's mine")
    assert "nvcc does not get along with special characters" in clone.refuse("--cuda", "--arch", "61")


def test_module_does_not_outlive_its_libraries(built: CudaClone, workshop: Workshop) -> None:
    clone = copy_of(built, workshop)
    assert "nothing to do" in clone.build()
    assert clone.module.exists()
    said = clone.build(CFLAGS="-g")  # libraries of another stamp
    assert "the CUDA module went with the libraries that were there: ./build_llama.sh --cuda adds it again" in said
    assert not clone.module.exists()


def test_killed_build_goes_on_where_it_stopped(clone: CudaClone, tmp_path: Path, toolkit: Path) -> None:
    """Killed with one of two files compiled: the second run does not compile that one again."""
    clone.build()
    compiler, brake = tmp_path / "g++", tmp_path / "brake"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        f'case "$*" in *second.cu*) while [ -e {brake} ]; do sleep 0.1; done;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    brake.touch()
    options = ["--cuda", "--arch", "61", "--toolkit", str(toolkit), "--jobs", "1"]
    process = clone.start(*options, CUDAHOSTCXX=str(compiler))
    wait_for(tmp_path / "calls", "second.cu")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not clone.module.exists()
    brake.unlink()
    (tmp_path / "calls").unlink()
    said = clone.build(*options, CUDAHOSTCXX=str(compiler))
    assert "continuing an unfinished build" in said
    compiled = re.findall(r"(\w+)\.cu(?!\.o)", (tmp_path / "calls").read_text())
    assert "second" in compiled
    assert "first" not in compiled
    assert gpu_code(clone.module) == {("elf", "61"): 2, ("ptx", "61"): 2}


def test_module_with_other_code_than_asked_for_is_refused(clone: CudaClone, tmp_path: Path, toolkit: Path) -> None:
    backend = "ggml/src/ggml-cuda/CMakeLists.txt"
    other = MINIATURE[backend].replace(
        "enable_language(CUDA)", "enable_language(CUDA)\nset(CMAKE_CUDA_ARCHITECTURES 70)"
    )
    checkout = write_tree(tmp_path / "checkout", MINIATURE | {backend: other})
    done = clone.run("--source", str(checkout), "--cuda", "--arch", "61", "--toolkit", str(toolkit))
    assert done.returncode == 2
    assert "the module holds sm_70 ×2, compute_70 ×2, which is not code for 61" in done.stderr
    assert not clone.module.exists()


SUBSET = ["scale.cu", "norm.cu", "getrows.cu"]


def test_a_part_of_the_real_backend_compiles_for_pascal(tmp_path: Path, toolkit: Path) -> None:
    engine, lib = REPOSITORY / "vendor/llama.cpp", REPOSITORY / "swarmkv_ll/_lib"
    if not (engine / "ggml/src/ggml-cuda").is_dir():
        pytest.skip("the engine's source is not unpacked here: its libraries came from the build cache")
    configure = ["cmake", "-S", REPOSITORY / "vendor/cuda", "-B", tmp_path, "-G", "Ninja", f"-DENGINE={engine}"]
    configure += [f"-DLIB={lib}", "-DCMAKE_CUDA_ARCHITECTURES=61", f"-DCMAKE_CUDA_COMPILER={toolkit}/bin/nvcc"]
    configure += [f"-DCUDAToolkit_ROOT={toolkit}", f"-DSUBSET={';'.join(SUBSET)}"]
    for command in (configure, ["cmake", "--build", tmp_path, "--target", "ggml-cuda"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    code = gpu_code(tmp_path / "bin/libggml-cuda.so")
    assert set(code) == {("elf", "61"), ("ptx", "61")}
    assert code["elf", "61"] == len(SUBSET)
