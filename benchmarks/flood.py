"""A tenant that floods at twenty times its quota, through a real Envoy: what another one notices, and who is charged.

    make bench-flood [ARGS='--rounds 3']

Two simulated engines behind Envoy and Pointsman. `calm` sends a steady load; `flood` has a quota of tokens and sends
twenty times that. Rounds, the kinds of load of each one after the other:

- `before`: `calm` alone;
- `flood`: both, with the quota;
- `no quota`: both, without tenants and without a queue: what the quota is for.

Then two checks. *Retry-After*: with the bucket empty, a request is refused and told to come again after r seconds; one
1.2 s before that must be refused, one at that time must pass (r is rounded up to whole seconds, so the rest is less
than one). *Accounts*: what both tenants were charged over the whole run beside what the engines count themselves.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import typer
from harness import HANG_GUARD_S, Engine, System, eventually, free_ports, pool_of  # of the tests over a real Envoy

from benchmarks.open_loop import Answer, Load, Stream, quantiles_ms, statuses
from extproc.access.keys import digest_of

_ENGINES, _PLACES = 2, 8
_FLOOD, _CALM = "flood", "calm"
_KEYS = {name: f"pm-{name}-0123456789abcdef" for name in (_FLOOD, _CALM)}
_PROMPT_TOKENS, _ANSWER_TOKENS = 300, 40
_REQUEST_TOKENS = _PROMPT_TOKENS + _ANSWER_TOKENS
_QUOTA_PER_S, _BURST, _TIMES = 2.0, 8, 20.0
"""In requests' worth of tokens."""
_CALM_PER_S = 4.0
_EARLY_S, _ON_TIME_S = 1.2, 0.05
_MOST_TRIES = 5
_COUNTED = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ACCESS = {"api_keys": [{"name": f"{name}-1", "tenant": name, "sha256": digest_of(key)} for name, key in _KEYS.items()]}
_TENANTS = {
    "usage": "inject",
    "named": {
        _FLOOD: {"tokens": {"per_s": _QUOTA_PER_S * _REQUEST_TOKENS, "burst": _BURST * _REQUEST_TOKENS}},
        _CALM: {"tokens": {"per_s": 1e6}},
    },
}


def stream(name: str, per_s: float) -> Stream:
    """A tenant's requests."""
    return Stream(name, per_s, {"authorization": f"Bearer {_KEYS[name]}"}, _PROMPT_TOKENS, _ANSWER_TOKENS)


@contextmanager
def system(engines: list[Engine], folder: Path, **config: Any) -> Iterator[System]:  # noqa: ANN401 - YAML is Any
    """Pointsman and Envoy over the engines."""
    folder.mkdir()
    pool = pool_of(engines, hardware="8b-l40s", **config.pop("pool", {}))
    headers = {"authorization": f"Bearer {_KEYS[_CALM]}"}
    made = System(folder, {"pools": [pool], "access": _ACCESS, "headers": headers, **config})
    made.start()
    try:
        made.wait_pickable(*(engine.address for engine in engines))
        yield made
    finally:
        made.stop()


_LARGE = replace(stream(_FLOOD, 1.0), prompt_tokens=(_BURST - 1) * _REQUEST_TOKENS)
"""A request that needs most of the bucket: what it has to wait for is several seconds."""

# -- who is charged


def charged(to: System) -> dict[str, float]:
    """Tokens by tenant, and how many of all by estimate."""
    of = {name: to.total("pointsman_tenant_tokens_total", f'tenant="{name}"') for name in (_FLOOD, _CALM)}
    return {**of, "estimate": to.total("pointsman_tenant_tokens_total", 'source="estimate"')}


def used(engines: list[Engine]) -> float:
    """Tokens of prompts and answers that the engines count."""
    pages = [engine.get("/metrics").text for engine in engines]
    return sum(float(value) for page in pages for value in _COUNTED.findall(page))


# -- Retry-After


async def retries(to: System, trials: int) -> list[tuple[int, int, int]]:
    """By trial: the seconds told, the status of a request before they are over, and of one then."""
    load, found = Load(to.url, 7), []
    async with aiohttp.ClientSession() as client:
        for _ in range(trials):
            refused = await _refused(load, client)
            told_s = refused.retry_after_s or 0
            early, on_time = [
                await _at(refused.asked_s + told_s + after_s, load, client) for after_s in (-_EARLY_S, _ON_TIME_S)
            ]
            found.append((told_s, early.status, on_time.status))
    return found


async def _refused(load: Load, client: aiohttp.ClientSession) -> Answer:
    """A large request right after the bucket was emptied; anew if the machine was so slow that it has filled again."""
    for _ in range(_MOST_TRIES):
        await asyncio.gather(*(load.ask(client, stream(_FLOOD, 1.0)) for _ in range(2 * _BURST)))
        answer = await load.ask(client, _LARGE)
        if answer.status == 429 and (answer.retry_after_s or 0) > _EARLY_S:
            return answer
    raise TimeoutError(f"not refused in {_MOST_TRIES} tries: {answer}")


