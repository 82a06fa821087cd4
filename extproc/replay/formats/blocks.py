"""Names for blocks that traces know by ids of their own, or not at all: 64 bits, well spread, as real hashes are."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import xxhash


class BlockNames:
    """Equal keys get equal names; what no key is known for gets a new one each time. The same on every run."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._rng = Random(seed)

    def of(self, *key: object) -> int:
        """The name of the block with this key."""
        return int(xxhash.xxh3_64_intdigest(f"{self._seed}{key!r}".encode()))

    def fresh(self, count: int) -> list[int]:
        """Names of blocks that nothing else contains."""
        return [self._rng.getrandbits(64) for _ in range(count)]

    def fill(
        self, prompt: Sequence[int], answer: Sequence[int], prompt_tokens: int, output_tokens: int, block_tokens: int
    ) -> tuple[list[int], int]:
        """(blocks, how many are the prompt's): what is known of prompt and answer, new names where nothing is."""
        full = prompt_tokens // block_tokens
        total = (prompt_tokens + output_tokens) // block_tokens
        blocks = list(prompt[:full])
        blocks += self.fresh(full - len(blocks))
        blocks += answer[: total - full]
        blocks += self.fresh(total - len(blocks))
        return blocks, full
