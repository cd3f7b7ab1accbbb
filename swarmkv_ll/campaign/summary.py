"""Medians, bounds and verdicts out of a campaign's rows. No engine: a summary can be made anew from the files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .records import Row

SCHEMA = 1
"""Of `summary.json`; raised when a name in it changes its meaning."""

MAX_OTHERS = 0.15
"""Share of the machine that others may take in the mean."""

MAX_SPREAD = 0.5
"""How far apart the yardstick's fast and slow tenths may be, as a share of its median."""

TARGETS = (
    ("activation_ratio", "share_of_bound", 0.98),
    ("activation_ratio", "median", 120.0),
    ("end_to_end_ratio_2", "median", 1.97),
    ("fork_share_of_memcpy", "median", 0.95),
    ("export_share_of_memcpy", "median", 0.85),
    ("restore_share_of_memcpy", "median", 0.85),
    ("save_load_vs_llama_cpp_python", "median", 20.0),
    ("fan_out_vs_llama_batched_bench", "median", 0.95),
    ("fan_out_vs_llama_server", "median", 4.0),
)
"""What is wanted of a full run, for about 3,500 tokens."""

MIN_DOCUMENT = 3000
"""Tokens of the article's document from which on targets are judged: with shorter ones fixed costs show."""

_TWO_COPIES = "two copies of the state; llama-cpp-python copies n_batch rows of scores besides"
_SERVER = "the engine's decode of a batch of all branches"

PEERS = {
    "save_load": ("save_load_vs_llama_cpp_python", _TWO_COPIES),
    "save_load_n_batch_2048": ("save_load_vs_llama_cpp_python_n_batch_2048", _TWO_COPIES),
    "ram_cache": ("ram_cache_vs_llama_cpp_python", "one copy of the state, and the decode of the question"),
    "fan_out_vs_llama_batched_bench": (
        "fan_out_vs_llama_batched_bench",
        "the engine's decode, the same on both sides: only we choose tokens and turn them into text",
    ),
    "fan_out_vs_llama_server": (
        "fan_out_vs_llama_server",
        f"{_SERVER}; the server computes the document again in every slot that does not hold it",
    ),
    "fan_out_vs_llama_server_one_slot": (
        "fan_out_vs_llama_server_one_slot",
        f"{_SERVER}; one slot answers one after another",
    ),
    "fan_out_vs_llama_server_kept": (
        "fan_out_vs_llama_server_kept",
        f"{_SERVER}; the server, whose slots each keep a copy of the document, answers over HTTP",
    ),
    "fan_out_vs_llama_server_slots": (
        "fan_out_vs_llama_server_slots",
        f"{_SERVER}; the server reads the document's state from a file for every slot",
    ),
}
"""Of each comparison with a peer: its metric, and what decides it."""

OURS = "swarmkv_ll"


@dataclass(frozen=True)
class _Metric:
    """Values of a metric, trial by trial, all of them better when larger; with each its bound, where there is one."""

    name: str
    values: Sequence[float]
    bounds: Sequence[float]
    shares: Sequence[float]
    unit: str
    what: str
    limited_by: str
    n_document: int | None = None

    def to_dict(self) -> dict[str, Any]:
        middle = median(self.values)
        return {
            "median": middle,
            "best": max(self.values),
            "worst": min(self.values),
            "bound": median(self.bounds) if self.bounds else None,
            "share_of_bound": median(self.shares) if self.shares else None,
            "unit": self.unit,
            "n": len(self.values),
            "spread": (max(self.values) - min(self.values)) / middle if middle else None,
            "n_document": self.n_document,
            "what": self.what,
            "limited_by": self.limited_by,
        }


class _Trials:
    """Rows of one experiment, looked up trial by trial."""

    def __init__(self, rows: Sequence[Row], experiment: str) -> None:
        self.found: dict[int, dict[tuple[str, str, str], float]] = {}
        self.n_document: int | None = None
        for row in rows:
            if row.experiment == experiment:
                self.n_document = row.n_document
                self.found.setdefault(row.trial, {})[row.strategy, row.contexts, row.name] = row.value

    def __iter__(self) -> Any:
        return iter(sorted(self.found))

    def get(self, trial: int, name: str, strategy: str = "", contexts: str = "") -> float | None:
        return self.found[trial].get((strategy, contexts, name))


