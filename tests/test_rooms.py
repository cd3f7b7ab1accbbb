"""Who may import whom: the order of the modules in the design, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import run_ok

import swarmkv_ll

PACKAGE = Path(swarmkv_ll.__file__).parent

ORDER = [
    ["errors"],
    ["blob", "budget", "cache", "dag", "elf", "pipeline_file", "policy", "printable"],
    ["cells", "fatbin", "timeline"],
    ["cuda", "default_model", "modelfile", "exclusive", "skv"],
    ["identity"],
    ["record"],
    ["inspection"],
    ["ffi"],
    ["runtime"],
    ["sampling"],
    ["arena"],
    ["model"],
    ["adapter", "answer", "chat", "limits", "outputs"],
    ["context"],
    ["state"],
    ["borrowed", "fit"],
    ["snapshot"],
    ["batching", "fanout", "interop", "on_device"],
    ["measure", "pipeline"],
    ["pipeline_measure"],
    ["doctor", "terminal"],
    ["campaign"],
    ["cli_bench", "cli_run", "cli_snapshot"],
    ["cli"],
    ["__main__"],
]
"""From the ground up; a module imports only from rows above its own."""

PURE = {
    "errors": set(),
    "blob": {"errors"},
    "budget": {"errors"},
    "cells": {"errors", "blob"},
    "cache": {"errors"},
    "cuda": {"elf", "errors", "fatbin", "printable"},
    "dag": {"errors"},
    "elf": {"errors"},
    "fatbin": {"elf", "errors", "printable"},
    "pipeline_file": {"errors"},
    "policy": {"errors"},
    "printable": set(),
    "timeline": {"cache", "errors", "printable"},
    "default_model": {"cache", "errors"},
    "modelfile": {"cache", "errors"},
    "exclusive": {"errors"},
    "identity": {"errors", "modelfile"},
    "skv": {"cache", "errors"},
    "record": {"blob", "cache", "errors", "identity", "skv"},
    "inspection": {"blob", "cache", "errors", "record", "skv"},
}
"""These work without a built engine, and import nothing else of ours."""

EXCEPTIONS = {
    ("model", "context"): "a model makes its contexts: Model.context imports when it is called",
    ("context", "borrowed"): "a borrowed context is learnt from its state: Context.adopt imports when it is called",
    ("context", "on_device"): "a context makes its snapshots: Context.snapshot imports when it is called",
    ("context", "snapshot"): "a context makes its snapshots: Context.snapshot imports when it is called",
}
"""The imports that point downward: inside a function, or for type checkers only."""

BINDING = "_llama"


def imports_of(source: str, dots: int = 1, *, package: str = "swarmkv_ll") -> Iterator[tuple[str, bool]]:
    """Modules of ours that a source imports, and whether when it is loaded (or later, or for type checkers only).

    `dots` before a name mean the package: two in a module that is a folder, where one means the module itself.
    """

    def walk(node: ast.AST, now: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            later |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [a.name.removeprefix(f"{package}.") for a in child.names if a.name.startswith(f"{package}.")]
            elif isinstance(child, ast.ImportFrom) and (child.level == dots or child.module == package):
                inside = child.module if child.level else None
                public = swarmkv_ll._HOME  # names that the package takes from a module when they are first used
                names = [inside] if inside else [public.get(a.name, a.name) for a in child.names if a.name[0] != "_"]
                names += [BINDING] * any(a.name == BINDING for a in child.names)
            elif isinstance(child, ast.ImportFrom) and (child.module or "").startswith(f"{package}."):
                names = [str(child.module).removeprefix(f"{package}.")]
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                names = [
                    str(a.value).removeprefix(f"{package}.")
                    for a in child.args
                    if isinstance(a, ast.Constant) and str(a.value).startswith(f"{package}.")
                ]
            for name in names:
                yield name.split(".")[0], now and not later
            yield from walk(child, now and not later)

    return walk(ast.parse(source), True)


SOURCES: dict[str, list[tuple[str, int]]] = {}
"""Each module's source, and the dots that mean the package in it; several where it is a folder."""

