"""Other routers' published rules, with their own defaults and index sizes: to compare with, or to move over from.

Each is a formula over figures that Pointsman has for every policy: the prefix index, requests and tokens in flight,
prompts not yet prefilled, scraped queue and KV use. Not here: what the projects do around their rule (their hashing,
trees, metrics loops, bugs), so a comparison is of rules. Where a rule knows only "the least loaded" or "a holder", the
order of the rest, which is asked for a list to fail over along, is by load.

Sources, as read in August 2026: vllm-router 0.1.17 and sglang-router 0.3.2 (cache_aware), smg 1.13 (cache_aware),
AIBrix (prefix-cache, values of its shipped manifests), llm-d-router (weights 2:2:3, optimized-baseline), Dynamo
(KV router), LMetric (arXiv 2603.15202), Preble (E2, arXiv 2407.00023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from policies.placement.policy import FormulaSpec, Scored
from policies.placement.view import View
from policies.types import Floats, Mask

Weight = Annotated[float, Ge(0), Le(1e6)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAwareSpec(FormulaSpec):
    """vllm-router and sglang-router: the longest prefix, unless the fleet is out of balance.

    Out of balance: the most loaded has more than `balance_abs_threshold` requests more than the least loaded, and more
    than `balance_rel_threshold` times as many. Then, and where no endpoint holds more than `cache_threshold` of the
    prompt, the least loaded. The index: 2^25 characters per worker.
    """

    kind: Literal["cache_aware"] = "cache_aware"
    cache_threshold: Share = 0.3
    balance_abs_threshold: Annotated[int, Ge(0)] = 64
    balance_rel_threshold: Annotated[float, Ge(1), Le(1e6)] = 1.5
    index_tokens: Annotated[int, Gt(0)] | None = 8_388_608

    def scored(self, view: View) -> Scored:
        """Load; holders first, whatever theirs is, where the rule goes by the cache."""
        load = view.in_flight
        most, least = load.max(), load.min()
        imbalanced = most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least
        holders = _holders(view, self.cache_threshold)
        if imbalanced or not holders.any():
            return _lowest({"load": load})
        return _lowest({"miss": np.where(holders, 0.0, 1 + load)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SmgCacheAwareSpec(FormulaSpec):
    """smg: the least loaded holder of the longest prefix, unless that one is overloaded.

    Overloaded: more than `balance_rel_threshold` times the mean load, and above the mean by more than two standard
    deviations (at least 4, at most `balance_abs_threshold` requests). Then, and where no endpoint holds more than
    `cache_threshold` of the prompt, the least loaded. The index: 2^26 characters.
    """

    kind: Literal["smg_cache_aware"] = "smg_cache_aware"
    cache_threshold: Share = 0.3
    balance_abs_threshold: Annotated[int, Ge(0)] = 64
    balance_rel_threshold: Annotated[float, Ge(1), Le(1e6)] = 1.5
    index_tokens: Annotated[int, Gt(0)] | None = 16_777_216

    def scored(self, view: View) -> Scored:
        """Load; the least loaded holder before all others, unless it is overloaded."""
        load = view.in_flight
        holders = _holders(view, self.cache_threshold)
        chosen = float(load[holders].min()) if holders.any() else np.inf
        if self._overloaded(chosen, load):
            return _lowest({"load": load})
        return _lowest({"miss": np.where(holders & (load == chosen), 0.0, 1 + load)})

    def _overloaded(self, chosen: float, load: Floats) -> bool:
        mean = float(load.mean())
        slack = min(float(self.balance_abs_threshold), max(_SMG_LEAST_SLACK, 2 * float(load.std())))
        return chosen > self.balance_rel_threshold * mean and chosen > mean + slack


_SMG_LEAST_SLACK = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AibrixPrefixSpec(FormulaSpec):
    """AIBrix: the longest prefix, in whole per cent, among those whose load is not unusual; then the fewer requests.

    Where the loads are more than `imbalance_requests` apart, or no holder is within `deviations` standard deviations
    above the mean, the least loaded. Its code has 8 and 1; every manifest it ships has 16 and 2. The index: 200,000
    blocks of 128 characters.
    """

    kind: Literal["aibrix_prefix"] = "aibrix_prefix"
    imbalance_requests: Annotated[int, Ge(0)] = 16
    deviations: Annotated[float, Ge(0), Le(1e6)] = 2.0
    index_tokens: Annotated[int, Gt(0)] | None = 6_400_000

    def scored(self, view: View) -> Scored:
        """Load, and a load beyond all others' for each per cent of the prompt that an eligible holder lacks."""
        load = view.in_flight
        most = float(load.max())
        usual = load <= load.mean() + self.deviations * load.std() + _ROUNDING
        holders = usual & (view.matched_tokens > 0)
        if most - load.min() > self.imbalance_requests or not holders.any():
            return _lowest({"load": load})
        missing = np.where(holders, 100.0 - np.floor(100 * _share_held(view)), 101.0)
        return _lowest({"load": load, "miss": missing * (most + 1)})


