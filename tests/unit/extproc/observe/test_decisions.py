"""The decision log: bounded, without prompts, with what became of each."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from extproc.observe import decisions
from extproc.observe.decisions import DecisionLog, explain, explain_unplaceable
from policies.placement.placement import Unplaceable
from policies.types import Choice, Decision, Fallback, InferenceRequest, Kind, Ranking, Reason, Refusal

REFUSAL = Refusal(413, "invalid_request_error", "too large", Reason.BODY_TOO_LARGE)


def request(number: int = 0) -> InferenceRequest:
    """A request with a prompt that must not be kept."""
    return InferenceRequest(
        Kind.CHAT, "served", f"alias-{number}", 100 + number, stream=True, prompt=b"SECRET", session_key="SECRET"
    )


def decision() -> Decision:
    """Slots 2, 0 and 5 were candidates; 5 won, then 0."""
    return Decision(
        pool="p",
        policy="default",
        choice=Choice.AFFINITY,
        order=(5, 0),
        addresses=("five:1", "zero:1"),
        matched_tokens=np.array([10.0, 0.0, 64.0]),
        chosen_matched_tokens=64,
        ranking=Ranking(
            order=[5, 0],
            candidates=np.array([0, 2, 5], np.intp),
            first=2,
            best_score=0.75,
            working=lambda: (np.array([0.5, 0.25, 0.75]), {"queue_depth": np.array([1.0, 0.1234567, 0.5])}),
        ),
        filtered=(("ready", ("one:1", "three:1")),),
        slot_addresses=("zero:1", "one:1", "two:1", "three:1", None, "five:1"),
        fallbacks=(Fallback.STALE_FIGURES,),
    )


def filled(capacity: int, count: int) -> DecisionLog:
    """A log after `count` decisions."""
    log = DecisionLog(capacity)
    for number in range(count):
        log.add(float(number), f"id-{number}", request(number), decision())
    return log


def test_a_decision_is_explained_best_first() -> None:
    """Every candidate by name with its score and the parts of it; who was filtered and by what."""
    assert explain(decision()) == {
        "pool": "p",
        "policy": "default",
        "choice": "affinity",
        "endpoints": ["five:1", "zero:1"],
        "matched_tokens": 64,
        "candidates": [
            {"endpoint": "five:1", "score": 0.75, "matched_tokens": 64, "parts": {"queue_depth": 0.5}},
            {"endpoint": "zero:1", "score": 0.5, "matched_tokens": 10, "parts": {"queue_depth": 1.0}},
            {"endpoint": "two:1", "score": 0.25, "matched_tokens": 0, "parts": {"queue_depth": 0.123457}},
        ],
        "filtered": [{"filter": "ready", "endpoints": ["one:1", "three:1"]}],
        "fallbacks": ["stale_figures"],
        "waited_s": 0.0,
        "detour_s": 0.0,
        "prefix_index": "approximate",
    }


def test_nowhere_to_go_is_explained_by_the_filters() -> None:
    """In the same words."""
    assert explain_unplaceable(Unplaceable((("ready", ("a:1",)), ("model", ("b:1", "c:1"))))) == {
        "endpoints": [],
        "filtered": [{"filter": "ready", "endpoints": ["a:1"]}, {"filter": "model", "endpoints": ["b:1", "c:1"]}],
    }


def test_a_record_has_the_request_and_no_prompt() -> None:
    """In JSON; neither the prompt nor the session, which may be a person."""
    [record] = filled(5, 1).read(5)
    text = json.dumps(record)
    assert "SECRET" not in text
    described = {key: record[key] for key in ("time", "request_id", "kind", "asked_model", "model", "rewritten")}
    assert described == {
        "time": 0.0,
        "request_id": "id-0",
        "kind": "chat",
        "asked_model": "alias-0",
        "model": "served",
        "rewritten": True,
    }
    assert (record["input_tokens"], record["stream"]) == (100, True)
    assert record["endpoints"] == ["five:1", "zero:1"]
    assert (record["served_by"], record["outcome"]) == (None, None)


def test_the_ring_keeps_the_newest() -> None:
    """Newest first, at most as many as asked for and as it holds."""
    log = filled(3, 10)
    assert [record["request_id"] for record in log.read(99)] == ["id-9", "id-8", "id-7"]
    assert [record["request_id"] for record in log.read(2)] == ["id-9", "id-8"]
    assert len(log._records) == 3


def test_an_answer_is_bounded_by_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is told, the newest with their candidates, and how many were left out of the others."""
    monkeypatch.setattr(decisions, "_MOST_ROWS", 12)  # a decision has three candidates and two filtered endpoints
    told = filled(9, 4).read(9)
    assert [record["request_id"] for record in told] == ["id-3", "id-2", "id-1", "id-0"]
    assert [record["rows_left_out"] for record in told] == [0, 0, 5, 5]
    assert [len(record["candidates"]) for record in told] == [3, 3, 0, 0]
    assert [record["filtered"] for record in told[1:3]] == [explain(decision())["filtered"], []]
    assert all(record["endpoints"] == ["five:1", "zero:1"] for record in told)
    assert told[0].keys() == told[3].keys()


