"""NVIDIA's DCGM exporter -> how busy an engine's GPUs are. For people to see: no policy of ours goes by it.

An exporter tells of every GPU of its host, of which an engine has some. Which, only the operator knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

PATH = "/metrics"

_LINE = re.compile(rb"\n(DCGM_FI_DEV_(?:GPU_UTIL|FB_USED|FB_FREE))\{([^\n]*)\} ([^\s#]+)")
_NAME = re.compile(rb'(?:^|[,\s])(gpu|UUID)="([^"]{0,64})"')
_LARGEST = 1e9
"""Per cent and mebibytes are below; the exporter writes 9e18 for what it cannot read."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """Of the GPUs of one engine: share of time at work, the mean; share of memory in use, of all together. 0..1."""

    gpus: int
    used: float
    memory_used: float | None = None


class NoGpu(Exception):
    """The page tells of no GPU that is meant."""


def parse_gpus(page: bytes, gpus: Collection[str] = ()) -> GpuLoad:
    """Read one page. `gpus`: only these, by index or UUID; none means all. Raises NoGpu."""
    values: dict[bytes, list[float]] = {}
    for family, labels, text in _LINE.findall(b"\n" + page):
        number = _number(text)
        if number is not None and (not gpus or _is_one_of(labels, gpus)):
            values.setdefault(family, []).append(number)
    used = values.get(b"DCGM_FI_DEV_GPU_UTIL", [])
    if not used:
        raise NoGpu(f"no DCGM_FI_DEV_GPU_UTIL of {', '.join(gpus) or 'any GPU'} on the page")
    return GpuLoad(len(used), min(1.0, sum(used) / len(used) / 100), _memory_used(values))


def _is_one_of(labels: bytes, gpus: Collection[str]) -> bool:
    return any(value.decode("utf-8", "replace") in gpus for _, value in _NAME.findall(labels))


def _memory_used(values: dict[bytes, list[float]]) -> float | None:
    used, free = (sum(values.get(b"DCGM_FI_DEV_FB_" + what, [])) for what in (b"USED", b"FREE"))
    return used / (used + free) if used + free else None


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= _LARGEST else None
