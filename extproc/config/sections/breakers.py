"""When an endpoint, a model or a zone fails so often that it is better left alone for a while."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from extproc.config.sections.fields import Model, Positive, Seconds
from policies.admission.breakers import BreakerSpec

_Ratio = Annotated[float, Field(ge=0, lt=1)]


class _Errors(Model):
    """What all of them have: how many errors are too many, and for how long that is remembered."""

    error_ratio: _Ratio | None = Field(None, description="share of failed requests; 4xx and clients that left are none")
    window_s: Seconds = Field(120.0, description="of the requests of so long")
    least_requests: Positive = Field(20, description="fewer tell nothing")
    open_s: Seconds = Field(180.0, description="the rest, before it is tried again")

    @property
    def spec(self) -> BreakerSpec | None:
        """The same for the breaker itself; None where no share of errors is too many."""
        if self.error_ratio is None:
            return None
        return BreakerSpec(self.error_ratio, self.window_s, self.least_requests, self.open_s)


class EndpointBreaker(_Errors):
    """One endpoint: out after too many errors, given less after timeouts, passed over while it is busy."""

    error_ratio: _Ratio | None = 0.1
    most_out: float = Field(0.5, gt=0, le=1, description="of a pool's endpoints, for errors to take out another")
    timeouts: Positive | None = Field(3, description="in a row, degrade it; none: they count as failed requests")
    most_requests: Positive | None = Field(None, description="what an endpoint bears at once; none: not known")
    queue_share: float | None = Field(
        0.9, gt=0, le=1, description="with more than this share of them it counts as busy"
    )

    @property
    def busy_above(self) -> float:
        """Requests at one endpoint; with more it is busy."""
        if self.most_requests is None or self.queue_share is None:
            return float("inf")
        return self.most_requests * self.queue_share


class ModelBreaker(_Errors):
    """A pool, whose models are refused at once instead of being tried."""

    error_ratio: _Ratio | None = 0.3
    open_s: Seconds = 30.0
    all_busy: bool = Field(True, description="also while every endpoint is busy, as `endpoint` tells it")


class ZoneBreaker(_Errors):
    """A zone, whose endpoints are passed over while another has any."""

    error_ratio: _Ratio | None = 0.05
    least_requests: Positive = 50


class Breakers(Model):
    """Each of them can be switched off with `null`, as a whole or what it goes by."""

    endpoint: EndpointBreaker | None = EndpointBreaker()
    model: ModelBreaker | None = ModelBreaker()
    zone: ZoneBreaker | None = ZoneBreaker()
