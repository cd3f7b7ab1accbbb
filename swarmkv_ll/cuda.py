"""Whether the CUDA module may be loaded on this machine, and if not, why and what helps.

The engine itself would not say: a release build passes over a module that it cannot load in silence, and one that has
no code for the GPU aborts the process at its first kernel. So everything is looked at before the module is touched,
and without a driver nothing beyond a search for `libcuda.so.1` is done. Pure standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import elf
from .errors import BinaryFormatError, CudaUnavailableError
from .fatbin import Code, code_in
from .printable import one_line

MODULE = "libggml-cuda.so"
"""The CUDA backend, beside the engine's libraries."""

INFO = "cuda-info.json"
"""What `build_llama.sh --cuda` writes beside it: how it was built, and for which engine."""

MOST_GPUS = 16
"""`GGML_CUDA_MAX_DEVICES`: with more the module aborts."""

AGAIN = "./build_llama.sh --cuda builds it again"

LONGEST = 1000
"""Characters of a reason: it may hold texts of others."""

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows this process: its name, and its compute capability as (major, minor)."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: the newest CUDA it supports, as (major, minor), and the GPUs it shows this process."""

    version: tuple[int, int]
    gpus: tuple[Gpu, ...]


def refusal(message: str, *, by_choice: bool = False) -> CudaUnavailableError:
    """The error, its text on one line without what could steer a terminal, and not too long."""
    return CudaUnavailableError(one_line(message, LONGEST), by_choice=by_choice)


