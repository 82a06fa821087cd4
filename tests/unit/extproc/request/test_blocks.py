"""Block hashes: equal prefixes and only those are equal; tokens per block add up."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.request.blocks import block_hashes, block_tokens, seed_of
from extproc.request.tokens import TokenRates, image_spans, prompt_tokens

SEED = seed_of("m", None, None)
RATES = TokenRates()


def test_a_block_is_a_thirty_second_of_what_precedes_it() -> None:
    """256 bytes up to 8 KB and a block, which have 33; and from there on as much of what comes before."""
    _, ends = block_hashes(bytes(1 << 20), SEED)
    sizes = [after - before for before, after in pairwise([0, *ends])]
    assert sizes[:35] == [256] * 33 + [264, 272]
    assert all(size == before // 32 for before, size in zip(ends[32:], sizes[33:], strict=False))


@pytest.mark.parametrize(("length", "blocks"), [(16_000, 53), (64_000, 98), (512_000, 166), (4 << 20, 234)])
def test_a_long_prompt_has_few_blocks(length: int, blocks: int) -> None:
    """The reason they grow."""
    hashes, _ = block_hashes(bytes(length), SEED)
    assert len(hashes) == blocks


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2)])
def test_only_whole_blocks_count(length: int, blocks: int) -> None:
    """What does not fill a block has no hash."""
    hashes, ends = block_hashes(bytes(length), SEED)
    assert len(hashes) == len(ends) == blocks


def test_the_hashes_are_the_same_in_every_process() -> None:
    """Fixed values: replicas share them, so a change of the scheme must be seen."""
    assert seed_of("m", None, None) == 9613065592591756178
    assert block_hashes(bytes(512), SEED)[0] == [14289591926824622865, 16142896053812598377]


@pytest.mark.parametrize("other", [("n", None, None), ("m", "lora", None), ("m", None, "salt"), ("m", "salt", None)])
def test_another_model_adapter_or_salt_shares_nothing(other: tuple[str, str | None, str | None]) -> None:
    """Not one hash of the same prompt is equal."""
    prompt = bytes(20_000)
    assert not set(block_hashes(prompt, SEED)[0]) & set(block_hashes(prompt, seed_of(*other))[0])


def test_an_adapter_is_not_mistaken_for_a_salt() -> None:
    """The same word in another place is another seed."""
    assert seed_of("m", "x", None) != seed_of("m", None, "x")


def test_a_block_repeated_hashes_differently_by_what_came_before() -> None:
    """The chain: equal bytes at another depth are another prefix."""
    hashes, _ = block_hashes(b"a" * 256 * 10, SEED)
    assert len(set(hashes)) == 10


def test_a_memoryview_hashes_as_its_bytes() -> None:
    """No copy is needed."""
    prompt = b"p" * 1_000
    assert block_hashes(memoryview(prompt), SEED) == block_hashes(prompt, SEED)


@settings(deadline=None)
@given(
    common=st.binary(max_size=3).map(lambda unit: (unit or b"-") * 400),
    cut=st.integers(0, 1200),
    left=st.binary(max_size=600),
    right=st.binary(max_size=600),
)
def test_prompts_share_exactly_the_blocks_of_their_common_prefix(
    common: bytes, cut: int, left: bytes, right: bytes
) -> None:
    """Every whole block inside the common bytes is equal, and none after them is."""
    one, two = common[:cut] + left, common[:cut] + right
    shared = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    (hashes_one, ends), (hashes_two, _) = block_hashes(one, SEED), block_hashes(two, SEED)
    for position, (a, b) in enumerate(zip(hashes_one, hashes_two, strict=False)):
        assert (a == b) is (ends[position] <= shared)


def test_text_is_spread_evenly() -> None:
    """A token per four bytes, so 64 in each of the first blocks and more in the longer ones behind them."""
    prompt = b"x" * (33 * 256 + 264 + 272)
    _, ends = block_hashes(prompt, SEED)
    tokens = prompt_tokens(prompt, [], RATES)
    assert block_tokens(ends, len(prompt), tokens, [], 1024) == [64] * 33 + [66, 68]


def test_an_images_tokens_lie_on_its_own_bytes() -> None:
    """A picture that fills blocks 2 and 3: they carry its 1,024 tokens, the text blocks only their own."""
    url = b'"data:image/png;base64,' + b"A" * (512 - 24) + b'"'
    prompt = b"x" * 256 + url + b"x" * 256
    _, ends = block_hashes(prompt, SEED)
    images = image_spans(prompt)
    assert images == [(256, 768)]
    tokens = prompt_tokens(prompt, images, RATES)
    assert block_tokens(ends, len(prompt), tokens, images, 1024) == [64, 512, 512, 64]


def test_a_huge_image_does_not_make_the_text_behind_it_worthless() -> None:
    """The text after a long data URL keeps its four bytes per token."""
    prompt = b'"data:image/png;base64,' + b"A" * 200_000 + b'"' + b"x" * 200_000
    images = image_spans(prompt)
    _, ends = block_hashes(prompt, SEED)
    tokens = prompt_tokens(prompt, images, RATES)
    per_block = block_tokens(ends, len(prompt), tokens, images, 1024)
    behind = [(t, e) for t, e in zip(per_block, ends, strict=True) if e > 210_000]
    assert len(behind) > 20
    assert all(abs(count - (end - before) / 4) <= 1 for (_, before), (count, end) in pairwise(behind))


PROMPTS = st.lists(
    st.one_of(
        st.integers(0, 3_000).map(lambda n: b"x" * n),
        st.integers(0, 300).map(lambda n: "你".encode() * n),
        st.integers(0, 3_000).map(lambda n: b'"data:image/png;base64,' + b"A" * n + b'"'),
    ),
    max_size=6,
).map(b"".join)


@settings(deadline=None)
@given(prompt=PROMPTS, per_image=st.integers(1, 5_000))
def test_blocks_never_hold_more_tokens_than_the_prompt(prompt: bytes, per_image: int) -> None:
    """One figure per block, none negative, the sum at most the whole and close to the share of whole blocks."""
    rates = TokenRates(tokens_per_image=per_image)
    images = image_spans(prompt)
    tokens = prompt_tokens(prompt, images, rates)
    _, ends = block_hashes(prompt, SEED)
    per_block = block_tokens(ends, len(prompt), tokens, images, per_image)
    assert len(per_block) == len(ends)
    assert all(count >= 0 for count in per_block)
    assert sum(per_block) <= tokens
    if ends and ends[-1] == len(prompt):
        assert tokens - sum(per_block) <= 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 900)), max_size=12),
    st.integers(0, 400),
    st.integers(1, 2_000),
)
def test_many_images_are_shared_out_as_if_each_block_looked_at_all(
    gaps: list[tuple[int, int]], tail: int, per_image: int
) -> None:
    """The walk over blocks and images together gives what looking at every image for every block would."""
    images, position = [], 0
    for gap, size in gaps:
        images.append((position + gap, position + gap + size))
        position += gap + size
    length = position + tail
    ends = list(range(256, length + 1, 256))
    tokens = len(images) * per_image + 100
    rate = 100 / max(1, length - sum(end - start for start, end in images))
    cumulative = [0]
    for block_end in ends:
        covered = [(max(0, min(end, block_end) - start), end - start) for start, end in images]
        text = block_end - sum(part for part, _ in covered)
        cumulative.append(text * rate + sum(per_image * part / whole for part, whole in covered))
    found = block_tokens(ends, length, tokens, images, per_image)
    if not images:
        return
    total = 0
    for tokens_here, expected in zip(found, cumulative[1:], strict=True):
        total += tokens_here
        assert abs(total - expected) <= 1


def test_a_million_image_marks_are_one_walk() -> None:
    """8 MB of tiny data URLs: the work is one step per block and image, not their product (which would not end)."""
    prompt = b"[" + b'"data:a/b;base64,",' * 420_000 + b"1]"
    images = image_spans(prompt)
    _, ends = block_hashes(prompt, 0)
    assert len(images) == 420_000
    assert sum(block_tokens(ends, len(prompt), 420_000 * 2, images, 2)) <= 420_000 * 2


def test_a_salt_is_kept_nowhere() -> None:
    """It may be a secret, and is as long as its sender likes."""
    salt = "secret" * 1_000
    before = sys.getrefcount(salt)
    assert seed_of("m", None, salt) == seed_of("m", None, salt) != SEED
    assert sys.getrefcount(salt) == before
