"""A request on its way to a decision: all that is known of it once it has been read. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.config.generations import Generation
from extproc.flight import Flight
from extproc.precise import Found
from extproc.request.plans import Plan, Read
from policies.types import Refusal


@dataclass(init=False)
class Asked:
    """A request that was read, and under which config; with what it takes to decide it anew. Never changed.

    `read`: what was found in its body; `found`: what the engines hold of it; each where that was found out before.
    """

    generation: Generation
    flight: Flight
    headers: Mapping[str, str]
    plan: Plan
    body: bytes
    read: Read | Refusal | None
    found: Found | None

    def __init__(
        self,
        generation: Generation,
        flight: Flight,
        headers: Mapping[str, str],
        plan: Plan,
        body: bytes,
        read: Read | Refusal | None,
        found: Found | None,
    ) -> None:
        self.generation = generation
        self.flight = flight
        self.headers = headers
        self.plan = plan
        self.body = body
        self.read = read
        self.found = found