def _no_gpu(message: str) -> CudaUnavailableError:
    """The driver shows no GPU: the user's choice, where it is told which to show."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return refusal(message)
    return refusal(f"{message}, with CUDA_VISIBLE_DEVICES={_brief(repr(visible))}", by_choice=True)


def _brief(text: object) -> str:
    return one_line(text, 120)


def find_driver() -> Driver:
    """Ask the driver for its version and its GPUs.

    Raises
    ------
    CudaUnavailableError
        There is no driver, or it has an error, no GPU to show, or figures that cannot be.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise refusal(f"no NVIDIA driver here ({error})") from None
    version, n, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    gpus = []
    try:
        _call(library, "cuDriverGetVersion", ctypes.byref(version))
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(n))
        if not (1000 <= version.value < 100_000 and 0 <= n.value <= 1000):
            raise refusal(f"libcuda.so.1 is not NVIDIA's driver (version {version.value}, {n.value} GPUs)")
        for i in range(n.value):
            device, capability = ctypes.c_int(), []
            _call(library, "cuDeviceGet", ctypes.byref(device), i)
            _call(library, "cuDeviceGetName", name, len(name), device)
            for attribute in (_MAJOR, _MINOR):
                _call(library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
                capability.append(value.value)
            major, minor = capability
            if not (1 <= major <= 99 and 0 <= minor <= 9):
                raise refusal(f"libcuda.so.1 is not NVIDIA's driver (compute capability {major}.{minor} of GPU {i})")
            gpus.append(Gpu(_brief(name.value.decode(errors="replace")), (major, minor)))
    except AttributeError as error:
        raise refusal(f"libcuda.so.1 is not NVIDIA's driver ({error})") from None
    if not gpus:
        raise _no_gpu("the NVIDIA driver shows no GPU")
    return Driver((version.value // 1000, version.value % 1000 // 10), tuple(gpus))


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    if error := getattr(library, function)(*arguments):
        name = ctypes.c_char_p()
        named = hasattr(library, "cuGetErrorName") and library.cuGetErrorName(error, ctypes.byref(name)) == 0
        told = (name.value or b"").decode(errors="replace") if named else "unnamed"
        raise (_no_gpu if error == _NO_DEVICE else refusal)(
            f"the NVIDIA driver's {function} gives error {error} ({_brief(told)})"
        )


def runs_as(code: Code, capability: tuple[int, int]) -> Literal["elf", "ptx"] | None:
    """How a GPU runs a module: its machine code, PTX that the driver compiles for it, or not at all.

    Machine code runs on GPUs of the same major number and no lower minor one; PTX on any that is not older. Code for
    an architecture with an `a` runs on exactly that one, with an `f` on its own family, the same major number.

    Parameters
    ----------
    code : dict
        Of `fatbin.gpu_code`.
    capability : (int, int)
    """
    major, minor = capability
    kinds = set()
    for kind, architecture in code:
        its_major, its_minor = divmod(int(architecture.rstrip("af")), 10)
        if architecture[-1] == "a":
            runs = (its_major, its_minor) == capability
        elif kind == "elf" or architecture[-1] == "f":
            runs = its_major == major and its_minor <= minor
        else:
            runs = (its_major, its_minor) <= capability
        if runs:
            kinds.add(kind)
    return "elf" if "elf" in kinds else "ptx" if "ptx" in kinds else None


def in_words(code: Code) -> str:
    """The architectures as nvcc writes them: `sm_61 ×144, compute_61 ×144`; of very many not all."""
    words = {"elf": "sm", "ptx": "compute", "lto": "lto"}
    return one_line(", ".join(f"{words[kind]}_{architecture} ×{n}" for (kind, architecture), n in code.items()), 500)


_LARGEST_INFO = 1 << 20
_TOOLKIT = re.compile(r"([1-9][0-9]?)\.([0-9]{1,2})(?:\.[0-9]{1,5}){0,2}")


def read_info(lib_dir: Path) -> dict[str, Any]:
    """What the build wrote about the module.

    Raises
    ------
    CudaUnavailableError
        The file is missing, or not as it was written.
    """
    path = lib_dir / INFO
    if not os.path.lexists(path):
        raise refusal(f"nothing says which engine {MODULE} is for: {path} is missing; {AGAIN}")
    try:
        with elf.mapped(path) as data:
            text = data[:_LARGEST_INFO]
        info = json.loads(text.decode())
        stamp, build_id, toolkit = info["stamp"], info["build_id"], _TOOLKIT.fullmatch(info["toolkit"])
        if not (isinstance(stamp, str) and isinstance(build_id, str) and toolkit):
            raise ValueError
        info["toolkit_version"] = int(toolkit[1]), int(toolkit[2])
    except BinaryFormatError as error:
        raise refusal(f"{path} is damaged ({error.message}); {AGAIN}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refusal(f"{path} is damaged; {AGAIN}") from None
    found: dict[str, Any] = info
    return found


def prepare(lib_dir: Path, engine_stamp: str) -> Path | None:
    """Look at everything the CUDA module needs, and load the libraries it needs, so that it can be loaded itself.

    Parameters
    ----------
    lib_dir : path
        Folder of the engine's libraries.
    engine_stamp : str
        Of the engine that is in this process.

    Returns
    -------
    path or None
        The module, ready to be loaded; or None where none was built.

    Raises
    ------
    CudaUnavailableError
        The first reason against it. The module was not loaded.
    """
    module = lib_dir / MODULE
    if not os.path.lexists(module):  # a link to nowhere is a module that is damaged
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        raise refusal(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", by_choice=True)
    driver = find_driver()
    info = read_info(lib_dir)
    if info["stamp"] != engine_stamp:
        raise refusal(f"the CUDA module was built for engine {_brief(info['stamp'])}, this is {engine_stamp}; {AGAIN}")
    try:
        with elf.mapped(module) as data:
            build_id, sonames, code = elf.build_id(data), elf.needed(data), code_in(data)
    except BinaryFormatError as error:
        raise refusal(f"the CUDA module is damaged: {error}; {AGAIN}") from None
    if build_id != info["build_id"]:
        raise refusal(
            f"the CUDA module's build id is {_brief(build_id)}, {INFO} is about {_brief(info['build_id'])}; {AGAIN}"
        )
    check_fit(code, driver, info["toolkit_version"])
    for soname in sonames:
        _load_library(soname, lib_dir)
    return module


def check_fit(code: Code, driver: Driver, toolkit: tuple[int, int]) -> None:
    """Compare the module's code with the driver and every GPU it shows: the engine would use them all.

    Raises
    ------
    CudaUnavailableError
    """
    its = f"the NVIDIA driver supports CUDA {driver.version[0]}.{driver.version[1]}"
    if driver.version[0] < toolkit[0]:
        raise refusal(f"{its}, the module needs {toolkit[0]}.0 or newer; update the driver")
    if len(driver.gpus) > MOST_GPUS:
        raise refusal(f"{len(driver.gpus)} GPUs, the engine takes {MOST_GPUS}; choose some with CUDA_VISIBLE_DEVICES")
    how = [runs_as(code, gpu.capability) for gpu in driver.gpus]
    here = sorted({gpu.capability for gpu in driver.gpus})
    build = " ".join(["./build_llama.sh --cuda", *(f"--arch {major}{minor}" for major, minor in here)])
    for i, (gpu, runs) in enumerate(zip(driver.gpus, how, strict=True)):
        which = f"GPU {i}, {gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        if runs is None:
            fitting = ",".join(_visible_name(j) for j, other in enumerate(how) if other)
            raise refusal(
                f"the CUDA module has no code for {which}, only {in_words(code)}; {build} builds it for what is here, "
                f"CUDA_VISIBLE_DEVICES={fitting or chr(34) * 2} hides it"
            )
        if runs == "ptx" and driver.version < toolkit:
            raise refusal(
                f"{its}, but {which} needs the module's PTX, made by CUDA {toolkit[0]}.{toolkit[1]}; update the driver, or "
                f"{build} builds machine code for what is here"
            )


def _visible_name(i: int) -> str:
    """What to write into `CUDA_VISIBLE_DEVICES` for the GPU that is now number `i`."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return named[i].strip() if i < len(named) and named[i].strip() else str(i)


def find_library(soname: str, lib_dir: Path) -> Path | None:
    """Where a CUDA library lies: beside the module, or in an installed `nvidia-*` wheel. None: the loader may know."""
    folders = [lib_dir, *(path for entry in sys.path for path in sorted(Path(entry, "nvidia").glob("*/lib")))]
    return next((folder / soname for folder in folders if os.path.isfile(folder / soname)), None)


def _load_library(soname: str, lib_dir: Path) -> None:
    """Load a library from beside the module, from an installed `nvidia-*` wheel, or as the system's loader finds it.

    Once it is in the process under its soname, the module's own need of it is met.
    """
    try:
        ctypes.CDLL(str(find_library(soname, lib_dir) or soname))
    except OSError as error:
        raise refusal(
            f"the CUDA module needs {soname}, which cannot be loaded ({error}); pip install 'swarmkv-ll[cuda12]' brings it"
        ) from None
