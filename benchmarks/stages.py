"""What each step of a decision costs, in microseconds of CPU of its thread; no Envoy, no sockets.

    make bench-stages [ARGS='--slices 400']

Steps are measured one by one over the same scene, in slices of a few calls that take turns with slices of a fixed piece
of work; the figure told is the median slice. The fixed work's time stands at the end: it tells how fast the machine was
meanwhile, and guards of the same form (tests/unit/extproc/test_decision_cost.py) go by ratios to it.

`decide` is the whole decision from headers and body to a reply: read, hash, match, choose, book, count, and the end of
an older request. It is what the budgets are about, warm, marginal cost included. Bodies that are read in steps, so as
not to keep others waiting, have no such figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import typer

from benchmarks.decision_scene import HEADERS, HOLD_S, Scene
from extproc.observe.logging import configure_logging
from extproc.reply import Pending, Route
from extproc.request.apis import BY_PATH
from extproc.request.blocks import block_hashes, block_tokens
from extproc.request.parsing import Parsed, parse_body, to_request
from extproc.wire.messages import Phase, read, render_route
from policies.placement.placement import Unplaceable
from policies.types import InferenceRequest

_SIZES = (2_000, 60_000, 480_000, 4_000_000)
_FLEETS = (16, 256, 1_024)
_BUDGETS_US = {(16, 2_000): 50.0, (1_024, 2_000): 80.0, (16, 60_000): 150.0, (16, 480_000): 500.0}
_SLICE_S = 0.001
_WARM_UP = 40
_RATES = np.linspace(1.0, 2.0, 16)
_CHAT = BY_PATH[HEADERS[":path"]]
Work = Callable[[], object]


def fixed_work() -> None:
    """Of the same kind as a decision's and always the same: small objects, dictionaries, arrays of sixteen."""
    found: dict[int, tuple[int, int]] = {}
    for number in range(60):
        found[number * 7 % 61] = (number, number + 1)
    rates = _RATES
    for _ in range(12):
        rates = np.maximum(rates * 1.01, _RATES)
    sum(first for first, _ in found.values())


def thread_us(work: Work, calls: int) -> float:
    """Microseconds of CPU of one call, over so many."""
    began = time.thread_time_ns()
    for _ in range(calls):
        work()
    return (time.thread_time_ns() - began) / calls / 1e3


def paired(work: Work, slices: int) -> tuple[float, float]:
    """The median slice of a piece of work, and the median of its ratios to the fixed work's slice beside it."""
    for _ in range(_WARM_UP):
        work()
    calls = max(1, round(_SLICE_S * 1e6 / max(1.0, thread_us(work, 5))))
    own, ratios = [], []
    for _ in range(slices):
        one = thread_us(work, calls)
        own.append(one)
        ratios.append(one / thread_us(fixed_work, 10))
    return statistics.median(own), statistics.median(ratios)


@dataclass
class Steps:
    """One request's steps, each to be called again and again."""

    scene: Scene

    def all(self) -> dict[str, Work]:
        """By name, in the order of a request."""
        scene = self.scene
        body, message = scene.bodies[1], scene.messages[1]
        request, parsed = self._request(body)
        tokens, now_s = request.input_tokens, time.monotonic()
        placement, members = scene.placement, scene.placement.members
        decision = placement.choose(request, scene.state, now_s, scene.rng, length=3)
        if isinstance(decision, Unplaceable):
            raise TypeError(decision)
        route = Route("pool_chat", decision.addresses, "0" * 32, "sim")

        def commit() -> None:
            taken = placement.commit(decision, request, scene.state, now_s)
            scene.state.release(taken)
            placement.ended(taken, now_s)

        return {
            "headers message": lambda: read(scene.headers_message),
            "body message": lambda: read(message),
            "read JSON": lambda: parse_body(_CHAT, body),
            "hash": lambda: block_tokens(block_hashes(parsed.prompt, 1)[1], len(parsed.prompt), tokens, (), 0),
            "match": lambda: placement.index.match(request.block_hashes, request.block_tokens, members),
            "choose": lambda: placement.choose(request, scene.state, now_s, scene.rng, length=3),
            "book, give back": commit,
            "render": lambda: render_route(route, Phase.REQUEST_BODY, body),
            **({"decide": self.decide, "whole request": scene.request} if self._at_once() else {}),
        }

    def _at_once(self) -> bool:
        flight = self.scene.flights.open()
        reply = self.scene.pipeline.decide(flight, HEADERS, self.scene.bodies[1])
        flight.close()
        if isinstance(reply, Pending):
            reply.ready.cancel()
        return isinstance(reply, Route)

    def _request(self, body: bytes) -> tuple[InferenceRequest, Parsed]:
        parsed = parse_body(_CHAT, body)
        if not isinstance(parsed, Parsed):
            raise TypeError(parsed)
        target = self.scene.generation.targets["sim"]
        return to_request(parsed, target.model, target.rates), parsed

    def decide(self) -> None:
        """From headers and body to a reply; and its end, which is not part of it but has to be."""
        flight = self.scene.flights.open()
        flight.hold_s = HOLD_S
        self.scene.pipeline.decide(flight, HEADERS, self.scene.bodies[1])
        self.scene.keep(flight)


def table(title: str, columns: dict[str, Scene], slices: int) -> dict[tuple[str, str], float]:
    """Measure every step of every scene and print them side by side; the times by step and column."""
    found: dict[tuple[str, str], float] = {}
    for name, scene in columns.items():
        for _ in range(_WARM_UP if "MB" not in name else 0):
            scene.request()
        for step, work in Steps(scene).all().items():
            found[step, name] = paired(work, slices if "MB" not in name else slices // 5)[0]
    typer.echo(f"{title:18}" + "".join(f"{name:>12}" for name in columns))
    for step in dict.fromkeys(step for step, _ in found):
        typer.echo(
            f"{step:18}"
            + "".join(f"{found[step, name]:12.1f}" if (step, name) in found else f"{'-':>12}" for name in columns)
        )
    typer.echo("")
    return found


def _told(size: int) -> str:
    return f"{size // 1_000_000} MB" if size >= 1_000_000 else f"{size // 1_000} KB"


def main(slices: int = 150) -> None:
    """Measure, print; ends with 1 if a budget is missed."""
    configure_logging("error", "console")  # a thousand endpoints come into service, a line each
    typer.echo(f"microseconds of CPU, medians of {slices} slices; `decide` has steps that are not told alone\n")
    sizes = table("16 endpoints", {_told(size): Scene(16, size) for size in _SIZES}, slices)
    fleets = table("2 KB, endpoints:", {str(fleet): Scene(fleet, _SIZES[0]) for fleet in _FLEETS}, slices)
    fixed_us = statistics.median(thread_us(fixed_work, 10) for _ in range(200))
    typer.echo(f"the fixed work, to compare machines by: {fixed_us:.1f} us\n")
    kept = True
    for (fleet, size), most in _BUDGETS_US.items():
        cost = fleets["decide", str(fleet)] if size == _SIZES[0] else sizes["decide", _told(size)]
        kept &= cost <= most
        verdict = "kept" if cost <= most else "MISSED"
        typer.echo(f"budget decide, {_told(size)}, {fleet} endpoints: {cost:.0f} us of at most {most:.0f}: {verdict}")
    if not kept:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
