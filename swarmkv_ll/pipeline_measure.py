"""What a pipeline is worth on this machine: each figure as a ratio, its two sides measured in one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np

from .batching import BatchedDecoder, Step
from .fanout import fan_out, prefill
from .measure import Ratio
from .model import Model, Tokens
from .pipeline import BranchNode, Pipeline, PrefillNode
from .pipeline.results import PipelineResult

N_DOCUMENT = 3501
N_SHORT = 1000
"""Tokens shared where generation is measured: as many as llama-batched-bench is given in its example."""

N_REPREFILLS = 8
"""Re-prefills measured. More branches than that are computed from their mean."""

WINDOW = 32
"""Steps over which shares are compared."""

Tell = Callable[[str], None]


def measure(model: Model, tell: Tell) -> list[Ratio]:
    """Every row. `tell` is told what is being measured. Takes some minutes."""
    document, question = texts(model)
    rows = []
    tell("generation, batched and one at a time")
    rows += generation(model, document[:N_SHORT], question)
    tell("streaming prefill")
    streamed, prefill_s = streaming(model, document, question)
    rows += streamed
    tell("branches against re-prefills")
    rows += end_to_end(model, document, question, prefill_s, tell)
    tell("memory of 50 branches")
    rows += memory(model)
    return rows


def texts(model: Model) -> tuple[Tokens, Tokens]:
    """A document of 3,501 tokens, the sample specification over and over, and a question of 5."""
    text = (resources.files("swarmkv_ll") / "data" / "sample_spec.md").read_text(encoding="utf-8")
    tokens = model.tokenize(text, add_special=True, parse_special=False)
    question = model.tokenize(" The station's main purpose is", add_special=False, parse_special=False)[-5:]
    return np.resize(tokens, N_DOCUMENT), question


def branches(model: Model, document: Tokens, question: Tokens, n: int, max_tokens: int = 1) -> PipelineResult:
    """`n` branches of one question."""
    nodes: dict[str, Any] = {"document": PrefillNode(document)}
    nodes |= {f"branch-{i}": BranchNode(question, "document", max_tokens=max_tokens) for i in range(n)}
    return Pipeline(model, nodes).run().check()


def _seconds(result: PipelineResult, name: str = "document") -> float:
    return (result[name].time_ms or 0.0) / 1e3


def end_to_end(model: Model, document: Tokens, question: Tokens, known: list[float], tell: Tell) -> list[Ratio]:
    """2, 8 and 50 branches of one answer token, against as many re-prefills.

    Nearly all of it is prefill, whose speed drifts by a tenth on a shared machine. So there are two figures: as it
    came, and with this run's median prefill in the place of each.
    """
    runs = {}
    reprefills: list[float] = []
    rest: list[float] = []
    for n in (2, 8, 50):
        tell(f"{n} branches against {min(n, N_REPREFILLS)} re-prefills")
        runs[n] = branches(model, document, question, n)
        for _ in range(min(n, N_REPREFILLS) - len(reprefills)):
            baseline = fan_out(model, document, [question], max_tokens=1, strategy="reprefill")
            reprefills.append(baseline.end_to_end_ms / 1e3)
            rest.append((baseline.end_to_end_ms - baseline.prefill_ms) / 1e3)
            known.append(baseline.prefill_ms / 1e3)
    known += [_seconds(run) for run in runs.values()]
    a_prefill = median(known)
    rows = []
    for (n, run), target in zip(runs.items(), (1.97, 7.6, 42), strict=True):
        took = run.end_to_end_ms / 1e3
        came = n * mean(reprefills[:n]) / took
        evened = n * (a_prefill + mean(rest)) / (a_prefill + took - _seconds(run))
        how = "" if n <= N_REPREFILLS else f" ({N_REPREFILLS} measured)"
        details = {"as_it_came": came, "seconds": took, "reprefill_seconds": mean(reprefills[:n]), "prefill": a_prefill}
        rows.append(
            Ratio(f"{n} branches end to end, against {n} re-prefills{how}", evened, target, "×", details=details)
        )
    return rows


def streaming(model: Model, document: Tokens, question: Tokens) -> tuple[list[Ratio], list[float]]:
    """When branches that need a part of the document answer, against that part of its prefill and their own decode.

    Of the prefill that they were answered from: another one's speed differs by a tenth and more on a shared machine. How
    it stands to a prefill alone, measured just before, is told beside it. Also gives both prefills' times.
    """
    needed = (512, 3000)
    prefills, bound = [], dict.fromkeys(needed, 0.0)
    with model.context(N_DOCUMENT + 64, n_batch=512) as ctx:
        begin = perf_counter()
        prefill(ctx, document)
        prefills.append(perf_counter() - begin)
        for n in reversed(needed):
            times = []
            for _ in range(5):
                ctx.remove(0, n)
                begin = perf_counter()
                ctx.decode(question)
                times.append(perf_counter() - begin)
            bound[n] = median(times)
    nodes: dict[str, Any] = {"document": PrefillNode(document)}
    for n in needed:
        nodes[f"needs-{n}"] = BranchNode(question, "document", required_prefix_tokens=n, max_tokens=1)
    result = Pipeline(model, nodes).run().check()
    prefills.append(_seconds(result))
    rows, (alone, streamed) = [], prefills
    for n in needed:
        first = result[f"needs-{n}"].token_s[0] - (result["document"].begun_s or 0.0)
        ideal, apart = (n / len(document) * whole + bound[n] for whole in (streamed, alone))
        details = {"seconds": first, "ideal": ideal, "prefill": streamed, "alone": alone, "as_it_came": first / apart}
        rows.append(
            Ratio(f"first answer of {n:,} tokens ÷ ideal", first / ideal, 1.1, "×", at_most=True, details=details)
        )
    return rows, prefills


def generation(model: Model, document: Tokens, question: Tokens, rounds: int = 3) -> list[Ratio]:
    """8 branches of 64 tokens in one batch, against one at a time; who got how much; what the steps cost besides."""
    n_branches, max_tokens = 8, 64
    with model.context(len(document) + 1 + n_branches * 80, 2 + n_branches, n_batch=512) as ctx:
        decoder = BatchedDecoder(ctx)
        source = decoder.prefill(document, uses=1_000_000)
        decoder.run()

        def rate(together: int) -> tuple[float, list[Step]]:
            first, begin, n = len(decoder.steps), perf_counter(), 0
            for _ in range(n_branches // together):
                made = [
                    decoder.branch(question, after=source, name=f"branch-{i}", max_tokens=max_tokens)
                    for i in range(together)
                ]
                decoder.run()
                n += sum(len(branch.answer.times) for branch in made)
            return n / (perf_counter() - begin), decoder.steps[first:]

        batched, alone = [], []
        for _ in range(rounds):
            alone.append(rate(1))
            batched.append(rate(n_branches))
    ratios = [a[0] / b[0] for a, b in zip(batched, alone, strict=True)]
    rates = {"batched_per_s": median(a[0] for a in batched), "alone_per_s": median(b[0] for b in alone)}
    return [
        Ratio("8 × 64 tokens in one batch, against one at a time", median(ratios), 1.6, "×", details=rates),
        Ratio(
            f"largest ÷ smallest share of 8 branches in {WINDOW} steps",
            max(unfairness(steps, n_branches) for _, steps in batched),
            1.1,
            "×",
            at_most=True,
        ),
        Ratio(
            "orchestration of a step of 8, share of it",
            median(overhead(steps) for _, steps in batched),
            0.03,
            at_most=True,
            details={"of_one_branch": median(overhead(steps) for _, steps in alone)},
        ),
    ]


def unfairness(steps: list[Step], n_branches: int) -> float:
    """Largest share of tokens ÷ smallest, at the worst window of steps in which all branches run."""
    running = [step for step in steps if len(step.parts) == n_branches and all(p.kind == "decode" for p in step.parts)]
    worst = 1.0
    for begin in range(max(1, len(running) - WINDOW + 1)):
        had: dict[str, int] = {}
        for step in running[begin : begin + WINDOW]:
            for part in step.parts:
                had[part.name] = had.get(part.name, 0) + part.n_tokens
        worst = max(worst, max(had.values()) / min(had.values()))
    return worst


def overhead(steps: list[Step]) -> float:
    """Share of decode steps' time that is neither the engine's nor choosing tokens."""
    steps = [step for step in steps if all(part.kind == "decode" for part in step.parts)]
    return sum(step.overhead_s for step in steps) / sum(step.end - step.begin for step in steps)


_PEAK = """
import sys
from swarmkv_ll import Model
from swarmkv_ll.pipeline_measure import branches, texts
with Model(sys.argv[1]) as model:
    branches(model, *texts(model), int(sys.argv[2]))
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


def memory(model: Model) -> list[Ratio]:
    """Peak resident memory of a process with 50 branches, against one with a single branch."""
    peak = {}
    for n in (1, 50):
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(model.path), str(n)], capture_output=True, text=True, check=True
        )
        peak[n] = int(done.stdout) * 1024
    details = {"bytes_of_1": peak[1], "bytes_of_50": peak[50]}
    return [Ratio("peak memory of 50 branches ÷ of one", peak[50] / peak[1], 1.3, "×", at_most=True, details=details)]
