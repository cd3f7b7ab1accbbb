"""Locks that a signal handler or callback cannot enter a second time in its own thread."""

from __future__ import annotations

import threading
from typing import Any

from .errors import ReentrantCallError


def new_lock() -> Any:
    """A lock for `alone`. C code from acquiring to releasing, so that Ctrl-C cannot leave it half-way."""
    return threading.RLock()


def alone(lock: Any, what: str) -> Any:
    """`lock`, for a `with` statement; an error, where a plain lock would wait for ever, if this thread holds it."""
    if lock._is_owned():
        raise ReentrantCallError(what)
    return lock
