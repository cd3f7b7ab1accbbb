"""The pictures of a campaign, written from its summary and rows. Needs matplotlib, no display and no engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache import write_atomically
from . import canvas, pictures
from .canvas import series
from .records import Row
from .values import activations, pick, shares_by_trial, sides_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 200


@dataclass(frozen=True)
class Picture:
    """A picture of a campaign.

    Attributes
    ----------
    title : str
    shows : str
        What is to be seen, for those who cannot see it, and for its caption.
    height : float
        Inches; its width is 8.
    needs : str
        The rows without which there is nothing to draw.
    ready : callable
        Whether rows hold them.
    fill : callable
        Draws them.
    """

    title: str
    shows: str
    height: float
    needs: str
    ready: Callable[[Sequence[Row]], bool]
    fill: Callable[[Figure, Sequence[Row]], pictures.Filled]


def missing(name: str, rows: Sequence[Row]) -> str | None:
    """Why a picture cannot be drawn from these rows, in a line; None if it can."""
    picture = PICTURES[name]
    return None if picture.ready(rows) else f"{picture.title}: not drawn, for this run measured no {picture.needs}"


def draw(summary: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write every picture that these rows are enough for, as PNG (1,600 pixels wide) and SVG, into a folder.

    Those that are not drawn are told by `missing`. The same rows give the same files.

    Raises
    ------
    ImportError
        `matplotlib` is not installed.
    OSError
    """
    from matplotlib import rc_context

    paths = []
    for name in PICTURES:
        if missing(name, rows):
            continue
        with rc_context(canvas.STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # of a name in a script that the font has not
            made = figure(name, summary, rows)
            for kind in ("png", "svg"):
                image = BytesIO()
                made.savefig(image, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
                write_atomically(folder / f"{name}.{kind}", image.getvalue())
                paths.append(folder / f"{name}.{kind}")
    return paths


def figure(name: str, summary: Mapping[str, Any], rows: Sequence[Row]) -> Figure:
    """A picture, to be saved or looked into."""
    from matplotlib import rc_context

    picture = PICTURES[name]
    with rc_context(canvas.STYLE):
        made = canvas.blank(picture.height)
        measured, legend = picture.fill(made, rows)
        canvas.add_header(made, picture.title, (measured, canvas.where(summary)), legend)
    return made


def _several(rows: Sequence[Row], column: str, **columns: Any) -> bool:
    return len(series(pick(rows, **columns), column)) > 1


PICTURES = {
    "end_to_end": Picture(
        "End-to-end latency of the branches",
        "Bars: seconds until the last branch's first logits, for each way to come to branches. Dashed: one prefill and "
        "the decode of each branch's prompt, the bound.",
        3.8,
        "branches of one document end to end",
        lambda rows: bool(pictures.fans(rows, "end_to_end_s")),
        pictures.end_to_end,
    ),
    "activation": Picture(
        "Activation of the second branch",
        "On a logarithmic axis, the time from a branch's start to its first logits, for each way to come to it. Dashed: "
        "the same prompt's decode alone, the bound.",
        3.6,
        "activation of a second branch",
        lambda rows: any(activations(pick(rows, experiment="article"), side) for side in sides_of(rows)),
        pictures.activation,
    ),
    "prefill_breakdown": Picture(
        "Where the time goes",
        "Stacked bars: contexts, prefill, export, fork and restore, and the decode of the branches' prompts. Left all of "
        "it, right the same without the prefills.",
        4.6,
        "prefills for branches",
        lambda rows: bool(pictures.fans(rows, "prefill_s")),
        pictures.prefill_breakdown,
    ),
    "consistency": Picture(
        "Consistency of the trials",
        "Left: each trial's share of its bound, metric by metric. Right: over the run, a decode and a copy that are "
        "always the same, and what other processes and a hypervisor took of the processors.",
        5.2,
        "trials with a bound, and no yardsticks",
        lambda rows: bool(shares_by_trial(rows).keys() & pictures.SHARES.keys() or pick(rows, experiment="noise")),
        pictures.consistency,
    ),
    "branches": Picture(
        "Scaling with the number of branches",
        "Against the number of branches. Left: the time end to end. Right: how many times as fast that is as "
        "re-prefilling for each. Dashed: the bound.",
        4.3,
        "sweep of the number of branches",
        lambda rows: _several(rows, "n_branches", experiment="branches", name="end_to_end_s"),
        pictures.branches,
    ),
    "lengths": Picture(
        "Scaling with the document's length",
        "Against the document's tokens. Left: what prefill, activation and the copies take. Right: how many times as fast "
        "as a re-prefill the second branch's activation is. Dashed: the bound.",
        4.5,
        "sweep of the document's length",
        lambda rows: (
            bool(pick(rows, experiment="lengths"))
            and _several(pictures.of_lengths(rows), "n_document", name=("prefill_s", "activation_s"))
        ),
        pictures.lengths,
    ),
    "memory": Picture(
        "Memory against branches",
        "Memory that a process holds with so many branches ready to go on: a context for each, one context and a "
        "snapshot's fork for each, or cells shared in one context.",
        3.8,
        "memory of several numbers of branches",
        lambda rows: _several(rows, "n_branches", experiment="memory", name="memory_bytes"),
        pictures.memory,
    ),
}
"""All there are, in the order in which they are told; a picture's files are named by its key."""
