"""PreciseIndex: what engines report, and what a prompt finds by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from policies.placement.precise_index import (
    TOKEN_BYTES,
    Cleared,
    PreciseIndex,
    Removed,
    Stored,
    Tier,
    extra_of,
)

BLOCK = 2
HERE, THERE = "10.0.0.1:8000", "10.0.0.2:8000"


def _packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)


def _stored(tokens: Sequence[int], *hashes: int, parent: int | None = None, **also: object) -> Stored:
    return Stored(hashes, parent, _packed(tokens), also.pop("block_tokens", BLOCK), **also)  # type: ignore[arg-type]


def _held(
    index: PreciseIndex, tokens: Sequence[int], *endpoints: str, adapter: str | None = None, salt: str | None = None
) -> list[int]:
    found = index.match(_packed(tokens), adapter, salt, endpoints or (HERE,)).tokens
    return list(found.values())


def _new(max_blocks: int = 1_000, **weights: float) -> PreciseIndex:
    index = PreciseIndex(max_blocks, {Tier[name.upper()]: weight for name, weight in weights.items()})
    for endpoint in (HERE, THERE):
        index.keep_ranks(endpoint, [0])
        index.forget(endpoint, 0, empty=True)
    return index


def test_an_endpoint_is_credited_for_the_blocks_it_reported() -> None:
    """One engine holds three blocks of the prompt, another the first only; each has names of its own for them."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 71, 72), _stored([5, 6], 73, parent=72)])
    index.apply(THERE, 0, [_stored([1, 2], 99)])
    assert _held(index, [1, 2, 3, 4, 5, 6, 7], HERE, THERE) == [6, 2]


def test_the_last_token_is_always_computed() -> None:
    """A prompt that ends with a block gets all but that block, for the engine needs a token to compute."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2)])
    assert _held(index, [1, 2, 3, 4]) == [2]
    assert _held(index, [1, 2, 3, 4, 5]) == [4]
    assert _held(index, []) == [0]


def test_a_hole_ends_the_match() -> None:
    """Blocks behind one that was dropped are of no use, until it is stored again."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2, 3, 4, 5, 6], 1, 2, 3), Removed([2])])
    assert _held(index, [1, 2, 3, 4, 5, 6, 7]) == [2]
    index.apply(HERE, 0, [_stored([3, 4], 2, parent=1)])
    assert _held(index, [1, 2, 3, 4, 5, 6, 7]) == [6]


def test_a_block_is_there_until_its_last_copy_is_dropped() -> None:
    """Engines fill a second block with what they hold already, and drop the two one after the other."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2], 1), _stored([1, 2], 1), Removed([1])])
    assert _held(index, [1, 2, 3]) == [2]
    index.apply(HERE, 0, [Removed([1])])
    assert _held(index, [1, 2, 3]) == [0]
    assert len(index) == 0


def test_adapters_and_salts_share_nothing() -> None:
    """The adapter sets every block apart, the salt the first and so all after it."""
    index = _new()
    lora, salted = extra_of(["l1"]), extra_of(["l1", "pepper"])
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2, extras=[salted, lora])])
    prompt = [1, 2, 3, 4, 5]
    assert _held(index, prompt, adapter="l1", salt="pepper") == [4]
    assert _held(index, prompt, adapter="l1") == [0]
    assert _held(index, prompt, salt="pepper") == [0]
    assert _held(index, prompt) == [0]


def test_what_an_engine_does_not_tell_it_is_blind_for() -> None:
    """Engines that do not tell salts, or adapters by name, cannot be matched for requests with them."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2], 1, tells_salt=False)])
    index.apply(THERE, 0, [_stored([1, 2], 1, tells_adapter=False)])
    assert index.match(_packed([1, 2, 3]), None, None, [HERE, THERE]).blind == ()
    assert index.match(_packed([1, 2, 3]), None, "pepper", [HERE, THERE]).blind == (HERE,)
    assert index.match(_packed([1, 2, 3]), "l1", None, [HERE, THERE]).blind == (THERE,)


def test_an_endpoint_nobody_heard_of_is_blind() -> None:
    """Nothing is known of it, which is not the same as that it holds nothing."""
    found = _new().match(_packed([1, 2, 3]), None, None, ["10.0.0.9:8000"])
    assert found.tokens == {"10.0.0.9:8000": 0}
    assert found.blind == ("10.0.0.9:8000",)


