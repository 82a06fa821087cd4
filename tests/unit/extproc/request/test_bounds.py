"""Bounds on the shape of requests: what is counted, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.apis import BY_PATH
from extproc.request.bounds import Bounds, items, nesting
from extproc.request.parsing import Parsed, parse_body
from policies.types import Reason, Refusal

CHAT, TEXT = BY_PATH["/v1/chat/completions"], BY_PATH["/v1/completions"]


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


JSON = st.recursive(
    st.none() | st.text(st.sampled_from('[]{}"\\a/')) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.sampled_from('[{"\\'), max_size=3), inner),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1]))
def test_nesting_is_counted_as_a_parser_would_find_it(value: Any, indent: int | None) -> None:
    """Whatever brackets, quotes and backslashes strings and keys hold."""
    assert nesting(json.dumps(value, indent=indent).encode()) == _depth(value)


@given(JSON, st.integers(0, 6))
def test_a_body_is_refused_exactly_if_it_is_nested_deeper_than_allowed(value: Any, most: int) -> None:
    """In any field, also one that routing does not read."""
    body = json.dumps({"model": "m", "messages": [], "metadata": value}).encode()
    parsed = parse_body(CHAT, body, bounds=Bounds(nesting=1 + most))
    assert isinstance(parsed, Refusal) == (_depth(json.loads(body)) > 1 + most)
    if isinstance(parsed, Refusal):
        assert (parsed.status, parsed.reason) == (400, Reason.INVALID_JSON)
        assert parsed.message == f"the body is nested deeper than {1 + most} levels"


@pytest.mark.parametrize(
    ("raw", "count"),
    [(b"", 0), (b'"text"', 0), (b"[]", 0), (b'[ "a", "b,c" ]', 2), (b"[1,2,3,4]", 0), (b"[-1]", 0), (b"[[1],[2]]", 2)],
)
def test_items_are_those_of_a_list_that_is_not_token_ids(raw: bytes, count: int) -> None:
    """A long prompt in token ids is one text."""
    assert items(raw) == count


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_too_many_items_in_a_list_of_the_prompt_are_refused(field: str) -> None:
    """As many as allowed are not."""
    fields: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    allowed = json.dumps(fields | {field: [{}] * 3}).encode()
    assert isinstance(parse_body(CHAT, allowed, bounds=Bounds(items=3)), Parsed)
    refused = parse_body(CHAT, json.dumps(fields | {field: [{}] * 4}).encode(), bounds=Bounds(items=3))
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.reason) == (400, Reason.TOO_MANY_ITEMS)
    assert "more than 3 items" in refused.message


def test_token_ids_are_bounded_by_tokens_and_texts_by_items() -> None:
    """Of `/v1/completions` both are called prompt."""
    ids = b'{"model":"m","prompt":[1,2,3,4,5,6]}'
    assert isinstance(parse_body(TEXT, ids, bounds=Bounds(items=3)), Parsed)
    texts = b'{"model":"m","prompt":["a","b","c","d"]}'
    assert isinstance(parse_body(TEXT, texts, bounds=Bounds(items=3)), Refusal)


def test_a_prompt_beyond_the_tokens_allowed_is_too_large() -> None:
    """The words say how many it has, as far as is known, and how many it may have."""
    refusal = Bounds(tokens=100).judge_tokens(101)
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (413, Reason.PROMPT_TOO_LONG)
    assert "101" in refusal.message
    assert "100" in refusal.message
    assert Bounds(tokens=100).judge_tokens(100) is None
    assert Bounds().judge_tokens(10**9) is None
