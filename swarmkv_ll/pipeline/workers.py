"""Plain Python functions in a bounded number of threads, each with its time limit. Pure Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import NodeCancelledError, NodeTimeoutError


class _Task(NamedTuple):
    name: str
    function: Callable[[], Any]
    time_limit: float | None


class Workers:
    """Calls functions, at most `n_workers` at a time.

    Python has no way to end a function from outside. One that is past its limit, or was cancelled, counts as ended; its
    thread goes on until it returns, another takes its place, and what it returns is not used.

    Parameters
    ----------
    n_workers : int
    begun : callable
        ``begun(name)`` when a function is called.
    done, failed : callable
        ``done(name, value)`` or ``failed(name, error)``, once for each; from any thread.
    """

    def __init__(
        self,
        n_workers: int,
        begun: Callable[[str], None],
        done: Callable[[str, Any], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._begun, self._done, self._failed = begun, done, failed
        self._n_free, self._closed = n_workers, False
        self._waiting: deque[_Task] = deque()
        self._running: dict[str, threading.Timer | None] = {}
        self._lock = threading.Lock()

    def submit(self, name: str, function: Callable[[], Any], time_limit: float | None = None) -> None:
        """Call a function as soon as a thread is free. The limit, in seconds, counts from then."""
        with self._lock:
            self._waiting.append(_Task(name, function, time_limit))
        self._next()

    def close(self) -> None:
        """Call no more functions: those that wait are going to be cancelled."""
        self._closed = True

    def cancel(self, name: str) -> None:
        """End a function that was submitted, or is running."""
        with self._lock:
            waiting = [task for task in self._waiting if task.name == name]
            for task in waiting:
                self._waiting.remove(task)
        if waiting or self._leave(name):
            self._failed(name, NodeCancelledError(name))

    def _next(self) -> None:
        """Call what waits, as far as threads are free."""
        while True:
            with self._lock:
                if self._closed or not self._n_free or not self._waiting:
                    return
                task = self._waiting.popleft()
                self._n_free -= 1
                timer = None
                if task.time_limit is not None:
                    timer = threading.Timer(task.time_limit, self._expire, (task,))
                    timer.daemon = True
                self._running[task.name] = timer
            try:
                self._begun(task.name)
                if timer:
                    timer.start()
                threading.Thread(target=self._call, args=(task,), name=f"swarmkv {task.name}", daemon=True).start()
            except Exception as error:  # the system has no thread left
                if self._end(task.name):
                    self._failed(task.name, error)

    def _call(self, task: _Task) -> None:
        try:
            value = task.function()
        except BaseException as error:  # SystemExit and the like are a failure of this node, not of its thread
            if self._leave(task.name):
                self._failed(task.name, error)
        else:
            if self._leave(task.name):
                self._done(task.name, value)

    def _expire(self, task: _Task) -> None:
        if self._leave(task.name):
            assert task.time_limit is not None
            self._failed(task.name, NodeTimeoutError(task.name, task.time_limit))

    def _leave(self, name: str) -> bool:
        """Whether it was still running. It no longer is, and the next begins."""
        ended = self._end(name)
        if ended:
            self._next()
        return ended

    def _end(self, name: str) -> bool:
        with self._lock:
            if name not in self._running:
                return False
            timer = self._running.pop(name)
            self._n_free += 1
        if timer:
            timer.cancel()
        return True