def test_blocks_after_an_unknown_one_are_orphans() -> None:
    """We joined late: what follows a block we never heard of cannot be matched, and the endpoint is blind."""
    index = _new()
    index.apply(HERE, 0, [_stored([5, 6, 7, 8], 3, 4, parent=2)])
    assert index.tally.orphans == 2
    assert not index.is_known(HERE)
    assert _held(index, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [0]


def test_an_endpoint_is_known_again_once_its_cache_turned_over() -> None:
    """When it has dropped as many known blocks in a row as it holds, nothing we do not know is left."""
    index = _new()
    index.forget(HERE, 0, empty=False)
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2), Removed([77]), _stored([5, 6], 3), Removed([1])])
    assert not index.is_known(HERE)
    index.apply(HERE, 0, [_stored([7, 8], 4), Removed([2])])
    assert index.is_known(HERE)


def test_an_engine_that_cleared_its_cache_holds_nothing() -> None:
    """And is known from then on, whatever was missed before."""
    index = _new()
    index.forget(HERE, 0, empty=False)
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2), Cleared()])
    assert _held(index, [1, 2, 3, 4, 5]) == [0]
    assert index.is_known(HERE)
    assert len(index) == 0


def test_ranks_behind_one_address_count_by_what_can_be_expected() -> None:
    """Requests are shared out among them blindly: held by one of two, a prompt is worth half."""
    index = _new()
    index.keep_ranks(HERE, [0, 1])
    index.forget(HERE, 1, empty=True)
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2)])
    assert _held(index, [1, 2, 3, 4, 5]) == [2]
    index.apply(HERE, 1, [_stored([1, 2, 3, 4], 1, 2)])
    assert _held(index, [1, 2, 3, 4, 5]) == [4]
    index.keep_ranks(HERE, [1])
    index.apply(HERE, 1, [Removed([2])])
    assert _held(index, [1, 2, 3, 4, 5]) == [2]


def test_engines_may_have_blocks_of_different_sizes() -> None:
    """Each is walked in steps of its own."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2)])
    index.apply(THERE, 0, [_stored([1, 2, 3], 1, block_tokens=3)])
    assert _held(index, [1, 2, 3, 4, 5], HERE, THERE) == [4, 3]


def test_a_part_of_a_block_is_no_block() -> None:
    """Some engines report parts of blocks too; they neither count nor say how large a block is."""
    index = _new()
    index.apply(
        HERE, 0, [_stored([1], 9, block_tokens=1), _stored([1, 2], 1), _stored([3], 8, parent=1, block_tokens=1)]
    )
    assert _held(index, [1, 2, 3, 4]) == [2]
    assert index.tally.odd == 1


def test_only_layers_that_attend_to_everything_count() -> None:
    """Of a model with several kinds of layers, those with a window say nothing of the whole prefix."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2], 1, group=0, whole_prefix=False), _stored([1, 2], 1, group=1)])
    index.apply(HERE, 0, [Removed([1], group=0)])
    assert _held(index, [1, 2, 3]) == [2]
    index.apply(HERE, 0, [Removed([1], group=1)])
    assert _held(index, [1, 2, 3]) == [0]


def test_slower_tiers_count_for_less() -> None:
    """A block only in the CPU's memory has to be copied back; the same block in both is worth a whole one."""
    index = _new(cpu=0.5, disk=0.25)
    index.apply(HERE, 0, [_stored([1, 2, 3, 4], 1, 2), Stored([1, 2], None, b"", 0, tier=Tier.CPU), Removed([2])])
    assert _held(index, [1, 2, 3, 4, 5]) == [3]
    index.apply(HERE, 0, [Stored([2], None, b"", 0, tier=Tier.DISK), Removed([2], Tier.CPU)])
    assert _held(index, [1, 2, 3, 4, 5]) == [2]  # 2 + 0.5, in whole tokens


def test_no_more_blocks_are_kept_than_allowed() -> None:
    """The oldest goes, is counted, and the endpoint is no longer said to be known."""
    index = _new(max_blocks=2)
    index.apply(HERE, 0, [_stored([1, 2, 3, 4, 5, 6], 1, 2, 3)])
    assert len(index) == 2
    assert index.tally.evicted == 1
    assert not index.is_known(HERE)


def test_room_is_made_for_more_than_one_block_at_a_time() -> None:
    """The way to the oldest block leads past all that went before it; one that comes at the bound must not take it."""
    index = _new(max_blocks=128)
    for block in range(129):
        index.apply(HERE, 0, [_stored([block, block], block)])
    assert index.tally.evicted == 3  # the one beyond the bound, and two in advance
    for block in range(129, 131):
        index.apply(HERE, 0, [_stored([block, block], block)])
    assert index.tally.evicted == 3
    assert len(index) == 128
    assert _held(index, [3, 3, 0]) == [2]  # those that went were the oldest
    assert _held(index, [2, 2, 0]) == [0]


