"""`build_llama.sh`, from the outside, and what it left in `swarmkv_ll/_lib`.

Compiling the real engine takes minutes, so most tests here build a miniature of it: four C files with the layout, the
targets and the version interface of llama.cpp, packed as a source package that pip can download from a folder. The
script, the compiler, cmake, ninja and pip are the real ones.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import textwrap
import time
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "build_llama.sh"
LIB = REPOSITORY / "swarmkv_ll" / "_lib"
TOOLS_PROJECT = "vendor/tools/CMakeLists.txt"

COMMIT = "1234567890abcdef1234567890abcdef12345678"

MINIATURE = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.14...3.28)
        project(miniature C CXX)
        set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
        add_library(ggml-base SHARED ggml/src/base.c)
        target_compile_definitions(ggml-base PRIVATE COMMIT="${GGML_BUILD_COMMIT}")
        add_library(ggml SHARED ggml/src/registry.c)
        target_link_libraries(ggml PUBLIC ggml-base)
        if (GGML_CPU_ALL_VARIANTS)
            set(modules ggml-cpu-old ggml-cpu-new)
        else()
            set(modules ggml-cpu)
        endif()
        foreach (module IN LISTS modules)
            add_library(${module} MODULE ggml/src/cpu.c)
            add_dependencies(ggml ${module})
        endforeach()
        add_library(llama SHARED src/llama.c)
        target_include_directories(llama PRIVATE include ggml/include)
        target_link_libraries(llama PUBLIC ggml)
        """,
    "LICENSE": "MIT License, miniature\n",
    "cmake/nothing.cmake": "\n",
    "ggml/include/ggml.h": "const char * ggml_commit(void);\n",
    **{f"ggml/include/{name}.h": "\n" for name in ("ggml-alloc", "ggml-backend", "ggml-cpu", "ggml-opt", "gguf")},
    "ggml/src/base.c": "const char * ggml_commit(void) { return COMMIT; }\n",
    "ggml/src/registry.c": (
        "extern const char * ggml_commit(void);\nconst char * registry(void) { return ggml_commit(); }\n"
    ),
    "ggml/src/cpu.c": "int cpu(void) { return 1; }\n",
    "include/llama.h": "const char * where(void);\n",
    "licenses/LICENSE-other": "other\n",
    "src/CMakeLists.txt": "\n",
    "src/llama.c": (
        '#include "ggml.h"\n#include "llama.h"\nconst char * where(void) { return ggml_commit() ? __FILE__ : 0; }\n'
    ),
    "vendor/CMakeLists.txt": "\n",
    "tools/not-needed.txt": "not read by a build of the libraries\n",
    # What --cuda reads besides.
    "ggml/cmake/common.cmake": "\n",
    "ggml/src/ggml-cuda/CMakeLists.txt": """
        find_package(CUDAToolkit REQUIRED)
        enable_language(CUDA)
        ggml_add_backend_library(ggml-cuda first.cu second.cu)
        target_link_libraries(ggml-cuda PRIVATE CUDA::cudart CUDA::cublas)
        """,
    **{
        f"ggml/src/ggml-cuda/{name}.cu": f"__global__ void {name}(int * x) {{ *x += 1; }}\n"
        for name in ("first", "second")
    },
    # What --tools reads besides.
    "common/CMakeLists.txt": """
        add_library(llama-common STATIC common.c)
        target_compile_definitions(llama-common PRIVATE COMMIT="${LLAMA_BUILD_COMMIT}")
        target_link_libraries(llama-common PUBLIC llama)
        """,
    "common/common.c": (
        '#include <stdio.h>\n#include "ggml.h"\n#include "llama.h"\n'
        'int show(void) { return printf("commit %s, engine %s, %s\\n", COMMIT, ggml_commit(), where()) < 0; }\n'
    ),
    "tools/mtmd/CMakeLists.txt": "\n",
    "tools/ui/CMakeLists.txt": "\n",
    **{
        f"tools/{folder}/{name}": text
        for folder in ("server", "batched-bench")
        for name, text in {
            "CMakeLists.txt": f"""
                add_executable(llama-{folder} main.c)
                target_link_libraries(llama-{folder} PRIVATE llama-common)
                """,
            "main.c": "int show(void);\nint main(void) { return show(); }\n",
        }.items()
    },
}

