"""vLLM's Prometheus metrics -> the figures routing needs. The only module that knows vLLM's metric names.

A page is about 59 KB; reading it whole with a general parser costs milliseconds of the decision loop. Only the lines
of the families in `_NAMES` are looked at. With data parallelism one page has a line per engine: counts and capacities
are summed, KV usage is averaged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_NAMES = {
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:num_requests_running": "running",
    b"vllm:kv_cache_usage_perc": "kv_used",
    b"vllm:gpu_cache_usage_perc": "kv_used",  # its name before vLLM 0.10
    b"vllm:prefix_cache_queries_total": "prefix_queries",
    b"vllm:prefix_cache_hits_total": "prefix_hits",
    b"process_start_time_seconds": "started_at",
    b"vllm:iteration_tokens_total_count": "steps",
    b"vllm:generation_tokens_total": "generated",
    b"vllm:prompt_tokens_total": "prefilled",
}
_CACHE_CONFIG = b"vllm:cache_config_info"
_ADAPTERS = b"vllm:lora_requests_info"
_LINE = re.compile(
    rb"^(" + b"|".join(re.escape(name) for name in (*_NAMES, _CACHE_CONFIG, _ADAPTERS)) + rb")(\{[^\n]*\})? ([^\s#]+)",
    re.MULTILINE,
)
_LABEL = re.compile(rb'[{,](kv_cache_size_tokens|num_gpu_blocks|block_size)="([^"]{0,40})"')
"""Only the labels that are read, anchored: a general pattern takes minutes over a page made to be slow."""
_ADAPTER_LABEL = re.compile(rb'[{,](max_lora|running_lora_adapters|waiting_lora_adapters)="([^"]{0,65536})"')


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One scrape of one endpoint. Counts are requests, `kv_used` 0..1, capacities tokens; None where not reported.

    `progress`: grows with every step, or where steps are not counted with every token.
    `prefix_queries_tokens`, `prefix_hits_tokens` are counters since the engine's start at `started_at_s` (Unix time).
    The adapters' figures are known together, from an engine that has served one: `max_adapters` is None before.
    """

    waiting: float | None = None
    running: float | None = None
    kv_used: float | None = None
    running_adapters: frozenset[str] = field(default=frozenset(), kw_only=True)
    waiting_adapters: frozenset[str] = field(default=frozenset(), kw_only=True)
    max_adapters: int | None = field(default=None, kw_only=True)
    kv_capacity_tokens: int | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    started_at_s: float | None = None
    progress: float | None = None


class NotMetrics(Exception):
    """The page has none of the families that a vLLM reports."""


def parse_metrics(page: bytes) -> EngineFigures:
    """Read one /metrics page. Raises NotMetrics."""
    values: dict[str, list[float]] = {}
    capacity = 0
    adapters = (-1.0, b"")
    for name, labels, value in _LINE.findall(page):
        if name == _CACHE_CONFIG:
            capacity += _capacity_tokens(labels)
        elif name == _ADAPTERS:
            adapters = max(adapters, (_number(value) or 0.0, labels))
        elif (number := _number(value)) is not None:
            values.setdefault(_NAMES[name], []).append(number)
    if "running" not in values or "waiting" not in values:
        raise NotMetrics("no vllm:num_requests_running and _waiting on the page")
    return EngineFigures(
        waiting=sum(values["waiting"]),
        running=sum(values["running"]),
        **_adapters(adapters[1]),
        kv_used=_mean(values.get("kv_used")),
        kv_capacity_tokens=capacity or None,
        prefix_queries_tokens=_sum(values.get("prefix_queries")),
        prefix_hits_tokens=_sum(values.get("prefix_hits")),
        started_at_s=_sum(values.get("started_at")),
        progress=_sum(values.get("steps") or [*values.get("generated", ()), *values.get("prefilled", ())]),
    )


def _adapters(labels: bytes) -> dict[str, Any]:
    """The adapters that the newest line tells of; nothing without one.

    Lines of earlier moments stay on the page, each with the time it was set as its value. vLLM's waiting set repeats
    the running one and lags behind it in what was measured, so it adds little.
    """
    fields = dict(_ADAPTER_LABEL.findall(labels))
    most = fields.get(b"max_lora", b"")
    if not most.isdigit() or len(most) > _MOST_DIGITS:
        return {}
    return {
        "max_adapters": int(most),
        "running_adapters": _names(fields.get(b"running_lora_adapters", b"")),
        "waiting_adapters": _names(fields.get(b"waiting_lora_adapters", b"")),
    }


_MOST_DIGITS = 6


def _names(joined: bytes) -> frozenset[str]:
    return frozenset(name.strip() for name in joined.decode("utf-8", "replace").split(",") if name.strip())


_LARGEST_FIGURE = 1e18
"""Above any count an engine can reach, and far from where a sum of a page's lines would be infinite."""
_LARGEST_CAPACITY_TOKENS = 1 << 40
"""A trillion tokens of KV cache: what claims more is not believed."""


def _capacity_tokens(labels: bytes) -> int:
    """KV capacity: the engine's own figure if it gives one, else blocks times block size; 0 if neither makes sense."""
    fields = dict(_LABEL.findall(labels))
    try:
        if fields.get(b"kv_cache_size_tokens", b"None") != b"None":
            tokens = int(fields[b"kv_cache_size_tokens"])
        else:
            blocks, block_tokens = int(fields[b"num_gpu_blocks"]), int(fields[b"block_size"])
            tokens = blocks * block_tokens if blocks > 0 else 0
    except (KeyError, ValueError):
        return 0
    return tokens if 0 < tokens <= _LARGEST_CAPACITY_TOKENS else 0


def _number(text: bytes) -> float | None:
    """A count or share, or None: one NaN or infinity would make every score NaN."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= _LARGEST_FIGURE else None


def _sum(values: list[float] | None) -> float | None:
    return sum(values) if values else None


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None
