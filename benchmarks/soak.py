"""Twenty minutes of everything at once through a real Envoy: nothing may grow, get lost, or fail without a cause.

    make bench-soak [ARGS='--minutes 2 --transport grpcio']

Mixed load (whole answers, streams, bodies of megabytes plain and compressed, clients that leave) while endpoints come
and go, the config is reloaded, engines are killed and started again, and so is the senses process. Ends with 1 if a
count is lost, if a request failed that no kill explains, or, in runs of ten minutes or more, if memory grew.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import typer
from harness import System, chat, eventually, free_ports

from benchmarks.rig import LightEngines, cost, pids, prepare, system_over

_CHAT = "/v1/chat/completions"
_MIX = ["whole"] * 10 + ["stream"] * 8 + ["leave"] * 4 + ["large", "gzip"]
_CLIENTS = 24
_PAUSE_S = 0.4
_DISTURB_EVERY_S = 6.0
_DEAD_S = 2.0
_AFTER_S = 4.0
"""So long after a killed engine is back a failed request may still be its doing."""
_SAMPLE_EVERY_S = 2.0
_JUDGED_FROM_MINUTES = 10.0
_MOST_GROWTH = 0.05
_RESULTS = ("joined", "unrouted", "unknown", "error")


@dataclass
class Soak:
    """What goes on, and what has come of it."""

    system: System
    engines: list[LightEngines]
    dice: random.Random
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[float, str]] = field(default_factory=list)
    excused: list[tuple[float, float]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    # -- load

    async def client(self, session: aiohttp.ClientSession, until: float) -> None:
        """One request after the other."""
        while time.monotonic() < until:
            kind = self.dice.choice(_MIX)
            began = time.monotonic()
            try:
                told = await self._request(session, kind)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                told = type(error).__name__
            self.answers[f"{kind}: {told}"] += 1
            if told not in {"200", "left"}:
                self.faults.append((began, f"{kind}: {told}"))
            await asyncio.sleep(self.dice.expovariate(1 / _PAUSE_S))

    async def _request(self, session: aiohttp.ClientSession, kind: str) -> str:
        words = self.dice.randrange(200_000, 800_000) if kind in {"large", "gzip"} else self.dice.randrange(10, 400)
        body = json.dumps(chat(f"{self.dice.random()} " + "word " * words, stream=kind in {"stream", "leave"})).encode()
        headers = {"content-type": "application/json"}
        if kind == "gzip":
            headers["content-encoding"] = "gzip"
            body = await asyncio.to_thread(gzip.compress, body, 1)
        if kind in {"stream", "leave"}:
            headers["x-tokens"] = str(self.dice.randrange(2, 12))
        try:
            async with asyncio.timeout(self.dice.random() * 0.4 if kind == "leave" else 60):
                async with session.post(_CHAT, data=body, headers=headers) as answer:
                    whole = await answer.read()
        except TimeoutError:
            return "left" if kind == "leave" else "hangs"
        cut = kind in {"stream", "leave"} and answer.status == 200 and not whole.endswith(b"[DONE]\n\n")
        return "cut" if cut else str(answer.status)

    # -- disturbances

    async def disturb(self, until: float) -> None:
        """One after the other, in turn."""
        kinds: list[Callable[[], Awaitable[None]]] = [self._churn, self._reload, self._kill_engines, self._kill_senses]
        number = 0
        while time.monotonic() + _DISTURB_EVERY_S < until:
            await asyncio.sleep(_DISTURB_EVERY_S)
            await kinds[number % len(kinds)]()
            number += 1
            if number % 10 == 0:
                typer.echo(f"after {number * _DISTURB_EVERY_S / 60:.0f} minutes: {sum(self.answers.values())} requests")

    async def _churn(self) -> None:
        """Other endpoints than before: always one less than there are."""
        left = [address for one in self.engines for address in one.addresses]
        left.remove(self.dice.choice(left))
        self.system.config["pools"][0]["endpoints"] = {"static": left}
        self._write("churn")

    async def _reload(self) -> None:
        """Another generation with the same endpoints."""
        self.system.config["timeouts"] = {"first_byte_s": self.dice.randrange(200, 300)}
        self._write("reload")

    def _write(self, what: str) -> None:
        self.system.write_config()
        self.done[what] += 1

    async def _kill_engines(self) -> None:
        """Half of them, for a while."""
        began, victim = time.monotonic(), self.dice.choice(self.engines)
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(_DEAD_S)
        victim.start()
        self.excused.append((began - 1, time.monotonic() + _AFTER_S))
        self.done["engines killed"] += 1

    async def _kill_senses(self) -> None:
        """The launcher's grandchild; the decision process starts it again."""
        os.kill(_child_of(self.system.child(" serve "), "extproc.senses"), signal.SIGKILL)
        self.done["senses killed"] += 1

    async def watch(self, until: float) -> None:
        """Memory, in MB, as time goes."""
        began, of = time.monotonic(), pids(self.system)
        while time.monotonic() < until:
            for name, pid in of.items():
                self.memory.setdefault(name, []).append((time.monotonic() - began, cost(pid).rss_kb / 1024))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def run(self, for_s: float) -> None:
        """All of it for so long."""
        until = time.monotonic() + for_s
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self.system.url, connector=connector, timeout=timeout) as session:
            clients = [self.client(session, until) for _ in range(_CLIENTS)]
            await asyncio.gather(*clients, self.disturb(until), self.watch(until))

    # -- verdict

    def unexplained(self) -> Counter[str]:
        """Failed requests that no kill explains: those that began while nothing was dead."""
        return Counter(
            what for at, what in self.faults if not any(first - 10 <= at <= last for first, last in self.excused)
        )


