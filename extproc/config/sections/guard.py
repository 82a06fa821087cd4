"""What protects the fleet from its clients: how much each may ask for, and what no prompt may hold."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.sections.callers import Rate
from extproc.config.sections.fields import Model, Name, Pattern, Positive

_MOST_PATTERNS = 100
"""Each is a search of every prompt, and a series of a metric."""


class GuardPattern(Model):
    """What to do about prompts in which a regular expression is found."""

    regex: Pattern = Field(description="RE2; searched in the prompt's JSON, and in it with its escapes decoded")
    action: Literal["refuse", "count"] = "refuse"


class Guard(Model):
    """Limits of each client, and patterns. A client is told by its address, or by what `access` says of it."""

    client: Literal["address", "tenant", "key"] = Field("address", description="what tells clients apart")
    trusted_hops: int = Field(
        0, ge=0, le=16, description="proxies before our Envoy that append to x-forwarded-for and can be believed"
    )
    requests: Rate | None = None
    concurrency: Positive | None = Field(None, description="requests at once")
    patterns: Annotated[dict[Name, GuardPattern], Field(max_length=_MOST_PATTERNS)] = Field(
        default_factory=dict, description="name -> what no prompt may hold"
    )
    search_bytes: Annotated[int, Field(ge=64, le=1_048_576)] = Field(
        65_536, description="so much of a prompt is searched, half at its beginning and half at its end"
    )

    @model_validator(mode="after")
    def _guards_something(self) -> Self:
        if self.requests is None and self.concurrency is None and not self.patterns:
            raise ValueError("guards nothing: give requests, concurrency or patterns, or leave `guard` out")
        return self
