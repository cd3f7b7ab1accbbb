"""The machine that is measured on: what it is, threads pinned to its processors, and how quiet it was."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..arena import Arena, available_memory
from ..context import Context
from ..doctor import examine
from ..measure import interleaved
from ..model import Model, Tokens

CPUS = frozenset(os.sched_getaffinity(0))
"""Processors of this process, before anything was pinned."""

_COPY_BYTES = 32 << 20
_ROUNDS = 5


def describe() -> dict[str, Any]:
    """What was measured on, as plain data that names no path."""
    found = examine()
    engine, memory = found["engine"], found["memory"]
    return {
        "cpu": _cpu(),
        "cpus": len(CPUS),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": found["python"],
        "numpy": np.__version__,
        "engine": f"llama.cpp {engine['version']} at {engine['commit'][:12]}",
        "stamp": engine["stamp"],
        "compiler": engine["compiler"],
        "instruction_sets": engine["instruction_sets"],
        "devices": [f"{d['name']}: {d['description']}" for d in found["devices"]],
        "waiting": found["threads"]["waiting"],
        "pinned": memory["pinned"],
        "huge_pages": memory["huge_pages"],
    }


def _cpu() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.machine()


@contextmanager
def pinned_threads(n_threads: int, work: Callable[[], object]) -> Iterator[bool]:
    """Bind this thread and the engine's, one to a processor, for the block. Gives whether it could be done.

    The engine's are those that `work` (which decodes something) has running. Processes started meanwhile inherit one
    processor, if they do not ask for `CPUS` again.
    """
    work()  # the pool is made at the first decode
    before = _busy()
    for _ in range(3):
        work()
    spent = {tid: ticks - before.get(tid, 0) for tid, ticks in _busy().items()}
    main = threading.get_native_id()
    workers = sorted((tid for tid in spent if tid != main), key=lambda tid: -spent[tid])[: n_threads - 1]
    if len(CPUS) < n_threads or len(workers) < n_threads - 1:
        yield False
        return
    bound = dict(zip((main, *workers), _cores_first(), strict=False))
    try:
        for tid, cpu in bound.items():
            os.sched_setaffinity(tid, {cpu})
        yield True
    finally:
        for tid in bound:
            with suppress(ProcessLookupError):  # a worker that has ended
                os.sched_setaffinity(tid, CPUS)


def _cores_first() -> list[int]:
    """Our processors: one of each physical core, then those that share a core with one of these."""
    cores, others = dict[str, int](), list[int]()
    for cpu in sorted(CPUS):
        core = str(cpu)
        with suppress(OSError), open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            core = file.read().strip()
        if cores.setdefault(core, cpu) != cpu:
            others.append(cpu)
    return [*cores.values(), *others]


def _busy() -> dict[int, int]:
    """CPU time of each thread of this process, in the kernel's ticks."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{name}/stat", encoding="ascii", errors="replace") as file:
            values = file.read().rpartition(")")[2].split()
            found[int(name)] = int(values[11]) + int(values[12])
    return found


@dataclass
class Yardstick:
    """A decode and a copy that are always the same, to see how steady the machine is. Made by `yardstick`."""

    ctx: Context
    question: Tokens
    back: Callable[[], object]
    source: np.ndarray[Any, np.dtype[np.uint8]]
    target: np.ndarray[Any, np.dtype[np.uint8]]

    def decode(self) -> None:
        """A branch's prompt over a document that is there."""
        self.back()
        self.ctx.decode(self.question)

    def copy(self) -> None:
        """32 MiB."""
        np.copyto(self.target, self.source)

    def measure(self) -> dict[str, float]:
        """Both, in seconds: medians of five in turns."""
        times = interleaved(_ROUNDS, decode_s=self.decode, copy_s=self.copy)
        return {name: times.median(name) for name in times}


@contextmanager
def yardstick(model: Model, document: Tokens, question: Tokens, n_threads: int) -> Iterator[Yardstick]:
    """A yardstick over a short document, which is computed here."""
    source, target = (np.full(_COPY_BYTES, i, np.uint8) for i in (1, 2))
    with ExitStack() as stack:
        ctx = stack.enter_context(model.context(len(document) + len(question) + 64, n_batch=512, n_threads=n_threads))
        ctx.decode(document)
        back: Callable[[], object] = partial(ctx.remove, 0, len(document))
        if not model.capabilities.attention_only:  # such a memory cannot drop what came last
            arena = stack.enter_context(Arena.for_branches(ctx, 0))
            back = partial(stack.enter_context(ctx.snapshot(arena)).restore, ctx)
        yield Yardstick(ctx, question, back, source, target)


class Load:
    """What other processes took of the machine since this was made."""

    def __init__(self) -> None:
        self.begin = perf_counter()
        self.ours, (self.busy, self.stolen) = _ours(), _machine()

    def measure(self) -> dict[str, float]:
        """Shares (0 to 1) of our processors' time: others' processes, and what a hypervisor gave to someone else."""
        spent = perf_counter() - self.begin
        busy, stolen = _machine()
        others = (busy - self.busy) - (_ours() - self.ours)
        return {
            "others_cpu": max(0.0, others / (len(CPUS) * spent)),
            "steal": max(0.0, (stolen - self.stolen) / (len(CPUS) * spent)),
            "case_s": spent,
        }


def _ours() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _machine() -> tuple[float, float]:
    """Seconds of our processors that all processes have used, and that were stolen, since the machine started."""
    ours, busy, stolen = {f"cpu{n}" for n in CPUS}, 0, 0
    with open("/proc/stat", encoding="ascii") as file:
        for line in file:
            name, *values = line.split()
            if name in ours:
                user, nice, system, _, _, irq, softirq, steal, *_ = map(int, values)
                busy, stolen = busy + user + nice + system + irq + softirq, stolen + steal
    tick = os.sysconf("SC_CLK_TCK")
    return busy / tick, stolen / tick
