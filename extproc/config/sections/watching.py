"""How engines are watched: figures, model lists, trials."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from extproc.config.sections.fields import LAST_PORT, Model, Positive


class Dcgm(Model):
    """NVIDIA's DCGM exporter on every endpoint's host."""

    port: Annotated[int, Field(gt=0, le=LAST_PORT)] = 9400
    interval_ms: Positive = Field(1_000, description="between two reads; an exporter measures every 30 s by default")


class Scrape(Model):
    """Reading /metrics from every endpoint."""

    interval_ms: Positive = 200
    timeout_ms: Positive = 1_000
    backoff_max_ms: Positive = 5_000
    stale_after_intervals: float = Field(3, gt=0)
    pushes: bool = Field(True, description="listen to engines that push their figures; false reads /metrics alone")
    kv_alarm: float = Field(0.75, gt=0, le=1, description="share of an engine's KV cache in use that raises an alarm")
    dcgm: Dcgm | None = Field(None, description="none unless asked for; `{}` asks for it")


class Probe(Model):
    """Asking every endpoint for its model list; and one that takes no traffic for a generation of one token."""

    interval_ms: Positive = 500
    timeout_ms: Positive = 2_000
    failed_probes: Positive = 3
    failed_requests: Positive = 3
    cooldown_ms: int = Field(
        5_000,
        ge=0,
        le=60_000,
        description="failed requests keep an endpoint out for this, doubled with each fall in a row",
    )
    trial: bool = Field(True, description="an endpoint takes traffic only once a generation of ours was answered")
    trial_timeout_ms: Positive = 30_000
    no_progress_ms: Positive = Field(10_000, description="an engine with requests that does no step for this is stuck")
    warm_up_requests: int = Field(
        0, ge=0, le=1_000_000, description="a cold engine's share of the traffic grows over so many"
    )
