"""Who takes part: names, files and index sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.replay.entrants import NoSuchPolicy, entrants
from policies.placement.weighted import WeightedSpec


def test_a_preset_comes_with_its_own_index() -> None:
    """Or with the engine's size, a number of tokens, or what the engines really hold."""
    own, engine, counted, exact = entrants(
        ["cache-aware", "cache-aware@engine", "cache-aware@1000", "cache-aware@exact"]
    )
    assert [one.spec.index_tokens for one in (own, engine, counted, exact)] == [8_388_608, None, 1000, None]
    assert [one.exact for one in (own, engine, counted, exact)] == [False, False, False, True]
    assert own.name == "cache-aware"
    assert engine.name == "cache-aware@engine"


def test_right_sized_twins_are_made_where_there_is_a_difference() -> None:
    """The default has the engine's size anyway; who names an index gets that one alone."""
    found = entrants(["default", "cache-aware", "cache-aware@10"], right_sized=True)
    assert [one.name for one in found] == ["default", "cache-aware", "cache-aware@engine", "cache-aware@10"]


@pytest.mark.parametrize(
    "text", ["policy: {kind: weighted, picker: power_of_two}\n", "kind: weighted\npicker: power_of_two\n"]
)
def test_a_file_may_be_a_policy_or_have_one(text: str, tmp_path: Path) -> None:
    """Named by the file."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    (mine,) = entrants([str(path)])
    assert mine.name == "mine"
    assert isinstance(mine.spec, WeightedSpec)
    assert mine.spec.picker == "power_of_two"


def test_a_file_may_name_a_preset(tmp_path: Path) -> None:
    """As a pool's policy may."""
    path = tmp_path / "mine.yaml"
    path.write_text("policy: round-robin\n", encoding="utf-8")
    assert entrants([str(path)])[0].spec == entrants(["round-robin"])[0].spec


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "no preset 'nobody'; there are: .*default"),
        ("default@big", "after @ stands"),
        ("default@0", "after @ stands"),
        ("nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_unknown_entrants_are_refused(name: str, says: str) -> None:
    """With what there is."""
    with pytest.raises(NoSuchPolicy, match=says):
        entrants([name])


def test_a_file_that_is_no_policy_is_refused(tmp_path: Path) -> None:
    """Naming it."""
    path = tmp_path / "mine.yaml"
    path.write_text("kind: nothing\n", encoding="utf-8")
    with pytest.raises(NoSuchPolicy, match=r"mine\.yaml"):
        entrants([str(path)])
