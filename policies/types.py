"""The words the whole house speaks: what a request is, what a decision is, why something was refused.

Plain data only. Nothing here reads a clock, draws a number or knows a protocol. What every request makes anew writes
its constructor out: compiled (hatch_build.py), that takes 0.1 us, where the one that dataclass makes takes 1.3 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Slots: TypeAlias = npt.NDArray[np.intp]
"""Endpoint slots, shape (n,): indices into the arrays of FleetState."""
Floats: TypeAlias = npt.NDArray[np.float64]
"""One figure per candidate, shape (n,)."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""One verdict per candidate, shape (n,)."""


def _is_compiled() -> bool:
    return not isinstance(_is_compiled, FunctionType)


_MOST_LISTED = 4_096 if _is_compiled() else 48
"""Up to so many endpoints loops over floats are faster than arrays, whose every operation costs a microsecond, and
several where little of numpy is in the processor's caches. Compiled they are so as far as anybody has endpoints."""


@dataclass(init=False)
class ListedSlots:
    """Slots for loops, as a list in rising order. Where they are neighbours `end` is behind the last, else 0."""

    listed: list[int]
    begin: int
    end: int
    _bits: int

    def __init__(self, listed: list[int]) -> None:
        self.listed = listed
        self.begin = listed[0]
        last = listed[-1] + 1
        self.end = last if last - listed[0] == len(listed) else 0
        self._bits = 0

    @property
    def bits(self) -> int:
        """The same as the bits of a number."""
        if not self._bits:
            self._bits = sum([1 << slot for slot in self.listed])
        return self._bits


def listed_slots(slots: Slots) -> ListedSlots | None:
    """Of slots that rise; None where they are too many for loops, or none."""
    return ListedSlots(slots.tolist()) if 0 < len(slots) <= _MOST_LISTED else None


def highest(figures: list[float]) -> float:
    """What max() gives; compiled in a tenth of its time."""
    most = figures[0]
    for figure in figures:
        if figure > most:
            most = figure
    return most


def one_by_one(figures: npt.NDArray[Any]) -> memoryview[Any]:
    """The same figures, to be read and written one at a time: as Python's own numbers, in half of numpy's time."""
    view: Any = figures.data
    return cast("memoryview[Any]", view)


Filtered: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""Per filter that removed something: its name and the addresses removed."""


class Choice(StrEnum):
    """What told for the endpoint chosen."""

    ONLY_CANDIDATE = "only_candidate"
    AFFINITY = "affinity"
    """It holds as much of the prompt as any other."""
    SPILLED = "spilled"
    """Another holds more of the prompt, but was passed over for its load."""
    LOAD = "load"
    """Nobody holds any of the prompt."""


class Fallback(StrEnum):
    """What a decision had to do without. Each is counted: a silent fallback is a bug."""

    STALE_FIGURES = "stale_figures"
    CONTEXT_ESTIMATE = "context_estimate"
    RETRY_BUDGET = "retry_budget"
    """It will not be tried again if it fails: as much is retried already as may be."""
    PREFIX_LATE = "prefix_late"
    """The exact match was not known within its budget, so our own book-keeping answered; as in the next four."""
    PREFIX_SENSES_DOWN = "prefix_senses_down"
    PREFIX_NO_TOKENS = "prefix_no_tokens"
    PREFIX_TOO_LONG = "prefix_too_long"
    PREFIX_CROWDED = "prefix_crowded"
    CANNOT_WAIT = "cannot_wait"
    """Its gateway may give up before a queue is through, so it was sent on at once."""
    PREFIX_BLIND = "prefix_blind"
    """Of some candidates it is not known all what they hold; for these our own book-keeping answered."""


class Kind(StrEnum):
    """What the client wants from the engine."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    MESSAGE = "message"
    """Anthropic's API."""
    EMBEDDING = "embedding"
    RERANK = "rerank"
    POOLING = "pooling"
    TOKENIZE = "tokenize"
    AUDIO = "audio"
    REALTIME = "realtime"
    OTHER = "other"
    """Routed by its path alone."""