_ROUNDING = 1e-9
"""Equal loads have a mean that may fall short of them by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmDSpec(FormulaSpec):
    """llm-d: weighted scores of the queue (scraped), the KV cache (scraped) and the share of the prompt held.

    The queue is stretched between the shortest and the longest, as llm-d does: queues of 0 and 1 are as far apart as 0
    and 500. It lives by how fresh the figures are: llm-d scrapes every 50 ms. The index: 31,250 blocks of 64 tokens.
    """

    kind: Literal["llm_d"] = "llm_d"
    queue_weight: Weight = 2.0
    kv_weight: Weight = 2.0
    prefix_weight: Weight = 3.0
    index_tokens: Annotated[int, Gt(0)] | None = 2_000_000

    def scored(self, view: View) -> Scored:
        """The weighted sum."""
        state, slots = view.state, view.slots
        waiting = view.fresh_or(state.waiting[slots], view.in_flight)
        used = view.fresh_or(state.kv_used[slots], view.kv_claimed)
        parts = {
            "queue": self.queue_weight * _stretched(waiting),
            "kv": self.kv_weight * (1 - used),
            "prefix": self.prefix_weight * _share_held(view),
        }
        return sum(parts.values(), np.zeros(len(slots))), parts


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoKvSpec(FormulaSpec):
    """Dynamo: prompt tokens still to be prefilled plus tokens held by requests in flight; lowest wins.

    Dynamo reads the engines' KV events by default; with this index, sized as the engine's cache, it goes by our own
    book-keeping instead. Temperature 0, no decay, as by default.
    """

    kind: Literal["dynamo_kv"] = "dynamo_kv"
    overlap_credit: Weight = 1.0
    prefill_load_scale: Weight = 1.0

    def scored(self, view: View) -> Scored:
        """The cost, negated."""
        prompt = view.request.input_tokens
        waiting = view.ledger.waiting_tokens(view.slots)
        prefill = np.maximum(waiting + prompt - self.overlap_credit * view.matched_tokens, 0.0)
        return _lowest({"prefill": self.prefill_load_scale * prefill, "decode": view.prompt_tokens_in_flight + prompt})


@dataclass(frozen=True, slots=True, kw_only=True)
class LmetricSpec(FormulaSpec):
    """LMetric: new prefill tokens times batch size; nothing to set."""

    kind: Literal["lmetric"] = "lmetric"

    def scored(self, view: View) -> Scored:
        """The product, negated."""
        batch = view.in_flight + 1
        return _lowest({"queued": view.ledger.waiting_tokens(view.slots) * batch, "new": _uncached(view) * batch})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrebleE2Spec(FormulaSpec):
    """Preble's E2: exploit the cache where most of the prompt is held, else explore by cost.

    The cost is in tokens: to be prefilled there, and those that running requests read. Preble's windows of three
    minutes and its regression for one model and two GPUs are not copied, nor its rebalancing of hot subtrees.
    """

    kind: Literal["preble_e2"] = "preble_e2"
    decode_weight: Weight = 0.001

    def scored(self, view: View) -> Scored:
        """The cost, negated; the holders of most first where they hold more than half."""
        ledger, slots, held = view.ledger, view.slots, view.matched_tokens
        waiting = ledger.waiting_tokens(slots)
        decoding = np.maximum(view.in_flight - ledger.pending[slots], 0.0)
        read = np.maximum(view.prompt_tokens_in_flight - waiting, 0.0)
        parts = {"prefill": waiting + _uncached(view), "decode": self.decode_weight * decoding * read}
        if 2 * held.max() > view.request.input_tokens:
            worst = (parts["prefill"] + parts["decode"]).max()
            parts["miss"] = np.where(held == held.max(), 0.0, worst + 1)
        return _lowest(parts)


def _lowest(parts: dict[str, Floats]) -> Scored:
    """The lowest sum wins."""
    first, *others = parts.values()
    return -sum(others, first), parts


def _holders(view: View, threshold: float) -> Mask:
    """Who holds the longest prefix, if it is more than `threshold` of the prompt."""
    held = view.matched_tokens
    most = held.max()
    holders: Mask = (held == most) & (most > threshold * view.request.input_tokens)
    return holders


def _share_held(view: View) -> Floats:
    return np.minimum(1.0, view.matched_tokens / max(1, view.request.input_tokens))


def _uncached(view: View) -> Floats:
    return np.maximum(view.request.input_tokens - view.matched_tokens, 0.0)


def _stretched(waiting: Floats) -> Floats:
    """1 for the shortest queue, 0 for the longest; 1 for all where they are equal."""
    most, least = waiting.max(), waiting.min()
    return (most - waiting) / (most - least) if most > least else np.ones(len(waiting))