def test_a_large_fleets_answer_is_bounded() -> None:
    """A thousand decisions over a thousand endpoints are a million rows: seconds of work, and hundreds of megabytes."""
    log = DecisionLog(1_000)
    wide = replace(
        decision(),
        matched_tokens=np.zeros(1_024),
        ranking=Ranking([5, 0], np.arange(1_024), 5, 0.0, lambda: (np.zeros(1_024), {})),
        slot_addresses=("one:1",) * 1_024,
    )
    for number in range(1_000):
        log.add(0.0, f"id-{number}", request(), wide)
    told = log.read(1_000)
    assert len(told) == 1_000
    assert sum(len(record["candidates"]) for record in told) == 4 * 1_024


def test_one_asked_for_by_its_id_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the fleet."""
    monkeypatch.setattr(decisions, "_MOST_ROWS", 1)
    [record] = filled(9, 4).read(9, "id-0")
    assert (len(record["candidates"]), record["rows_left_out"]) == (3, 0)


@pytest.mark.parametrize("limit", [0, -1])
def test_none_asked_for_is_none(limit: int) -> None:
    """Not all of them."""
    assert filled(3, 3).read(limit) == []


def test_one_is_found_by_its_id() -> None:
    """As long as it is kept."""
    log = filled(3, 10)
    assert [record["request_id"] for record in log.read(1, "id-7")] == ["id-7"]
    assert log.read(1, "id-6") == []


def test_the_outcome_is_attached_when_it_comes() -> None:
    """Also to one that is no longer the newest; to one that fell out of the ring it is too late."""
    log = filled(3, 10)
    log.finish("id-7", "zero:1", "ok")
    log.finish("id-0", "zero:1", "ok")
    log.finish("never", None, "ok")
    [record] = log.read(1, "id-7")
    assert (record["served_by"], record["outcome"]) == ("zero:1", {"outcome": "ok"})
    assert [one["outcome"] for one in log.read(3)] == [None, None, {"outcome": "ok"}]


def test_a_log_of_nothing_keeps_nothing() -> None:
    """`observe.decisions: 0`."""
    log = filled(0, 5)
    log.finish("id-4", None, "ok")
    assert log.read(5) == []
    assert log.read(5, "id-4") == []
    assert not log._records


def test_refusals_have_a_ring_of_their_own() -> None:
    """A flood of bad requests does not push the decisions out; the newest are told first."""
    log = filled(2, 2)
    for number in range(5):
        log.add_refusal(float(number), f"no-{number}", "/v1/" + "x" * 10_000, REFUSAL)
    assert [record["request_id"] for record in log.read(9)] == ["id-1", "id-0"]
    told = log.read_refusals(9)
    assert [record["request_id"] for record in told] == ["no-4", "no-3"]
    assert len(told[0]["path"]) < 300
    assert {key: told[0][key] for key in ("time", "status", "reason", "message", "param", "retry_after_s")} == {
        "time": 4.0,
        "status": 413,
        "reason": "body_too_large",
        "message": "too large",
        "param": None,
        "retry_after_s": None,
    }
    assert log.read_refusals(1) == told[:1]
    assert log.read_refusals(0) == []


def test_a_log_of_nothing_keeps_no_refusals() -> None:
    """Same bound."""
    log = DecisionLog(0)
    log.add_refusal(0.0, "no", "/", REFUSAL)
    assert log.read_refusals(5) == []
