"""ServeGen's models of a provider's clients, a pair of files each: rates over time, and lengths over time.

Drawn from, not replayed: each client's arrivals are a renewal process with the shape its window gives, at its window's
rate. The requests are the first ones from the busiest window on. Nothing says which prompts begin alike.
"""

from __future__ import annotations

import ast
import csv
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, islice
from math import gamma
from pathlib import Path
from random import Random

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import BadTrace
from extproc.replay.traces import Trace, TraceRequest

_BLOCK_TOKENS = 128
_REQUESTS = 6000
_JITTER_S = 3.0


@dataclass(frozen=True, slots=True)
class _Window:
    """From `starts_s` on: arrivals per second, and the family and shape of the gaps between them."""

    starts_s: float
    rate: float
    family: str
    shape: float

    def gap_s(self, rng: Random) -> float:
        if self.family == "Gamma":
            return rng.gammavariate(self.shape, 1 / (self.shape * self.rate))
        if self.family == "Weibull":
            return rng.weibullvariate(1 / (self.rate * gamma(1 + 1 / self.shape)), self.shape)
        return rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """One distribution of token counts."""

    values: Sequence[int]
    cumulated: Sequence[float]

    def draw(self, rng: Random) -> int:
        position = bisect_right(self.cumulated, rng.random() * self.cumulated[-1])
        return max(1, self.values[min(position, len(self.values) - 1)])


@dataclass(frozen=True, slots=True)
class _Client:
    name: str
    windows: Sequence[_Window]
    prompts: Mapping[float, _Lengths]
    answers: Mapping[float, _Lengths]


def read(folder: Path, requests: int | None = None) -> Trace:
    """Requests of all clients in the folder, 6,000 unless said otherwise. Raises BadTrace."""
    clients = [_client(file) for file in sorted(folder.glob("*-trace.csv"))]
    start_s = _busiest_s(clients)
    names = BlockNames("servegen")
    streams = [_arrivals(client, start_s, Random(client.name)) for client in clients]
    drawn = [
        _request(arrives_s - start_s, prompt, answer, names)
        for arrives_s, prompt, answer, _ in islice(merge(*streams), requests or _REQUESTS)
    ]
    return Trace(folder.name, _BLOCK_TOKENS, drawn, _JITTER_S)


def _request(arrives_s: float, prompt: int, output: int, names: BlockNames) -> TraceRequest:
    blocks, full = names.fill((), (), prompt, output, _BLOCK_TOKENS)
    return TraceRequest(arrives_s, prompt, output, blocks, full)


def _busiest_s(clients: Sequence[_Client]) -> float:
    rates: dict[float, float] = {}
    for client in clients:
        for window in client.windows:
            rates[window.starts_s] = rates.get(window.starts_s, 0.0) + window.rate
    return max(rates, key=lambda starts_s: rates[starts_s], default=0.0)


def _arrivals(client: _Client, start_s: float, rng: Random) -> Iterator[tuple[float, int, int, str]]:
    """One client's requests from `start_s` on: arrival, lengths, client."""
    for window, after in zip(client.windows, [*client.windows[1:], None], strict=True):
        ends_s = after.starts_s if after else window.starts_s
        prompts, answers = _at(client.prompts, window.starts_s), _at(client.answers, window.starts_s)
        if ends_s <= start_s or not window.rate or prompts is None or answers is None:
            continue
        at_s = max(window.starts_s, start_s) + window.gap_s(rng)
        while at_s < ends_s:
            yield at_s, prompts.draw(rng), answers.draw(rng), client.name
            at_s += window.gap_s(rng)


def _at(lengths: Mapping[float, _Lengths], time_s: float) -> _Lengths | None:
    """The distribution of the last window that began by then, or else the first there is."""
    begun = [starts_s for starts_s in lengths if starts_s <= time_s]
    return lengths[max(begun)] if begun else next(iter(lengths.values()), None)


def _client(file: Path) -> _Client:
    name = file.name.removesuffix("-trace.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        windows = [_window(f"{file}, line {number}", line) for number, line in enumerate(csv.reader(lines), 1)]
    lengths = file.with_name(f"{name}-dataset.json")
    try:
        by_window = json.loads(lengths.read_bytes())
        prompts, answers = (
            {float(starts): _lengths(one[which]) for starts, one in by_window.items() if one[which] != "{}"}
            for which in ("input_tokens", "output_tokens")
        )
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise BadTrace(f"{lengths}: {error}") from error
    return _Client(name, windows, prompts, answers)


def _window(where: str, line: Sequence[str]) -> _Window:
    try:
        starts_s, rate, _, family, shape, *_ = line
        return _Window(float(starts_s), float(rate), family, float(shape))
    except ValueError as error:
        raise BadTrace(f"{where}: expected start, rate, cv, pattern and its two figures: {error}") from error


def _lengths(written: str) -> _Lengths:
    """From text like `{12: 0.25, 14: 0.75}`."""
    found = ast.literal_eval(written)
    return _Lengths(list(found), list(accumulate(found.values())))
