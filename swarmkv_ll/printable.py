"""Text of unknown origin, made fit for a line of a terminal, a picture or a page."""

from __future__ import annotations


def clean(text: object) -> str:
    """Text without what could steer a terminal, or not be printed."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(text))


def one_line(text: object, longest: int | None = None) -> str:
    """On one line; of one that is too long the middle is cut, for names of a kind often differ at their ends."""
    line = clean(" ".join(str(text).split()))
    if longest is None or len(line) <= longest:
        return line
    return f"{line[: longest // 2]}…{line[len(line) - (longest - 1) // 2 :]}"