def summarise(run: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """All that `summary.json` holds, of what was measured; parts that were not are absent.

    Parameters
    ----------
    run : mapping
        `run.json`.
    rows : sequence of Row
    """
    metrics = [*_activation(rows), *_end_to_end(rows), *_copies(rows), *_generation(rows), *_identity(rows)]
    peers = _peers(run.get("peers", {}), rows)
    metrics += _against_peers(peers, rows)
    noise = _noise(rows)
    measured = {metric.name: metric.to_dict() for metric in metrics if metric.values}
    return {
        "schema": SCHEMA,
        "created_at": run.get("created_at"),
        "seconds": run.get("seconds"),
        "command": run.get("command"),
        "settings": {**run.get("settings", {}), "pinned_threads": run.get("pinned_threads")},
        "machine": run.get("machine", {}),
        "model": run.get("model", {}),
        "metrics": measured,
        "targets": _judged(run, metrics, noise),
        "noise": noise,
        "article": _article(rows),
        "peers": {name: {k: v for k, v in peer.items() if k != "trials"} for name, peer in peers.items()},
        "skipped": list(run.get("skipped", [])),
    }


def best_run(summary: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The article's best trial, with everything that was measured in it."""
    best = summary["article"]["best_trial"]
    trial = next((t for t in summary["article"]["trials"] if t["trial"] == best), None)
    measured = [
        {"strategy": row.strategy, "contexts": row.contexts, "name": row.name, "value": row.value}
        for row in rows
        if row.experiment == "article" and row.trial == best
    ]
    return {"schema": SCHEMA, "rule": "the largest 2 · ttft_pct + e2e_pct", "trial": trial, "rows": measured}


def _ours(trials: _Trials, trial: int) -> str:
    """Contexts of the way that the library itself takes: the document held, or, where the memory cannot, restored."""
    return "holding" if trials.get(trial, "activation_median_s", "snapshot", "holding") is not None else "reused"


def _activation(rows: Sequence[Row]) -> list[_Metric]:
    trials = _Trials(rows, "article")
    ways = {
        "": ("a branch's first logits where the context still holds the document", "the branch's own decode"),
        "_reused": ("the same out of a snapshot: fork, restore, decode", "the branch's own decode, and two copies"),
        "_fresh": (
            "the same into a context made for the branch",
            "the branch's own decode, making a context, and two copies",
        ),
        "_shared": (
            "the same in a sequence over the document's cells, both branches' prompts in one batch",
            "the decode of two prompts, where the bound counts one",
        ),
    }
    found = []
    for suffix, (what, limited_by) in ways.items():
        values, bounds, shares = [], [], []
        for trial in trials:
            contexts = suffix[1:] or "holding"
            way = ("shared", "") if contexts == "shared" else ("snapshot", contexts)
            again = trials.get(trial, "activation_s", "reprefill", "fresh")
            took = trials.get(trial, "activation_median_s", *way) or trials.get(trial, "activation_s", *way)
            if not again or not took:
                continue
            values.append(again / took)
            if alone := trials.get(trial, "bound_s"):
                bounds.append(again / alone)
                share = trials.get(trial, "bound_share", "snapshot", contexts)
                shares.append(share or alone / took)
        told = f"re-prefilling a branch ÷ {what}"
        name = f"activation_ratio{suffix}"
        found.append(_Metric(name, values, bounds, shares, "×", told, limited_by, trials.n_document))
    return found


def _end_to_end(rows: Sequence[Row]) -> list[_Metric]:
    found = []
    for n, experiment in ((2, "article"), (8, "eight")):
        trials = _Trials(rows, experiment)
        for suffix, strategy in (("", "snapshot"), ("_shared", "shared")):
            values, bounds = [], []
            for trial in trials:
                contexts = _ours(trials, trial) if strategy == "snapshot" else ""
                again = trials.get(trial, "end_to_end_s", "reprefill", "fresh")
                took = trials.get(trial, "end_to_end_s", strategy, contexts)
                branches = trials.get(trial, "branch_s", "reprefill", "fresh")
                alone = trials.get(trial, "bound_s") or (branches / n if branches else None)
                if again and took and alone:
                    values.append(again / took)
                    # A context, a prefill and a branch once, and the other branches' decodes; shared ones are decoded
                    # in one batch, which may cost no more than one of them.
                    bounds.append(again / (again / n + (n - 1 if strategy == "snapshot" else 0) * alone))
            what = f"{n} branches, each re-prefilling ÷ the document once and {n} branches"
            what += " in one batch" if strategy == "shared" else ", one after another"
            limited_by = "the prefill that has to be made once, and the branches' own decode"
            if strategy == "shared":
                limited_by += " in one batch, which the bound counts as one branch"
            shares = [value / bound for value, bound in zip(values, bounds, strict=True)]
            name = f"end_to_end_ratio_{n}{suffix}"
            found.append(_Metric(name, values, bounds, shares, "×", what, limited_by, trials.n_document))
    return found


def _copies(rows: Sequence[Row]) -> list[_Metric]:
    trials = _Trials(rows, "article")

    def of(name: str) -> list[float]:
        return [value for trial in trials if (value := trials.get(trial, name)) is not None]

    told = (
        ("fork_share_of_memcpy", "fork_share", "np.copyto of as many bytes ÷ a fork", "memory bandwidth"),
        ("export_share_of_memcpy", "export_share", "np.copyto ÷ an export out of the context", "memory bandwidth"),
        (
            "restore_share_of_memcpy",
            "restore_share",
            "np.copyto ÷ a checked restore into the context",
            "memory bandwidth, and the check of every cell's position",
        ),
        (
            "first_fork_share_of_warm",
            "first_fork_share",
            "a fork ÷ the first one in a new arena",
            "memory bandwidth: an arena touches its pages when it is made",
        ),
    )
    return [
        _Metric(name, of(row), [1.0] * len(of(row)), of(row), "", what, limited_by, trials.n_document)
        for name, row, what, limited_by in told
    ]


def _generation(rows: Sequence[Row]) -> list[_Metric]:
    trials = _Trials(rows, "generation")
    n_branches, n_answer = next(
        ((row.n_branches, row.n_answer) for row in rows if row.experiment == "generation"), (8, 32)
    )
    values, bounds = [], []
    for trial in trials:
        alone, together, engine = (trials.get(trial, f"{name}_s") for name in ("one_at_a_time", "together", "engine"))
        if alone and together and engine:
            values.append(alone / together)
            bounds.append(alone / engine)
    return [
        _Metric(
            f"batched_generation_ratio_{n_branches}x{n_answer}",
            values,
            bounds,
            [value / bound for value, bound in zip(values, bounds, strict=True)],
            "×",
            f"{n_branches} answers of {n_answer} tokens one after another ÷ in one batch",
            "the engine's own time for such a batch",
            trials.n_document,
        )
    ]


def _identity(rows: Sequence[Row]) -> list[_Metric]:
    values = [
        row.value
        for row in rows
        if row.name == "identical" and row.strategy == "snapshot" and row.experiment in ("article", "eight")
    ]
    what = "cases of two and eight branches, three ways each, whose logits were bit for bit those of re-prefilling"
    return [
        _Metric(
            "bit_identical", values, [1.0] * len(values), values, "", what, "nothing: all of them is what is promised"
        )
    ]


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────


def _peers(known: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What is told of each peer, with medians over its trials; under "trials" each comparison's ratios."""
    found: dict[str, dict[str, Any]] = {}
    for name, peer in known.items():
        comparisons, trials = [], {}
        for key, told in peer.get("comparisons", {}).items():
            values: dict[int, dict[str, float]] = {}
            for row in rows:
                if row.experiment == "peers" and row.document == name and row.name == measure(key, told["unit"]):
                    values.setdefault(row.trial, {})[row.strategy] = row.value
            pairs = [(v[name], v[OURS]) for v in values.values() if len(v) == 2]
            if not pairs:
                continue
            ratios = [times_as_good(theirs, ours, told["unit"]) for theirs, ours in pairs]
            trials[key] = ratios
            comparisons.append(
                {
                    "name": key,
                    **told,
                    "why": PEERS[key][1] if key in PEERS else None,
                    "peer_value": median(theirs for theirs, _ in pairs),
                    "our_value": median(ours for _, ours in pairs),
                    "ratio": median(ratios),
                    "n": len(pairs),
                }
            )
        found[name] = {
            "status": "measured" if comparisons else "skipped",
            "reason": peer.get("reason"),
            "version": peer.get("version"),
            "comparisons": comparisons,
            "trials": trials,
        }
    return found


def times_as_good(theirs: float, ours: float, unit: str) -> float:
    """How many times as good as a peer we were: of seconds fewer are better, of tokens a second more."""
    return theirs / ours if unit == "s" else ours / theirs


def measure(comparison: str, unit: str) -> str:
    """Name of a comparison's rows."""
    return f"{comparison}_s" if unit == "s" else f"{comparison}_per_s"


def _against_peers(peers: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> list[_Metric]:
    found = []
    for name, peer in peers.items():
        for comparison in peer["comparisons"]:
            key = comparison["name"]
            ratios = peer["trials"][key]
            bounds: list[float] = []
            if key.startswith("save_load") and (copy := _copy_seconds(rows)):
                bounds = [comparison["peer_value"] / (2 * copy)] * len(ratios)
            found.append(
                _Metric(
                    PEERS.get(key, (key,))[0],
                    ratios,
                    bounds,
                    [ratio / bound for ratio, bound in zip(ratios, bounds, strict=True)] if bounds else [],
                    "×",
                    f"{comparison['what']}: times as fast as {name}",
                    comparison["why"] or "not known",
                )
            )
    return found


def _copy_seconds(rows: Sequence[Row]) -> float | None:
    """np.copyto of the article's state."""
    found = [row.value for row in rows if row.experiment == "article" and row.name == "copyto_s"]
    return median(found) if found else None


# ── the article, verdicts, noise ─────────────────────────────────────────────────────────────────────


def _article(rows: Sequence[Row]) -> dict[str, Any]:
    """Its definitions, and its choice of the best trial."""
    trials = _Trials(rows, "article")
    names = ("activation_s", "end_to_end_s", "prefill_s")
    found = []
    for trial in trials:
        again = {name: trials.get(trial, name, "reprefill", "fresh") for name in names}
        ours = {name: trials.get(trial, name, "snapshot", _ours(trials, trial)) for name in names}
        if None in again.values() or None in ours.values():
            continue
        ttft, e2e = (100 * (1 - ours[name] / again[name]) for name in names[:2])  # type: ignore[operator]
        n_document = next(row.n_document for row in rows if row.experiment == "article")
        found.append(
            {
                "trial": trial,
                "reprefill": again,
                "ours": ours,
                "ttft_pct": ttft,
                "e2e_pct": e2e,
                "score": 2 * ttft + e2e,
                "redundant_prefill_s": again["prefill_s"] / 2,  # type: ignore[operator]
                "redundant_prefill_tokens": n_document,
            }
        )
    best = max(found, key=lambda trial: trial["score"])["trial"] if found else None
    return {"trials": found, "best_trial": best}


def _judged(run: Mapping[str, Any], metrics: Sequence[_Metric], noise: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Targets of what was measured in a full run: by the median, where all trials fall on the same side of it.

    On a noisy machine they all have to be further away from it than its yardsticks varied.
    """
    settings = run.get("settings", {})
    if settings.get("mode") != "full" or settings.get("n_document", 0) < MIN_DOCUMENT:
        return []
    margin = 1.0
    if not noise["conclusive"]:
        varied = [noise[name] for name in ("decode_spread", "copy_spread", "others_cpu")]
        margin += max(math.inf if share is None else share for share in varied)
    known = {metric.name: metric for metric in metrics if metric.values}
    found = []
    for name, of, wanted in TARGETS:
        if name not in known:
            continue
        values = known[name].values if of == "median" else known[name].shares
        if not values:
            continue
        verdict = "not concluded"
        if len(values) == settings.get("trials"):
            if min(values) >= wanted * margin:
                verdict = "met"
            elif max(values) * margin < wanted:
                verdict = "missed"
        found.append({"metric": name, "of": of, "wanted": wanted, "measured": median(values), "verdict": verdict})
    return found


def _noise(rows: Sequence[Row]) -> dict[str, Any]:
    """How steady the machine was: of the yardsticks, how far the slow tenth is from the fast one; what others took."""
    found = {
        name: np.array([row.value for row in rows if row.experiment == "noise" and row.name == name])
        for name in ("decode_s", "copy_s", "others_cpu", "steal", "case_s")
    }

    def spread(values: Any) -> float | None:
        if not len(values):
            return None
        low, middle, high = np.percentile(values, (10, 50, 90))
        return float((high - low) / middle)

    noise: dict[str, Any] = {"decode_spread": spread(found["decode_s"]), "copy_spread": spread(found["copy_s"])}
    for name in ("others_cpu", "steal"):
        weights = found["case_s"] if len(found["case_s"]) == len(found[name]) else None
        noise[name] = float(np.average(found[name], weights=weights)) if len(found[name]) else None
    reasons = []
    if noise["decode_spread"] is None:
        reasons.append("how steady the machine was is not known")
    for name, told in (("decode", "short decode"), ("copy", "copy of 32 MiB")):
        if (noise[f"{name}_spread"] or 0) > MAX_SPREAD:
            times = found[f"{name}_s"] * 1e3
            reasons.append(
                f"the same {told} took {times.min():.1f} to {times.max():.1f} ms (spread "
                f"{noise[f'{name}_spread']:.0%} of its median, at most {MAX_SPREAD:.0%} is fit to conclude from)"
            )
    taken = (noise["others_cpu"] or 0) + (noise["steal"] or 0)
    if taken > MAX_OTHERS:
        reasons.append(
            f"other processes ({noise['others_cpu']:.0%}) and a hypervisor ({noise['steal']:.0%}) took {taken:.0%} of the "
            f"processors, at most {MAX_OTHERS:.0%} is fit to conclude from"
        )
    return noise | {"conclusive": not reasons, "reasons": reasons}
