"""What messages say about installing what is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from extproc.extras import how_to_install
from extproc.replay.command import _require

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_what_to_type_is_said_for_a_clone() -> None:
    """On an index there is no such package."""
    assert how_to_install("demo", "embedded") == "pip install '.[demo,embedded]' in a clone"


def test_every_message_names_extras_that_there_are_and_the_clone() -> None:
    """Also those of packages that may not import ours."""
    named = []
    for package in ("extproc", "policies", "vllm_adapters"):
        for source in (ROOT / package).rglob("*.py"):
            text = source.read_text()
            assert "pip install 'pointsman" not in text, source
            named += re.findall(r"how_to_install\(([^)]*['\"][^)]*)\)", text)
            for written in re.findall(r"pip install '\.\[([a-z,]+)\]'(?! in a clone)", text):
                pytest.fail(f"{source}: [{written}] without `in a clone`")
    extras = {extra for names in named for extra in re.findall(r"[a-z]+", names)}
    assert {"demo", "embedded", "plots", "vllm"} <= extras <= EXTRAS.keys()


def test_replay_says_what_its_tables_need(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As every other command does."""
    monkeypatch.setattr("extproc.replay.command.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        _require("rich")
    assert capsys.readouterr().err.strip() == f"this needs rich, which is not installed: {how_to_install('plots')}"
