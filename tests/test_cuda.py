"""A CUDA module that lies beside the engine: used where everything fits, one warning line and the CPU where not.

The driver here is a library of a few lines that reports what a test says. The modules are small libraries with real
GPU code in them (`data/make.sh`) and a backend that notes its start and offers no device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import CUDA_FILES, Files, run_ok, run_python

import swarmkv_ll
from swarmkv_ll import cuda, elf
from swarmkv_ll.cuda import Driver, Gpu
from swarmkv_ll.errors import CudaUnavailableError
from swarmkv_ll.fatbin import Code
from swarmkv_ll.ffi import LIB_DIR

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to make drivers and modules with")

DATA = Path(__file__).resolve().parent / "data"

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* FAKE_GPUS: "6.1 NVIDIA GeForce GTX 1080;5.2 ..."; FAKE_CUDA: 12040; FAKE_INIT: what cuInit returns. */
static const char * gpu(int i) {
    const char * at = getenv("FAKE_GPUS");
    while (i-- && at) { at = strchr(at, ';'); at = at ? at + 1 : at; }
    return at && *at ? at : NULL;
}
int cuInit(unsigned flags) { (void) flags; return atoi(getenv("FAKE_INIT")); }
int cuDriverGetVersion(int * version) { *version = atoi(getenv("FAKE_CUDA")); return 0; }
int cuDeviceGetCount(int * n) { for (*n = 0; gpu(*n); ++*n) {} return 0; }
int cuDeviceGet(int * device, int i) { *device = i + 40; return 0; }
int cuDeviceGetName(char * name, int size, int device) {
    snprintf(name, size, "%.*s", (int) strcspn(gpu(device - 40) + 4, ";"), gpu(device - 40) + 4);
    return 0;
}
int cuDeviceGetAttribute(int * value, int attribute, int device) {
    *value = gpu(device - 40)[attribute == 75 ? 0 : 2] - '0';
    return attribute == 75 || attribute == 76 ? 0 : 1;
}
int cuGetErrorName(int error, const char ** name) {
    *name = error == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return error != 100;
}
"""

BACKEND = r"""
#include <stdio.h>
#include <stdlib.h>
__asm__(".section .nv_fatbin,\"a\"\n.balign 8\n" CODE "\n.previous");
int cublas(void);
void ggml_log_internal(int level, const char * format, ...);
static const char * name(void * reg) { (void) reg; return "CUDA"; }
static size_t none(void * reg) { (void) reg; return 0; }
static struct { int api_version; const char * (*name)(void *); size_t (*count)(void *); void * rest[3]; } reg = { 2, name, none };
void * ggml_backend_init(void) {
    fclose(fopen(getenv("FAKE_STARTED"), "a"));
    ggml_log_internal(4, "ggml_cuda_init: failed to initialize CUDA: %s\n", "no CUDA-capable device is detected");
    return cublas() == 12 ? &reg : NULL;
}
"""


