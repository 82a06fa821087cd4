"""The model list: names, context windows, and what is no list."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_adapters.health import Listing, NotAListing, parse_models


def listing(*entries: dict[str, Any]) -> Listing:
    """What a list of these entries is read as."""
    return parse_models(json.dumps({"object": "list", "data": entries}).encode())


def test_models_and_adapters_are_names_alike() -> None:
    """An adapter has no window of its own; the base model's is the endpoint's."""
    read = listing(
        {"id": "tiny", "object": "model", "max_model_len": 4096, "root": "/models/tiny", "parent": None},
        {"id": "lora", "object": "model", "max_model_len": None, "root": "/lora", "parent": "tiny"},
    )
    assert read == Listing(frozenset({"tiny", "lora"}), 4096, frozenset({"lora"}))


def test_the_largest_window_counts() -> None:
    """Which model it belongs to is not known to routing; refusing is the engine's to do."""
    assert listing({"id": "a", "max_model_len": 100}, {"id": "b", "max_model_len": 300}).context_tokens == 300


@pytest.mark.parametrize("window", [None, "4096", 4096.5, [1], 0, -1, 10**400])
def test_a_window_that_is_no_count_is_unknown(window: object) -> None:
    """Other servers may put anything there."""
    assert listing({"id": "a", "max_model_len": window}) == Listing(frozenset({"a"}), None)


def test_a_list_without_windows_is_a_list() -> None:
    """OpenAI's own form has none."""
    assert listing({"id": "a"}) == Listing(frozenset({"a"}), None)


def test_an_empty_list_serves_nothing() -> None:
    """A server that has loaded no model yet."""
    assert listing() == Listing(frozenset(), None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"OK",
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"data": [{"name": "a"}]}',
        b'{"data": [{"id": 1}]}',
        b'{"data": ["a"]}',
        b'{"data": [{"id": "\xff"}]}',
        b'{"error": {"message": "loading"}}',
    ],
)
def test_another_answer_is_not_a_listing(body: bytes) -> None:
    """An error object, an empty page, names that are no text."""
    with pytest.raises(NotAListing):
        parse_models(body)


def test_a_list_of_more_models_than_anybody_serves_is_none() -> None:
    """It would be told, and taken in, once a second."""
    assert len(listing(*({"id": str(number)} for number in range(10_000))).models) == 10_000
    with pytest.raises(NotAListing):
        listing(*({"id": str(number)} for number in range(10_001)))


@pytest.mark.parametrize("body", ['{"x":%s,"data":[]}', '{"data":[{"id":"a","x":%s}]}', '{"data":%s}'])
def test_nesting_without_end_is_not_a_listing(body: str) -> None:
    """Wherever the brackets stand."""
    with pytest.raises(NotAListing):
        parse_models((body % ("[" * 100_000 + "]" * 100_000)).encode())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_answer_raises_anything_else(body: bytes) -> None:
    """Whatever an endpoint serves there."""
    with contextlib.suppress(NotAListing):
        assert isinstance(parse_models(body), Listing)


def test_a_pointsman_is_no_engine() -> None:
    """An endpoint that is our own gateway would send every request round in a loop."""
    with pytest.raises(NotAListing, match="for ever"):
        parse_models(b'{"data":[{"id":"m","owned_by":"pointsman"}]}')


def test_true_is_no_context_length() -> None:
    """In Python a bool is an int; a window of one token would refuse every prompt."""
    assert parse_models(b'{"data":[{"id":"m","max_model_len":true}]}').context_tokens is None
