"""What the environment says: nothing of it is needed, and nothing in it stops a server."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

log = logging.getLogger("vllm.plugins.pointsman")
"""Under vLLM's own logger, else nobody would see it."""

DEFAULT_ADDRESS = "tcp://*:5559"
"""Behind the ports that vLLM's documentation uses for KV events."""


@dataclass(frozen=True)
class Settings:
    """`address`: where to bind, None to publish nothing. `hold_s`: a shutdown waits so long for subscribers."""

    address: str | None
    messages_per_s: float
    hold_s: float

    @classmethod
    def from_environment(cls) -> Settings:
        """POINTSMAN_STATS, POINTSMAN_STATS_HZ and POINTSMAN_STATS_HOLD_MS, or their defaults."""
        address = os.environ.get("POINTSMAN_STATS") or DEFAULT_ADDRESS
        return cls(
            address=None if address == "off" else address,
            messages_per_s=_number("POINTSMAN_STATS_HZ", 50, 1, 100),
            hold_s=_number("POINTSMAN_STATS_HOLD_MS", 500, 0, 10_000) / 1000,
        )


def _number(name: str, default: float, least: float, most: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if least <= value <= most:
        return value
    log.warning("%s=%s is not from %g to %g; using %g", name, text, least, most, default)
    return default