def _child_of(parent: int, what: str) -> int:
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if int(fields[1]) == parent and what in command:
            return int(entry.name)
    raise LookupError(f"no child {what}")


def lost(system: System) -> dict[str, float]:
    """What is still held, and by how much counts disagree; all 0 if none was lost."""
    eventually(lambda: not any(system.in_flight().values()), "all is given back")
    eventually(lambda: not system.total("pointsman_requests_unsettled"), "all is settled")
    opened, ended = (system.total(f"pointsman_ext_proc_streams_{what}_total") for what in ("opened", "ended"))
    routed = system.total("pointsman_stage_seconds_count", 'stage="commit"')
    settled = system.total("pointsman_completions_total") + system.total("pointsman_access_log_missing_total")
    return {
        "in flight": float(sum(system.in_flight().values())),
        "streams opened - ended": opened - ended,
        "routed - outcomes": routed - settled,
    }


def growth(samples: list[tuple[float, float]]) -> tuple[float, float, float]:
    """After the first third: MB at its beginning and end by the line that fits best, and that line's MB per minute."""
    kept = samples[len(samples) // 3 :]
    slope, first = statistics.linear_regression([at for at, _ in kept], [mb for _, mb in kept])
    return first + slope * kept[0][0], first + slope * kept[-1][0], 60 * slope


def report(soak: Soak, minutes: float) -> bool:
    """Everything found; whether it is as it should be."""
    good = True
    typer.echo(f"{sum(soak.answers.values())} requests, by kind and what became of them (`left`: as it was to be)")
    for name, count in sorted(soak.answers.items()):
        typer.echo(f"{count:8} {name}")
    typer.echo(f"disturbances: {dict(soak.done)}")
    for name, samples in soak.memory.items():
        begin, end, per_minute = growth(samples)
        judged = "" if minutes >= _JUDGED_FROM_MINUTES else f"; not judged below {_JUDGED_FROM_MINUTES} minutes"
        typer.echo(f"{name:10} {begin:6.1f} -> {end:6.1f} MB, {per_minute:+.2f} MB per minute after warm-up{judged}")
        grew = end > (1 + _MOST_GROWTH) * begin
        good = good and not (name == "decision" and minutes >= _JUDGED_FROM_MINUTES and grew)
    counts = lost(soak.system)
    typer.echo(f"held or lost: {counts}")
    entries = {how: soak.system.total("pointsman_access_log_entries_total", f'result="{how}"') for how in _RESULTS}
    missing = soak.system.total("pointsman_access_log_missing_total")
    typer.echo(f"access-log entries: {entries}, never came for {missing:.0f} requests (counted as outcome unknown)")
    unexplained = soak.unexplained()
    typer.echo(f"failed while nothing was dead or coming back: {dict(unexplained) or 'none'}")
    return good and not any(counts.values()) and not unexplained


def main(minutes: float = 20.0, transport: str = "lane", seed: int = 1) -> None:
    """Start everything, run, judge."""
    prepare()
    typer.echo(f"{minutes:g} minutes of mixed load by {transport}; every {_DISTURB_EVERY_S:.0f} s a disturbance")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ports = free_ports(8)
        engines = [LightEngines(folder, ports[:4], 0.2), LightEngines(folder, ports[4:], 0.2)]
        try:
            with system_over(folder, transport, engines, retries={"attempts": 2}) as system:
                soak = Soak(system, engines, random.Random(seed))
                asyncio.run(soak.run(60 * minutes))
                good = report(soak, minutes)
        finally:
            for one in engines:
                one.kill()
    typer.echo("as it should be" if good else "NOT AS IT SHOULD BE")
    raise SystemExit(not good)


if __name__ == "__main__":
    typer.run(main)
