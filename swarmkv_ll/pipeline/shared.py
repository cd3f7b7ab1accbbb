"""A pipeline's documents and branches in one context: all that run decode in one batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..batching import BatchedDecoder, Branch, Prefix
from ..context import Context
from ..errors import SwarmKVError
from ..policy import Policy
from ..timeline import Span
from .executor import BranchJob, Reports
from .plan import Plan


class SharedExecutor:
    """Runs a `BatchedDecoder` in a thread of its own."""

    def __init__(self, ctx: Context, plan: Plan, reports: Reports, policy: Policy | None, n_parallel: int) -> None:
        self._plan, self._reports = plan, reports
        self.decoder = BatchedDecoder(ctx, policy, n_parallel)
        self._jobs: dict[str, Prefix | Branch] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="swarmkv decode", daemon=True)
        self._thread.start()

    def prefill(self, name: str) -> None:
        """Begin a document."""
        plan = self._plan
        job = self.decoder.prefill(
            plan.documents[name],
            name=name,
            uses=plan.n_children[name],
            borders=plan.borders.get(name, ()),
            time_limit=plan.nodes[name].time_limit,
            on_begin=partial(self._begun, name),
            on_progress=partial(self._reports.progress, name),
        )
        self._jobs[name] = job
        job.future.add_done_callback(partial(self._ended, name))

    def branch(self, job: BranchJob) -> None:
        """Begin a branch."""
        planned = self._plan.branches[job.name]
        after = self._jobs[planned.after]
        pending = after.pending if isinstance(after, Branch) else None
        branch = self.decoder.branch(
            job.tokens_after(pending),
            after=after,
            n_prefix=planned.n_prefix,
            name=job.name,
            max_tokens=job.max_tokens,
            sampler=job.sampler,
            tell=partial(self._reports.tell, job.name),
            priority=job.priority,
            uses=self._plan.n_children[job.name],
            time_limit=job.time_limit,
            on_begin=partial(self._begun, job.name),
        )
        self._jobs[job.name] = branch
        branch.future.add_done_callback(partial(self._ended, job.name))

    def stop(self, name: str) -> None:
        """Cancel a document or branch."""
        self.decoder.cancel(self._jobs[name])

    def skip(self, name: str) -> None:
        """A branch will never begin."""
        after = self._jobs.get(self._plan.branches[name].after)
        if after is not None:
            self.decoder.release(after)

    def close(self) -> None:
        """End the thread, once the batch it is in is done."""
        self._closing = True
        self.decoder.wake.set()
        self._thread.join()

    def _begun(self, name: str, job: Prefix | Branch) -> None:
        self._reports.begun(name, job.begun)

    def _ended(self, name: str, future: Future[Any]) -> None:
        job, error = self._jobs[name], future.exception()
        if isinstance(job, Branch):
            self._reports.answered(name, job.answer, fork_ms=1e3 * job.fork_s)
            if job.begun:
                self._reports.span(Span(name, "fork", job.begun, job.begun + job.fork_s))
        if error is not None:
            self._reports.failed(name, error)
        else:
            self._reports.done(name, job.answer.text if isinstance(job, Branch) else job.watermark)

    def _work(self) -> None:
        decoder = self.decoder
        while not self._closing:
            decoder.wake.clear()
            try:
                worked = decoder.step()
            except BaseException as error:  # of a policy, say: nobody is left waiting for an answer
                decoder.fail_all(error if isinstance(error, Exception) else SwarmKVError(repr(error)))
                worked = False
            if not worked and not self._closing:
                decoder.wake.wait()
