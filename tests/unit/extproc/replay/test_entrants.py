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
    "text",
    [
        "policy: {kind: weighted, picker: power_of_two, scorers: [{name: cost}]}\n",
        "kind: weighted\npicker: power_of_two\nscorers: [{name: cost}]\n",
    ],
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
        ("default@exact+late", "not while it waits"),
        ("nowhere.yaml", "^nowhere.yaml: No such file or directory$"),
    ],
)
def test_unknown_entrants_are_refused(name: str, says: str) -> None:
    """With what there is."""
    with pytest.raises(NoSuchPolicy, match=says):
        entrants([name])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: nothing", "top level: kind must be one of .* not 'nothing'"),
        ("scorers: [{name: nothing}]", "unknown scorer 'nothing'; there are: "),
        ("scorers: [{nme: cost}]", r"scorers\[0\].name: required, but not given; scorers\[0\].nme: unknown key"),
        ("filters: [nothing]", "unknown filter 'nothing'; there are: "),
        ("picker: max_score", "nothing ranks the endpoints; name scorers, or use least-request"),
        ("scorers: [{name: cost, weight: 0}]", "nothing ranks the endpoints"),
        ("pools: [{name: a, policy: default}]", "a whole config; put the `policy` of one pool"),
        ("kind: [", "while parsing"),
    ],
)
def test_a_file_that_is_no_policy_is_refused(text: str, says: str, tmp_path: Path) -> None:
    """In one line that names it, before anything runs."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(NoSuchPolicy, match=rf"^.*mine\.yaml: {says}") as told:
        entrants([str(path)])
    assert len(str(told.value).splitlines()) == 1