def compile_library(path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c", "-", "-x", "none", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def compile_module(path: Path, cublas: Path, *fatbins: Path) -> Path:
    code = " ".join(f'".incbin \\"{each}\\"\\n"' for each in fatbins) or '""'
    options = ("-Wl,--build-id=sha1", "-Wl,--no-as-needed", str(cublas), str(LIB_DIR / "libggml-base.so"))
    return compile_library(path, BACKEND.replace("CODE", code), *options)


@dataclass
class Machine:
    """A copy of the package with a CUDA module, a driver, and a cuBLAS, each as a test wants them."""

    folder: Path
    model: Path
    libraries: Path
    """Where the loader looks: LD_LIBRARY_PATH."""

    driver: Path
    cublas: Path

    @property
    def lib(self) -> Path:
        return self.folder / "swarmkv_ll" / "_lib"

    @property
    def module(self) -> Path:
        return self.lib / cuda.MODULE

    @property
    def started(self) -> bool:
        """Whether the module was loaded and its backend asked for."""
        return (self.folder / "started").exists()

    def write_info(self, **changes: Any) -> None:
        with elf.mapped(self.module) as data:
            found = elf.build_id(data)
        stamp = json.loads((self.lib / "build-info.json").read_text())["stamp"]
        (self.lib / cuda.INFO).write_text(
            json.dumps({"stamp": stamp, "build_id": found, "toolkit": "12.4.131", **changes})
        )

    def env(self, gpus: str, version: int = 12040, init: int = 0, **more: str) -> dict[str, str]:
        return {
            "FAKE_GPUS": gpus,
            "FAKE_CUDA": str(version),
            "FAKE_INIT": str(init),
            "FAKE_STARTED": str(self.folder / "started"),
            "LD_LIBRARY_PATH": str(self.libraries),
            **more,
        }

    def decode(self, gpus: str = "6.1 NVIDIA GeForce GTX 1080", **how: Any) -> tuple[list[str], dict[str, Any]]:
        """Decode on whatever there is; the lines on standard error, and the doctor's findings on CUDA."""
        done = run_python(
            """
            import json, sys, weakref
            import numpy as np
            from swarmkv_ll import Model
            from swarmkv_ll.doctor import examine
            with Model(sys.argv[1]) as model, model.context(64) as ctx:
                ctx.decode([1, 2, 3])
                assert np.ptp(ctx.logits()) > 0
                weights = weakref.ref(model._handle)
            assert weights() is None  # not kept by the frames of the reason that is
            found = examine()
            assert "CPU" in found["backends"] and [d["name"] for d in found["devices"]] == ["CPU"], found
            print(json.dumps(found["cuda"]))
            """,
            self.model,
            package=self.folder,
            env=self.env(gpus, **how),
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return done.stderr.splitlines(), found

    def reason(self, *words: str, **how: Any) -> dict[str, Any]:
        """Decode, with one warning line in which these words are; the doctor's findings, which say the same."""
        lines, found = self.decode(**how)
        assert len(lines) == 1, lines
        assert lines[0] == f"CUDA is not used, the CPU is: {found['reason']}"
        assert not found["used"]
        for word in words:
            assert word in lines[0]
        return found


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver, a cuBLAS and a module of the fat binary for 61 and 90a, compiled once."""
    folder = tmp_path_factory.mktemp("cuda")
    compile_library(folder / "libcuda.so.1", DRIVER)
    soname = "-Wl,-soname,libcublas.so.12"
    compile_library(folder / "libcublas.so.12", "int cublas(void) { return 12; }", soname)
    compile_module(folder / cuda.MODULE, folder / "libcublas.so.12", DATA / "cuda12.fatbin")
    return folder


@pytest.fixture
def machine(parts: Path, tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Everything fits, but that the module offers no device."""
    for name in ("CUDA_VISIBLE_DEVICES", "GGML_BACKEND_PATH"):
        monkeypatch.delenv(name, raising=False)
    ignored = shutil.ignore_patterns("__pycache__", "data", *CUDA_FILES)
    shutil.copytree(Path(swarmkv_ll.__file__).parent, tmp_path / "swarmkv_ll", ignore=ignored)
    (tmp_path / "libraries").mkdir()
    made = Machine(
        tmp_path,
        files["llama"],
        tmp_path / "libraries",
        Path(shutil.copy(parts / "libcuda.so.1", tmp_path / "libraries")),
        Path(shutil.copy(parts / "libcublas.so.12", tmp_path / "libraries")),
    )
    shutil.copy(parts / cuda.MODULE, made.module)
    made.write_info()
    return made


# ── whether it is loaded ─────────────────────────────────────────────────────────────────────────────


def test_a_module_that_fits_is_loaded(machine: Machine) -> None:
    """The control: all that is in the way is that it offers no device."""
    found = machine.reason(
        "the CUDA module found no GPU: failed to initialize CUDA: no CUDA-capable device is detected"
    )
    assert machine.started
    assert found["module"] == str(machine.module)
    assert found["architectures"] == [
        {"kind": "elf", "architecture": "61", "n": 2},
        {"kind": "elf", "architecture": "90a", "n": 1},
        {"kind": "ptx", "architecture": "61", "n": 1},
        {"kind": "ptx", "architecture": "90a", "n": 1},
    ]
    assert (found["toolkit"], found["driver"], found["driver_error"]) == ("12.4.131", "12.4", None)
    assert found["gpus"] == [{"name": "NVIDIA GeForce GTX 1080", "compute_capability": "6.1", "runs_as": "elf"}]


def test_without_a_module_nothing_is_said(machine: Machine) -> None:
    machine.module.unlink()
    lines, found = machine.decode()
    assert lines == []
    assert (found["module"], found["used"], found["reason"]) == (None, False, None)
    assert found["gpus"][0]["name"] == "NVIDIA GeForce GTX 1080"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_no_warning(machine: Machine, hidden: str) -> None:
    lines, found = machine.decode(CUDA_VISIBLE_DEVICES=hidden)
    assert lines == []
    assert found["reason"] == f"CUDA_VISIBLE_DEVICES='{hidden}' hides every GPU"
    assert not machine.started
    done = run_python(
        "import logging; logging.basicConfig(level=logging.INFO); from swarmkv_ll import runtime; runtime.start()",
        package=machine.folder,
        env=machine.env("", CUDA_VISIBLE_DEVICES=hidden),
    )
    assert f"INFO:swarmkv_ll:CUDA is not used, the CPU is: {found['reason']}" in done.stderr.splitlines()


@pytest.mark.parametrize("chosen", ["-1,0", "none", "99", "\x1b[2J" * 1000])
@pytest.mark.parametrize("init", [0, 100])
def test_a_choice_that_leaves_no_gpu_is_no_warning(machine: Machine, chosen: str, init: int) -> None:
    """What the variable means is the driver's to say; it is named."""
    lines, found = machine.decode(gpus="", init=init, CUDA_VISIBLE_DEVICES=chosen)
    assert lines == []
    says = (
        "the NVIDIA driver's cuInit gives error 100 (CUDA_ERROR_NO_DEVICE)"
        if init
        else "the NVIDIA driver shows no GPU"
    )
    assert found["reason"].startswith(
        f"{says}, with CUDA_VISIBLE_DEVICES='{chosen[:5] if chosen.isprintable() else ''}"
    )
    assert found["reason"] == found["driver_error"]
    assert found["reason"].isprintable()
    assert len(found["reason"]) < 300
    assert not machine.started


def test_an_error_with_a_choice_is_still_a_warning(machine: Machine) -> None:
    machine.reason("gives error 803", init=803, CUDA_VISIBLE_DEVICES="0")


def has_driver() -> bool:
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
def test_no_driver(machine: Machine) -> None:
    machine.driver.unlink()
    found = machine.reason("no NVIDIA driver here", "libcuda.so.1")
    assert not machine.started
    assert (found["driver"], found["gpus"]) == (None, [])
    assert found["driver_error"] == found["reason"]
    assert len(found["architectures"]) == 4


@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
def test_without_a_driver_the_module_is_not_looked_at(machine: Machine) -> None:
    """Nor anything beside it: a start is as quick as without."""
    machine.driver.unlink()
    machine.module.write_bytes(b"")
    (machine.lib / cuda.INFO).unlink()
    machine.reason("no NVIDIA driver here")


def test_no_real_driver(machine: Machine) -> None:
    machine.driver.write_bytes(b"no library")
    machine.reason("no NVIDIA driver here", "libcuda.so.1")
    compile_library(machine.driver, "int cuDriverGetVersion(int * version) { return 0; }")
    machine.reason("libcuda.so.1 is not NVIDIA's driver", "cuInit")
    assert not machine.started


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (100, "the NVIDIA driver's cuInit gives error 100 (CUDA_ERROR_NO_DEVICE)"),
        (803, "the NVIDIA driver's cuInit gives error 803 (unnamed)"),
    ],
)
def test_an_error_of_the_driver(machine: Machine, init: int, words: str) -> None:
    machine.reason(words, init=init)
    assert not machine.started


