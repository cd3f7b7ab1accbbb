"""PEP 517 backend: setuptools, plus the build tools this machine lacks.

``build_llama.sh`` needs cmake, ninja and pip. Where they are installed, they are used as they are; where not, they are
added to the build requirements, and pip brings them from the package index into the build's own environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

OLDEST_CMAKE = (3, 18)


def _output(*command: str, **environment: str) -> str:
    """What a command prints, or "" when it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout


def _missing_tools() -> list[str]:
    missing = []
    version = re.match(r"cmake version (\d+)\.(\d+)", _output("cmake", "--version"))
    if not version or tuple(map(int, version.groups())) < OLDEST_CMAKE:
        missing.append("cmake>=3.18")
    if shutil.which("ninja") is None or not _output("ninja", "--version"):
        missing.append("ninja")
    # The interpreter's own pip, which the build environment hides through PYTHONPATH; the script knows to look there.
    if not _output(sys.executable, "-m", "pip", "--version", PYTHONPATH=""):
        missing.append("pip")
    return missing


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _missing_tools()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _missing_tools()
