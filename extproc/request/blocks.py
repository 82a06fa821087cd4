"""A prompt as a chain of block hashes, each with its share of the tokens.

Blocks grow with depth: each is a thirty-second of what comes before it, 256 bytes at least. So a prompt of half a
megabyte has 164 and one of 4 MB 234, not 2,000 and 16,000, and of a shared prefix a sixty-fourth goes unnoticed on
average, however long it is: over the prefixes of a public trace of conversations 1.4 %, 64 tokens. Rejected: doubling
every 64 blocks, which notices as little of a prefix of 16 KB and twice as much of one of 500 KB, for twice as many
blocks (313), each of which is hashed, looked up, held and evicted. Each hash is seeded by the one before it, the first
by model, adapter and cache salt: equal bytes give equal hashes in every process and replica.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import xxhash

from extproc.request.tokens import Span

FIRST_BLOCK_BYTES: Final = 256
_OF_WHAT_PRECEDES: Final = 32
_LONGEST_BYTES: Final = 1 << 38
"""No prompt is as long."""


def _ends() -> list[int]:
    ends = [0]
    while ends[-1] < _LONGEST_BYTES:
        ends.append(ends[-1] + max(FIRST_BLOCK_BYTES, ends[-1] // _OF_WHAT_PRECEDES))
    return ends


_ENDS: Final[list[int]] = _ends()[1:]
"""Where the blocks of any prompt end: they are the same for all."""

_hash: Final = xxhash.xxh3_64_intdigest
_blocks_until: Final = bisect_right


def seed_of(model: str, adapter: str | None, cache_salt: str | None) -> int:
    """The chain's first seed: prompts under another model, adapter or salt share nothing."""
    if not cache_salt:
        return _seed_without_salt(model, adapter)
    # kept nowhere: it may be a secret, and as long as a body may be
    return _hash("\0".join((model, adapter or "", cache_salt)).encode("utf-8", "surrogatepass"))


def _made_without_salt(model: str, adapter: str | None) -> int:
    return _hash("\0".join((model, adapter or "", "")).encode("utf-8", "surrogatepass"))


_seed_without_salt: Final = lru_cache(maxsize=1024)(_made_without_salt)


def block_hashes(prompt: bytes | memoryview, seed: int) -> tuple[list[int], list[int]]:
    """(hashes, ends): the chained hash of every whole block and the byte offset where it ends."""
    hashes: list[int] = []
    hash_more(prompt, len(prompt), seed, hashes)
    return hashes, _ENDS[: len(hashes)]


def hash_more(prompt: bytes | memoryview, upto: int, seed: int, hashes: list[int]) -> None:
    """Add the hashes of the whole blocks that end before `upto`, of a prompt of which some were hashed before.

    Of bytes each block is copied, which for the small blocks of a short prompt is cheaper than a view.
    """
    known = len(hashes)
    seed, start = (hashes[-1], _ENDS[known - 1]) if known else (seed, 0)
    ends = _ENDS[known : _blocks_until(_ENDS, upto)]
    if isinstance(prompt, bytes):
        for end in ends:
            seed = _hash(prompt[start:end], seed)
            hashes.append(seed)
            start = end
    else:
        for end in ends:
            seed = _hash(prompt[start:end], seed)
            hashes.append(seed)
            start = end


def ends_of(hashes: list[int]) -> list[int]:
    """Where the blocks end that have these hashes."""
    return _ENDS[: len(hashes)]


def block_tokens(
    ends: list[int], prompt_bytes: int, tokens: int, images: Sequence[Span], tokens_per_image: int
) -> list[int]:
    """Tokens per block, adding up to the prompt's share that lies in whole blocks. They end at `ends`, as all do.

    Text is spread evenly over its bytes; an image's tokens are spread over the bytes of its own data URL.
    """
    if images:
        cumulative = _cumulative_with_images(ends, prompt_bytes, tokens, images, tokens_per_image)
        return [upto - before for before, upto in pairwise((0, *cumulative))]
    shares: list[int] = []
    before = 0
    for end in ends:
        after = end * tokens // prompt_bytes
        shares.append(after - before)
        before = after
    return shares


def _cumulative_with_images(
    ends: list[int], prompt_bytes: int, tokens: int, images: Sequence[Span], tokens_per_image: int
) -> list[int]:
    """Tokens up to each block's end, in one walk over blocks and images: a prompt may have a million images."""
    text_bytes = max(1, prompt_bytes - sum(end - start for start, end in images))
    tokens_per_text_byte = (tokens - len(images) * tokens_per_image) / text_bytes
    cumulative = []
    passed, passed_bytes = 0, 0  # images that ended before this block's end, and their bytes
    for block_end in ends:
        while passed < len(images) and images[passed][1] <= block_end:
            passed_bytes += images[passed][1] - images[passed][0]
            passed += 1
        started, share = _begun(images, passed, block_end)
        text = block_end - passed_bytes - started
        cumulative.append(int(text * tokens_per_text_byte + (passed + share) * tokens_per_image))
    return cumulative


def _begun(images: Sequence[Span], position: int, block_end: int) -> tuple[int, float]:
    """(bytes, share) of the image that the block's end cuts through, if it does."""
    if position == len(images) or images[position][0] >= block_end:
        return 0, 0.0
    start, end = images[position]
    return block_end - start, (block_end - start) / (end - start)