def test_a_driver_without_a_gpu(machine: Machine) -> None:
    machine.reason("the NVIDIA driver shows no GPU", gpus="")
    assert not machine.started


@pytest.mark.parametrize("gpus", ["-.1 A", "0.1 A", "6.: A", "6.- A"])
def test_a_compute_capability_that_cannot_be(machine: Machine, gpus: str) -> None:
    found = machine.reason(
        "libcuda.so.1 is not NVIDIA's driver (compute capability ", "of GPU 1)", gpus=f"6.1 A;{gpus}"
    )
    assert not machine.started
    assert found["gpus"] == []


@pytest.mark.parametrize("n", [-5, 2_000_000_000])
def test_a_number_of_gpus_that_cannot_be(machine: Machine, n: int) -> None:
    machine.driver.unlink()
    compile_library(machine.driver, DRIVER.replace("for (*n = 0; gpu(*n); ++*n) {}", f"*n = {n};"))
    machine.reason(f"libcuda.so.1 is not NVIDIA's driver (version 12040, {n} GPUs)")


def test_texts_of_others_stay_on_one_line(machine: Machine) -> None:
    """And are shown in brief: a GPU's name, a stamp, a build id."""
    found = machine.reason("GPU 0, a b\ufffd[31m", gpus="5.2 a\nb\x1b[31m" + "c" * 200)
    assert found["reason"].isprintable()
    assert found["gpus"][0]["name"].isprintable()
    for key in ("stamp", "build_id"):
        machine.write_info(**{key: "a\nb\x1b[2J\ud800" + "x" * 100_000})
        found = machine.reason("a b\ufffd[2J\ufffdxxx")
        assert found["reason"].isprintable()
        assert len(found["reason"]) < 500
    assert not machine.started


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    words = "the NVIDIA driver supports CUDA 11.8, the module needs 12.0 or newer; update the driver"
    machine.reason(words, version=11080)
    assert not machine.started


