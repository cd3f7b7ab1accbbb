"""A wheel for other machines (`vendor/wheel/build.sh`), and what an engine does on a processor it was not compiled for.

Other processors are emulated by Debian's `qemu-user`. A wheel takes minutes to build: the tests of one use
`SWARMKV_WHEEL`, or what lies in `dist/`, and are skipped where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from helpers import TESTS, Files

REPOSITORY = TESTS.parent
LIB = REPOSITORY / "swarmkv_ll" / "_lib"
SCRIPT = REPOSITORY / "vendor/wheel/build.sh"
GLIBC = (2, 28)

QEMU = shutil.which("qemu-x86_64")
emulates = pytest.mark.skipif(
    QEMU is None or os.uname().machine != "x86_64", reason="needs qemu-x86_64 (qemu-user), on x86-64"
)


def on(cpu: str, code: str, *args: object, package: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, on an emulated processor ("host": on this one)."""
    emulator = [] if cpu == "host" else [str(QEMU), "-cpu", cpu]
    return subprocess.run(
        [*emulator, sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(package), "PYTHONFAULTHANDLER": ""},
        cwd=TESTS.anchor,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


START = """
    from swarmkv_ll import runtime
    from swarmkv_ll.errors import EngineLoadError
    try:
        runtime.start()
        print("started")
    except EngineLoadError as error:
        print(error)
"""


# ── the engine of this clone ──


@emulates
def test_an_engine_built_for_newer_processors_is_one_clear_error_on_an_older_one() -> None:
    built = json.loads((LIB / "build-info.json").read_text())["instruction_sets"]
    if "AVX" not in built and "sse42" not in built:
        pytest.skip("the engine is built for a processor as old as those that are emulated")
    done = on("Nehalem", START)
    assert done.returncode == 0, done.stderr
    expected = "started" if "sse42" in built else f"no CPU device: none of the backends in {LIB} could be loaded"
    assert done.stdout.startswith(expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fast"], "unknown option --fast"),
        (["--out"], "--out needs a value"),
        (["--check", "nowhere.whl"], "there is no nowhere.whl"),
    ],
)
def test_refused_options(options: list[str], says: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"wheel: {says}")
    assert not list(tmp_path.iterdir())


# ── a wheel ──


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = os.environ.get("SWARMKV_WHEEL")
    found = [Path(named)] if named else sorted(REPOSITORY.glob("dist/*manylinux*.whl"), key=os.path.getmtime)
    if not found:
        pytest.skip("no wheel: SWARMKV_WHEEL names none, and dist/ holds none (vendor/wheel/build.sh makes one)")
    return found[-1]