async def _at(time_s: float, load: Load, client: aiohttp.ClientSession) -> Answer:
    await asyncio.sleep(time_s - time.monotonic())
    return await load.ask(client, _LARGE)


# -- the run

Rounds = dict[str, list[Answer]]


def measure(engines: list[Engine], folder: Path, rounds: int, for_s: float, seed: int) -> Rounds:
    """Every kind of load in every round, and the checks."""
    found: Rounds = {"before": [], "flood": [], "no quota": []}
    calm, flood = stream(_CALM, _CALM_PER_S), stream(_FLOOD, _TIMES * _QUOTA_PER_S)
    queue = {"endpoint_requests": _PLACES}
    with (
        system(engines, folder / "with", tenants=_TENANTS, pool={"queue": queue}) as guarded,
        system(engines, folder / "without") as open_,
    ):
        used_elsewhere, used_before = 0.0, used(engines)
        for number in range(rounds):
            at = seed + 10 * number
            found["before"] += asyncio.run(Load(guarded.url, at).run([calm], for_s))
            found["flood"] += asyncio.run(Load(guarded.url, at + 1).run([calm, flood], for_s))
            began = used(engines)
            found["no quota"] += asyncio.run(Load(open_.url, at + 1).run([calm, flood], for_s))
            used_elsewhere += used(engines) - began
        told = asyncio.run(retries(guarded, 3))
        report_retries(told)
        report_accounts(guarded, engines, used_before + used_elsewhere, found)
    return found


def report_retries(found: list[tuple[int, int, int]]) -> None:
    """A line for each trial."""
    for told_s, early, on_time in found:
        verdict = "right" if (early, on_time) == (429, 200) else "WRONG"
        typer.echo(f"Retry-After {told_s} s: {early} after {told_s - _EARLY_S:.1f} s, {on_time} then; {verdict}")


def report_accounts(to: System, engines: list[Engine], before: float, found: Rounds) -> None:
    """Charged beside used, of all; and beside what answers told their clients, of each."""
    eventually(lambda: not sum(to.in_flight().values()), "all are settled")
    eventually(lambda: all(not account["running"] for account in _accounts(to).values()), "all are settled")
    of, truth = charged(to), used(engines) - before
    total = of[_FLOOD] + of[_CALM]
    typer.echo(
        f"charged {total:.0f} tokens, {of['estimate']:.0f} of them by estimate; the engines count {truth:.0f}: "
        f"{100 * (total / truth - 1):+.3f} %"
    )
    calm = sum(one.tokens for kind in ("before", "flood") for one in found[kind] if one.stream == _CALM)
    typer.echo(f"{_CALM}: charged {of[_CALM]:.0f}, its answers told {calm}")


def _accounts(to: System) -> dict[str, Any]:
    return dict(httpx.get(f"{to.admin_url}/v1/tenants", timeout=HANG_GUARD_S).json()["tenants"])


def report(found: Rounds, rounds: int, for_s: float) -> None:
    """The tables."""
    typer.echo(f"{'load':10} {'tenant':7} {'answered':>8} {'TTFT p50':>9} {'p95':>7} {'p99':>7} ms   statuses")
    for kind, answers in found.items():
        for name in (_CALM, _FLOOD):
            own = [one for one in answers if one.stream == name]
            if not own:
                continue
            of = quantiles_ms(own)
            times = " ".join(f"{of.get(share, 0):7.0f}" for share in ("p50", "p95", "p99"))
            typer.echo(f"{kind:10} {name:7} {of['count']:8.0f}   {times}      {statuses(own)}")
    passed = sum(one.status == 200 for one in found["flood"] if one.stream == _FLOOD)
    may = rounds * (for_s * _QUOTA_PER_S + _BURST)
    typer.echo(f"{_FLOOD} had {passed} requests through; its quota allows {may:.0f} at most, bursts included")
    before, during, without = (
        statistics.median(one.ttft_s for one in found[kind] if one.stream == _CALM) for kind in found
    )
    ratios = f"{during / before:.2f} with the quota, {without / before:.0f} without"
    typer.echo(f"{_CALM}'s p50 over that before the flood: {ratios}")


def main(rounds: int = 2, seconds: float = 12.0, seed: int = 1) -> None:
    """Start engines and both systems, measure, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = ("--max-num-seqs", str(_PLACES), "--hardware", "8b-l40s")
        engines = [Engine(folder / f"{port}.log", port, *places) for port in free_ports(_ENGINES)]
        try:
            for engine in engines:
                engine.wait_ready()
            found = measure(engines, folder, rounds, seconds, seed)
        finally:
            for engine in engines:
                engine.stop()
    report(found, rounds, seconds)


if __name__ == "__main__":
    typer.run(main)
