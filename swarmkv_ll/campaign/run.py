"""A campaign from its settings to its folder: every case measured once, kept as it is measured, summed up at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import __version__, budget
from ..budget import validate_context_budget
from ..errors import CampaignError, ContextBudgetError, PeerError, SwarmKVError
from ..fanout import document_and_prompts
from ..ffi import LIB_DIR
from ..limits import default_n_threads
from ..model import Model, Tokens
from ..printable import one_line
from ..runtime import STAMP
from . import experiments, peers
from .experiments import Bench
from .machine import Load, Yardstick, describe, pinned_threads, yardstick
from .plan import FULL, HEADROOM, MIN_CONTEXT, N_QUESTION, QUICK, Sizes, Task, fitting, tasks
from .records import BEST, PLOTS, SUMMARY, Case, Folder, Row, opened, rows_of
from .report import write_report
from .summary import OURS, best_run, measure, summarise

Progress = Callable[[str, float, float], None]
"""Told what is measured, and how much of how much work is done."""

_WARM_TOKENS = 256
"""The yardstick's document, and what warms everything up."""

GENERAL_PROMPTS = ("What is this about?", "Which names does it give?", "Which numbers does it give?")
"""Of documents that come without prompts."""


@dataclass(frozen=True)
class RealDocument:
    """A document from life, and what is asked of it."""

    name: str
    text: str
    prompts: Sequence[str]


