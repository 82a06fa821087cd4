"""Which metric families mean what: one table per engine's dialect, newest name first. No code that reads a page.

A name may select by one label, `family{label=value}`. Counters stand without `_total`, which may follow. Names in use
before stay as long as engines in the field have them; where a page has both, the newer one counts.

The figures:

- `waiting`, `running`: requests; `swapped`: pushed out of a full cache, waiting to get in again; `admitted`: both
  running and waiting, of engines that do not say `waiting`
- `kv_used`: share of the cache that requests hold, 0..1; `kv_used_blocks` where only these are told
- `kv_tokens`: the cache's size; or `kv_blocks` and `block_tokens`
- `queried`, `hits`: prompt tokens looked up in the prefix cache and found there; `hit_ratio` where only that is told
- `prefilled`, `generated`: tokens; `preempted`: requests; `finished`: requests, by the dialect's `reason_label`
- `steps`: of the engine. A dialect has it only if it grows while a request is served: one that has requests and does no
  step is stuck
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """One family, or those of its lines that have a `label` with this value."""

    family: bytes
    label: bytes = b""
    value: bytes = b""

    @classmethod
    def of(cls, name: str) -> Source:
        """From its name in the tables."""
        family, _, selected = name.encode().rstrip(b"}").partition(b"{")
        label, _, value = selected.partition(b"=")
        return cls(family, label, value)

    def takes(self, labels: bytes) -> bool:
        """Whether a line with these labels is one of it."""
        return not self.label or self.label + b'="' + self.value + b'"' in labels


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of engine names its figures.

    `prefix` begins every family. `engine_label` tells engines behind one page apart; lines alike in it are the same
    figure told by several ranks, of which the largest counts. `labelled`: families that speak through their labels,
    by what they tell of.
    """

    name: str
    prefix: str
    engine_label: str
    figures: Mapping[str, tuple[str, ...]]
    reason_label: str = "finished_reason"
    labelled: Mapping[str, str] = field(default_factory=dict)
    sources: dict[str, tuple[Source, ...]] = field(init=False)
    line: re.Pattern[bytes] = field(init=False)
    """Begins with a constant, for which `re` looks fast: six times as fast as `^` before any of the names."""

    def __post_init__(self) -> None:
        sources = {figure: tuple(map(Source.of, names)) for figure, names in self.figures.items()}
        families = {one.family for many in sources.values() for one in many}
        families |= {family.encode() for family in self.labelled.values()}
        after = len(self.prefix)
        names = b"|".join(re.escape(family[after:]) for family in sorted(families))
        prefix = re.escape(b"\n" + self.prefix.encode())
        pattern = re.compile(prefix + rb"(" + names + rb")(?:_total)?(\{[^\n]*\})? ([^\s#]+)")
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "line", pattern)


VLLM = Dialect(
    name="vllm",
    prefix="vllm:",
    engine_label="engine",
    figures={
        "waiting": ("vllm:num_requests_waiting",),
        "swapped": ("vllm:num_requests_swapped",),  # V0 only
        "running": ("vllm:num_requests_running",),
        "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # before 0.10
        "queried": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),  # before 0.9; at first in blocks
        "hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "hit_ratio": ("vllm:gpu_prefix_cache_hit_rate",),  # V0 only; -1 where it has none
        "prefilled": ("vllm:prompt_tokens",),
        "generated": ("vllm:generation_tokens",),
        "preempted": ("vllm:num_preemptions",),
        "finished": ("vllm:request_success",),
        "steps": ("vllm:iteration_tokens_total_count",),
    },
    labelled={"cache_config": "vllm:cache_config_info", "adapters": "vllm:lora_requests_info"},
)

SGLANG = Dialect(
    name="sglang",
    prefix="sglang:",
    engine_label="dp_rank",
    figures={
        "waiting": ("sglang:num_queue_reqs",),
        "running": ("sglang:num_running_reqs",),
        "kv_used": ("sglang:token_usage",),
        "kv_tokens": ("sglang:max_total_num_tokens",),
        "queried": ("sglang:prompt_tokens",),
        "hits": ("sglang:cached_tokens",),
        "hit_ratio": ("sglang:cache_hit_rate",),
        "prefilled": ("sglang:prompt_tokens",),
        # `generation_tokens` grows only as requests end
        "generated": ("sglang:realtime_tokens{mode=decode}", "sglang:generation_tokens"),
        "preempted": ("sglang:num_retracted_requests",),
    },
)

TRTLLM_SERVE = Dialect(
    name="trtllm-serve",
    prefix="trtllm_",
    engine_label="",
    figures={
        "waiting": ("trtllm_num_requests_waiting", "trtllm_server_queue_length"),
        "running": ("trtllm_num_requests_running", "trtllm_num_active_requests"),
        "kv_used": ("trtllm_kv_cache_utilization",),
        "kv_blocks": ("trtllm_kv_cache_max_blocks",),
        "block_tokens": ("trtllm_kv_cache_tokens_per_block",),
        "queried": ("trtllm_prompt_tokens",),
        "hits": ("trtllm_prompt_cached_tokens",),
        "hit_ratio": ("trtllm_kv_cache_hit_rate",),
        "prefilled": ("trtllm_prompt_tokens",),
        "generated": ("trtllm_generation_tokens",),
        "finished": ("trtllm_request_success",),
    },
)

TRITON_TRTLLM = Dialect(
    name="triton-trtllm",
    prefix="nv_trt_llm_",
    engine_label="model",
    figures={
        "waiting": ("nv_trt_llm_request_metrics{request_type=waiting}",),
        "admitted": ("nv_trt_llm_request_metrics{request_type=active}",),
        "running": ("nv_trt_llm_request_metrics{request_type=scheduled}",),
        "kv_used": ("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",),
        "kv_used_blocks": ("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=used}",),
        "kv_blocks": ("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",),
        "block_tokens": ("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",),
        "steps": ("nv_trt_llm_general_metrics{general_type=iteration_counter}",),
    },
)

DIALECTS = (VLLM, SGLANG, TRTLLM_SERVE, TRITON_TRTLLM)
