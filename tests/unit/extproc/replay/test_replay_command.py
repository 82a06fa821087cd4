"""`pointsman replay` from end to end, on a trace small enough to be done at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from extproc.cli import cli
from extproc.replay.entrants import Entrant
from policies.placement.policy import FormulaSpec, Scored
from policies.placement.view import View

_SMALL = ["replay", "generated", "--offline", "--requests", "60", "--engines", "2", "--jobs", "1"]


def _run(*arguments: str, small: bool = True) -> Any:
    return CliRunner().invoke(cli, [*(_SMALL if small else []), *arguments])


def test_a_comparison_prints_a_table_and_writes_everything(tmp_path: Path) -> None:
    """What ran, a row per policy, figures and curves as JSON, pictures on one page, tables as text."""
    json_file, plots, markdown = tmp_path / "all.json", tmp_path / "plots", tmp_path / "tables.md"
    result = _run(
        "--rate", "20", "--seeds", "2", "--policies", "default,cache-aware", "--index", "engine",
        "--json", str(json_file), "--plots", str(plots), "--markdown", str(markdown),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "60 requests" in result.output
    assert "Spread" in result.output
    assert "* the best of its column" in " ".join(result.output.split())
    document = json.loads(json_file.read_text(encoding="utf-8"))
    (table,) = document["tables"]
    assert [row["policy"] for row in table["rows"]] == ["default", "cache-aware", "cache-aware@engine"]
    assert [len(row["seeds"]) for row in table["rows"]] == [2, 2, 2]
    assert "| default |" in markdown.read_text(encoding="utf-8")
    page = (plots / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("image/png", "")
    assert len(list(plots.glob("*.png"))) == 4


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    """What is in the folder is not run again."""
    once = _run("--rate", "20", "--policies", "default", "--resume", str(tmp_path))
    assert "Spread" not in once.output  # of one seed there is none
    more = _run("--rate", "20", "--policies", "default,round-robin", "--resume", str(tmp_path))
    assert "1/1 default" in once.output
    assert "default, 20/s" not in more.output
    assert "round-robin, 20/s" in more.output


def test_loads_are_shares_of_a_measured_capacity() -> None:
    """Said before the runs; so few requests make it uncertain, which is said as well."""
    result = _run("--load", "0.5", "--policies", "round-robin")
    assert result.exit_code == 0, result.output
    assert "load 1 on generated, 2 engines:" in result.output
    assert "uncertain" in result.output


def test_disturbances_are_five_tables() -> None:
    """Each with its load in the title."""
    result = _run("--disturbances", "--policies", "round-robin")
    assert result.exit_code == 0, result.output
    for title in ("half speed", "5 s stale", "joins cold", "dies", "flood on one prefix"):
        assert title in result.output


def test_a_flood_comes_on_top_of_the_trace(tmp_path: Path) -> None:
    """Three times its requests for a fifth of its time, at the load that is asked for."""
    file = tmp_path / "all.json"
    result = _run("--rate", "10", "--flood", "--policies", "round-robin", "--json", str(file))
    assert result.exit_code == 0, result.output
    (table,) = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert table["trace"] == "generated with a flood"
    assert 60 * 1.3 < table["requests"] < 60 * 2.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --load"),
        (["--load", "much"], "--load: 'much' is not a number above 0"),
        (["--load", "0"], "is not a number above 0"),
        (["--rate", "1", "--policies", "nobody"], "no preset 'nobody'"),
        (["--disturbances", "--flood"], "one of the --disturbances already"),
        (["--rate", "1", "--first-tokens", "guessed"], "'--first-tokens'"),
        (["--rate", "1", "--hardware", "abacus"], "no hardware 'abacus'; there are: 8b-h100"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], says: str) -> None:
    """With status 2, and a word on what would."""
    result = _run(*arguments)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("told", ["seen", "timed", "never"])
def test_how_first_tokens_are_told_is_the_fleets(told: str, tmp_path: Path) -> None:
    """What it changes: test_offline.py."""
    file = tmp_path / "all.json"
    result = _run("--rate", "20", "--policies", "default", "--first-tokens", told, "--json", str(file))
    assert result.exit_code == 0, result.output
    (table,) = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert table["fleet"]["first_tokens"] == told


def test_live_first_tokens_are_told_as_they_are() -> None:
    """There is no choice, and who makes one is told so."""
    result = _run(
        "replay", "generated", "--live", "--requests", "20", "--rate", "1", "--first-tokens", "never", small=False
    )
    assert result.exit_code == 2
    assert "--first-tokens is for --offline" in result.output


class _Broken(FormulaSpec):
    """Another package's policy that divides by nothing."""

    def scored(self, view: View) -> Scored:
        return np.full(len(view.slots), np.nan), {}


def test_a_policy_whose_scores_are_none_ends_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, not in a random number generator's words."""
    monkeypatch.setattr("extproc.replay.run.entrants", lambda *_, **__: [Entrant("theirs", _Broken())])
    result = _run("--rate", "20", "--policies", "theirs")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("policy 'theirs' ranks ")
    assert "with a score of nan; scores must be finite" in line


def test_sessions_that_wait_have_no_load(tmp_path: Path) -> None:
    """Their rate depends on the answers; they take sessions per second."""
    asked = [{"in": 300, "out": 5, "hash_ids": [1, 2, 3, 4], "think_time": 1.0}] * 8
    session = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": asked}
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(json.dumps(session), encoding="utf-8")
    common = ("replay", str(tmp_path), "--offline", "--engines", "2", "--jobs", "1", "--policies", "default")
    refused = _run(*common, "--load", "0.8", small=False)
    assert refused.exit_code == 2
    assert "--sessions-per-s" in refused.output
    done = _run(*common, "--sessions-per-s", "1", small=False)
    assert done.exit_code == 0, done.output


def test_only_offline_is_there() -> None:
    """Rather than an empty promise."""
    result = _run("replay", "generated", small=False)
    assert result.exit_code == 2
    assert "--offline" in result.output
