"""`swarmkv snapshot`: files of snapshots, made, looked into, tried and changed."""

from __future__ import annotations

import click


@click.group()
def snapshot() -> None:
    """Save, inspect and change files of KV state."""
