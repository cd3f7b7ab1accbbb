"""Fixtures: tiny models of every kind of memory, and the default model where a test needs a real one."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import Files, Models

if TYPE_CHECKING:
    from swarmkv_ll import Arena, Model


def pytest_configure() -> None:
    """Have Ctrl-C work, here and in processes that tests start, also where a shell runs this in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A CUDA module without a driver is a line on standard error in every process; test_cuda.py wants it, others do not.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_xdist_auto_num_workers() -> int:
    """Two processes: each decodes with a thread or two, and has its own copy of the models."""
    return 2


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Tiny models as files: `files["llama"]` is a path; names in `helpers.WRITERS`, and "changed" (one weight of "llama")."""
    return Files(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def models(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Tiny models, loaded: `models["llama"]`. Their fingerprints stay out of the user's cache."""
    import swarmkv_ll.modelfile

    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swarmkv_ll.modelfile, "cache_dir", lambda: cache)
        yield Models(files)


@pytest.fixture(scope="session")
def llama(models: Models) -> Model:
    """The tiny attention model."""
    return models["llama"]


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Room for some tiny states."""
    from swarmkv_ll import Arena

    with Arena(8 << 20) as made:
        yield made
        made.check_integrity()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every context and arena that is made from here on."""
    from swarmkv_ll import Arena, Context

    made: list[Any] = []
    for cls in (Context, Arena):

        def init(self: Any, *args: Any, _true: Any = cls.__init__, **options: Any) -> None:
            _true(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(cls, "__init__", init)
    return made


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model: `SWARMKV_MODEL`, or the cache, or fetched now; skips with the reason where it is not to be had."""
    from swarmkv_ll.default_model import fetch_default_model, find_default_model
    from swarmkv_ll.errors import ModelUnavailableError

    found = find_default_model()  # a wrong SWARMKV_MODEL fails the test instead of skipping it
    try:
        return found or fetch_default_model()
    except ModelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def default_model(default_model_path: Path, models: Models) -> Model:
    """The default model, loaded once. For tests marked `requires_model`."""
    from swarmkv_ll import Model

    return Model(default_model_path)