for path in sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("[!_]*/*.py")]):
    *folders, file = path.relative_to(PACKAGE).parts
    name = folders[0] if folders else file.removesuffix(".py")
    SOURCES.setdefault(name, []).append((path.read_text(encoding="utf-8"), 1 + len(folders)))

MODULES = sorted(SOURCES.keys() - {"__init__"})
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def wrong_imports(name: str, source: str, dots: int = 1) -> list[str]:
    allowed = {other for other in RANK if RANK[other] < RANK[name]}
    wrong = []
    for other, at_load in imports_of(source, dots):
        if other == BINDING:
            ok = name == "ffi"
        elif (name, other) in EXCEPTIONS:
            ok = not at_load
        else:
            ok = other in PURE.get(name, allowed)
        if not ok:
            wrong.append(f"{name} imports {other}")
    return wrong


def test_every_module_has_its_place() -> None:
    assert set(MODULES) <= set(RANK)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_upward_only(name: str) -> None:
    assert [wrong for source, dots in SOURCES[name] for wrong in wrong_imports(name, source, dots)] == []


def test_a_module_may_be_a_folder() -> None:
    """Its files import each other as they like; two dots are the package."""
    assert len(SOURCES["blob"]) > 1
    assert {dots for _, dots in SOURCES["blob"]} == {2}
    assert any(("errors", True) in imports_of(source, dots) for source, dots in SOURCES["blob"])
    assert wrong_imports("blob", "from ..errors import BlobError\nfrom .layout import parse", 2) == []


@pytest.mark.parametrize(("name", "other"), EXCEPTIONS)
def test_the_exceptions_are_in_use(name: str, other: str) -> None:
    assert any((other, False) in imports_of(source, dots) for source, dots in SOURCES[name])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("arena", "from .context import Context"),
        ("model", "from .context import Context"),
        ("model", "class Model:\n  from .context import Context"),
        ("runtime", "from . import ffi, snapshot"),
        ("runtime", "import swarmkv_ll.snapshot"),
        ("runtime", "from swarmkv_ll import snapshot"),
        ("runtime", "from . import Snapshot"),
        ("runtime", "from swarmkv_ll.snapshot import Snapshot"),
        ("runtime", "def later():\n  from .snapshot import Snapshot"),
        ("runtime", "if TYPE_CHECKING:\n  from .snapshot import Snapshot"),
        ("runtime", "importlib.import_module('swarmkv_ll.snapshot')"),
        ("blob", "from ..cells import CellLedger"),
        ("blob", "from ..ffi import C"),
        ("blob", "from .. import Arena"),
        ("blob", "import swarmkv_ll.cells"),
        ("limits", "from .outputs import Outputs"),
        ("arena", "from ._llama import lib"),
        ("arena", "from swarmkv_ll import _llama"),
    ],
)
def test_a_wrong_import_is_found(name: str, source: str) -> None:
    assert len(wrong_imports(name, source, 2 if name == "blob" else 1)) == 1


def test_the_pure_modules_need_no_engine() -> None:
    """Neither the binding nor a library of the engine is loaded by them, nor by the package itself."""
    printed = run_ok(
        """
        import sys
        class NoBinding:
            def find_spec(self, name, path=None, target=None):
                if name == "swarmkv_ll._llama":
                    raise ImportError("not here")
        sys.meta_path.insert(0, NoBinding())
        import importlib
        for name in sys.argv[1:]:
            importlib.import_module(f"swarmkv_ll.{name}")
        from swarmkv_ll import SwarmKVError, validate_context_budget
        print(validate_context_budget(1, 2, 1000))
        print([name for name in sys.modules if name in ("swarmkv_ll.ffi", "swarmkv_ll._llama", "_cffi_backend")])
        with open("/proc/self/maps") as maps:
            print([line for line in maps if "libllama" in line or "libggml" in line])
        try:
            import swarmkv_ll.ffi
        except Exception as error:  # a control: what does need it says so
            print(type(error).__name__)
        """,
        *PURE,
    )
    assert printed.splitlines() == ["869", "[]", "[]", "EngineLoadError"]