@pytest.fixture(scope="module")
def package(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files; everything it depends on comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_tags_say_what_it_runs_on(wheel: Path) -> None:
    assert re.fullmatch(r"swarmkv_ll-[\w.]+-cp310-abi3-manylinux_2_\d+_(x86_64|aarch64)\.whl", wheel.name)
    assert int(wheel.name.split("manylinux_2_")[1].split("_")[0]) <= GLIBC[1]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_its_libraries_need_an_old_glibc_and_each_other(package: Path) -> None:
    libraries = sorted(package.rglob("*.so*"))
    assert {"libllama.so", "_llama.abi3.so"} <= {path.name for path in libraries}
    ours = {path.name for path in libraries}
    for path in libraries:
        text = subprocess.run(["readelf", "-dVsW", path], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)) - ours
        assert needed <= {f"lib{name}.so.{n}" for name, n in (("c", 6), ("m", 6), ("pthread", 0), ("dl", 2))} | {
            "ld-linux-x86-64.so.2",
            "ld-linux-aarch64.so.1",
        }, path.name
        versions = {tuple(map(int, v.split("."))) for v in re.findall(r"\bGLIBC_([\d.]+)", text)}
        assert versions, path.name
        assert max(versions) <= GLIBC, path.name
        assert not re.search(r"\b(GLIBCXX|CXXABI|GOMP|GCC)_\d", text), path.name
        # What it has of a C++ library is its own: nothing that a neighbour's libstdc++ or unwinder could stand in for,
        # but operator new and delete, which are malloc and free everywhere.
        exported = [line.split()[-1] for line in text.splitlines() if re.search(r" (GLOBAL|WEAK) +DEFAULT +\d", line)]
        assert exported, path.name
        runtime = re.compile(r"_Unwind|__cxa_|__gxx_|_Z(N|NK|T[ISV]|T[ISV]N)St(?!3__1)")
        assert not [name for name in exported if runtime.match(name)], path.name


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_its_threads_yield_while_they_wait(package: Path) -> None:
    modules = list(package.glob("swarmkv_ll/_lib/libggml-cpu-*.so"))
    assert len(modules) > 6
    for module in modules:
        text = subprocess.run(
            ["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True
        ).stdout
        assert re.search(r"\bsched_yield\b", text), module.name


ANSWER = """
    import sys
    from swarmkv_ll import Model, Sampler
    from swarmkv_ll.ffi import LIB_DIR, mapped_files
    with Model(sys.argv[1]) as model, model.context(n_ctx=128, n_threads=2) as ctx:
        ctx.decode(list(b"Once upon a time there was a harbour"))
        print(*ctx.generate(Sampler(), max_tokens=12))
    print(*mapped_files("libggml-cpu"))
"""


def answer(cpu: str, package: Path, model: Path) -> tuple[str, str]:
    """The greedy tokens, and the CPU variant that computed them."""
    done = on(cpu, ANSWER, model, package=package)
    assert done.returncode == 0, done.stderr
    tokens, libraries = done.stdout.splitlines()
    (library,) = libraries.split()
    assert Path(library).parent == package / "swarmkv_ll/_lib"
    return tokens, Path(library).stem.removeprefix("libggml-cpu-")


@emulates
@pytest.mark.parametrize(
    ("cpu", "variant"),
    [
        ("Nehalem", "sse42"),
        ("SandyBridge", "sandybridge"),
        ("IvyBridge", "ivybridge"),
        ("Opteron_G5", "piledriver"),
        ("Haswell", "haswell"),
    ],
)
def test_an_older_processor_gets_its_variant_and_the_same_answer(
    package: Path, files: Files, cpu: str, variant: str
) -> None:
    expected, _ = answer("host", package, files["llama"])
    assert len(set(expected.split())) > 3
    assert answer(cpu, package, files["llama"]) == (expected, variant)


DIRECT = """
    import ctypes, sys
    ctypes.CDLL(sys.argv[1] + "/libggml-base.so", ctypes.RTLD_GLOBAL)
    module = ctypes.CDLL(sys.argv[1] + "/libggml-cpu-haswell.so")
    numbers = (ctypes.c_float * 64)(*[1.0] * 64)
    total = ctypes.c_float()
    module.ggml_vec_dot_f32(64, ctypes.byref(total), ctypes.c_size_t(0), numbers, ctypes.c_size_t(0), numbers, ctypes.c_size_t(0), 1)
    print(total.value)
"""


@emulates
def test_the_emulated_processor_does_lack_what_the_variants_are_for(package: Path) -> None:
    """Else the tests above could not fail: the code they choose against must die there."""
    lib = package / "swarmkv_ll/_lib"
    assert on("Nehalem", DIRECT, lib).returncode in (-signal.SIGILL, 128 + signal.SIGILL)
    assert on("Haswell", DIRECT, lib).stdout == "64.0\n"


DEVICES = """
    import ctypes, sys
    ggml = ctypes.CDLL(sys.argv[1] + "/libggml.so", ctypes.RTLD_GLOBAL)
    ctypes.CDLL(sys.argv[1] + "/libllama.so")
    ggml.ggml_backend_load_all_from_path(sys.argv[1].encode())
    print(ggml.ggml_backend_dev_count(), [line.split("/")[-1].strip() for line in open("/proc/self/maps") if "ggml-cpu" in line][:1])
"""


@emulates
def test_the_engine_itself_runs_on_the_first_64_bit_processors(package: Path) -> None:
    # Without numpy, whose wheels ask for more.
    assert on("Opteron_G1", DEVICES, package / "swarmkv_ll/_lib").stdout == "1 ['libggml-cpu-x64.so']\n"


@emulates
def test_no_variant_that_fits_is_one_clear_error(package: Path, tmp_path: Path) -> None:
    poor = shutil.copytree(package, tmp_path / "poor")
    for module in poor.glob("swarmkv_ll/_lib/libggml-cpu-*.so"):
        if "haswell" not in module.name:
            module.unlink()
    assert on("Haswell", START, package=poor).stdout == "started\n"
    done = on("Nehalem", START, package=poor)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"no CPU device: none of the backends in \S+ could be loaded \(libggml-cpu-haswell\.so\)", done.stdout
    )


def test_a_broken_model_is_our_error(package: Path, files: Files, tmp_path: Path) -> None:
    """The engine throws C++ exceptions and catches them, with an unwinder of its own in each library."""
    whole = files["llama"].read_bytes()
    broken = tmp_path / "broken.gguf"
    code = """
        import sys
        from swarmkv_ll import Model
        from swarmkv_ll.errors import ModelLoadError
        try:
            Model(sys.argv[1])
        except ModelLoadError as error:
            print("refused")
    """
    for data in (whole[: len(whole) // 2], whole[:100], whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight")):
        broken.write_bytes(data)
        done = on("host", code, broken, package=package)
        assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_a_wheel_that_needs_a_newer_system_is_refused(wheel: Path, package: Path, tmp_path: Path) -> None:
    mine = (LIB / "libllama.so").read_bytes()
    if not re.search(rb"GLIBC_2\.(29|3\d)\0", mine):
        pytest.skip("what is compiled here would run on an older system too")
    newer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(newer, "w") as new:
        for name in old.namelist():
            new.writestr(name, mine if name.endswith("/libllama.so") else old.read(name))
    for path, code in ((wheel, 0), (newer, 2)):
        done = subprocess.run(["bash", SCRIPT, "--check", path], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert done.stderr.startswith("wheel: not a wheel for manylinux_2_28_")
