"""Token estimates: plain text, CJK, inline images."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.request.tokens import TokenRates, estimate_tokens, image_spans, prompt_tokens

RATES = TokenRates()
PNG = b'"data:image/png;base64,' + b"A" * 4_000 + b'"'


@pytest.mark.parametrize(("length", "tokens"), [(0, 1), (1, 1), (4, 1), (8, 2), (400, 100), (402, 100), (4_000, 1_000)])
def test_four_bytes_are_a_token(length: int, tokens: int) -> None:
    """Rounded, and never less than one."""
    assert estimate_tokens(b"x" * length, RATES) == tokens


@pytest.mark.parametrize("character", "你あア한")
def test_a_cjk_character_is_one_and_a_half_tokens(character: str) -> None:
    """Ideographs, both kana and Hangul, each of three bytes."""
    assert estimate_tokens((character * 100).encode(), RATES) == 150


def test_an_escaped_cjk_character_costs_the_same() -> None:
    """Clients that send ASCII only write six bytes for it; the engine sees one character."""
    text = "你好" * 50
    assert estimate_tokens(json.dumps(text)[1:-1].encode(), RATES) == 150
    assert estimate_tokens(text.encode(), RATES) == 150


def test_mixed_text_adds_up() -> None:
    """Forty bytes of ASCII, ten raw and ten escaped CJK characters: 10 + 15 + 15."""
    text = b"x" * 40 + "语".encode() * 10 + b"\\u8bed" * 10
    assert estimate_tokens(text, RATES) == 40


def test_other_scripts_go_by_their_bytes() -> None:
    """Two bytes per Cyrillic or accented letter, so two letters a token."""
    assert estimate_tokens(("я" * 100).encode(), RATES) == 50
    assert estimate_tokens(("é" * 100).encode(), RATES) == 50


def test_the_rates_are_the_pools() -> None:
    """A model with other habits is counted by them."""
    rates = TokenRates(bytes_per_token=2.0, tokens_per_cjk_character=1.0, tokens_per_image=10)
    assert estimate_tokens(b"x" * 100, rates) == 50
    assert estimate_tokens(("你" * 100).encode(), rates) == 100
    assert prompt_tokens(PNG, image_spans(PNG), rates) == 11


@pytest.mark.parametrize(
    "text",
    [PNG + b"x" * 400, b"x" * 400 + PNG, b"x" * 200 + PNG + b"x" * 200],
    ids=["first", "last", "between"],
)
def test_an_image_is_a_fixed_number_of_tokens_wherever_it_stands(text: bytes) -> None:
    """1,024 for the picture and 100 for the text around it, whatever the data URL's length."""
    assert prompt_tokens(text, image_spans(text), RATES) == 1_024 + 100


def test_every_image_counts() -> None:
    """Two pictures and eight bytes between."""
    text = PNG + b"x" * 8 + PNG
    assert image_spans(text) == [(0, len(PNG)), (len(PNG) + 8, len(text))]
    assert prompt_tokens(text, image_spans(text), RATES) == 2 * 1_024 + 2


def test_other_media_count_as_images_do() -> None:
    """Audio and video data URLs are no text either."""
    text = b'"data:audio/x-wav;base64,AAAA" "data:video/mp4;base64,AAAA" "data:image/svg+xml;base64,AAAA"'
    assert len(image_spans(text)) == 3


@pytest.mark.parametrize(
    "url",
    [
        rb"data:image\/png;base64,",
        b"data:image/png;charset=utf-8;base64,",
        rb"data:image\u002fpng;base64,",
    ],
    ids=["escaped slash", "parameter", "escaped as unicode"],
)
def test_an_image_is_an_image_however_its_url_is_written(url: bytes) -> None:
    """PHP escapes slashes by default; some clients name a character set."""
    text = b'"' + url + b"A" * 400_000 + b'"' + b"x" * 400
    assert prompt_tokens(text, image_spans(text), RATES) == 1_024 + 100


def test_a_prompt_full_of_beginnings_is_searched_in_one_go() -> None:
    """Text that looks like a data URL again and again and never is one."""
    text = b'"data:' * 50_000 + b";base64,"
    assert image_spans(text) == []


@pytest.mark.parametrize(
    "text",
    [b'"https://example.com/a.png"', b'"the word ;base64, in a sentence"', b'"data:image/png,raw"', b""],
)
def test_what_is_no_data_url_is_text(text: bytes) -> None:
    """A link, a mention and an image that is not base64."""
    assert image_spans(text) == []


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_an_estimate_is_at_least_one_token(text: bytes) -> None:
    """For any bytes, UTF-8 or not."""
    assert prompt_tokens(text, image_spans(text), RATES) >= 1


@settings(deadline=None)
@given(st.text(alphabet='ab你한é\n"\\/', max_size=60))
def test_escaping_a_text_does_not_change_its_cjk_share(text: str) -> None:
    """Raw and escaped spellings of CJK text are estimated alike, up to rounding."""
    text = "".join(character for character in text if character in "ab你한")
    raw = json.dumps(text, ensure_ascii=False).encode()
    escaped = json.dumps(text).encode()
    assert estimate_tokens(raw, RATES) == estimate_tokens(escaped, RATES)


PIECES = ["word ", "\\", "u", "\\u4f60", "你", "é", ";b", "\u2fff", "\ud7ff"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=30))
def test_a_long_text_is_counted_like_a_short_one(parts: list[str]) -> None:
    """Whatever it is made of, many times the same text is as many times its tokens, up to rounding."""
    text = "".join([*parts, " "]).encode()
    times = 4_096 // len(text) + 1
    cjk, escaped = len(re.findall("[\u3000-\ud7ff]", text.decode())), text.count(b"\\u")
    tokens = (len(text) - 3 * cjk - 6 * escaped) / RATES.bytes_per_token
    tokens += (cjk + escaped) * RATES.tokens_per_cjk_character
    assert estimate_tokens(text * times, RATES) == max(1, round(times * tokens))
