"""What the commands share: progress bars, printing, the model by its name, texts. Needs no engine until a model is loaded."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from .cache import target_of
from .default_model import fetch_default_model, find_default_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .measure import Ratio
    from .model import Model

err = Console(stderr=True)
out = Console()
if out.width < 1:  # COLUMNS=0
    out.width = 80


def path_of_model(named: str | None) -> Path:
    """Of the model that was named, or the default one, which is fetched if need be."""
    if named:
        return Path(named)
    if found := find_default_model():
        return found
    with progress_bar() as progress:
        task = progress.add_task("downloading model", total=None)
        return fetch_default_model(lambda done, total: progress.update(task, completed=done, total=total))


def progress_bar(width: int = 17) -> Progress:
    """On standard error, and gone when it is done; nothing where that is no terminal. `width` is its text's."""
    return Progress(
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextmanager
def loaded_model(named: str | None) -> Iterator[Model]:
    """That model, loaded, for the block."""
    from .model import Model

    path = path_of_model(named)
    with progress_bar() as progress:
        task = progress.add_task("loading model", total=1.0)
        loaded = Model(path, on_progress=lambda share: progress.update(task, completed=share))
    with loaded:
        yield loaded


@contextmanager
def extra_named() -> Iterator[None]:
    """Tell how to get a package that is not there."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").split(".", maxsplit=1)[0]
        if package not in ("gguf", "matplotlib"):
            raise
        raise click.ClickException(f"this needs {package}: pip install {package}") from None


def show(renderable: Any) -> None:
    """Print for a person, or, into a file or pipe, without wrapping and padding."""
    if out.is_terminal:
        out.print(renderable)
        return
    text = StringIO()
    Console(width=100_000, file=text).print(renderable)
    click.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def ratio_table(ratios: Sequence[Ratio], caption: str, *, judged: bool = True) -> Table:
    """Ratios beside what they should reach."""
    table = Table(box=box.SIMPLE_HEAD, title="Measured in this run", title_justify="left", caption_justify="left")
    table.caption = caption
    for name in ("ratio", "measured", "wanted", ""):
        table.add_column(name, justify="left" if name in ("ratio", "") else "right", no_wrap=name != "ratio")
    for ratio in ratios:
        wanted, mark = "", ""
        if ratio.target is not None:
            wanted = f"{'≤' if ratio.at_most else '≥'} {ratio.target:g} {ratio.unit}".strip()
            mark = "" if not judged else "[green]met[/]" if ratio.met else "[yellow]missed[/]"
        table.add_row(ratio.name, f"{ratio.value:,.{2 if ratio.unit else 3}f} {ratio.unit}".strip(), wanted, mark)
    return table


def read_text(path: str) -> str:
    """A text file, or with - standard input."""
    if path != "-" and stat.S_ISCHR(os.stat(path).st_mode) and not os.path.samefile(path, os.devnull):
        raise click.UsageError(f"{path} is a device, which may have no end; - is standard input")
    try:
        return sys.stdin.buffer.read().decode() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is not UTF-8 text (byte {error.start})") from None


def check_target(path: str) -> Path:
    """Refuse what could not be written, before the work whose result goes there. Gives the file that `path` leads to.

    Raises
    ------
    OSError
        It cannot: a folder, no such folder, or one that may not be written to.
    """
    target = target_of(path)[0]
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not os.access(target.parent, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
    return target


def lines_of(text: str) -> list[str]:
    """Its lines that hold something."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def sample(name: str) -> str:
    """A text that comes with the package."""
    return (resources.files("swarmkv_ll") / "data" / name).read_text(encoding="utf-8")


def duration(ms: float) -> str:
    """For people; – for none."""
    if ms == 0:
        return "–"
    return f"{ms:,.2f} ms" if ms < 10 else f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"