def test_what_comes_late_from_one_that_left_brings_nothing_back() -> None:
    """Neither an endpoint nor a rank: nobody would remove it again."""
    index = _new()
    index.keep_ranks(HERE, [0])
    index.remove(THERE)
    for endpoint, rank in ((THERE, 0), (HERE, 1), ("10.0.0.3:8000", 0)):
        index.apply(endpoint, rank, [_stored([1, 2], 1)])
        index.forget(endpoint, rank, empty=True)
        index.apply(endpoint, rank, [_stored([1, 2], 1)])
    assert len(index) == 0
    assert _held(index, [1, 2, 3], HERE, THERE) == [0, 0]
    assert not index.is_known(THERE)


def test_an_endpoint_that_left_leaves_nothing() -> None:
    """Its place in the masks goes to the next, which starts from nothing."""
    index = _new()
    index.apply(HERE, 0, [_stored([1, 2], 1)])
    index.remove(HERE)
    index.keep_ranks("10.0.0.3:8000", [0])
    index.apply("10.0.0.3:8000", 0, [_stored([7, 8], 1)])
    assert _held(index, [1, 2, 3], HERE, "10.0.0.3:8000") == [0, 0]
    assert _held(index, [7, 8, 3], "10.0.0.3:8000") == [2]


_PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=BLOCK, max_size=4 * BLOCK), min_size=1, max_size=6)


class PlainEngine:
    """An engine's cache as a count of copies per prefix; its names of blocks depend on itself."""

    def __init__(self, index: PreciseIndex, endpoint: str, seed: int) -> None:
        self.copies: Counter[tuple[int, ...]] = Counter()
        self._index, self._endpoint, self._seed = index, endpoint, seed

    def _name(self, prefix: tuple[int, ...]) -> int | None:
        return hash((self._seed, prefix)) & (1 << 64) - 1 if prefix else None

    def prefixes(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Of whole blocks."""
        return [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]

    def serve(self, prompt: Sequence[int]) -> None:
        """As vLLM: reuse what is there but for the last token, store the rest anew."""
        whole = self.prefixes(prompt)
        reused = self.hit(prompt) // BLOCK
        fresh = whole[reused:]
        if fresh:
            parent = self._name(whole[reused - 1]) if reused else None
            tokens = _packed(prompt[reused * BLOCK : len(whole) * BLOCK])
            names = [self._name(prefix) for prefix in fresh]
            self.copies.update(fresh)
            self._index.apply(self._endpoint, 0, [Stored(names, parent, tokens, BLOCK)])  # type: ignore[arg-type]

    def drop(self, prefix: tuple[int, ...]) -> None:
        """One copy."""
        self.copies[prefix] -= 1
        self.copies += Counter()
        self._index.apply(self._endpoint, 0, [Removed([self._name(prefix)])])  # type: ignore[list-item]

    def hit(self, prompt: Sequence[int]) -> int:
        """Tokens it would reuse."""
        found = 0
        for prefix in self.prefixes(prompt)[: (len(prompt) - 1) // BLOCK]:
            if not self.copies[prefix]:
                break
            found += BLOCK
        return found


@given(st.data())
def test_it_says_what_the_engines_find(data: st.DataObject) -> None:
    """Whatever two engines serve and drop, the index tells for every prompt what each would reuse of it."""
    index = _new()
    engines = [PlainEngine(index, HERE, 1), PlainEngine(index, THERE, 2)]
    prompts = data.draw(_PROMPTS)
    for _ in range(data.draw(st.integers(1, 12))):
        engine = data.draw(st.sampled_from(engines))
        dropped = sorted(engine.copies)
        if dropped and data.draw(st.booleans()):
            engine.drop(data.draw(st.sampled_from(dropped)))
        else:
            engine.serve(data.draw(st.sampled_from(prompts)))
        for prompt in prompts:
            assert _held(index, prompt, HERE, THERE) == [one.hit(prompt) for one in engines]
    assert len(index) == sum(len(one.copies) for one in engines)


_HASHES = st.integers(0, 5)
_EVENTS = st.lists(
    st.one_of(
        st.builds(
            _stored,
            st.lists(st.integers(0, 2), max_size=4),
            _HASHES,
            parent=st.none() | _HASHES,
            tier=st.sampled_from(Tier),
            group=st.integers(0, 1),
            block_tokens=st.integers(0, 3),
        ),
        st.builds(Removed, st.lists(_HASHES, max_size=3), st.sampled_from(Tier), st.integers(0, 1)),
        st.just(Cleared()),
    ),
    max_size=30,
)


@given(_EVENTS, st.integers(1, 4))
def test_nonsense_does_no_harm(events: list[Stored | Removed | Cleared], max_blocks: int) -> None:
    """Events in no sensible order raise nothing, keep to the limit, and leave nothing behind when the endpoint goes."""
    index = _new(max_blocks)
    for event in events:
        index.apply(HERE, 0, [event])
        assert len(index) <= max_blocks
        assert _held(index, [0, 1, 2, 0, 1])[0] <= 4
    index.remove(HERE)
    assert len(index) == 0
    assert not any(index._holders)