def test_a_driver_of_the_same_major_number_will_do(machine: Machine) -> None:
    machine.reason("the CUDA module found no GPU", version=12000)
    assert machine.started


def test_a_gpu_that_is_too_old(machine: Machine) -> None:
    found = machine.reason(
        "the CUDA module has no code for GPU 0, NVIDIA GeForce GTX 980 (compute capability 5.2)",
        "only sm_61 ×2, sm_90a ×1, compute_61 ×1, compute_90a ×1",
        "./build_llama.sh --cuda --arch 52 builds it for what is here",
        'CUDA_VISIBLE_DEVICES="" hides it',
        gpus="5.2 NVIDIA GeForce GTX 980",
    )
    assert not machine.started
    assert found["gpus"][0]["runs_as"] is None


def test_a_second_gpu_that_is_too_old(machine: Machine) -> None:
    """The engine would use both. The way out names those that fit, as the user's own choice of GPUs has them."""
    gpus = "6.1 NVIDIA GeForce GTX 1080;5.2 NVIDIA GeForce GTX 980;6.1 NVIDIA TITAN X"
    machine.reason("no code for GPU 1, NVIDIA GeForce GTX 980", "CUDA_VISIBLE_DEVICES=0,2 hides it", gpus=gpus)
    machine.reason("CUDA_VISIBLE_DEVICES=3,GPU-7 hides it", gpus=gpus, CUDA_VISIBLE_DEVICES="3,1,GPU-7")
    assert not machine.started


def test_more_gpus_than_the_engine_takes(machine: Machine) -> None:
    machine.reason("17 GPUs, the engine takes 16", gpus=";".join(["6.1 NVIDIA TITAN X"] * 17))
    assert not machine.started


def test_ptx_needs_a_driver_that_is_not_older_than_it(machine: Machine) -> None:
    gpus = "7.5 NVIDIA GeForce RTX 2080"
    machine.reason("supports CUDA 12.2", "needs the module's PTX, made by CUDA 12.4", gpus=gpus, version=12020)
    assert not machine.started
    found = machine.reason("the CUDA module found no GPU", gpus=gpus, version=12040)
    assert machine.started
    assert found["gpus"][0]["runs_as"] == "ptx"


def test_a_library_is_missing(machine: Machine) -> None:
    machine.cublas.unlink()
    machine.reason("needs libcublas.so.12, which cannot be loaded", "pip install 'swarmkv-ll[cuda12]'")
    assert not machine.started


@pytest.mark.parametrize("place", ["_lib", "wheel"])
def test_a_library_beside_the_module_or_in_a_wheel(machine: Machine, place: str) -> None:
    """Neither is where the loader looks."""
    folder = machine.lib if place == "_lib" else machine.folder / "wheels" / "nvidia" / "cublas" / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    machine.cublas.rename(folder / machine.cublas.name)
    where = f"{machine.folder}:{machine.folder / 'wheels'}"
    machine.reason("the CUDA module found no GPU", PYTHONPATH=where)
    assert machine.started


def test_a_damaged_library_in_a_wheel(machine: Machine) -> None:
    folder = machine.folder / "wheels" / "nvidia" / "cublas" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublas.so.12").write_bytes(machine.cublas.read_bytes()[:100])
    where = f"{machine.folder}:{machine.folder / 'wheels'}"
    machine.reason("needs libcublas.so.12, which cannot be loaded", str(folder), PYTHONPATH=where)
    assert not machine.started


# ── the module itself ────────────────────────────────────────────────────────────────────────────────


