"""The decision loop's end: starts the senses, gives them their orders, passes on what they report.

The senses are our own child, and not the launcher's, so that `up` and `serve` have them alike and the socket between
us needs no name. Rejected: a Unix socket in the run folder, which `serve` alone has not, and which anybody could
connect to. A process that falls is started again after a growing pause; one that is silent for too long is killed
first. Meanwhile figures grow stale and decisions rest on our own accounting, which the metrics say.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import structlog

from extproc.config.schema import Config
from extproc.senses.inbox import Inbox
from extproc.senses.messages import (
    Alive,
    Frames,
    FromSenses,
    Index,
    Pace,
    ProbeNow,
    Target,
    ToSenses,
    Watch,
    encode,
    from_senses,
)

log = structlog.get_logger(__name__)

_HANGS_AFTER_S = 10.0
"""Silent for so long, with a heartbeat due every second, they hang; a busy machine delays them by less."""
_SECOND_LOOK_S = 2.0
"""Before that is believed: where we were the ones that stood still, what they said meanwhile is only now read."""
_SCRAPES_PER_S = 1_000
"""Of all endpoints together: each costs the decision loop some 30 us."""
_TAKEN_AT_ONCE, _SHARE_AT_ONCE = 16, 4
"""Reports: half a millisecond. Of 256 endpoints there may be a hundred in one read where the machine is busy. A quarter
of them where that is more: else they would wait without end for a loop whose turns are long."""
_SETTLED_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_DOUBLINGS = 0.1, 5.0, 10
_STOP_GRACE_S = 2.0


class LinkEvents(Protocol):
    """Who counts what becomes of the senses."""

    def senses_up(self, *, up: bool) -> None:
        """They can be heard, or no more."""

    def senses_lost(self) -> None:
        """They fell or hung."""

    def senses_dropped(self, reports: int) -> None:
        """They did not send so many reports, since we did not take those before in time."""


class Senses:
    """The senses process, kept running."""

    def __init__(self, inbox: Inbox, events: LinkEvents, config: Config) -> None:
        self._inbox = inbox
        inbox.tell = self.tell
        self._events = events
        self._config = config
        self._watch = Watch([], pace_of(config, 0))
        self._index = Index([])
        self._log = config.observe.log
        self._buffer_bytes = config.limits.senses_buffer_bytes
        self._line: _Line | None = None
        self.pid: int | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.configure(config)

    # -- orders

    def configure(self, config: Config) -> None:
        """Use the new pace."""
        self._inbox.trials = config.probe.trial
        self._inbox.trial_timeout_s = config.probe.trial_timeout_ms / 1000
        self._config = config
        self._order_watch(Watch(self._watch.targets, pace_of(config, len(self._watch.targets))))

    def watch(self, targets: Iterable[Target]) -> None:
        """Watch exactly these endpoints."""
        wanted = list(targets)
        self._order_watch(Watch(wanted, pace_of(self._config, len(wanted))))

    @property
    def stale_after_s(self) -> float:
        """Figures older than this are not used: so many of the intervals that are kept."""
        return self._watch.pace.scrape_interval_ms * self._config.scrape.stale_after_intervals / 1000

    def _order_watch(self, wanted: Watch) -> None:
        if wanted == self._watch:
            return
        for gone in {target.address for target in self._watch.targets} - {t.address for t in wanted.targets}:
            self._inbox.forget(gone)
        self._watch = wanted
        self.tell(wanted)

    def probe_now(self, address: str) -> None:
        """Ask this one at once: a request has just shown that something is wrong with it."""
        self.tell(ProbeNow(address))

    def index(self, wanted: Index) -> None:
        """Keep precise indexes for exactly these pools."""
        if wanted != self._index:
            self._index = wanted
            self.tell(wanted)

    def tell(self, order: ToSenses) -> bool:
        """Give an order; without senses it is lost, and new ones are told what to watch. Whether there are any."""
        if self._line is not None:
            self._line.send(order)
        return self._line is not None

    # -- the process

    def start(self) -> None:
        """Start them, and again whenever they fall."""
        self._keeper = asyncio.create_task(self._keep(), name="senses")

    async def close(self) -> None:
        """End them."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        loop, falls = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                await self._run_once()
            except Exception:  # no memory or process left: tried again like a fall
                log.exception("senses cannot be started")
            self._events.senses_lost()
            falls = 1 if loop.time() - began > _SETTLED_S else falls + 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(falls - 1, _MOST_DOUBLINGS))
            log.error("senses fell, starting them again", pause_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        """One life of the process, from its start to its end."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._spawn(theirs)
        self.pid = process.pid
        log.info("started", child="senses", pid=process.pid)
        try:
            _, line = await asyncio.get_running_loop().create_unix_connection(lambda: _Line(self._take), sock=ours)
            line.send(self._watch)
            line.send(self._index)
            self._line = line
            await line.until_silent()
        finally:
            self._hang_up()
            await _end(process)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None
        self._inbox.forget_all()
        self._events.senses_up(up=False)

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Start it. Held up by a few milliseconds, once per life; a fork by the loop would meet grpc's threads."""
        descriptor = theirs.fileno()
        # -P: else a file in the operator's folder that is named like a module of ours would be imported in its place
        command = [sys.executable, "-P", "-m", "extproc.senses", str(descriptor), str(self._buffer_bytes)]
        return subprocess.Popen(  # noqa: S603 - our own program
            [*command, self._log.level, self._log.format],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )

    def _take(self, message: FromSenses) -> None:
        if isinstance(message, Alive):
            self._events.senses_up(up=True)
            if message.dropped:
                self._events.senses_dropped(message.dropped)
        else:
            self._inbox.take(message)


class _Line(asyncio.Protocol):
    """Our end of the socket. A few reports are taken per turn of the loop; while some wait, no more are read."""

    def __init__(self, take: Callable[[FromSenses], None]) -> None:
        self._take = take
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time
        self._heard_at_s = self._now_s()
        self._over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        self._heard_at_s = self._now_s()
        self._waiting.extend(self._frames.feed(data))
        self._take_some()
        if self._waiting:
            self._transport.pause_reading()
            self._loop.call_soon(self._take_more)

    def _take_some(self) -> None:
        waiting = len(self._waiting)
        for _ in range(min(waiting, max(_TAKEN_AT_ONCE, waiting // _SHARE_AT_ONCE))):
            try:
                self._take(from_senses(self._waiting.popleft()))
            except Exception:
                log.exception("report of the senses not taken")

    def _take_more(self) -> None:
        self._take_some()
        if self._waiting:
            self._loop.call_soon(self._take_more)
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio.Protocol
        """asyncio.Protocol. What waits is of a process that is gone: nobody must hear of it any more."""
        self._waiting.clear()
        self._over.set()

    def send(self, order: ToSenses) -> None:
        """Send it, or keep it until it can be sent."""
        if not self._over.is_set():
            self._transport.write(encode(order))

    def close(self) -> None:
        """Hang up; the other end ends of that. Nothing that waits is taken any more."""
        self._waiting.clear()
        self._transport.abort()

    async def until_silent(self) -> None:
        """Until the other end hangs up, or says nothing for too long."""
        while not self._over.is_set():
            left_s = self._heard_at_s + _HANGS_AFTER_S - self._now_s()
            if not (await self._hears(left_s) or await self._hears(_SECOND_LOOK_S)):
                log.error("senses are silent, killing them", silent_s=_HANGS_AFTER_S)
                return

    async def _hears(self, patience_s: float) -> bool:
        """Whether anything came, or the end. Looked at afterwards: a task woken by each report costs as much as it."""
        before_s = self._heard_at_s
        # not wait_for: in Python 3.11 it forgets that it was cancelled when what it waits for comes just then
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._over.wait()
        return self._over.is_set() or self._heard_at_s != before_s


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended, since nobody talks to it any more; kill it if it does not."""
    try:
        await asyncio.to_thread(process.wait, _STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)


def pace_of(config: Config, endpoints: int) -> Pace:
    """How the config would have endpoints asked; more slowly where there are too many for that."""
    scrape, probe = config.scrape, config.probe
    return Pace(
        scrape_interval_ms=max(scrape.interval_ms, math.ceil(1000 * endpoints / _SCRAPES_PER_S)),
        scrape_timeout_ms=scrape.timeout_ms,
        scrape_backoff_max_ms=scrape.backoff_max_ms,
        probe_interval_ms=probe.interval_ms,
        probe_timeout_ms=probe.timeout_ms,
        trial_timeout_ms=probe.trial_timeout_ms,
        pushes=scrape.pushes,
        requests=config.tenants is not None,  # for what their streams have used
    )
