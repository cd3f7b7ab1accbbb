"""Loading the engine: the right one, once, or one clear line; its log, its devices, and how its threads wait."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import CUDA_FILES, Files, run_ok, run_python

import swarmkv_ll
from swarmkv_ll import errors, ffi, runtime
from swarmkv_ll.errors import EngineLoadError, SwarmKVError

# ── names ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", swarmkv_ll.__all__)
def test_public_names_are_importable(name: str) -> None:
    assert getattr(swarmkv_ll, name).__name__ == name
    assert name in dir(swarmkv_ll)


def test_the_names_that_are_promised() -> None:
    promised = [
        "Model",
        "Context",
        "Arena",
        "Lease",
        "Snapshot",
        "fan_out",
        "bind_contiguous_cache",
        "validate_context_budget",
    ]
    assert set(promised) <= set(swarmkv_ll.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        swarmkv_ll.Nothing  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+", swarmkv_ll.__version__)


def test_every_exception_derives_from_one() -> None:
    classes = [member for _, member in inspect.getmembers(errors, inspect.isclass) if issubclass(member, BaseException)]
    assert len(classes) > 20
    for member in classes:
        assert issubclass(member, SwarmKVError), member
        assert member.__doc__


# ── the right engine ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with its engine, to break."""
    source = Path(swarmkv_ll.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "data", *CUDA_FILES)
    shutil.copytree(source, tmp_path / "copy" / "swarmkv_ll", ignore=ignored)
    return tmp_path / "copy"


