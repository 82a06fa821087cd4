"""The `/metrics` page of a simulated engine: the vLLM series a router reads, under their current names."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_adapters.simulator.books import Books
from vllm_adapters.simulator.engine import Engine

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


def render(engine: Engine, books: Books, model: str) -> str:
    """The page. Held answers count as running, though the engine is done with them."""
    labels = {"engine": "0", "model_name": model}
    samples: tuple[tuple[str, str, float], ...] = (
        ("vllm:num_requests_running", "gauge", engine.running + books.held),
        ("vllm:num_requests_waiting", "gauge", engine.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", engine.kv_used),
        ("vllm:prefix_cache_queries_total", "counter", engine.prefix_queries_tokens_total),
        ("vllm:prefix_cache_hits_total", "counter", engine.prefix_hits_tokens_total),
        ("vllm:num_preemptions_total", "counter", engine.preemptions_total),
        ("vllm:prompt_tokens_total", "counter", engine.prompt_tokens_total),
        ("vllm:generation_tokens_total", "counter", engine.generation_tokens_total),
    )
    lines = [_head("process_start_time_seconds", "gauge"), f"process_start_time_seconds {books.started_at_s!r}"]
    for name, kind, value in samples:
        lines += [_head(name, kind), _sample(name, labels, value)]
    lines.append(_head("vllm:request_success_total", "counter"))
    for reason in _FINISHED_REASONS:
        lines.append(
            _sample("vllm:request_success_total", {**labels, "finished_reason": reason}, books.finished[reason])
        )
    lines += [_head("vllm:cache_config_info", "gauge"), _sample("vllm:cache_config_info", _cache_config(engine), 1)]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str) -> str:
    return f"# HELP {name} Simulated.\n# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {float(value)}"


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