def test_a_module_of_another_engine(machine: Machine) -> None:
    machine.write_info(stamp="000000000000-00000000")
    stamp = json.loads((machine.lib / "build-info.json").read_text())["stamp"]
    words = f"the CUDA module was built for engine 000000000000-00000000, this is {stamp}"
    machine.reason(words, "./build_llama.sh --cuda builds it again")
    assert not machine.started


def test_a_module_that_was_put_there_by_hand(machine: Machine, parts: Path) -> None:
    compile_module(machine.module, parts / "libcublas.so.12", *[DATA / "cuda12.fatbin"] * 2)
    machine.reason("the CUDA module's build id is ", f"{cuda.INFO} is about ")
    (machine.lib / cuda.INFO).unlink()
    machine.reason(f"nothing says which engine {cuda.MODULE} is for", "is missing")
    assert not machine.started


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '"',
        '"text"',
        "null",
        "NaN",
        "1" * 5000,
        '{"stamp": ' * 100000,
        '{"stamp": 1, "build_id": "", "toolkit": "12.4"}',
        "\0",
        "[" * 100000,
    ],
)
def test_a_damaged_note_beside_it(tmp_path: Path, text: str) -> None:
    (tmp_path / cuda.INFO).write_text(text)
    with pytest.raises(CudaUnavailableError, match="is damaged"):
        cuda.read_info(tmp_path)


@pytest.mark.parametrize(
    "toolkit",
    [
        *(
            None,
            12,
            12.4,
            "",
            "12",
            "x.y",
            [12, 4],
            "-12.4",
            "12.-4",
            " 12 . 4 \n",
            "12.4\n",
            "12.4.1_3",
            "١٢.٤",
            "0.4",
        ),
        *("999999999999999999.4", "1" * 5000 + ".4", "12.400", "12.4.131\x1b[2J", "12.4" + ".1" * 1000),
    ],
)
def test_a_damaged_toolkit_in_it(tmp_path: Path, toolkit: object) -> None:
    (tmp_path / cuda.INFO).write_text(json.dumps({"stamp": "a", "build_id": "b", "toolkit": toolkit}))
    with pytest.raises(CudaUnavailableError, match="is damaged"):
        cuda.read_info(tmp_path)


def place(path: Path, what: str) -> None:
    """Put something there that is not a file to read."""
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "link to nowhere":
            path.symlink_to("nowhere")
        case "link to itself":
            path.symlink_to(path.name)


WHATS = ["folder", "pipe", "device", "link to nowhere", "link to itself"]


@pytest.mark.parametrize("what", WHATS)
def test_no_file_where_the_module_should_be(machine: Machine, what: str) -> None:
    place(machine.module, what)
    found = machine.reason("the CUDA module is damaged", str(machine.module), "builds it again")
    assert (found["module"], found["used"]) == (str(machine.module), False)
    assert found["damage"] in found["reason"]


@pytest.mark.parametrize("what", WHATS)
def test_no_file_where_the_note_should_be(machine: Machine, what: str) -> None:
    place(machine.lib / cuda.INFO, what)
    found = machine.reason(f"{machine.lib / cuda.INFO} is damaged (", "builds it again")
    assert found["toolkit"] is None
    assert not machine.started


def test_a_pipe_where_a_library_could_be(machine: Machine) -> None:
    """It is passed over."""
    os.mkfifo(machine.lib / machine.cublas.name)
    machine.reason("the CUDA module found no GPU")
    assert machine.started


def test_a_damaged_module(machine: Machine) -> None:
    whole = machine.module.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        b"",
        b"\0" * 5000,
        whole.replace(b"\x50\xed\x55\xba", b"\x50\xed\x55\xbb"),
    ):
        machine.module.write_bytes(damaged)
        found = machine.reason("the CUDA module is damaged", str(machine.module), "builds it again")
        assert found["architectures"] == []
        assert found["damage"] in found["reason"]
    assert not machine.started


def test_a_module_without_gpu_code(machine: Machine, parts: Path) -> None:
    compile_module(machine.module, parts / "libcublas.so.12")
    machine.write_info()
    machine.reason("the CUDA module is damaged", "no GPU code in it")
    assert not machine.started


