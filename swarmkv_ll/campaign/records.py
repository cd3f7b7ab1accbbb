"""What a campaign keeps: a row for each measured value, and the folder they are written to, trial by trial."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..cache import open_regular, write_atomically
from ..errors import CampaignError

TRIALS, RUN, SUMMARY, BEST = "all_trials.csv", "run.json", "summary.json", "best_run.json"
REPORT_HTML, REPORT_MD, PLOTS = "report.html", "report.md", "plots"

_IN_THE_WAY = 8
"""Names of a foreign folder's files that an error tells."""


@dataclass(frozen=True)
class Case:
    """What is measured once, in one go; the first columns of `all_trials.csv`.

    Attributes
    ----------
    experiment : str
        A part of the campaign, see `plan`.
    trial : int
        From 1.
    document : str
        "deterministic", or a real document's name.
    n_document, n_branches, n_answer : int or None
        Tokens of the document, branches, tokens that each answers.
    flash_attn, kv_type : str
        "on" or "off"; a KV cache's type.
    """

    experiment: str
    trial: int = 1
    document: str = ""
    n_document: int | None = None
    n_branches: int | None = None
    n_answer: int | None = None
    flash_attn: str = ""
    kv_type: str = ""


@dataclass(frozen=True)
class Row(Case):
    """One measured value: a line of `all_trials.csv`.

    Attributes
    ----------
    strategy, contexts : str
        Who or what was measured: "reprefill", "shared", "snapshot", a peer's name; and of a snapshot's branch whether its
        context was "fresh", "reused" (restored into) or "holding" the document.
    name : str
        Of the measure; its end is the unit: ``_s`` seconds, ``_bytes``, ``_per_s``.
    value : float
    """

    strategy: str = ""
    contexts: str = ""
    name: str = ""
    value: float = 0.0


COLUMNS = tuple(f.name for f in fields(Row))
_CASE = tuple(f.name for f in fields(Case))
_COUNTS = ("trial", "n_document", "n_branches", "n_answer")


def case_of(row: Row) -> Case:
    """The case a row belongs to."""
    return Case(**{name: getattr(row, name) for name in _CASE})


def rows_of(case: Case, values: Mapping[str, float], strategy: str = "", contexts: str = "") -> list[Row]:
    """A row for each of `values`."""
    known = {name: getattr(case, name) for name in _CASE}
    return [Row(**known, strategy=strategy, contexts=contexts, name=k, value=float(v)) for k, v in values.items()]


