"""The class that vLLM makes for each engine: a `vllm.stat_logger_plugins` entry point. Hands on; decides nothing.

Works with vLLM 0.32. Whatever it cannot find out is left out, and no trouble of its own reaches the engine.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from .publisher import Publisher, running_publisher
from .settings import log
from .shutdown import watch_shutdown
from .wire import Engine


class PointsmanStatLogger(StatLoggerBase):  # type: ignore[misc] # vLLM is not installed where this is checked
    """One engine's figures, on their way to the process's publisher."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._publisher: Publisher | None = None
        try:
            self._publisher = publisher = running_publisher()
            if publisher is not None:
                _describe(publisher, vllm_config, engine_index)
                _watch_shutdown(publisher)
        except Exception:  # noqa: BLE001 - whatever it is, a server goes before its figures
            log.warning("stats may be incomplete", exc_info=True)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's interface
        engine_idx: int = 0,
        *_: Any,
        **__: Any,
    ) -> None:
        """One step was done."""
        publisher = self._publisher
        if publisher is not None:
            publisher.accumulator.step(engine_idx, scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Said already, when this logger was made."""


def _describe(publisher: Publisher, config: Any, index: int) -> None:
    cache, scheduler = getattr(config, "cache_config", None), getattr(config, "scheduler_config", None)
    capacity = _capacity_tokens(config, cache)
    publisher.accumulator.add_engine(
        Engine(
            index=index,
            max_loras=_whole(getattr(config, "lora_config", None), "max_loras"),
            max_num_seqs=_whole(scheduler, "max_num_seqs"),
            kv_capacity_tokens=capacity,
        )
    )
    memory = _whole(cache, "kv_cache_memory_bytes")
    if memory and capacity:
        publisher.accumulator.kv_bytes_per_token = memory / capacity


def _capacity_tokens(config: Any, cache: Any) -> int | None:
    """Of one engine. vLLM counts the blocks of all of them together."""
    tokens = _whole(cache, "kv_cache_size_tokens")
    blocks, block = _whole(cache, "num_gpu_blocks"), _whole(cache, "block_size")
    if tokens or not (blocks and block):
        return tokens
    engines = _whole(getattr(config, "parallel_config", None), "data_parallel_size") or 1
    return blocks * block // engines


def _whole(section: Any, name: str) -> int | None:
    value = getattr(section, name, None)
    return value if isinstance(value, int) else None


def _watch_shutdown(publisher: Publisher) -> None:
    try:
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError:
        log.warning("this vLLM's shutdown is not seen: draining is not announced")
    else:
        watch_shutdown(AsyncLLM, publisher)
