"""Listens to engines that push their figures. One listener per endpoint; reports what it heard and judges nothing else.

An endpoint's metrics page says where its plugin pushes (vllm_adapters/stat_logger), so there is nothing to configure.
Pushes are preferred: while they come the page is read rarely, and at full pace again when three heartbeats are missed.

Only this endpoint's messages count. Engines that share a host take each other's ports as they come and go, so a message
has to carry the mark that the page shows, or say that it is the server at our endpoint's port: that is the one before,
started anew, and its page cannot be read until it has loaded. Messages older than the page are left out, for counters
that seem to fall would look like a restart. So are those of a plugin that no longer hears its engine, which vLLM 0.32
drops when it is scaled (elastic expert parallelism): the page goes on, the pushes do not, and count as missed.

Bounded whoever sends: sizes, unread messages, messages read per turn, turns per second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import thread_time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from extproc.senses.messages import FellSilent, Heard
from vllm_adapters.metrics import EngineFigures
from vllm_adapters.pushed import HEARTBEAT_S, LARGEST_MESSAGE_BYTES, NotPushed, Pushed, parse_pushed

if TYPE_CHECKING:
    import zmq.asyncio

log = structlog.get_logger(__name__)

SILENCE_S = 3 * HEARTBEAT_S
"""Three heartbeats missed."""
_MOST_UNREAD = 64
_MOST_PER_TURN = 64
_REPORTS_PER_S = 500
"""Of all endpoints together: each costs the decision loop about a tenth of a millisecond, as a scrape does."""
_SHORTEST_GAP_S, _LONGEST_GAP_S = 0.01, 0.2
"""Between two reports of one endpoint: at first below what plugins send by default, at last what a scrape's interval is
by default, and below what a drain waits for us.
"""
MOST_FINISHED = 1_000
"""Single requests in a report: what an engine ends in a fifth of a second, many times over."""
_LONGEST_READ_S = 0.005
_READINGS = 10
"""After a turn, so much of the time that it took to read is left for others: a message may take 20 ms, a sender that
does not stop would have all of it.
"""
_DEAF_AFTER_S = 10.0
_LISTEN_AGAIN_S = 10.0
_RECONNECT_MS, _SLOWEST_RECONNECT_MS = 100, 2_000
_MOST_SOCKETS = 8_192

Report = Callable[[Heard | FellSilent], None]


class Ears:
    """What listeners share: how often each may report, and ZMQ, which is imported once an engine pushes at all."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] | None = None
        self.listening = 0

    @property
    def gap_s(self) -> float:
        """How long a listener waits after a report."""
        return min(max(self.listening / _REPORTS_PER_S, _SHORTEST_GAP_S), _LONGEST_GAP_S)

    def subscribe(self, host: str, port: int) -> zmq.asyncio.Socket:
        """A socket that is being connected, for as long as it takes, and again whenever the connection is lost.

        Raises OSError: no socket left, no such host.
        """
        import zmq

        try:
            return self._connecting(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error

    def _connecting(self, at: str) -> zmq.asyncio.Socket:
        import zmq.asyncio

        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, min(_MOST_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        options = {
            zmq.RCVHWM: _MOST_UNREAD, zmq.MAXMSGSIZE: LARGEST_MESSAGE_BYTES, zmq.LINGER: 0, zmq.IPV6: 1,
            zmq.RECONNECT_IVL: _RECONNECT_MS, zmq.RECONNECT_IVL_MAX: _SLOWEST_RECONNECT_MS,
        }  # fmt: skip
        socket = zmq.asyncio.Socket(self._context, zmq.SUB)
        try:
            for option, value in options.items():
                socket.setsockopt(option, value)
            socket.connect(at)
            socket.subscribe(b"")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def close(self) -> None:
        """Nobody listens any more."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


class Wake(Protocol):
    """Has the page read at once."""

    def __call__(self) -> None:
        """Do not wait for the next turn."""


class Listener:
    """One endpoint's ear. `live`: figures are pushed, and the page is read only to be sure."""

    def __init__(
        self, address: str, ears: Ears, report: Report, wake: Wake, wants_requests: Callable[[], bool] = lambda: False
    ) -> None:
        self.live = False
        self._wants_requests = wants_requests
        self._address = address
        self._host, _, port = address.rpartition(":")
        self._server_port = int(port) if port.isdigit() else -1
        self._ears = ears
        self._report = report
        self._wake = wake
        self._page = EngineFigures()
        self._run: str | None = None
        self._seq = 0
        self._heard_at_s = 0.0
        self._read_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing was heard since the last report."""
        self._newest: Pushed | None = None
        self._taken = self._lost = self._malformed = self._ignored = 0

    # -- what the page says

    def told(self, page: EngineFigures) -> None:
        """The endpoint's page was read: listen where it says, or no more."""
        before, self._page = self._page.stats_port, page
        if page.stats_port == before:
            return
        self.close()
        self._silent()
        if page.stats_port is not None:
            self.task = asyncio.create_task(self._listen(page.stats_port), name=f"listen {self._address}")

    def close(self) -> None:
        """Listen no more."""
        if self.task is not None:
            self.task.cancel()

    def _silent(self) -> None:
        if self.live:
            self.live = False
            self._report(FellSilent(self._address))
            self._wake()

    # -- what is pushed

    async def _listen(self, port: int) -> None:
        """Until cancelled, whatever goes wrong: a task that ended would leave the endpoint without figures."""
        while True:
            try:
                await self._listen_on(self._ears.subscribe(self._host, port))
            except OSError as error:
                log.warning("cannot listen to pushes", endpoint=self._address, port=port, error=str(error))
                await self._pause()
            except Exception:
                log.exception("listening to pushes failed", endpoint=self._address, port=port)
                await self._pause()

    async def _pause(self) -> None:
        """It went wrong: scraping goes on at full pace meanwhile."""
        self._begin()
        self._silent()
        self._report(Heard(self._address, deaf=1))
        await asyncio.sleep(_LISTEN_AGAIN_S)

    async def _listen_on(self, socket: zmq.asyncio.Socket) -> None:
        """Until nothing has come for so long that the socket may be deaf, as ZMQ's are once a message was cut off."""
        self._ears.listening += 1
        try:
            while await self._turn(socket):
                pass
        finally:
            self._ears.listening -= 1
            socket.close()

    async def _turn(self, socket: zmq.asyncio.Socket) -> bool:
        """One report, or the beginning of a silence. False after a long one."""
        now_s, was_live = asyncio.get_running_loop().time, self.live
        left_s = self._heard_at_s + SILENCE_S - now_s() if was_live else _DEAF_AFTER_S
        something = bool(await socket.poll(max(0, int(left_s * 1000))))
        if something:
            self._read(socket)
            if self._newest is not None:
                self._heard_at_s, self.live = now_s(), True
            self._report(self._heard())
            self._begin()
        if self.live and now_s() - self._heard_at_s >= SILENCE_S:
            self._silent()
        await asyncio.sleep(max(self._ears.gap_s, _READINGS * self._read_s))
        return something or was_live

    def _read(self, socket: zmq.asyncio.Socket) -> None:
        """What has come, up to a bound."""
        import zmq

        ready: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        began_s, self._read_s, number = thread_time(), 0.0, 0
        with contextlib.suppress(zmq.Again):
            while number < _MOST_PER_TURN and self._read_s < _LONGEST_READ_S:
                self.take(ready.recv(zmq.DONTWAIT))
                number, self._read_s = number + 1, thread_time() - began_s

    def take(self, data: bytes) -> None:
        """One message."""
        try:
            pushed = parse_pushed(data)
        except NotPushed as error:
            log.debug("not a push", endpoint=self._address, error=str(error))
            self._malformed += 1
            return
        if not self._is_ours(pushed) or not self._is_new(pushed):
            self._ignored += 1
            return
        self._taken += 1
        finished = pushed.finished if self._wants_requests() else ()  # they are most of a message
        state = msgspec.structs.replace(pushed, finished=finished, ttfts_s=())
        self._newest = state if self._newest is None else _merged(self._newest, state)

    def _is_ours(self, pushed: Pushed) -> bool:
        if pushed.run == self._page.stats_run:
            # a server whose page was read has loaded: one that says otherwise has lost its way
            return pushed.phase != "loading" and not _behind(pushed.figures, self._page)
        return pushed.server_port == self._server_port

    def _is_new(self, pushed: Pushed) -> bool:
        if pushed.run != self._run:
            self._run, self._seq = pushed.run, pushed.seq - 1
        missed = pushed.seq - self._seq - 1
        if missed < 0:
            return False
        self._lost += missed
        self._seq = pushed.seq
        return True

    def _heard(self) -> Heard:
        return Heard(self._address, self._newest, self._taken, self._lost, self._malformed, self._ignored)


_GROWING = ("prefix_queries_tokens", "prefix_hits_tokens", "generated_tokens", "prefilled_tokens")


def _behind(figures: EngineFigures, page: EngineFigures) -> bool:
    """The page was made later: some counter has grown since."""
    return any((getattr(figures, name) or 0) < (getattr(page, name) or 0) for name in _GROWING)


def _merged(before: Pushed, now: Pushed) -> Pushed:
    """The newest state, with what happened in both."""
    finished = (*before.finished, *now.finished)
    return msgspec.structs.replace(
        now,
        kv_peak=max(before.kv_peak or 0.0, now.kv_peak or 0.0),
        first_tokens=before.first_tokens + now.first_tokens,
        largest_request_tokens=max(before.largest_request_tokens, now.largest_request_tokens),
        finished=finished[:MOST_FINISHED],
        left_out=before.left_out + now.left_out + max(0, len(finished) - MOST_FINISHED),
    )