class Reason(StrEnum):
    """Why a decision or refusal came out as it did: the bounded label set of metrics and the decision log."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    EMPTY_BODY = "empty_body"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    UNSUPPORTED_CONTENT_TYPE = "unsupported_content_type"
    UNSUPPORTED_BODY_MODE = "unsupported_body_mode"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NO_CREDENTIALS = "no_credentials"
    WRONG_CREDENTIALS = "wrong_credentials"
    KEYS_UNREADABLE = "keys_unreadable"
    UNKNOWN_PATH = "unknown_path"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_RESPONSE = "unknown_response"
    ENGINE_ADMIN = "engine_admin"
    BODY_TOO_LARGE = "body_too_large"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_MANY_ITEMS = "too_many_items"
    PATTERN = "pattern"
    CLIENT_REQUESTS = "client_requests"
    CLIENT_CONCURRENCY = "client_concurrency"
    NO_READY_ENDPOINT = "no_ready_endpoint"
    ALL_BUSY = "all_busy"
    MODEL_BREAKER = "model_breaker"
    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_LARGE_BODIES = "too_many_large_bodies"
    QUOTA_REQUESTS = "quota_requests"
    QUOTA_TOKENS = "quota_tokens"
    QUOTA_CONCURRENCY = "quota_concurrency"
    QUOTA_BUDGET = "quota_budget"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DUPLICATE_UNDER_WAY = "duplicate_under_way"
    DUPLICATE_ANSWERED = "duplicate_answered"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL_ERROR = "internal_error"


_LONGEST_RETRY_S = 86_400.0


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for a Retry-After, of a wait that is at least that long: from one to a day."""
    return math.ceil(min(max(wait_s, 1.0), _LONGEST_RETRY_S))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not routed, as a value. `type` and `param` are OpenAI's error fields.

    `asked_model`: what the client named, if the request was read so far.
    """

    status: int
    type: str
    message: str
    reason: Reason
    param: str | None = None
    retry_after_s: int | None = None
    asked_model: str | None = None


@dataclass(frozen=True, slots=True)
class Precise:
    """What is known of a prompt from the engines: its exact length, and what each address holds of it, in tokens.

    `blind`: addresses that may hold more.
    """

    input_tokens: int
    tokens: Mapping[str, int]
    blind: frozenset[str] = frozenset()

    def sees(self, address: str) -> bool:
        """Whether all is known that the address holds."""
        return address in self.tokens and address not in self.blind


@dataclass(init=False)
class InferenceRequest:
    """One inference request as the policies see it.

    `prompt` is the raw JSON of the API's prompt fields (`tools`, then `messages`, say), never re-serialised.
    `model` is the name the engines serve; `asked_model` the name the client sent (an alias, perhaps).
    `block_hashes[i]` names the prompt up to the end of block i; `block_tokens[i]` is the estimate for that block alone.
    `choices`: answers wanted at once, of all prompts together, each of up to `max_tokens`.
    `subset`: the only addresses allowed, as `IP:port` or `IP`; None allows all.
    `tenant`: who asks, from a source that the config trusts; None where it trusts none.
    `precise`: what the engines hold of it, where that was asked and is known; `without`: why not, where it is not.
    `class_name`: of the pool's queue, None where it has none; `priority`: within it, lower goes sooner. `slo_ttft_s`:
    how soon the client wants its first token. `may_wait`: it waits where there is no room for it, so nobody is too busy
    for it. `policy`: by which it is placed, of those that its pool has for some
    tenants; None for the pool's own.
    """

    kind: Kind
    model: str
    asked_model: str
    input_tokens: int
    stream: bool
    max_tokens: int | None
    choices: int
    prompt: bytes | memoryview
    block_hashes: Sequence[int]
    block_tokens: Sequence[int]
    session_key: str | None
    cache_salt: str | None
    excluded: frozenset[str]
    subset: tuple[str, ...] | None
    tenant: str | None
    precise: Precise | None
    without: tuple[Fallback, ...]
    policy: str | None
    class_name: str | None
    priority: int
    slo_ttft_s: float | None
    may_wait: bool

    def __init__(
        self,
        kind: Kind,
        model: str,
        asked_model: str,
        input_tokens: int,
        *,
        stream: bool = False,
        max_tokens: int | None = None,
        choices: int = 1,
        prompt: bytes | memoryview = b"",
        block_hashes: Sequence[int] = (),
        block_tokens: Sequence[int] = (),
        session_key: str | None = None,
        cache_salt: str | None = None,
        excluded: frozenset[str] = frozenset(),
        subset: tuple[str, ...] | None = None,
        tenant: str | None = None,
        precise: Precise | None = None,
        without: tuple[Fallback, ...] = (),
        policy: str | None = None,
        class_name: str | None = None,
        priority: int = 0,
        slo_ttft_s: float | None = None,
        may_wait: bool = False,
    ) -> None:
        self.kind = kind
        self.model = model
        self.asked_model = asked_model
        self.input_tokens = input_tokens
        self.stream = stream
        self.max_tokens = max_tokens
        self.choices = choices
        self.prompt = prompt
        self.block_hashes = block_hashes
        self.block_tokens = block_tokens
        self.session_key = session_key
        self.cache_salt = cache_salt
        self.excluded = excluded
        self.subset = subset
        self.tenant = tenant
        self.precise = precise
        self.without = without
        self.policy = policy
        self.class_name = class_name
        self.priority = priority
        self.slo_ttft_s = slo_ttft_s
        self.may_wait = may_wait


@dataclass(init=False)
class Ranking:
    """What a picker makes of the scores: slots in order of preference, and the working for the explanation.

    `first`: where the first in `order` stands among the `candidates`; `best_score`: its score. `working` tells scores
    and parts, all aligned with `candidates`, not with `order`, of figures that never change. It is asked only where
    somebody reads the explanation, maybe in another thread: of most decisions nobody does.
    """

    order: Sequence[int]
    candidates: Slots
    first: int
    best_score: float
    working: Callable[[], tuple[Floats, dict[str, Floats]]]

    def __init__(
        self,
        order: Sequence[int],
        candidates: Slots,
        first: int,
        best_score: float,
        working: Callable[[], tuple[Floats, dict[str, Floats]]],
    ) -> None:
        self.order = order
        self.candidates = candidates
        self.first = first
        self.best_score = best_score
        self.working = working

    @property
    def scores(self) -> Floats:
        """One per candidate, the highest wins; shape (n,)."""
        return self.working()[0]

    @property
    def parts(self) -> dict[str, Floats]:
        """What the scores are made of, each of shape (n,)."""
        return self.working()[1]


@dataclass(init=False)
class Decision:
    """Where a request goes, and everything needed to explain it afterwards.

    `order` holds up to `endpoint_list_length` slots, best first; `addresses` are theirs. `fallbacks` says on what less
    than full knowledge it was made.
    `matched_tokens` is aligned with `ranking.candidates`. `filtered` names, per filter, the addresses it removed.
    `slot_addresses[slot]` names every slot as it was then: a slot may belong to another address by the time it is read.
    `precise`: matches are what the engines report; else our own book-keeping's. `waited_s`: how long it was held before
    that; `detour_s`: what its place costs more than the one it would have chosen, had that had room.
    """

    pool: str
    policy: str
    choice: Choice
    order: tuple[int, ...]
    addresses: tuple[str, ...]
    matched_tokens: Iterable[float]
    chosen_matched_tokens: int
    ranking: Ranking
    filtered: Filtered
    slot_addresses: tuple[str | None, ...]
    fallbacks: tuple[Fallback, ...]
    precise: bool
    waited_s: float
    detour_s: float

    def __init__(
        self,
        pool: str,
        policy: str,
        choice: Choice,
        order: tuple[int, ...],
        addresses: tuple[str, ...],
        matched_tokens: Iterable[float],
        chosen_matched_tokens: int,
        ranking: Ranking,
        filtered: Filtered,
        slot_addresses: tuple[str | None, ...],
        *,
        fallbacks: tuple[Fallback, ...] = (),
        precise: bool = False,
        waited_s: float = 0.0,
        detour_s: float = 0.0,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.choice = choice
        self.order = order
        self.addresses = addresses
        self.matched_tokens = matched_tokens
        self.chosen_matched_tokens = chosen_matched_tokens
        self.ranking = ranking
        self.filtered = filtered
        self.slot_addresses = slot_addresses
        self.fallbacks = fallbacks
        self.precise = precise
        self.waited_s = waited_s
        self.detour_s = detour_s


@dataclass(init=False)
class Promise:
    """What a prefix index promised of one prompt, to be compared with what the engine found (calibration.py).

    `stay`: of the endpoint's cache, which was emptied so often. `pinned_tokens`: in use by others then. `parts`: what
    lay behind it at rest, as how deep it lay and how many tokens it had.
    """

    stay: int
    pinned_tokens: int
    parts: tuple[tuple[int, int], ...]

    def __init__(
        self,
        stay: int,
        pinned_tokens: int,
        parts: tuple[tuple[int, int], ...],
    ) -> None:
        self.stay = stay
        self.pinned_tokens = pinned_tokens
        self.parts = parts


@dataclass(init=False)
class Reservation:
    """What one request takes from one endpoint while it runs. Given back exactly once, by its Flight.

    The ledger's marks: `work` is its prefill, `backlog` what was to be done before it, in tokens of a short prompt;
    `pending` while its first token is not known to have come; `crowded`: the engine had no room for it yet.
    `class_name`: counts as one of this class, with `claimed_tokens` of the KV cache. The index's: `pinned` for it are
    these blocks; `promise`: what it promised, where that is to be compared. `side_by_side`: answers made at once.
    """

    slot: int
    generation: int
    prompt_tokens: int
    uncached_tokens: int
    work: float
    backlog: float
    pending: bool
    crowded: bool
    class_name: str | None
    claimed_tokens: float
    pinned: Any
    promise: Promise | None
    side_by_side: float

    def __init__(
        self,
        slot: int,
        generation: int,
        prompt_tokens: int,
        uncached_tokens: int,
        *,
        work: float = 0.0,
        backlog: float = 0.0,
        pending: bool = False,
        crowded: bool = False,
        class_name: str | None = None,
        claimed_tokens: float = 0.0,
        pinned: Any = None,  # noqa: ANN401 - a Pinned of prefix_index.py, which imports these words
        promise: Promise | None = None,
        side_by_side: float = 1.0,
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.work = work
        self.backlog = backlog
        self.pending = pending
        self.crowded = crowded
        self.class_name = class_name
        self.claimed_tokens = claimed_tokens
        self.pinned = pinned
        self.promise = promise
        self.side_by_side = side_by_side

    @property
    def cached_tokens(self) -> int:
        """What the endpoint was believed to hold of the prompt before this request."""
        return self.prompt_tokens - self.uncached_tokens
