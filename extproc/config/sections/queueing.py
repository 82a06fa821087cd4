"""How requests wait for a pool that has no room for them now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.sections.fields import Model, Name, Positive, Seconds, Share, given_twice, refuse

HOLD_S = 600
"""So long our own Envoy waits for an answer of ours: the deadline is ours to keep and to answer for."""
LONGEST_WAIT_S = 540
"""What is answered later than that nobody may hear."""


class QueueClass(Model):
    """Requests of one kind. A request says with a header which class it belongs to; else it is of the first."""

    name: Name
    weight: float = Field(1.0, ge=1e-6, le=1e6, description="of its turns, beside other classes that wait")
    places: Positive = Field(200, description="requests that may wait")
    max_wait_s: float = Field(30, gt=0, le=LONGEST_WAIT_S, description="then it is answered 503, with a Retry-After")
    overflow: Name | None = Field(None, description="the class that takes what finds no place here; none: 429")
    endpoint_requests: Positive | None = Field(None, description="of this class at one endpoint at once")
    endpoint_kv_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="of an endpoint's KV cache that its requests may take"
    )
    engine_priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="X-Vllm-Priority for the engine, lower is sooner; none: what the client may have"
    )


def _two_classes() -> tuple[QueueClass, ...]:
    return (
        QueueClass(name="real-time", weight=7, places=200, max_wait_s=30, overflow="batch"),
        QueueClass(name="batch", weight=3, places=1_000, max_wait_s=300),
    )


class PoolQueue(Model):
    """Requests that find no room wait here and not inside an engine. `{}` asks for one with two classes."""

    classes: Annotated[tuple[QueueClass, ...], Field(min_length=1, max_length=32)] = Field(
        default_factory=_two_classes, description="the most urgent first"
    )
    order: Literal["arrival", "deadline"] = Field("arrival", description="within a class and a tenant")
    max_bytes: Positive = Field(256 * 1024 * 1024, description="of bodies held")
    min_share: Share = Field(0.2, description="of the turns, for every class that waits")
    most_passed_over: Positive = Field(20, description="turns of others in a row, before a class has its own")
    ageing_s: Seconds = Field(5, description="of waiting, worth one step of priority")
    late_binding: bool = Field(
        True, description="wait for the best endpoint, longer where it saves more; false: go as soon as any has room"
    )
    longest_detour_ms: Positive = Field(
        2_000, description="late binding: no longer wait makes up for more added latency at another endpoint"
    )
    busy_ms: Positive = Field(1_000, description="an endpoint with so much to prefill has no room")
    endpoint_requests: Positive | None = Field(
        None, description="no more at one endpoint at once; none: what `hardware` says of its batch"
    )

    @model_validator(mode="after")
    def _overflows_lead_somewhere(self) -> Self:
        names = [one.name for one in self.classes]
        refuse([*given_twice("class", names), *self._overflow_faults(names)])
        return self

    def _overflow_faults(self, names: list[str]) -> Iterator[str]:
        for one in self.classes:
            if one.overflow == one.name:
                yield f"class {one.name} overflows into itself; name another or leave overflow out"
            elif one.overflow is not None and one.overflow not in names:
                yield f"class {one.name} overflows into {one.overflow!r}; there are: {', '.join(names)}"
