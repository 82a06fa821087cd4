"""How urgent a request is: what its headers ask for, and what it gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.urgency import Urgency, engine_priority_of, slo_ttft_s, urgency_of

CLASSES = ("real-time", "standard", "batch")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Urgency("real-time")),
        ({"x-pointsman-priority": "batch"}, Urgency("batch")),
        ({"x-pointsman-priority": "7"}, Urgency("real-time", 7)),
        ({"x-pointsman-priority": "-7"}, Urgency("real-time", 0)),
        ({"x-gateway-inference-objective": "standard"}, Urgency("standard")),
        ({"x-gateway-inference-objective": "-3"}, Urgency("real-time", 3)),
        ({"x-gateway-inference-objective": "somebody-elses"}, Urgency("real-time")),
        ({"x-vllm-priority": "4"}, Urgency("real-time", 4)),
        ({"x-vllm-priority": "batch"}, Urgency("real-time")),
        ({"x-pointsman-priority": "batch", "x-vllm-priority": "4"}, Urgency("batch")),
    ],
    ids=str,
)
def test_what_headers_ask_for(headers: dict[str, str], expected: Urgency) -> None:
    """Our header first, then the inference gateway's, then the engine's; nobody goes before others of his class."""
    assert urgency_of(headers, CLASSES, None, 0) == expected


def test_a_class_that_does_not_exist_is_no_class() -> None:
    """A slip of the pen must not make a request the most urgent."""
    for word in ("Batch", "", "100000", "1.5"):
        assert urgency_of({"x-pointsman-priority": word}, CLASSES, None, 0) is None


@pytest.mark.parametrize(
    ("asked", "best", "expected"),
    [
        ("real-time", "standard", "standard"),
        ("batch", "standard", "batch"),
        (None, "standard", "standard"),
        ("real-time", "of another pool", "real-time"),
    ],
)
def test_a_tenant_has_no_better_class_than_it_may(asked: str | None, best: str, expected: str) -> None:
    """And its best unasked."""
    headers = {} if asked is None else {"x-pointsman-priority": asked}
    assert urgency_of(headers, CLASSES, best, 0) == Urgency(expected)


def test_a_tenants_best_priority_bounds_what_it_asks_for() -> None:
    """Up, not down."""
    asked = {"x-pointsman-priority": "-50"}
    assert urgency_of(asked, CLASSES, None, -10) == Urgency("real-time", -10)
    assert urgency_of({"x-pointsman-priority": "-5"}, CLASSES, None, -10) == Urgency("real-time", -5)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-pointsman-slo-ttft-ms": "1500"}, 1.5),
        ({"x-pointsman-slo-ttft-ms": "0"}, 0.1),
        ({"x-llm-d-slo-ttft-ms": "99"}, 0.1),
        ({"x-llm-d-slo-ttft-ms": "200"}, 0.2),
        ({"x-pointsman-slo-ttft-ms": "soon"}, None),
        ({"x-pointsman-slo-ttft-ms": "-1"}, None),
        ({"x-pointsman-slo-ttft-ms": "9" * 400}, None),
        ({}, None),
    ],
    ids=str,
)
def test_when_a_first_token_is_due(headers: dict[str, str], expected: float | None) -> None:
    """In milliseconds, or not at all."""
    assert slo_ttft_s(headers) == expected


@pytest.mark.parametrize(
    ("said", "best", "expected"),
    [
        (None, 0, None),
        (None, -10, None),
        (None, 10, 10),
        ("-5", 0, 0),
        ("-5", -10, -5),
        ("-50", -10, -10),
        ("1700000000", 0, 1_700_000_000),
        ("urgent", 0, 0),
        ("-1,-1", 0, 0),
        ("9" * 400, 5, 5),
    ],
)
def test_nobody_asks_an_engine_for_more_than_he_may_have(said: str | None, best: int, expected: int | None) -> None:
    """Later is free, sooner is bounded, nonsense is nothing; who says nothing needs no word unless he must be later."""
    headers = {} if said is None else {"x-vllm-priority": said}
    assert engine_priority_of(headers, best) == expected


HEADER = st.sampled_from(["x-pointsman-priority", "x-gateway-inference-objective", "x-vllm-priority"])


@given(st.dictionaries(HEADER, st.text(max_size=12)), st.sampled_from([None, *CLASSES, "x"]), st.integers(-100, 100))
def test_nothing_a_client_sends_goes_beyond_its_bounds(
    headers: dict[str, str], best_class: str | None, best_priority: int
) -> None:
    """Whatever it is, and without an error of ours."""
    found = urgency_of(headers, CLASSES, best_class, best_priority)
    if found is not None:
        assert found.priority >= best_priority
        assert best_class not in CLASSES or CLASSES.index(found.class_name) >= CLASSES.index(best_class)
