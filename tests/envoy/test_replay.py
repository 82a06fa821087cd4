"""`pointsman replay --live`: a trace through a real Envoy, one policy after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_default_policy_beats_round_robin_live_as_it_does_offline(tmp_path: Path) -> None:
    """The same trace both ways, in one table each: less time to the first token, and more answers within bounds.

    Both tell what the policy believed to be cached, of which the engines find most.
    """
    figures = {}
    for way in (["--offline"], ["--live", "--speed", "4"]):
        report = tmp_path / f"{way[0]}.json"
        command = [
            sys.executable, "-m", "extproc.cli", "replay", "generated", *way, "--engines", "3", "--requests", "240",
            "--rate", "6", "--policies", "round-robin,default", "--json", str(report),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        [table] = json.loads(report.read_text())["tables"]
        figures[way[0]] = {row["policy"]: {k: v["mean"] for k, v in row["figures"].items()} for row in table["rows"]}
    for way, rows in figures.items():
        print(way, rows)
        assert rows["default"]["ttft_mean_s"] < rows["round-robin"]["ttft_mean_s"], way
        assert rows["default"]["hit"] > rows["round-robin"]["hit"], way
        for row in rows.values():
            assert 0.8 * row["hit"] < row["promised"] < 1.25 * row["hit"], way