def write_rows(rows: Iterable[Row]) -> str:
    """Rows as CSV, with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = (getattr(row, name) for name in COLUMNS)
        writer.writerow("" if v is None else repr(v) if isinstance(v, float) else v for v in values)
    return text.getvalue()


def read_rows(text: str, name: str = TRIALS) -> list[Row]:
    """Rows from CSV.

    Raises
    ------
    CampaignError
        It has other columns, or a value is not a number.
    """
    lines = csv.reader(io.StringIO(text))
    if (header := next(lines, [])) != list(COLUMNS):
        raise CampaignError(f"{name} has the columns {', '.join(header) or '(none)'}; expected {', '.join(COLUMNS)}")
    rows = []
    if not text.endswith("\n"):
        raise CampaignError(f"{name} does not end with a line's end: it was cut")
    for n, line in enumerate(lines, start=2):
        if len(line) != len(COLUMNS):
            raise CampaignError(f"{name}, line {n}: {len(line)} values, expected {len(COLUMNS)}")
        known: dict[str, Any] = dict(zip(COLUMNS, line, strict=True))
        try:
            for count in _COUNTS:
                known[count] = int(known[count]) if known[count] else None
            known["value"] = float(known["value"])
            if not math.isfinite(known["value"]):
                raise ValueError(f"{known['name']} is {known['value']}")
        except ValueError as error:
            raise CampaignError(f"{name}, line {n}: {error}") from None
        rows.append(Row(**known))
    return rows


@dataclass
class Folder:
    """Where a run goes. Made by `opened`.

    Attributes
    ----------
    path : Path
    rows : list of Row
        All that was measured so far.
    run : dict
        `run.json`: settings, model, machine, when it began, what was skipped.
    """

    path: Path
    run: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Keep what one case gave: all of it or nothing."""
        if not (self.path / RUN).is_file():
            raise CampaignError(f"{self.path} was removed while it was written to")
        self.rows += rows
        write_atomically(self.path / TRIALS, write_rows(self.rows).encode())

    def note(self, **known: Any) -> None:
        """Keep something in `run.json`."""
        self.run |= known
        self.write_json(RUN, self.run)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write one of its files."""
        write_atomically(
            self.path / name, (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        )

    def done(self) -> set[Case]:
        """The cases that were measured."""
        return {case_of(row) for row in self.rows}


@contextmanager
def opened(path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[Folder]:
    """Take a folder for a run with `settings` (plain data): a new one, or one that holds an unfinished run with the same.

    It is locked meanwhile, so that two runs do not mix.

    Raises
    ------
    CampaignError
        It holds a finished run or one with other settings (unless `overwrite`: then the run's own files are removed),
        it is in use, or it holds files that no run has written.
    OSError
        It cannot be made or written.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CampaignError(f"{path} is being written by another run") from None
        yield _begun(path, dict(settings), overwrite)
    finally:
        os.close(lock)


def _begun(path: Path, settings: dict[str, Any], overwrite: bool) -> Folder:
    names = sorted(p.name for p in path.iterdir() if not (p.name.startswith(".swarmkv-") and p.suffix == ".tmp"))
    if names and RUN not in names:
        shown = ", ".join(names[:_IN_THE_WAY]) + (", …" if len(names) > _IN_THE_WAY else "")
        raise CampaignError(f"{path} holds files that are not a run's ({shown}): name another folder")
    run = _read_run(path) if names else {}
    if (path / PLOTS).is_symlink():
        raise CampaignError(f"{path / PLOTS} is a link, which no run has made: name another folder")
    if overwrite:
        run = {}
    if run.get("finished"):
        raise CampaignError(f"{path} holds a finished run: name another folder, or give --overwrite")
    if run:
        # As JSON, where a tuple is a list, for so it was kept.
        asked, found = json.loads(json.dumps(settings)), run.get("settings", {})
        if other := [key for key in {**asked, **found} if asked.get(key) != found.get(key)]:
            told = "; ".join(
                f"{key} {_short(found.get(key))} there, {_short(asked.get(key))} asked for" for key in other
            )
            raise CampaignError(
                f"{path} holds an unfinished run with other settings ({told}): name another folder, or give --overwrite"
            )
    else:
        _remove(path)
    folder = Folder(path, run)
    if (path / TRIALS).exists():
        folder.rows = read_rows(_text(path / TRIALS), str(path / TRIALS))
    elif not run:
        folder.note(settings=settings, finished=False)
    return folder


def read_run(path: Path) -> Folder:
    """A run as it lies in a folder.

    Raises
    ------
    CampaignError
        There is none, or its files are damaged.
    """
    if not (path / RUN).is_file() or not (path / TRIALS).is_file():
        raise CampaignError(f"{path} holds no run: it has no {RUN} or no {TRIALS}")
    return Folder(path, _read_run(path), read_rows(_text(path / TRIALS), str(path / TRIALS)))


def _read_run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(_text(path / RUN))
    except ValueError as error:
        raise CampaignError(f"{path / RUN} is damaged ({error}): name another folder") from None
    if not isinstance(run, dict) or not isinstance(run.get("settings"), dict) or "finished" not in run:
        raise CampaignError(f"{path / RUN} is not that of a run: name another folder")
    return run


def _text(path: Path) -> str:
    with open_regular(path) as file:
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise CampaignError(f"{path} is not UTF-8 text (byte {error.start})") from None


def _remove(path: Path) -> None:
    """What an earlier run has written; nothing else."""
    for name in (RUN, TRIALS, SUMMARY, BEST, REPORT_HTML, REPORT_MD):
        (path / name).unlink(missing_ok=True)
    from .plots import PICTURES

    for name in PICTURES:
        for kind in (".png", ".svg"):
            (path / PLOTS / f"{name}{kind}").unlink(missing_ok=True)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
