"""What the README tells of a run is what the run in docs/results has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_is_that_of_the_kept_run() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_kept_run_is_whole() -> None:
    from swarmkv_ll.campaign.plots import PICTURES
    from swarmkv_ll.campaign.records import read_run
    from swarmkv_ll.campaign.summary import summarise

    folder = ROOT / "docs/results"
    kept = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    jsonschema.validate(kept, json.loads((ROOT / "docs/summary.schema.json").read_text(encoding="utf-8")))
    run = read_run(folder)
    assert run.run["finished"] is True
    assert summarise(run.run, run.rows) == kept
    assert kept["settings"]["mode"] == "full"
    assert {peer["status"] for peer in kept["peers"].values()} == {"measured"}
    assert {p.name for p in (folder / "plots").iterdir()} == {
        f"{name}{kind}" for name in PICTURES for kind in (".png", ".svg")
    }
