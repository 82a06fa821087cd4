"""How requests reach the engines: Envoy, its timeouts and its retries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from extproc.config.sections.fields import Model, Positive


class Wire(Model):
    """How we talk to Envoy."""

    endpoint_list: Literal["auto", "list", "single"] = "auto"
    endpoint_list_length: int = Field(3, ge=1, le=8)
    response_headers: tuple[Literal["request_id", "endpoint", "model"], ...] = Field(
        ("request_id",), description="x-pointsman-* headers that clients see"
    )
    access_log_timeout_s: float = Field(
        10, gt=0, le=86_400, allow_inf_nan=False, description="an access-log entry later than this counts as missing"
    )
    hold_s: float = Field(
        0, ge=0, le=600, description="a gateway that does not say how long it waits for us waits so long; 0: no queue"
    )
    strict_pin: bool = Field(True, description="503 when Envoy knows none of the picked addresses, never its choice")


class Timeouts(Model):
    """Limits on upstream time, as Envoy applies them."""

    connect_ms: Positive = 1_000
    stream_idle_s: Positive = Field(900, description="no byte either way for this long ends a stream")
    upstream_idle_s: float = Field(
        4,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="idle upstream connections close after this; vLLM's after 5 s",
    )


class Retries(Model):
    """Envoy's retries, before any byte of the answer reached the client."""

    attempts: int = Field(1, ge=0, le=5)
    statuses: tuple[Annotated[int, Field(ge=500, le=599)], ...] = (502, 503)
