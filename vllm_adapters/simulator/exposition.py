"""The `/metrics` page of a simulated engine: the series a router reads, under the names of vLLM or another engine.

Under whatever names, the engine is the same: the dialects are for tests of who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from vllm_adapters.simulator.books import Books
from vllm_adapters.simulator.engine import Engine

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

_Labels: TypeAlias = Mapping[str, str]
_Series: TypeAlias = tuple[str, str, _Labels, float]
"""Name, kind, labels and value; series of one name stand together."""


def render(engine: Engine, books: Books, model: str, dialect: str = "vllm") -> str:
    """The page. Held answers count as running, though the engine is done with them."""
    lines: list[str] = []
    named = ""
    for name, kind, labels, value in _DIALECTS[dialect](engine, books, model):
        if name != named:
            lines += [f"# HELP {name} Simulated.", f"# TYPE {name} {kind}"]
            named = name
        lines.append(_sample(name, labels, value))
    return "\n".join(lines) + "\n"


def _vllm(engine: Engine, books: Books, model: str) -> Iterable[_Series]:
    labels = {"engine": "0", "model_name": model}
    yield "process_start_time_seconds", "gauge", {}, books.started_at_s
    yield "vllm:num_requests_running", "gauge", labels, engine.running + books.held
    yield "vllm:num_requests_waiting", "gauge", labels, engine.waiting
    yield "vllm:kv_cache_usage_perc", "gauge", labels, engine.kv_used
    yield "vllm:prefix_cache_queries_total", "counter", labels, engine.prefix_queries_tokens_total
    yield "vllm:prefix_cache_hits_total", "counter", labels, engine.prefix_hits_tokens_total
    yield "vllm:num_preemptions_total", "counter", labels, engine.preemptions_total
    yield "vllm:prompt_tokens_total", "counter", labels, engine.prompt_tokens_total
    yield "vllm:generation_tokens_total", "counter", labels, engine.generation_tokens_total
    for reason in _FINISHED_REASONS:
        ended = labels | {"finished_reason": reason}
        yield "vllm:request_success_total", "counter", ended, books.finished[reason]
    yield "vllm:cache_config_info", "gauge", _cache_config(engine), 1


def _sglang(engine: Engine, books: Books, model: str) -> Iterable[_Series]:
    labels = {"engine_type": "unified", "model_name": model, "pp_rank": "0", "tp_rank": "0"}
    yield "sglang:num_running_reqs", "gauge", labels, engine.running + books.held
    yield "sglang:num_queue_reqs", "gauge", labels, engine.waiting
    yield "sglang:token_usage", "gauge", labels, engine.kv_used
    yield "sglang:max_total_num_tokens", "gauge", labels, engine.cache.capacity * engine.block_size_tokens
    yield "sglang:prompt_tokens_total", "counter", {"model_name": model}, engine.prefix_queries_tokens_total
    cached = {"cache_source": "device", "model_name": model}
    yield "sglang:cached_tokens_total", "counter", cached, engine.prefix_hits_tokens_total
    decoded = labels | {"mode": "decode"}
    yield "sglang:realtime_tokens_total", "counter", decoded, engine.generation_tokens_total


def _triton(engine: Engine, books: Books, _: str) -> Iterable[_Series]:
    labels = {"model": "tensorrt_llm", "version": "1"}
    running = engine.running + books.held
    for kind, requests in (("active", running + engine.waiting), ("scheduled", running), ("waiting", engine.waiting)):
        yield "nv_trt_llm_request_metrics", "gauge", labels | {"request_type": kind}, requests
    cache = engine.cache
    blocks = (("max", cache.capacity), ("used", cache.used), ("tokens_per", engine.block_size_tokens))
    for kind, count in blocks:
        yield "nv_trt_llm_kv_cache_block_metrics", "gauge", labels | {"kv_cache_block_type": kind}, count


_DIALECTS: Mapping[str, Callable[[Engine, Books, str], Iterable[_Series]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "triton-trtllm": _triton,
}
DIALECTS = tuple(_DIALECTS)


def _sample(name: str, labels: _Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _cache_config(engine: Engine) -> dict[str, str]:
    blocks, size_tokens = engine.cache.capacity, engine.block_size_tokens
    return {
        "block_size": str(size_tokens),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
        "kv_cache_size_tokens": str(blocks * size_tokens),
        "num_gpu_blocks": str(blocks),
        "prefix_caching_hash_algo": "xxhash",
    }
