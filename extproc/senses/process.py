"""The senses process: takes orders from the decision process, looks at the engines, reports.

It ends when the other end of its socket does. What it cannot send is not kept: as soon as so many bytes wait to be
taken, reports are dropped and counted, since newer ones follow. Kept is only what somebody waits for, or what nobody
would say again; there is no more of it than was asked for, or was pushed before.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

import structlog

from extproc.senses.messages import (
    Alive,
    FellSilent,
    Frames,
    FromSenses,
    Index,
    Matched,
    ProbeNow,
    Scraped,
    ToSenses,
    Tried,
    Try,
    Watch,
    encode,
    to_senses,
)
from extproc.senses.watchers import Watchers

if TYPE_CHECKING:
    from extproc.senses.prefix import Prefixes

log = structlog.get_logger(__name__)

HEARTBEAT_S = 1.0
"""How often the other end hears that we live."""

_GATHERED_S = 0.003
"""Pages that were asked for together are reported together, in this time: each report would wake the other end."""


class Port(asyncio.Protocol):
    """Our end of the socket. `most_waiting_bytes`: beyond it reports that are made anew anyway are dropped."""

    def __init__(self, most_waiting_bytes: int) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self.watchers = Watchers(self.report)
        self.prefixes: Prefixes | None = None
        self._most_waiting_bytes = most_waiting_bytes
        self._frames = Frames()
        self._dropped = 0
        self._outgoing: list[bytes] = []
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.Protocol."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        for body in self._frames.feed(data):
            try:
                self._take(to_senses(body))
            except Exception:
                log.exception("order not carried out")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio.Protocol
        """asyncio.Protocol."""
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, order: ToSenses) -> None:
        if isinstance(order, Watch):
            self.watchers.watch(order)
        elif isinstance(order, ProbeNow):
            self.watchers.probe_now(order.address)
        elif isinstance(order, Try):
            self.watchers.try_generation(order.address, order.model)
        elif isinstance(order, Index):
            self._index(order)
        elif self.prefixes is not None:
            self.prefixes.match(order)

    def _index(self, order: Index) -> None:
        """What listens and tokenizes is imported where it is wanted: it takes its time and room."""
        if self.prefixes is None and order.pools:
            from extproc.senses.prefix import Prefixes

            self.prefixes = Prefixes(self.report)
        if self.prefixes is not None:
            self.prefixes.order(order)

    def report(self, message: FromSenses) -> None:
        """Tell the decision process."""
        if self._crowded and not isinstance(message, Matched | Tried | FellSilent):
            self._dropped += 1
        else:
            self._outgoing.append(encode(message))
            if not isinstance(message, Scraped):
                self._send()
            elif self._sending is None:
                self._sending = asyncio.get_running_loop().call_later(_GATHERED_S, self._send)
        if self.prefixes is not None and isinstance(message, Scraped):
            self.prefixes.scraped(message)

    def _send(self) -> None:
        """Write what has gathered."""
        if self._sending is not None:
            self._sending.cancel()
        outgoing, self._outgoing, self._sending = self._outgoing, [], None
        if not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))

    @property
    def _crowded(self) -> bool:
        return self._transport.get_write_buffer_size() > self._most_waiting_bytes

    async def beat(self) -> None:
        """Say that we live, again and again. While nobody listens, what is counted is kept for later."""
        while True:
            if not self._crowded:
                dropped, self._dropped = self._dropped, 0
                self.report(Alive(dropped))
                if self.prefixes is not None:
                    self.prefixes.tell()
            await asyncio.sleep(HEARTBEAT_S)


async def run(descriptor: int, most_waiting_bytes: int) -> None:
    """Serve the decision process at the other end of this socket until it hangs up."""
    loop = asyncio.get_running_loop()
    ours = socket.socket(fileno=descriptor)
    _, port = await loop.create_unix_connection(lambda: Port(most_waiting_bytes), sock=ours)
    beating = asyncio.create_task(port.beat(), name="heartbeat")
    await port.closed
    beating.cancel()
    await port.watchers.close()
    if port.prefixes is not None:
        await port.prefixes.close()