def test_a_module_that_the_engine_cannot_load(machine: Machine, parts: Path) -> None:
    """A symbol is missing that no look at it could foretell: the loader's own words are handed on."""
    soname = "-Wl,-soname,libcublas.so.12"
    compile_library(machine.cublas, "int another(void) { return 12; }", soname)
    machine.reason("the engine could not load", "undefined symbol: cublas")
    assert not machine.started


# ── the doctor's text ────────────────────────────────────────────────────────────────────────────────


def doctor(machine: Machine, gpus: str, **how: Any) -> str:
    done = run_python(
        "from swarmkv_ll.cli import main; import sys; sys.argv = ['swarmkv', 'doctor']; main()",
        package=machine.folder,
        env=machine.env(gpus, **how),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_doctor_tells_it(machine: Machine) -> None:
    text = doctor(machine, "6.1 NVIDIA GeForce GTX 1080;7.5 NVIDIA T4;5.2 NVIDIA GeForce GTX 980")
    assert "sm_61 ×2, sm_90a ×1, compute_61 ×1, compute_90a ×1, by toolkit 12.4.131\n" in text
    assert "not used: the CUDA module has no code for GPU 2" in text
    assert "for CUDA 12.4\n" in text
    assert "NVIDIA GeForce GTX 1080, compute capability 6.1: the module has code for it\n" in text
    assert "NVIDIA T4, compute capability 7.5: runs the module's PTX\n" in text
    assert "NVIDIA GeForce GTX 980, compute capability 5.2: the module has no code for it\n" in text


def test_the_doctor_without_a_module_or_with_a_damaged_one(machine: Machine) -> None:
    place(machine.module, "link to nowhere")
    text = doctor(machine, "6.1 NVIDIA GeForce GTX 1080")
    assert "NVIDIA GeForce GTX 1080, compute capability 6.1: the module could not be read\n" in text
    assert "not used: the CUDA module is damaged" in text
    machine.module.unlink()
    machine.module.write_bytes(b"damaged")
    text = doctor(machine, "", init=100)
    assert f"{machine.module}: not an ELF file, begins with 64616d61 (at offset 0)" in text
    assert "CUDA_ERROR_NO_DEVICE" in text
    machine.module.unlink()
    text = doctor(machine, "6.1 NVIDIA GeForce GTX 1080")
    assert "not built; ./build_llama.sh --cuda builds it\n" in text
    assert "NVIDIA GeForce GTX 1080, compute capability 6.1\n" in text


# ── what runs where ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_61", (6, 1), "elf"),
        ("sm_60", (6, 1), "elf"),
        ("sm_61", (6, 0), None),
        ("sm_61", (7, 0), None),
        ("sm_52", (6, 1), None),
        ("compute_61", (6, 0), None),
        ("compute_61", (6, 1), "ptx"),
        ("compute_61", (12, 0), "ptx"),
        ("sm_61 compute_61", (6, 1), "elf"),
        ("sm_61 compute_61", (8, 9), "ptx"),
        ("sm_90a", (9, 0), "elf"),
        ("sm_100a", (10, 3), None),
        ("compute_90a", (9, 0), "ptx"),
        ("compute_90a", (10, 0), None),
        ("sm_100f", (10, 3), "elf"),
        ("sm_103f", (10, 0), None),
        ("compute_100f", (10, 3), "ptx"),
        ("compute_100f", (12, 0), None),
        ("sm_120", (12, 1), "elf"),
        ("lto_61", (6, 1), None),
    ],
)
def test_what_a_gpu_runs(architectures: str, capability: tuple[int, int], runs: str | None) -> None:
    kinds = {"sm": "elf", "compute": "ptx", "lto": "lto"}
    code: Code = {}
    for word in architectures.split():
        kind, architecture = word.split("_")
        code[kinds[kind], architecture] = 3
    assert cuda.runs_as(code, capability) == runs
    assert cuda.in_words(code) == ", ".join(f"{word} ×3" for word in architectures.split())


def test_machine_code_needs_no_newer_driver() -> None:
    cuda.check_fit({("elf", "61"): 1, ("ptx", "61"): 1}, Driver((12, 0), (Gpu("a", (6, 1)),)), (12, 4))


# ── the CPU's part of it ─────────────────────────────────────────────────────────────────────────────


def loaded(machine: Machine, **env: str) -> list[str]:
    """Names of the backends' files in a process that has started the engine."""
    printed = run_ok(
        """
        from swarmkv_ll import runtime
        from swarmkv_ll.ffi import mapped_files
        assert runtime.backends()[0] == "CPU"
        print(*mapped_files("libggml-cpu", "own"), sep="\\n")
        """,
        package=machine.folder,
        env=machine.env("", **env),
    )
    return sorted(Path(line).name for line in printed.splitlines())