def load_error(
    package: Path, *, code: str = "import swarmkv_ll.ffi", env: dict[str, str] | None = None
) -> dict[str, str]:
    """What loading the engine of `package` raises: the exception's name, its line, and its attributes."""
    done = run_python(
        f"""
        import json, sys
        # An editable installation would find the parts that the copy lacks.
        sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
        from swarmkv_ll.errors import EngineLoadError
        try:
            {code}
        except EngineLoadError as error:
            assert error.__cause__ is None and error.__suppress_context__ or error.__context__ is None
            print(json.dumps({{"type": type(error).__name__, "line": str(error), **vars(error)}}))
        else:
            print(json.dumps({{"type": "none", "line": ""}}))
        """,
        package=package,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    assert "\n" not in found["line"]
    return found


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_a_copy_loads_its_own_engine(package: Path) -> None:
    """The control for what follows."""
    assert load_error(package)["type"] == "none"
    path = run_ok(
        "from swarmkv_ll.ffi import C, ffi; print(ffi.string(C.skv_library_path()).decode())", package=package
    )
    assert Path(path).parent == package / "swarmkv_ll" / "_lib"


def test_another_commit_of_ggml_is_refused(package: Path) -> None:
    commit = ffi.ffi.string(ffi.C.ggml_commit())
    other = commit[:-1] + (b"0" if commit[-1:] != b"0" else b"1")
    replace_in(package / "swarmkv_ll/_lib/libggml-base.so", b"\0" + commit + b"\0", b"\0" + other + b"\0")
    found = load_error(package)
    assert found["type"] == "AbiMismatchError"
    assert found["built"].startswith(commit.decode())
    assert found["loaded"].startswith(other.decode())
    assert found["built"] in found["line"]
    assert found["loaded"] in found["line"]
    assert "build_llama.sh" in found["line"]


def test_another_build_of_llama_is_refused(package: Path) -> None:
    """The same commit, built once more: its build id tells."""
    built = ffi.ffi.string(ffi.C.skv_built_stamp()).decode()
    build_id = bytes.fromhex(built.split("/")[1])
    assert len(build_id) == 8
    replace_in(package / "swarmkv_ll/_lib/libllama.so", build_id, build_id[::-1])
    found = load_error(package)
    assert found["type"] == "AbiMismatchError"
    assert (found["built"], found["loaded"]) == (built, f"{built.split('/')[0]}/{build_id[::-1].hex()}")


@pytest.mark.parametrize("library", ["libggml-base.so", "libllama.so"])
def test_a_second_engine_in_the_process_is_refused(package: Path, tmp_path: Path, library: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package / "swarmkv_ll" / "_lib", elsewhere)
    found = load_error(package, code=f"import ctypes; ctypes.CDLL({str(elsewhere / library)!r}); import swarmkv_ll.ffi")
    assert found["type"] == "EngineConflictError"
    assert str(elsewhere / library) in found["paths"]
    assert str(elsewhere / library) in found["line"]


def test_an_engine_that_is_preloaded_is_refused(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package / "swarmkv_ll" / "_lib", elsewhere)
    found = load_error(package, env={"LD_PRELOAD": str(elsewhere / "libggml-base.so")})
    assert found["type"] == "EngineConflictError"


def test_an_engine_in_the_library_path_does_not_come_before_ours(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package / "swarmkv_ll" / "_lib", elsewhere)
    code = "import swarmkv_ll.runtime as r; r.start(); from swarmkv_ll.ffi import mapped_files as m; print(m('libllama', 'libggml'))"
    printed = run_ok(code, package=package, env={"LD_LIBRARY_PATH": str(elsewhere)})
    assert str(package / "swarmkv_ll/_lib/libllama.so") in printed
    assert str(elsewhere) not in printed


# ── parts that are missing ───────────────────────────────────────────────────────────────────────────


def remove_binding(package: Path) -> None:
    for path in package.glob("swarmkv_ll/_llama*"):
        path.unlink()


def remove_library(package: Path) -> None:
    (package / "swarmkv_ll/_lib/libllama.so").unlink()


def remove_symbol(package: Path) -> None:
    replace_in(
        package / "swarmkv_ll/_lib/libllama.so", b"\0llama_state_seq_get_size\0", b"\0llama_state_seq_get_sizX\0"
    )


def remove_backends(package: Path) -> None:
    for path in package.glob("swarmkv_ll/_lib/libggml-cpu*"):
        path.unlink()


def spoil_backends(package: Path) -> None:
    for path in package.glob("swarmkv_ll/_lib/libggml-cpu*"):
        path.write_bytes(b"not a library")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_binding, r"binding is not built: run `pip install \.`"),
        (remove_library, r"cannot load the engine: libllama\.so.*cannot open shared object file"),
        (remove_symbol, r"cannot load the engine: .*undefined symbol: llama_state_seq_get_size"),
        (remove_backends, r"no CPU device: none of the backends in .*_lib could be loaded \(there are none\)"),
        (spoil_backends, r"no CPU device: none of the backends in .*_lib could be loaded \(libggml-cpu.*\.so"),
    ],
)
def test_a_missing_part_gives_one_clear_line(package: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(package)
    found = load_error(package, code="from swarmkv_ll import Arena; Arena(4096)")
    assert found["type"] == "EngineLoadError"
    assert re.search(says, found["line"]), found["line"]


# ── what it is ───────────────────────────────────────────────────────────────────────────────────────


def test_backends_and_devices() -> None:
    assert "CPU" in runtime.backends()
    (cpu,) = (device for device in runtime.devices() if device.kind == "cpu")
    assert cpu.name == "CPU"
    assert cpu.description
    assert cpu.memory_total > 0
    runtime.start()  # does nothing the second time
    assert len({device.name for device in runtime.devices()}) == len(runtime.devices())


def test_the_libraries_are_ours() -> None:
    assert ffi.foreign_engines() == []
    names = {Path(path).name for path in ffi.mapped_files("libllama.", "libggml")}
    assert {"libllama.so", "libggml.so", "libggml-base.so"} <= names
    assert any(name.startswith("libggml-cpu") for name in names)
    assert ffi.mapped_files("libnothing") == []


# ── its log ──────────────────────────────────────────────────────────────────────────────────────────

CHATTER = """
    import sys
    from swarmkv_ll import Arena, Model
    from swarmkv_ll.errors import ModelLoadError
    model = Model(sys.argv[1])
    ctx = model.context(256)
    ctx.decode([1, 2, 3])
    with open(sys.argv[2], "wb") as file:
        file.write(b"GGUF broken")
    try:
        Model(sys.argv[2])
    except ModelLoadError:
        print("done")
"""


def test_silent_unless_asked(files: Files, tmp_path: Path) -> None:
    done = run_python(CHATTER, files["llama"], tmp_path / "broken.gguf")
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_goes_where_logging_sends_it(files: Files, tmp_path: Path) -> None:
    done = run_python(
        "import logging; logging.basicConfig(level=logging.DEBUG)\n" + textwrap.dedent(CHATTER),
        files["llama"],
        tmp_path / "b",
    )
    lines = done.stderr.splitlines()
    assert len(lines) > 20
    assert all(re.match(r"(DEBUG|INFO|WARNING|ERROR):swarmkv_ll(\.llama)?:", line) for line in lines)
    assert any(line.startswith("ERROR:") for line in lines)
    assert any(line.startswith("INFO:") for line in lines)


def test_levels_are_respected(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "swarmkv_ll.llama"):
        swarmkv_ll.Model(files["llama"])
    assert caplog.records == []
    with caplog.at_level(logging.INFO, "swarmkv_ll.llama"):
        swarmkv_ll.Model(files["llama"])
    assert any("general.architecture" in record.message for record in caplog.records)
    assert {record.levelno for record in caplog.records} <= {logging.INFO, logging.WARNING}


HANDLER = """
    import logging, sys
    from swarmkv_ll import Arena, Model, runtime
    from swarmkv_ll.errors import ModelLoadError

    class Handler(logging.Handler):
        n = 0
        def emit(self, record):
            self.n += 1
            self.answer(record)

    handler = Handler()
    logging.getLogger("swarmkv_ll").addHandler(handler)
    logging.getLogger("swarmkv_ll.llama").setLevel(logging.DEBUG)
"""


def with_handler(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code with a log handler whose answer to a record is the code's to choose."""
    done = run_python(textwrap.dedent(HANDLER) + textwrap.dedent(code), *args, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done


def test_a_handler_may_ask_the_library() -> None:
    """During the start too, in this thread or in another."""
    done = with_handler(
        """
        import threading
        def ask(record):
            assert "CPU" in runtime.backends()
            thread = threading.Thread(target=runtime.devices)
            thread.start()
            thread.join()
        handler.answer = ask
        runtime.start()
        print(handler.n > 0)
        """
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_handler_that_raises_is_shown_and_stops_nothing(files: Files, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF broken")
    done = with_handler(
        """
        def fail(record):
            raise OSError("no room")
        handler.answer = fail
        runtime.start()
        assert handler.n > 0
        with Model(sys.argv[1]) as model, model.context(64) as ctx, Arena(8 << 20):
            ctx.decode([1, 2, 3])
        try:
            Model(sys.argv[2])
        except ModelLoadError as error:
            assert "broken.gguf" in str(error), error
            print("done", handler.n)
        """,
        files["llama"],
        tmp_path / "broken.gguf",
    )
    word, n = done.stdout.split()
    assert word == "done"
    assert done.stderr.count("OSError: no room\n") == int(n)


def test_a_handler_that_interrupts(files: Files) -> None:
    """It ends the call; the engine is started, its log in order, and the next call works."""
    done = with_handler(
        """
        def interrupt(record):
            raise KeyboardInterrupt
        handler.answer = interrupt
        try:
            runtime.start()
        except KeyboardInterrupt:
            seen = []
            handler.answer = lambda record: seen.append(record.getMessage())
            runtime.start()
            assert not seen
            Model(sys.argv[1]).close()
            assert any("general.architecture" in line for line in seen)
            print("done")
        """,
        files["llama"],
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_handler_that_asks_of_an_engine_that_cannot_start(package: Path) -> None:
    """Each answer asks again: that ends, as every endless recursion does."""
    spoil_backends(package)
    with_handler(
        """
        handler.answer = lambda record: runtime.backends()
        try:
            runtime.start()
        except RecursionError:
            pass
        """,
        package=package,
    )


# ── how OpenMP's threads wait ────────────────────────────────────────────────────────────────────────

WAITING = """
    import os, subprocess, sys
    from swarmkv_ll import runtime
    from swarmkv_ll.ffi import mapped_files, waiting_policy
    runtime.start()
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    print([os.environ.get(name) for name in names])
    child = "import os; print([os.environ.get(name) for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')])"
    print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
    print(waiting_policy())
    print(bool(mapped_files("libgomp.")))
"""


def waiting(**env: str) -> tuple[list[str], str]:
    clean = {"OMP_DISPLAY_ENV": "VERBOSE", "GOMP_SPINCOUNT": "", "OMP_WAIT_POLICY": ""}
    unset = "import os\nfor n in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'):\n    os.environ[n] or os.environ.pop(n)\n"
    done = run_python(unset + textwrap.dedent(WAITING), env=clean | env)
    assert done.returncode == 0, done.stderr
    *lines, with_gomp = done.stdout.splitlines()
    if with_gomp != "True":
        pytest.skip("this build of the engine does not use GNU OpenMP")
    read = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)  # what libgomp says it has read
    assert read, done.stderr
    return lines, read[1]


def test_a_short_spin_is_in_force_and_does_not_leak() -> None:
    lines, in_force = waiting()
    assert in_force == ffi.SPIN_COUNT == "1000"
    assert lines == ["[None, None]", "[None, None]", "GOMP_SPINCOUNT=1000 (set by swarmkv_ll)"]


def test_the_user_s_spin_is_left_alone() -> None:
    lines, in_force = waiting(GOMP_SPINCOUNT="77")
    assert in_force == "77"
    assert lines == ["['77', None]", "['77', None]", "GOMP_SPINCOUNT=77 (set by the user)"]


def test_the_user_s_waiting_policy_is_left_alone() -> None:
    lines, in_force = waiting(OMP_WAIT_POLICY="passive")
    assert in_force == "0"
    assert lines == ["[None, 'passive']", "[None, 'passive']", "OMP_WAIT_POLICY=passive (set by the user)"]


def test_the_environment_is_put_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen = []

    def fail() -> None:
        with ffi.short_spin():
            seen.append(os.environ["GOMP_SPINCOUNT"])
            raise EngineLoadError

    with pytest.raises(EngineLoadError):
        fail()
    assert seen == ["1000"]
    assert "GOMP_SPINCOUNT" not in os.environ
