"""How requests reach the engines: Envoy, its timeouts and its retries."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.sections.fields import Model, Positive, Seconds, Share


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


class TotalTimeout(Model):
    """How long an answer may take as a whole: allowance_s + margin * tokens / decode rate, within bounds."""

    allowance_s: Seconds = Field(600, description="for waiting in the engine and for prefill")
    margin: float = Field(1.5, ge=1, le=1_000, description="times what its tokens take at the learned decode rate")
    least_s: Seconds = 600
    most_s: Seconds = Field(14_400, description="also where nothing says how long the answer can get")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.least_s > self.most_s:
            raise ValueError(f"least_s {self.least_s:g} is more than most_s {self.most_s:g}")
        return self


class Timeouts(Model):
    """Limits on upstream time, as Envoy applies them."""

    connect_ms: Positive = 1_000
    first_byte_s: Seconds | None = Field(
        300, description="streamed answers: until the response headers, then another endpoint is tried; null: no limit"
    )
    total: TotalTimeout | None = Field(TotalTimeout(), description="a whole answer, retries included; null: no limit")
    silence_s: Seconds | None = Field(
        None, description="streamed answers: no byte from the engine for this long, first token or later, ends them"
    )
    stream_idle_s: Positive = Field(900, description="no byte either way for this long ends a stream")
    upstream_idle_s: float = Field(
        4,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="idle upstream connections close after this; vLLM's after 5 s",
    )

    @model_validator(mode="after")
    def _first_byte_comes_first(self) -> Self:
        # Envoy passes over a limit for one try that is not below that for all of them
        if self.total is not None and self.first_byte_s is not None and self.first_byte_s >= self.total.least_s:
            raise ValueError(
                f"first_byte_s {self.first_byte_s:g} would have no effect: it must be less than total.least_s, "
                f"{self.total.least_s:g}"
            )
        return self


class Retries(Model):
    """Envoy's retries, before any byte of the answer reached the client."""

    attempts: int = Field(1, ge=0, le=5)
    statuses: tuple[Annotated[int, Field(ge=500, le=599)], ...] = (502, 503)
    idempotency_window_s: Seconds | None = Field(
        600, description="what was answered is not done again under the same Idempotency-Key; null: keys mean nothing"
    )
    budget: Share = Field(0.2, description="of a pool's requests in ten seconds that may be retried; 1: all")
    budget_floor: int = Field(10, ge=0, le=1_000_000, description="retries in ten seconds that always may be")