def campaign(
    model: Model,
    out: Path,
    *,
    text: str,
    documents: Sequence[RealDocument] = (),
    quick: bool = False,
    with_peers: bool = False,
    n_document: int | None = None,
    overwrite: bool = False,
    command: str = "",
    on_progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure everything, and write the folder. Goes on where an interrupted run with the same settings has stopped.

    Parameters
    ----------
    model : Model
    out : Path
        The folder; see `records.opened`.
    text : str
        What deterministic documents are made of: its beginning, over and over.
    documents : sequence of RealDocument
    quick : bool
        Short documents and few cases: under a minute on two cores with the default model.
    with_peers : bool
        Measure llama-cpp-python, llama-batched-bench and llama-server too, those that are installed.
    n_document : int, optional
        Tokens of the article's document; 3,501 by default, 256 with `quick`.
    overwrite : bool
        Remove what an earlier run has written to the folder.
    command : str
        How this was called, for the report.
    on_progress : callable
        ``on_progress(what, done, total)``: what is measured now, and work done and in all.

    Returns
    -------
    dict
        What was written to `summary.json`.

    Raises
    ------
    ContextBudgetError
        `n_document` does not fit what the model was trained on. Nothing was made.
    CampaignError, OSError
        A document does not fit, or the folder cannot be taken, see `records.opened`. Nothing was made.
    """
    if model.n_ctx_train < MIN_CONTEXT:
        raise CampaignError(
            f"the model was trained on {model.n_ctx_train:,} tokens; at least {MIN_CONTEXT:,} are needed"
        )
    if len({d.name for d in documents}) < len(documents):
        raise CampaignError("two documents have the same name")
    if n_document is not None:
        validate_context_budget(n_document, HEADROOM - budget.HEADROOM, model.n_ctx_train)
    n_threads = default_n_threads()
    sizes, left_out = fitting(QUICK if quick else FULL, model.n_ctx_train, n_document)
    known = []
    for document in documents:
        chat = model.chat_template is not None
        prefix, questions = document_and_prompts(model, document.text, document.prompts, chat)
        try:
            validate_context_budget(len(prefix), max(map(len, questions)) + sizes.n_answer, model.n_ctx_train)
        except ContextBudgetError as error:
            raise CampaignError(f"{document.name}: {error}") from error
        known.append((document.name, len(prefix)))
    reasons = {peer: peers.missing(peer) for peer in peers.PEERS if with_peers}
    settings = {
        "mode": "quick" if quick else "full",
        "version": __version__,
        "stamp": STAMP,
        "model": model.fingerprint,
        "n_threads": n_threads,
        "n_question": N_QUESTION,
        "documents": [f"{d.name} ({hashlib.sha256(d.text.encode()).hexdigest()[:12]})" for d in documents],
        "peers": with_peers,
        **asdict(sizes),
    }
    text_tokens = model.tokenize(text, add_special=True, parse_special=False)
    bench = Bench(model, n_threads, text_tokens, _questions(model))
    described = _described(bench)
    there = [peer for peer, reason in reasons.items() if reason is None]
    todo = tasks(sizes, known, there, flash_attn=described["flash_attn"])
    with opened(out, settings, overwrite=overwrite) as folder:
        begin, before = perf_counter(), folder.run.get("seconds", 0.0)
        folder.note(
            created_at=folder.run.get("created_at") or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=command,
            machine=describe(),
            model=described,
            skipped=left_out + _not_there(reasons),
            peers=_told(reasons, folder.run.get("peers", {})),
        )
        run = _Run(bench, sizes, {d.name: d for d in documents}, folder, on_progress)
        try:
            run.all(todo)
        finally:
            folder.note(seconds=before + perf_counter() - begin)
        on_progress("drawing", 1.0, 1.0)
        return finish(folder)


def finish(folder: Folder) -> dict[str, Any]:
    """Write summary, best run, pictures and report of what a folder holds. Gives the summary."""
    summary = summarise(folder.run, folder.rows)
    drawn = _draw(summary, folder)
    folder.write_json(SUMMARY, summary)
    folder.write_json(BEST, best_run(summary, folder.rows))
    write_report(summary, folder.rows, folder.path, drawn)
    folder.note(finished=True)
    return summary


def _draw(summary: dict[str, Any], folder: Folder) -> list[Path]:
    """The pictures that can be drawn; where matplotlib is not installed a line in the summary says so."""
    try:
        import matplotlib  # noqa: F401

        from .plots import draw

        return draw(summary, folder.rows, folder.path / PLOTS)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        summary["skipped"].append("pictures: matplotlib is not installed (pip install matplotlib)")
    except Exception as error:  # what was measured is not lost over a picture, whatever is wrong with matplotlib
        summary["skipped"].append(f"pictures: {type(error).__name__}: {error}")
    return []


@dataclass
class _Run:
    """The cases of one call."""

    bench: Bench
    sizes: Sizes
    documents: Mapping[str, RealDocument]
    folder: Folder
    on_progress: Progress

    def all(self, todo: Sequence[Task]) -> None:
        """Measure the cases that the folder does not hold yet."""
        total, done = sum(task.cost for task in todo), 0
        held = self.folder.done()
        self.on_progress("warming up", 0, total)
        warm = self.bench.document(_WARM_TOKENS)
        with (
            yardstick(self.bench.model, warm, self.bench.question(0), self.bench.n_threads) as stick,
            pinned_threads(self.bench.n_threads, stick.decode) as pinned,
        ):
            self.folder.note(pinned_threads=pinned)
            for task in todo:
                if task.case not in held:
                    self._one(task, stick, done, total)
                done += task.cost

    def _one(self, task: Task, stick: Yardstick, done: int, total: int) -> None:
        """One case, with the yardstick before it and the load beside it."""
        case, told = task.case, 0
        expected = task.cost / max(1, _tokens_told(case))
        what = _what(case)

        def tell(n_tokens: int) -> None:
            nonlocal told
            told += n_tokens
            self.on_progress(what, done + min(task.cost, told * expected), total)

        tell(0)
        noise, load = stick.measure(), Load()
        try:
            rows = self._measured(case, tell)
        except SwarmKVError as error:
            if case.experiment == "article":  # without it there is nothing to tell
                raise
            self.folder.note(skipped=[*self.folder.run["skipped"], f"{what}: {error}"])
            return
        if not rows:
            return
        noise |= load.measure()
        for name, value in noise.items():
            rows += rows_of(_noise_case(case), {name: value}, strategy=case.experiment)
        self.folder.add(rows)

    def _measured(self, case: Case, tell: experiments.Tell) -> list[Row]:
        bench, sizes = self.bench, self.sizes
        if case.experiment in ("article", "eight", "lengths", "options"):
            rounds = sizes.rounds if case.experiment != "eight" else 3  # its bound; the rest is the article's
            return experiments.fan(bench, case, tell, rounds=rounds)
        if case.experiment == "generation":
            return experiments.generation(bench, case, tell)
        if case.experiment == "branches":
            return experiments.scaling(bench, case, tell, sizes.branches)
        if case.experiment == "memory":
            return experiments.memory(bench, case, tell, sizes.held)
        if case.experiment == "documents":
            document = self.documents[case.document]
            return experiments.answers_of(bench, case, tell, document.text, document.prompts)
        return self._against(case, tell)

    def _against(self, case: Case, tell: experiments.Tell) -> list[Row]:
        """One trial of a peer; what it did and how it was called is kept in `run.json`."""
        peer, bench = case.document, self.bench
        asked = peers.Case(
            model=bench.model.path.resolve(),
            document=bench.document(case.n_document or 0),
            question=bench.question(0),
            n_threads=bench.n_threads,
            n_short=self.sizes.n_short,
        )
        rows, told = list[Row](), dict[str, Any]()
        try:
            comparisons = peers.compare(peer, asked, bench.model, lambda _: tell(0))
        except PeerError as error:  # the others go on; it is tried again with the next trial
            self._know(peer, reason=str(error))
            self.folder.note(skipped=[*self.folder.run["skipped"], f"{peer}, trial {case.trial}: {error}"])
            return []
        for found in comparisons:
            told[found.name] = {"what": found.what, "call": found.call, "ours": found.ours, "unit": found.unit}
            name = measure(found.name, found.unit)
            rows += rows_of(case, {name: found.peer_value}, strategy=peer)
            rows += rows_of(case, {name: found.our_value}, strategy=OURS)
        self._know(peer, comparisons=told, reason=None)
        return rows

    def _know(self, peer: str, **known: Any) -> None:
        """Keep something of a peer in `run.json`."""
        told = self.folder.run["peers"]
        self.folder.note(peers={**told, peer: told[peer] | known})


def _noise_case(case: Case) -> Case:
    """Where the yardstick beside a case is kept."""
    return Case("noise", case.trial, case.document, case.n_document, case.n_branches)


def _what(case: Case) -> str:
    """A case in a few words, for the progress bar."""
    told = {
        "article": "article",
        "eight": "eight branches",
        "generation": "generation",
        "branches": "branches",
        "lengths": "lengths",
        "options": f"{case.kv_type}, flash {case.flash_attn}",
        "memory": "memory",
        "documents": case.document,
        "peers": case.document,
    }[case.experiment]
    return f"{told}, {case.n_document or 0:,} tokens"


def _tokens_told(case: Case) -> int:
    """Tokens that an experiment tells of while it runs."""
    n, n_branches = case.n_document or 0, case.n_branches or 0
    prefills = {"article": 3, "eight": 9, "branches": n_branches + 1, "lengths": 3, "options": 3, "documents": 5}
    return n * prefills.get(case.experiment, 1)


def _told(reasons: Mapping[str, str | None], known: Mapping[str, Any]) -> dict[str, Any]:
    """Of each peer its version, or why it cannot be measured; and what is known of its comparisons."""
    return {
        peer: {
            "reason": reason,
            "version": None if reason else peers.version(peer),
            "comparisons": known.get(peer, {}).get("comparisons", {}),
        }
        for peer, reason in reasons.items()
    }


def _not_there(reasons: Mapping[str, str | None]) -> list[str]:
    if not reasons:
        return ["peers: --peers measures them too"]
    return [f"{peer}: {reason}" for peer, reason in reasons.items() if reason]


def _described(bench: Bench) -> dict[str, Any]:
    model, question = bench.model, bench.question(0)
    n_layer = next((int(v) for k, v in model.metadata.items() if k.endswith(".block_count")), None)
    with model.context(256) as ctx:
        flash_attn = ctx.flash_attn
        ctx.decode(question)
        one = ctx.state_size()
        ctx.decode(question)
        each = (ctx.state_size() - one) / len(question)
    return {
        "name": one_line(model.path.name, 400),
        "description": model.description,
        "n_bytes": model.n_bytes,
        "n_params": model.n_params,
        "n_layer": n_layer,
        "n_ctx_train": model.n_ctx_train,
        "state_bytes_per_token": each,
        "flash_attn": flash_attn,
        "fingerprint": model.fingerprint,
    }


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────


_QUESTIONS = (
    " The station's main purpose is",
    " The document's first chapter describes",
    " After a power failure it will",
    " What nobody may ever change is",
    " The most important part is called",
    " In the spring all valves are",
    " The person in charge has to",
    " Water reaches the last bed when",
)


def _questions(model: Model) -> list[Tokens]:
    """Branches' prompts: as many different ones as the baseline has branches, all of one length."""
    found = [model.tokenize(text, add_special=False, parse_special=False) for text in _QUESTIONS]
    return [np.resize(tokens[-N_QUESTION:], N_QUESTION) for tokens in found]


def engine_header(model: Model, n_tokens: int) -> RealDocument:
    """A real document that every installation has: the beginning of the engine's C header."""
    text = (LIB_DIR / "include" / "llama.h").read_text(encoding="utf-8")
    tokens = model.tokenize(text, add_special=False, parse_special=False)[:n_tokens]
    return RealDocument("llama.h", model.detokenize(tokens), GENERAL_PROMPTS)
