"""The parts of the build that pyproject.toml cannot say: the engine first, then the extension that is linked to it."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

LIB = Path("swarmkv_ll/_lib")
NATIVE = Path("swarmkv_ll/_native")

# A free-threaded interpreter has no stable ABI.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildEngine(Command):
    """Run build_llama.sh, with the options in SWARMKV_BUILD_OPTIONS or else those of its last run."""

    description = "build llama.cpp into swarmkv_ll/_lib"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        options = shlex.split(os.environ.get("SWARMKV_BUILD_OPTIONS", "--again"))
        command = ["bash", "build_llama.sh", *options]
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode != 0:
            raise ExecError(f"{shlex.join(command)} ended with exit code {done.returncode}")
        # setuptools never removes from its build folder: what an earlier build left there would travel in the wheel.
        shutil.rmtree(Path(self.build_lib or "build/lib", "swarmkv_ll"), ignore_errors=True)


class Build(build):
    # Before build_py, which collects the libraries, and build_ext, which links to them.
    sub_commands = [("build_engine", None), *build.sub_commands]  # noqa: RUF012 - the base class says so


class BuildExt(build_ext):
    """Ask cffi for the extension only now: its build script compiles against the engine's headers and stamp."""

    def run(self) -> None:
        self.run_command("build_engine")
        ffibuilder = runpy.run_path(str(NATIVE / "build.py"))["ffibuilder"]
        generated = ffibuilder.distutils_extension(self.build_temp, verbose=False)
        (extension,) = self.extensions
        for name in (
            "sources",
            "include_dirs",
            "define_macros",
            "library_dirs",
            "libraries",
            "extra_compile_args",
            "extra_link_args",
        ):
            setattr(extension, name, getattr(generated, name))
        extension.depends = [str(path) for path in (*NATIVE.glob("*"), *LIB.glob("include/*"), LIB / "build-info.json")]
        super().run()


# The real sources are known in BuildExt.run; this one tells setuptools that there is something to compile.
extension = Extension("swarmkv_ll._llama", sources=[str(NATIVE / "shim.c")], py_limited_api=LIMITED_API)

setup(
    ext_modules=[extension],
    cmdclass={"build": Build, "build_engine": BuildEngine, "build_ext": BuildExt},
    # Without this the extension is abi3 but the wheel is tagged for one Python version only.
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