def test_the_variant_that_scores_best_is_loaded(machine: Machine) -> None:
    """A variant here is a score in front of the real backend. Zero means that it would not run here."""
    machine.module.unlink()
    real = machine.lib / "libggml-cpu.so"
    for name, score in (("better", 7), ("good", 5), ("never", 0)):
        source = f"int ggml_backend_score(void) {{ return {score}; }}"
        compile_library(
            machine.lib / f"libggml-cpu-{name}.so", source, "-Wl,--no-as-needed", str(real), "-Wl,-rpath,$ORIGIN"
        )
    (machine.lib / "libggml-cpu-damaged.so").write_bytes(b"")
    assert loaded(machine) == ["libggml-cpu-better.so", "libggml-cpu.so"]
    for name in ("better", "good"):
        (machine.lib / f"libggml-cpu-{name}.so").unlink()
    assert loaded(machine) == ["libggml-cpu.so"]


def test_the_users_own_backend_is_loaded(machine: Machine, parts: Path) -> None:
    """`GGML_BACKEND_PATH`, as the engine has it; whatever it is."""
    machine.module.unlink()
    own = machine.folder / "own.so"
    shutil.copy(parts / cuda.MODULE, own)
    assert loaded(machine, GGML_BACKEND_PATH=str(own)) == ["libggml-cpu.so", "own.so"]
    assert machine.started
    assert loaded(machine, GGML_BACKEND_PATH="/nowhere.so") == ["libggml-cpu.so"]


def own_backend(machine: Machine, path: str, **how: Any) -> list[str]:
    """Lines on standard error after a start with `GGML_BACKEND_PATH`, but the one about CUDA."""
    code = "from swarmkv_ll import runtime; assert runtime.backends() == ['CPU'], runtime.backends()"
    env = machine.env(how.pop("gpus", ""), **how, GGML_BACKEND_PATH=path)
    done = run_python(code, package=machine.folder, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if not line.startswith("CUDA is not used")]


@pytest.mark.parametrize("what", WHATS)
def test_no_file_where_the_users_own_backend_should_be(machine: Machine, what: str) -> None:
    own = machine.folder / "own.so"
    own.touch()
    place(own, what)
    (line,) = own_backend(machine, str(own))
    assert line.startswith(f"GGML_BACKEND_PATH={own} is not used: ")


def test_the_users_own_backend_cannot_be_loaded(machine: Machine) -> None:
    own = machine.folder / "own.so"
    own.write_bytes(b"no library, a long one" * 100)
    (line,) = own_backend(machine, str(own))
    assert line.startswith(f"GGML_BACKEND_PATH={own} is not used: failed to load {own}: ")
    assert "invalid ELF header" in line
    (line,) = own_backend(machine, "nowhere\n\x1b[2J.so")
    assert line.startswith("GGML_BACKEND_PATH=nowhere \ufffd[2J.so is not used: ")
    (line,) = own_backend(machine, "/" + "x" * 5000)
    assert "File name too long" in line
    assert len(line) <= 1000


def test_a_refused_module_is_not_loaded_as_the_users_own(machine: Machine) -> None:
    link = machine.folder / "link.so"
    link.symlink_to(machine.module)
    folders = f"{machine.libraries}:{machine.lib}"
    for path in (machine.module, link, cuda.MODULE):
        (line,) = own_backend(machine, str(path), gpus="5.2 NVIDIA GeForce GTX 980", LD_LIBRARY_PATH=folders)
        assert line == f"GGML_BACKEND_PATH={path} is not used: it is the CUDA module, which may not be loaded here"
    assert not machine.started


@pytest.mark.skipif(not (LIB_DIR / cuda.MODULE).exists(), reason="no CUDA module was built here")
@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
def test_the_real_module_without_a_driver(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = run_python(
        "import sys; from swarmkv_ll import Model, runtime; Model(sys.argv[1]).close(); print(runtime.backends())",
        files["llama"],
    )
    assert done.returncode == 0
    assert done.stdout == "['CPU']\n"
    assert len(done.stderr.splitlines()) == 1
    assert "CUDA is not used, the CPU is: no NVIDIA driver here" in done.stderr