PACKAGING = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: mini-engine\nVersion: 1.0\n",
    "pyproject.toml": """
        [build-system]
        requires = []
        build-backend = "backend"
        backend-path = ["."]
        """,
    "backend.py": """
        import pathlib
        def prepare_metadata_for_build_wheel(folder, config_settings=None):
            info = pathlib.Path(folder, "mini_engine-1.0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: mini-engine\\nVersion: 1.0\\n")
            (info / "WHEEL").write_text("Wheel-Version: 1.0\\n")
            return info.name
        def build_wheel(*arguments):
            raise NotImplementedError
        """,
}


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def write_sdist(path: Path) -> str:
    """Write the miniature's source package and return its sha256."""
    files = PACKAGING | {f"vendor/llama.cpp/{name}": text for name, text in MINIATURE.items()}
    # Without a time in the header the package, and so its hash, is the same in each test.
    with (
        gzip.GzipFile(path, "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, text in files.items():
            data = textwrap.dedent(text).encode()
            member = tarfile.TarInfo(f"mini_engine-1.0/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Clone:
    """A folder with the script and the miniature's lock in it, and an environment to run it in."""

    def __init__(self, folder: Path, index: Path, cache: Path, sha256: str) -> None:
        self.folder = folder
        self.lib = folder / "swarmkv_ll" / "_lib"
        self.work = folder / "vendor" / "build"
        self.unpacked = folder / "vendor" / "llama.cpp"
        self.cache = cache / "swarmkv-ll"
        self.lib.parent.mkdir(parents=True)
        shutil.copy(SCRIPT, folder)
        (folder / TOOLS_PROJECT).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / TOOLS_PROJECT, folder / TOOLS_PROJECT)
        self.write_lock(sha256)
        self.environment = {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "XDG_CACHE_HOME": str(cache),
            # The only package index is a folder with the miniature in it.
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(index),
            "PIP_NO_INDEX": "1",
        }

    def write_lock(self, sha256: str) -> None:
        write_tree(
            self.folder / "vendor",
            {
                "llama.cpp.lock": f"""
                # a comment
                package = "mini-engine"  # another
                version = "1.0"
                sdist = "mini_engine-1.0.tar.gz"
                sha256 = "{sha256}"
                size = "tiny"
                folder = "vendor/llama.cpp"
                commit = "{COMMIT}"
                license = "MIT"
                """
            },
        )

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", self.folder / SCRIPT.name, *options],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*options, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(options, process.returncode, out, err)

    def build(self, *options: str, **environment: str) -> str:
        """Run the script, expect success, and return what it printed."""
        done = self.run(*options, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    def refuse(self, *options: str, **environment: str) -> str:
        """Run the script, expect exit code 2 and one line on standard error, and return that line."""
        done = self.run(*options, **environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.startswith("build_llama: ")
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def info(self) -> dict[str, object]:
        info = json.loads((self.lib / "build-info.json").read_text())
        assert isinstance(info, dict)
        return info

    @property
    def tools(self) -> Path:
        """Where --tools puts what it builds on the libraries that are there."""
        build_ids = self.info()["build_ids"]
        assert isinstance(build_ids, dict)
        return self.cache / "tools" / str(self.info()["stamp"]) / str(build_ids["libllama.so"])[:16]

    def is_whole(self) -> bool:
        files = self.info()["files"]
        assert isinstance(files, dict)
        return all((self.lib / name).stat().st_size == size for name, size in files.items())


class Workshop:
    """Makes clones that share, or don't share, a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"
        self.index.mkdir()
        self.sdist = self.index / "mini_engine-1.0.tar.gz"
        self.sha256 = write_sdist(self.sdist)

    def clone(self, name: str = "clone", cache: str = "cache") -> Clone:
        return Clone(self.folder / name, self.index, self.folder / cache, self.sha256)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def clone(workshop: Workshop) -> Clone:
    return workshop.clone()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone that was built once: for tests that only look."""
    clone = Workshop(tmp_path_factory.mktemp("built")).clone()
    clone.build()
    return clone


@pytest.fixture
def rebuildable(built: Clone, workshop: Workshop) -> Clone:
    """A finished clone with a filled cache, of its own: for tests that damage it."""
    clone = workshop.clone()
    shutil.copytree(built.cache, clone.cache)
    shutil.copytree(built.lib, clone.lib)
    return clone


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file under `folder` with its time of change and size, without the script's own lock."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and "build/" not in str(path)
    }


# ── options ──


def test_help_names_every_option(clone: Clone) -> None:
    text = clone.build("--help")
    for option in (
        *(
            "--portable",
            "--cuda",
            "--arch",
            "--toolkit",
            "--plan",
            "--source",
            "--again",
            "--tools",
            "--jobs",
            "--clean",
        ),
        "--help",
    ):
        assert option in text
    assert not clone.work.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--fast"], "unknown option --fast"),
        (["--jobs"], "--jobs needs a value"),
        (["--jobs", "0"], "--jobs needs a positive number, not '0'"),
        (["--jobs", "many"], "--jobs needs a positive number, not 'many'"),
        (["--tools", "--portable"], "--tools goes with neither --portable nor --source"),
        (["--source", ".", "--tools"], "--tools goes with neither --portable nor --source"),
        (["--source", "nowhere"], "not a llama.cpp checkout: it has no CMakeLists.txt"),
    ],
)
def test_refused_options_change_nothing(clone: Clone, options: list[str], expected: str) -> None:
    before = snapshot(clone.folder)
    assert expected in clone.refuse(*options)
    assert snapshot(clone.folder) == before
    assert not clone.work.exists()


def test_source_must_be_a_checkout(clone: Clone, tmp_path: Path) -> None:
    checkout = write_tree(tmp_path / "checkout", MINIATURE)
    (checkout / "include/llama.h").unlink()
    assert "it has no include/llama.h" in clone.refuse("--source", str(checkout))


# ── a first build ──


def test_first_build_installs_everything(built: Clone) -> None:
    assert built.is_whole()
    names = {path.name for path in built.lib.iterdir()}
    assert names == {
        "build-info.json",
        "include",
        "libggml-base.so",
        "libggml-cpu.so",
        "libggml.so",
        "libllama.so",
        "licenses",
    }
    assert {path.name for path in (built.lib / "licenses").iterdir()} == {
        "LICENSE.llama.cpp",
        "LICENSE-other",
    }
    info = built.info()
    assert info["commit"] == COMMIT
    assert info["source"] == "pin"
    assert info["cpu"] == "native"
    assert (info["package"], info["version"]) == ("mini-engine", "1.0")
    assert re.fullmatch(rf"{COMMIT[:12]}-[0-9a-f]{{8}}", str(info["stamp"]))


def test_only_what_a_build_reads_is_unpacked(built: Clone) -> None:
    assert (built.unpacked / "src/llama.c").is_file()
    assert not (built.unpacked / "tools").exists()


def test_nothing_of_the_work_is_left(built: Clone) -> None:
    assert {path.name for path in built.work.iterdir()} == {"build.log", "lock", "options"}


def test_nothing_changed_is_quick_and_touches_nothing(built: Clone) -> None:
    before = snapshot(built.folder)
    begin = time.monotonic()
    out = built.build()
    assert time.monotonic() - begin < 2
    assert out.count("\n") == 1
    assert "nothing to do" in out
    assert snapshot(built.folder) == before


def test_second_clone_compiles_nothing(built: Clone, workshop: Workshop) -> None:
    second = workshop.clone("second")
    shutil.copytree(built.cache, second.cache)
    out = second.build(PIP_FIND_LINKS="/nonexistent")
    assert "copied from the build cache" in out
    assert not second.unpacked.exists()
    assert second.is_whole()
    assert second.info() == built.info()


def test_builds_are_the_same_wherever_the_clone_lies(built: Clone, workshop: Workshop) -> None:
    other = workshop.clone("a/rather/longer/path/to/another clone", cache="another cache")
    other.build()
    assert other.info()["build_ids"] == built.info()["build_ids"]
    assert b"longer/path" not in (other.lib / "libllama.so").read_bytes()


def test_flags_are_part_of_the_stamp(built: Clone, workshop: Workshop) -> None:
    other = workshop.clone()
    other.build(CFLAGS="-DSOMETHING")
    assert other.info()["stamp"] != built.info()["stamp"]


def test_portable_builds_keep_the_stamp_and_are_repeated(built: Clone, clone: Clone) -> None:
    clone.build("--portable")
    info = clone.info()
    assert info["stamp"] == built.info()["stamp"]
    assert (info["cpu"], info["instruction_sets"]) == ("portable", ["new", "old"])
    assert "nothing to do" in clone.build("--again")
    assert "libggml-cpu.so" not in {path.name for path in clone.lib.iterdir()}


# ── the source package ──


def test_tampered_download_is_refused_and_removed(clone: Clone, workshop: Workshop) -> None:
    downloads = clone.cache / "downloads"
    downloads.mkdir(parents=True)
    bad = downloads / workshop.sdist.name
    data = bytearray(workshop.sdist.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    line = clone.refuse()
    assert "hash mismatch" in line
    assert workshop.sha256 in line
    assert hashlib.sha256(data).hexdigest() in line
    assert not bad.exists()
    assert not clone.unpacked.exists()
    assert not clone.lib.exists()
    clone.build()
    assert clone.is_whole()


def test_tampered_index_is_refused(clone: Clone, workshop: Workshop) -> None:
    clone.write_lock("0" * 64)
    line = clone.refuse()
    assert f"hash mismatch: expected sha256 {'0' * 64}, got {workshop.sha256}" in line
    assert not clone.unpacked.exists()
    assert not list(clone.cache.rglob("*.tar.gz"))


def test_offline_with_an_empty_cache_says_what_to_do(clone: Clone) -> None:
    line = clone.refuse(PIP_FIND_LINKS="/nonexistent")
    assert "cannot download mini-engine 1.0" in line
    assert f"put mini_engine-1.0.tar.gz into {clone.cache}/downloads" in line


# ── interrupted and damaged builds ──


def test_unfinished_lib_is_repaired(rebuildable: Clone) -> None:
    (rebuildable.lib / "build-info.json").unlink()
    assert "is unfinished" in rebuildable.build()
    assert rebuildable.is_whole()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_lib_is_repaired(rebuildable: Clone, damage: str) -> None:
    library = rebuildable.lib / "libggml-cpu.so"
    if damage == "missing":
        library.unlink()
    else:
        os.truncate(library, 100)
    assert "is damaged" in rebuildable.build()
    assert rebuildable.is_whole()


def test_damaged_cache_is_not_trusted(rebuildable: Clone) -> None:
    (library,) = rebuildable.cache.glob("builds/*/libllama.so")
    os.truncate(library, 100)
    shutil.rmtree(rebuildable.lib)
    assert "built in" in rebuildable.build()
    assert rebuildable.is_whole()


def slow_compiler(folder: Path, last: str = "src/llama.c.o") -> tuple[str, Path]:
    """A C compiler that hangs on the library's last file for as long as the returned file exists."""
    compiler, brake = folder / "slow-cc", folder / "brake"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{last}*) while [ -e "{brake}" ]; do sleep 0.1; done;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    brake.touch()
    return str(compiler), brake


def wait_for(condition: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (condition.exists() and text in condition.read_text()):
        assert time.monotonic() < deadline, f"{condition} never said {text!r}"
        time.sleep(0.05)


def test_killed_build_is_continued(clone: Clone, tmp_path: Path) -> None:
    compiler, brake = slow_compiler(tmp_path)
    process = clone.start(CC=compiler)
    wait_for(clone.work / "build.log", "libggml.so")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not clone.lib.exists()
    brake.unlink()
    assert "continuing an unfinished build" in clone.build(CC=compiler)
    assert clone.is_whole()


def test_two_runs_in_one_clone_take_turns(clone: Clone, tmp_path: Path) -> None:
    compiler, brake = slow_compiler(tmp_path)
    first = clone.start(CC=compiler)
    wait_for(clone.work / "build.log", "libggml.so")
    second = clone.start(CC=compiler)
    time.sleep(1)
    brake.unlink()
    out_first, _ = first.communicate(timeout=30)
    out_second, _ = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "built in" in out_first
    assert "waiting for another build of this clone" in out_second
    assert "nothing to do" in out_second
    assert clone.is_whole()


def test_two_clones_compile_once(workshop: Workshop, tmp_path: Path) -> None:
    compiler, brake = slow_compiler(tmp_path)
    one, two = workshop.clone("one"), workshop.clone("two")
    first = one.start(CC=compiler)
    wait_for(one.work / "build.log", "libggml.so")
    second = two.start(CC=compiler)
    time.sleep(1)
    brake.unlink()
    first.communicate(timeout=30)
    out, _ = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "copied from the build cache" in out
    assert two.is_whole()


# ── machines that lack something ──


def path_without(folder: Path, pattern: str) -> str:
    """A folder that holds every command on PATH but those whose name matches `pattern`."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for command in Path(place).glob("*") if place else []:
            link = folder / command.name
            if not re.fullmatch(pattern, command.name) and not link.exists():
                link.symlink_to(command)
    return str(folder)


def test_no_compiler(clone: Clone, tmp_path: Path) -> None:
    path = path_without(tmp_path / "bin", r"(.*-)?(cc|gcc|c\+\+|g\+\+|clang(\+\+)?)(-\d+)?|c\d\d-gcc")
    assert "no compiler found (CC: cc gcc clang)" in clone.refuse(PATH=path)


def test_no_cplusplus_compiler(clone: Clone, tmp_path: Path) -> None:
    path = path_without(tmp_path / "bin", r"(.*-)?(c\+\+|g\+\+|clang\+\+)(-\d+)?")
    assert "no compiler found (CXX: c++ g++ clang++)" in clone.refuse(PATH=path)


def test_named_compiler_that_is_not_there(clone: Clone) -> None:
    assert "no compiler found (CC: no-such-cc -m64)" in clone.refuse(CC="no-such-cc -m64")


def test_compiler_that_does_not_work(clone: Clone, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo old\n')
    compiler.chmod(0o755)
    assert "does not compile C++17" in clone.refuse(CXX=str(compiler))
    assert "does not answer --version" in clone.refuse(CXX="false")


def test_no_python(clone: Clone) -> None:
    assert "no Python found as 'no-such-python'" in clone.refuse(PYTHON="no-such-python")


def test_python_without_pip(clone: Clone, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m pip" ] && exit 1\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    assert "has no pip" in clone.refuse(PYTHON=str(python))


@pytest.mark.parametrize("place", ["vendor/build", "swarmkv_ll/_lib", "vendor/llama.cpp"])
def test_folder_that_cannot_be_written(clone: Clone, place: str) -> None:
    # A file in a folder's place stops root too, which permissions don't.
    path = clone.folder / place
    path.write_text("in the way")
    line = clone.refuse()
    assert place in line
    assert "cannot write into" in line or "is in the way" in line
    assert path.read_text() == "in the way"


def test_cache_that_cannot_be_written_is_done_without(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    out = clone.build()
    assert f"cannot write into the cache {clone.cache}" in out
    assert clone.is_whole()
    assert "nothing to do" in clone.build()


@pytest.mark.parametrize("options", ["", "--tools"])
def test_full_disk(rebuildable: Clone, tmp_path: Path, options: str) -> None:
    clone = rebuildable
    if not options:
        shutil.rmtree(clone.lib)
        shutil.rmtree(clone.cache / "builds")
    small = tmp_path / "small"
    small.mkdir()
    inside = (
        f"mount -t tmpfs -o size=40m none {small} && cp -r {clone.folder} {small}/clone"
        f" && exec bash {small}/clone/{SCRIPT.name} {options}"
    )
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine allows no mount of a small file system (unshare -rm)")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside],
        env=clone.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"not enough disk space in .*: \d+ MiB free, \d+ MiB needed\n", done.stderr)
    assert done.stderr.count("\n") == 1


# ── a checkout of the user's own ──


def test_source_is_compiled_again_after_each_edit(clone: Clone, tmp_path: Path) -> None:
    checkout = write_tree(tmp_path / "checkout", MINIATURE)
    clone.build("--source", str(checkout))
    first = clone.info()
    assert str(first["source"]).startswith("tree:")
    assert first["sdist_sha256"] is None
    assert str(tmp_path) not in (clone.lib / "build-info.json").read_text()
    assert "nothing to do" in clone.build("--source", str(checkout))
    assert "nothing to do" in clone.build("--again")

    (checkout / "ggml/src/cpu.c").write_text("int cpu(void) { return 2; }\n")
    assert "built in" in clone.build("--again")
    assert clone.info()["stamp"] != first["stamp"]
    # Only what the edit reached: llama.c was compiled the first time.
    assert "llama.c.o" not in (clone.work / "build.log").read_text()
    assert not clone.cache.joinpath("builds").exists()


def test_failed_compilation_shows_the_log(clone: Clone, tmp_path: Path) -> None:
    checkout = write_tree(tmp_path / "checkout", MINIATURE)
    (checkout / "src/llama.c").write_text("int broken = missing;\n")
    done = clone.run("--source", str(checkout))
    assert done.returncode == 2
    assert f"compiling llama.cpp failed; the last lines of {clone.work}/build.log" in done.stderr
    assert "missing" in done.stderr
    assert not clone.lib.exists()


def test_engine_that_does_not_carry_the_stamp_is_refused(clone: Clone, tmp_path: Path) -> None:
    checkout = write_tree(tmp_path / "checkout", MINIATURE)
    (checkout / "ggml/src/base.c").write_text('const char * ggml_commit(void) { return "x"; }\n')
    done = clone.run("--source", str(checkout))
    assert done.returncode == 2
    assert "libggml-base.so says it is x, not" in done.stderr
    assert not clone.lib.exists()


def test_clean_removes_what_was_built_and_keeps_downloads(rebuildable: Clone) -> None:
    rebuildable.tools.mkdir(parents=True)
    assert "removed" in rebuildable.build("--clean")
    assert not rebuildable.lib.exists()
    assert not rebuildable.unpacked.exists()
    assert not list(rebuildable.cache.glob("builds/*/*"))
    assert not list(rebuildable.cache.glob("tools/*"))
    assert list(rebuildable.cache.glob("downloads/*.tar.gz"))
    assert "built in" in rebuildable.build(PIP_FIND_LINKS="/nonexistent")


# ── --tools ──


def run_tool(tool: Path, lib: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as its users do: the libraries named, and the current folder the one where the CPU backends lie."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(lib)}
    return subprocess.run([tool, *arguments], cwd=lib, env=environment, capture_output=True, text=True, check=False)


def test_tools_are_built_on_the_libraries_that_are_there(rebuildable: Clone) -> None:
    before = snapshot(rebuildable.lib)
    out = rebuildable.build("--tools")
    tools = rebuildable.tools
    assert out.splitlines()[-1].startswith(
        f"build_llama: llama-batched-bench and llama-server are ready in {tools}, built in"
    )
    assert snapshot(rebuildable.lib) == before
    assert {path.name for path in tools.iterdir()} == {"build-info.json", "llama-batched-bench", "llama-server"}

    stamp = f"{tools.parent.name}/{tools.name}"
    info = json.loads((tools / "build-info.json").read_text())
    assert (info["stamp"], info["commit"]) == (stamp, COMMIT)
    assert info["files"] == {name: (tools / name).stat().st_size for name in ("llama-batched-bench", "llama-server")}
    for name in info["files"]:
        done = run_tool(tools / name, rebuildable.lib)
        assert done.stdout == f"commit {stamp}, engine {tools.parent.name}, ./src/llama.c\n"
        assert os.fsencode(rebuildable.folder) not in (tools / name).read_bytes()
    # Nothing of the work is left, and the libraries' own sources and build were not touched.
    assert {path.name for path in rebuildable.work.iterdir()} == {"tools.log", "lock"}
    assert not rebuildable.unpacked.exists()

    before = snapshot(tools.parent)
    assert rebuildable.build("--tools") == (
        f"build_llama: nothing to do: llama-batched-bench and llama-server are in {tools}\n"
    )
    assert snapshot(tools.parent) == before
    assert "nothing to do: swarmkv_ll/_lib is up to date" in rebuildable.build()


def test_tools_build_missing_libraries_first_and_take_any_others(clone: Clone) -> None:
    clone.build("--portable")
    shutil.rmtree(clone.lib)
    out = clone.build("--tools")
    assert "swarmkv_ll/_lib is ready" in out
    assert clone.info()["cpu"] == "portable"
    assert (clone.tools / "llama-server").exists()
    assert not (clone.unpacked / "common").exists()
    before = snapshot(clone.lib)
    assert clone.build("--tools").startswith("build_llama: nothing to do: llama-batched-bench")
    assert snapshot(clone.lib) == before


@pytest.mark.parametrize("other", [{"source": "tree:0123456789ab"}, {"commit": "0" * 40}])
def test_tools_refuse_libraries_that_are_not_of_the_pin(rebuildable: Clone, other: dict[str, str]) -> None:
    (rebuildable.lib / "build-info.json").write_text(json.dumps(rebuildable.info() | other))
    rebuildable.work.mkdir()
    (rebuildable.work / "options").write_text("no\n/a/checkout\n")
    for options in (["--tools"], ["--tools", "--again"]):
        line = rebuildable.refuse(*options)
        assert "builds on the pinned llama.cpp, but swarmkv_ll/_lib holds another: run ./build_llama.sh first" in line
    assert not rebuildable.tools.exists()


def test_tools_check_the_source_package(rebuildable: Clone) -> None:
    (archive,) = rebuildable.cache.glob("downloads/*.tar.gz")
    os.truncate(archive, archive.stat().st_size - 1)
    assert "hash mismatch" in rebuildable.refuse("--tools")
    assert not archive.exists()
    assert not (rebuildable.work / "tools-source").exists()


def test_damaged_tools_are_built_again(rebuildable: Clone) -> None:
    rebuildable.build("--tools")
    os.truncate(rebuildable.tools / "llama-server", 100)
    assert "are ready in" in rebuildable.build("--tools")
    assert run_tool(rebuildable.tools / "llama-server", rebuildable.lib).returncode == 0


def test_killed_build_of_the_tools_is_continued(rebuildable: Clone, tmp_path: Path) -> None:
    compiler, brake = slow_compiler(tmp_path, "llama-server.dir/main.c.o")
    process = rebuildable.start("--tools", "--jobs", "2", CC=compiler)
    wait_for(rebuildable.work / "tools.log", "Linking C executable")  # the other one
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not rebuildable.tools.exists()
    brake.unlink()
    assert "continuing an unfinished build" in rebuildable.build("--tools", CC=compiler)
    assert "llama-batched-bench.dir/main.c.o" not in (rebuildable.work / "tools.log").read_text()
    assert (rebuildable.tools / "llama-server").exists()


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("add_subdirectory(nowhere)", "configuring the tools"),
        ("target_compile_options(llama-server PRIVATE -Dmain=3)", "compiling the tools"),
        ("target_link_options(llama-server PRIVATE -Wl,--wrap=show,--defsym=__wrap_show=0)", "checking the tools"),
    ],
)
def test_failed_build_of_the_tools_shows_the_log(rebuildable: Clone, line: str, step: str) -> None:
    with (rebuildable.folder / TOOLS_PROJECT).open("a") as project:
        project.write(line + "\n")
    done = rebuildable.run("--tools")
    assert done.returncode == 2
    assert done.stderr.startswith(f"build_llama: {step} failed; the last lines of {rebuildable.work}/tools.log:\n")
    assert not rebuildable.tools.exists()


def test_tools_of_another_stamp_are_refused(rebuildable: Clone) -> None:
    project = rebuildable.folder / TOOLS_PROJECT
    project.write_text(project.read_text().replace("foreach (part", "set(LLAMA_BUILD_COMMIT another)\nforeach (part"))
    done = rebuildable.run("--tools")
    assert "llama-batched-bench does not run, or is not of" in done.stderr
    assert "commit another" in done.stderr
    assert not rebuildable.tools.exists()


def test_tools_that_could_not_be_kept_are_not_compiled(rebuildable: Clone) -> None:
    (rebuildable.cache / "tools").write_text("in the way")
    assert f"cannot write into {rebuildable.tools.parent}" in rebuildable.refuse("--tools")
    assert not (rebuildable.work / "tools").exists()


def test_tools_without_a_cache_are_kept_in_the_clone(rebuildable: Clone) -> None:
    shutil.rmtree(rebuildable.cache.parent)
    rebuildable.cache.parent.write_text("in the way")
    out = rebuildable.build("--tools")
    assert f"cannot write into the cache {rebuildable.cache}" in out
    assert f"are ready in {rebuildable.work}/cache/tools/" in out
    assert "nothing to do" in rebuildable.build("--tools")


# ── the engine this test suite runs with ──


@pytest.fixture(scope="module")
def info() -> dict[str, object]:
    path = LIB / "build-info.json"
    if not path.exists():
        pytest.skip("the engine is not built: run ./build_llama.sh")
    info = json.loads(path.read_text())
    assert isinstance(info, dict)
    return info


def test_engine_carries_the_stamp(info: dict[str, object]) -> None:
    # In a process of its own: this one may have another copy of ggml loaded.
    code = (
        "import ctypes; lib = ctypes.CDLL('./libggml-base.so');"
        "lib.ggml_commit.restype = ctypes.c_char_p; print(lib.ggml_commit().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=LIB, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == info["stamp"]


def test_libraries_are_plain_files(info: dict[str, object]) -> None:
    for path in LIB.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or stat.S_ISREG(path.stat().st_mode)
    assert {"libllama.so", "libggml.so", "libggml-base.so"} <= {p.name for p in LIB.glob("*.so")}
    assert list(LIB.glob("libggml-cpu*.so"))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_libraries_look_for_each_other_beside_themselves_only(info: dict[str, object]) -> None:
    build_ids = info["build_ids"]
    assert isinstance(build_ids, dict)
    for path in LIB.glob("*.so"):
        text = subprocess.run(["readelf", "-dnW", path], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text) == ["$ORIGIN"]
        assert re.findall(r"\(SONAME\).*\[(.*)\]", text) in ([path.name], [])
        assert not re.search(r"\(NEEDED\).*\[lib(llama|ggml).*\.so\.", text)
        if path.name in build_ids:
            assert f"Build ID: {build_ids[path.name]}" in text


def test_no_path_of_the_building_machine(info: dict[str, object]) -> None:
    if str(info["source"]) == "pin":
        for path in (LIB / "build-info.json", *LIB.glob("*.so")):
            assert os.fsencode(REPOSITORY) + b"/" not in path.read_bytes(), path.name


def test_licences_travel_with_the_engine(info: dict[str, object]) -> None:
    text = (LIB / "licenses/LICENSE.llama.cpp").read_text()
    assert "MIT License" in text
    if info["source"] == "pin":
        assert text == (REPOSITORY / "vendor/LICENSE.llama.cpp").read_text()


def test_installed_package_is_abi3_and_names_both_licences(info: dict[str, object]) -> None:
    try:
        package = metadata.distribution("swarmkv-ll")
    except metadata.PackageNotFoundError:
        pytest.skip("swarmkv-ll is not installed: run pip install -e '.[test]'")
    wheel = package.read_text("WHEEL") or ""
    assert re.search(r"^Tag: cp310-abi3-linux_", wheel, re.MULTILINE)
    assert "Root-Is-Purelib: false" in wheel
    assert package.metadata.get_all("License-File") == ["LICENSE", "vendor/LICENSE.llama.cpp"]


def test_backend_asks_for_what_is_missing_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    backend = pytest.importorskip("_build_backend")
    for name, text in {"cmake": "cmake version 3.25.1", "ninja": "1.11"}.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho {text}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not {"cmake>=3.18", "ninja"} & set(backend._missing_tools())
    (tmp_path / "cmake").write_text("#!/bin/sh\necho cmake version 3.9.2\n")
    assert "cmake>=3.18" in backend._missing_tools()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert {"cmake>=3.18", "ninja"} <= set(backend._missing_tools())


def test_tools_run_on_this_engine(info: dict[str, object]) -> None:
    build_ids = info["build_ids"]
    assert isinstance(build_ids, dict)
    stamp = f"{info['stamp']}/{build_ids['libllama.so'][:16]}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "swarmkv-ll", "tools", stamp)
    if not (folder / "build-info.json").exists():
        pytest.skip("the tools are not built: run ./build_llama.sh --tools")
    for name in ("llama-batched-bench", "llama-server"):
        done = run_tool(folder / name, LIB, "--version")
        assert f"commit {stamp}" in done.stdout + done.stderr
        text = subprocess.run(
            ["ldd", folder / name],
            env=os.environ | {"LD_LIBRARY_PATH": str(LIB)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found = dict(re.findall(r"(lib(?:llama|ggml)\S*) => (\S+)", text))
        assert found == {library: str(LIB / library) for library in ("libllama.so", "libggml.so", "libggml-base.so")}
