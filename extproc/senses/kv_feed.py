"""Listens to the KV events of one pool's engines over ZMQ and keeps the pool's precise index by them.

An engine either binds a port, to which we connect, or connects to one of ours; who binds is the engine's setting, and
ours has to fit (`events.port` or `events.bind`). In the second case all speak into one socket, and the topic tells who
does: `kv@<ip:port>@<model>`. Where engines say themselves where their events come out (GET /kv_event_sources), that
counts; only the port is taken from there, never a host, so what we connect to is always the endpoint itself. With
`bind` there is nothing of the kind: whoever reaches our port speaks for any endpoint, by a topic that he writes.

Messages are numbered from the engine's start. A gap is filled by asking the engine to say it again, where it offers
that; else, or if it has forgotten too, everything of that engine is forgotten, and the endpoint counts as blind until
its cache has turned over or is cleared: half a truth in an index promises what is not there. Numbers that begin anew
mean that the engine did.

All is bounded: sockets, messages waiting in one or for their turn, the size of one, what is said again. What is lost by
that shows as a gap. These bounds are constants, since they follow from what vLLM makes of a step and not from a fleet:
real engines fill megabytes of them, and only one that lies, in a pool that trusts it with its requests, could fill all.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from enum import Enum, auto
from time import thread_time
from typing import TypeAlias, TypeVar

import aiohttp
import structlog
import zmq
import zmq.asyncio

from extproc.senses.messages import KvEvents
from policies.placement.precise_index import PreciseIndex
from vllm_adapters.kv_events import (
    SOURCES_PATH,
    BadEvents,
    Batch,
    Place,
    Places,
    address_in,
    parse_frames,
    places_told,
    replay_request,
    replayed,
)

log = structlog.get_logger(__name__)

_MOST_WAITING = 256
"""Messages in a socket, and again before an engine's turn. vLLM makes one per step, so these are seconds; what is
missed while a replay is heard, the next one brings.
"""
_LARGEST_MESSAGE_BYTES = 8 * 1024 * 1024
"""A step of 64,000 tokens, more than engines batch, takes half a megabyte; a prompt of a million tokens whose blocks
are all told again takes seven.
"""
_LARGEST_PAGE_BYTES = 256 * 1024
"""What 256 ranks have to say of themselves, and more."""
_MOST_SOCKETS = 24_576
"""Per pool. An engine takes three, two of them to see that the connection is lost, and one more while it says again."""
_ANSWER_S = 2.0
"""An engine that says nothing for so long when asked is not there, or does not offer what is asked."""
_MOST_REPLAYED = 100_000
"""Ten times what vLLM remembers unless it is told otherwise."""
_ASK_AGAIN_S, _RETRY_S, _BIND_AGAIN_S = 60.0, 1.0, 5.0
_COMPLAIN_AGAIN_S = 60.0
_LONG_S, _READINGS = 0.01, 10
"""After a message that took longer to read, so much of that time is left for others. Those of a step take less than a
millisecond, the largest half a second, and many of these would leave no engine's figures fresh.
"""
_HTTP_OK, _HTTP_SERVER_ERROR = 200, 500


class Step(Enum):
    """What a message is to us, by its number."""

    NEXT = auto()
    OLD = auto()
    """We had it."""
    GAP = auto()
    """Some before it are missing."""
    RESTART = auto()
    """The engine counts anew."""


class Reader:
    """Which message of one engine comes next. Pure."""

    def __init__(self) -> None:
        self.next: int | None = None
        self.last_at_s = 0.0

    @property
    def last(self) -> int:
        """The number of the last message taken; 0 if there is none."""
        return max(0, (self.next or 0) - 1)

    def judge(self, batch: Batch) -> Step:
        """What this message is. One with a lower number is new if it was made later than the last."""
        if self.next is None:
            return Step.GAP if batch.sequence else Step.NEXT
        if batch.sequence >= self.next:
            return Step.GAP if batch.sequence > self.next else Step.NEXT
        return Step.RESTART if batch.time_s > self.last_at_s else Step.OLD

    def took(self, batch: Batch) -> None:
        """This one was taken."""
        self.next = batch.sequence + 1
        self.last_at_s = max(self.last_at_s, batch.time_s)


class Sockets:
    """Those of one feed, in a context of its own: the one that all share has room for a thousand, or 250 engines."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None

    def open(self, kind: int) -> zmq.asyncio.Socket:
        """A socket, bounded in what it holds. Raises zmq.ZMQError: there is none left."""
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, min(_MOST_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE_BYTES)
        return socket

    def close(self) -> None:
        """All of them."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


class Complaints:
    """What is wrong with messages. All of it is counted, and the first of a minute logged: rubbish comes in floods."""

    def __init__(self, counts: Counter[str], **who: object) -> None:
        self._counts, self._who = counts, who
        self._silent_until_s = -math.inf

    def bad(self, error: BadEvents) -> None:
        """This one was none of an engine's."""
        self._counts["bad"] += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._silent_until_s:
            self._silent_until_s = now_s + _COMPLAIN_AGAIN_S
            log.warning("no KV events", **self._who, error=str(error)[:200])


Receive: TypeAlias = Callable[[float | None], Awaitable[Batch | None]]
"""The next message; None if none comes within so many seconds. Raises BadEvents."""


class Source:
    """One engine's events, in order and without a gap, into the index. `replay`: where it says them again, if it does.

    `counts`: what did not go smoothly, by name. `interrupted`: the connection was lost since the last message, so the
    next one may be another engine's, whatever its number.
    """

    def __init__(
        self,
        endpoint: str,
        rank: int,
        index: PreciseIndex,
        counts: Counter[str],
        receive: Receive,
        sockets: Sockets,
        replay: str | None = None,
    ) -> None:
        self.reader = Reader()
        self.interrupted = False
        self._endpoint = endpoint
        self._rank = rank
        self._index = index
        self._counts = counts
        self._receive = receive
        self._sockets = sockets
        self._replay_at = replay
        self._complaints = Complaints(counts, endpoint=endpoint, rank=rank)

    async def run(self) -> None:
        """Until cancelled."""
        await self._catch_up()
        while True:
            await self._turn()
            await asyncio.sleep(0)  # what waits in a socket comes at once, rubbish as well: others want their turn

    async def _turn(self) -> None:
        waits_s = _ANSWER_S if self.reader.next is None and self._replay_at else None
        try:
            batch = await self._receive(waits_s)
        except BadEvents as error:
            self._complaints.bad(error)
            return
        if batch is None:
            await self._catch_up()
        else:
            await self._take(batch)

    async def _catch_up(self) -> None:
        """Hear everything from the start, if the engine can still say it; from where it can, if not."""
        if self._replay_at is None:
            return
        ended = await self._hear_again(0)
        if ended and self.reader.next is None:  # it has said nothing yet
            self._index.forget(self._endpoint, self._rank, empty=True)
            self.reader.next = 0
        elif not ended:  # half of it is none: it is asked anew
            self._index.forget(self._endpoint, self._rank, empty=False)
            self.reader.next = None

    async def _take(self, batch: Batch) -> None:
        step = self.reader.judge(batch)
        if step is Step.RESTART and batch.sequence:
            self._begin_anew()
            step = Step.GAP
        interrupted, self.interrupted = self.interrupted, False
        if step is Step.GAP or interrupted:
            self._counts["gaps"] += step is Step.GAP
            if self._replay_at is not None:
                await self._hear_again(self.reader.last)
        self._take_as_is(batch)

    def _begin_anew(self) -> None:
        """The engine restarted, and we missed its first messages."""
        self._counts["restarts"] += 1
        self._index.forget(self._endpoint, self._rank, empty=False)
        self.reader.next = None

    def _take_as_is(self, batch: Batch) -> None:
        """Whatever is missing before it will not come any more."""
        step = self.reader.judge(batch)
        if step is Step.OLD:
            return
        if step is Step.RESTART:
            self._counts["restarts"] += 1
        elif step is Step.GAP and self.reader.next:
            self._counts["lost"] += 1
        if step is not Step.NEXT or batch.sequence == 0:
            self._index.forget(self._endpoint, self._rank, empty=batch.sequence == 0)
        self._index.apply(self._endpoint, self._rank, batch.events)
        self._counts["batches"] += 1
        self.reader.took(batch)

    async def _hear_again(self, first: int) -> bool:
        """Take what the engine says again from this number on. Whether it came to the end of it.

        The first one we should know: if we do not, its number is the same and the engine another, which is heard from
        its start, once. If that is yet another one, its next message will show.
        """
        self._index.fall_behind(self._endpoint, self._rank, behind=True)
        try:
            ended = await self._heard_again(first)
            if ended is None:
                ended = await self._heard_again(0)
            return ended is True
        finally:
            self._index.fall_behind(self._endpoint, self._rank, behind=False)

    async def _heard_again(self, first: int) -> bool | None:
        """As `_hear_again`; None, and nothing known of it, as soon as the engine shows to be another."""
        self._counts["replays"] += 1
        try:
            async with aclosing(self._replay(first)) as batches:
                async for batch in batches:
                    if batch.sequence and self.reader.judge(batch) is Step.RESTART:
                        self._begin_anew()
                        return None
                    self._take_as_is(batch)
                    await asyncio.sleep(0)
        except BadEvents as error:
            self._complaints.bad(error)
            return False
        except TimeoutError:
            return False
        return True

    async def _replay(self, first: int) -> AsyncGenerator[Batch, None]:
        """Raises BadEvents, and TimeoutError if the engine falls silent."""
        socket = self._sockets.open(zmq.DEALER)
        try:
            socket.connect(str(self._replay_at))
            await socket.send_multipart(replay_request(first))
            for _ in range(_MOST_REPLAYED):
                if not await socket.poll(round(_ANSWER_S * 1000)):
                    raise TimeoutError
                batch = await _read(replayed, await socket.recv_multipart())
                if batch is None:
                    return
                yield batch
        finally:
            socket.close()


_Read = TypeVar("_Read")


async def _read(parse: Callable[[Sequence[bytes]], _Read], frames: Sequence[bytes]) -> _Read:
    """What a message says. After one that took long to read, others have had their turn first."""
    began_s = thread_time()
    try:
        return parse(frames)
    finally:
        used_s = thread_time() - began_s
        if used_s > _LONG_S:
            await asyncio.sleep(_READINGS * used_s)


@asynccontextmanager
async def _interruptions(socket: zmq.asyncio.Socket, source: Source) -> AsyncIterator[None]:
    """Tell the source when its connection is lost. ZMQ connects again by itself, and says nothing of it."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def watch() -> None:
        while True:
            await monitor.recv_multipart()
            source.interrupted = True

    task = asyncio.create_task(watch(), name="kv events, connection")
    try:
        yield
    finally:
        task.cancel()
        socket.disable_monitor()
        monitor.close()


def places_configured(events: KvEvents) -> Places:
    """What the config says, each rank's port one above the last one's."""
    return {rank: Place(_plus(events.port, rank), _plus(events.replay_port, rank)) for rank in range(events.ranks)}


def _plus(port: int | None, rank: int) -> int | None:
    return None if port is None else port + rank


# -- one pool

_Running: TypeAlias = dict[tuple[int, Place], asyncio.Task[None]]
"""What listens to the engines behind one endpoint."""


class KvFeed:
    """The events of a pool's engines. `index` is theirs, `client` asks them where their events come out."""

    def __init__(self, events: KvEvents, index: PreciseIndex, client: aiohttp.ClientSession) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        self._index = index
        self._client = client
        self._sockets = Sockets()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, _Running] = {}
        self._sources: dict[tuple[str, int], Source] = {}
        self._waiting: dict[tuple[str, int], asyncio.Queue[Batch]] = {}
        self._bound: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, endpoints: Iterable[str]) -> None:
        """Listen to exactly these."""
        wanted = set(endpoints)
        if self._events.bind is not None and self._bound is None:
            self._bound = self._spawn(self._listen(self._events.bind), "kv events")
        for gone in self._followers.keys() - wanted:
            self._stop(gone)
        for endpoint in wanted - self._followers.keys():
            self._start(endpoint)

    def restarted(self, endpoint: str, started_at_s: float) -> None:
        """Its metrics say that it did, at this Unix time: begin anew, unless its events have told already."""
        sources = [source for (address, _), source in self._sources.items() if address == endpoint]
        if endpoint not in self._followers or (
            sources and all(source.reader.last_at_s > started_at_s for source in sources)
        ):
            return
        self.counts["restarts"] += 1
        self._stop(endpoint)
        self._start(endpoint)

    async def close(self) -> None:
        """Listen no more."""
        for endpoint in list(self._followers):
            self._stop(endpoint)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, endpoint: str) -> None:
        running = self._running[endpoint] = {}
        self._followers[endpoint] = self._spawn(self._follow(endpoint, running), f"kv events {endpoint}")

    def _stop(self, endpoint: str) -> None:
        """At once: what is told a turn later takes one more message meanwhile, after the endpoint was removed."""
        self._followers.pop(endpoint).cancel()
        for (rank, _), task in self._running.pop(endpoint).items():
            self._end(endpoint, rank, task)
        self._index.remove(endpoint)

    def _end(self, endpoint: str, rank: int, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._sources.pop((endpoint, rank), None)
        self._waiting.pop((endpoint, rank), None)

    async def _follow(self, endpoint: str, running: _Running) -> None:
        """Listen to all engines behind an endpoint, as many as it says there are."""
        while True:
            places = await self._places(endpoint)
            if places is not None:
                self._run(endpoint, places, running)
            await asyncio.sleep(_RETRY_S if places is None else _ASK_AGAIN_S)

    def _run(self, endpoint: str, places: Places, running: _Running) -> None:
        wanted = {(rank, place) for rank, place in places.items() if self._events.bind or place.events is not None}
        if not wanted:
            log.warning("engine does not say where its KV events are, nor does the config", endpoint=endpoint)
        for rank, place in running.keys() - wanted:
            self._end(endpoint, rank, running.pop((rank, place)))
        self._index.keep_ranks(endpoint, places)
        for rank, place in wanted - running.keys():
            source = self._source(endpoint, rank, place)
            running[rank, place] = self._spawn(source, f"kv events {endpoint}/{rank}")

    async def _source(self, endpoint: str, rank: int, place: Place) -> None:
        """One engine, until cancelled. What goes wrong is counted and tried again, more and more rarely."""
        now_s, pause_s = asyncio.get_running_loop().time, _RETRY_S
        while True:
            began_s = now_s()
            try:
                await self._heard(endpoint, rank, place)
            except zmq.ZMQError as error:
                self.counts["deaf"] += 1
                log.warning("cannot listen to KV events", endpoint=endpoint, rank=rank, error=str(error))
            except Exception:
                self.counts["failed"] += 1
                log.exception("listening to KV events failed", endpoint=endpoint, rank=rank)
            self._index.forget(endpoint, rank, empty=False)
            pause_s = _RETRY_S if now_s() - began_s > _ASK_AGAIN_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ASK_AGAIN_S)

    async def _heard(self, endpoint: str, rank: int, place: Place) -> None:
        host = endpoint.rpartition(":")[0]
        replay = None if place.replay is None else f"tcp://{host}:{place.replay}"
        if self._events.bind is None:
            await self._connected(endpoint, rank, f"tcp://{host}:{place.events}", replay)
        else:
            queue = self._waiting[endpoint, rank] = asyncio.Queue(_MOST_WAITING)
            await self._made(endpoint, rank, _from(queue), replay).run()

    async def _connected(self, endpoint: str, rank: int, at: str, replay: str | None) -> None:
        socket = self._sockets.open(zmq.SUB)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(at)

            async def receive(within_s: float | None) -> Batch | None:
                if within_s is not None and not await socket.poll(round(within_s * 1000)):
                    return None
                return await _read(parse_frames, await socket.recv_multipart())

            source = self._made(endpoint, rank, receive, replay)
            async with _interruptions(socket, source):
                await source.run()
        finally:
            socket.close()

    def _made(self, endpoint: str, rank: int, receive: Receive, replay: str | None) -> Source:
        source = Source(endpoint, rank, self._index, self.counts, receive, self._sockets, replay)
        self._sources[endpoint, rank] = source
        return source

    async def _listen(self, at: str) -> None:
        """One socket for all engines that connect to us, as soon as its port is free."""
        while True:
            try:
                await self._listen_once(at)
            except zmq.ZMQError as error:
                self.counts["deaf"] += 1
                log.warning("cannot listen to KV events", at=at, error=str(error))
            except Exception:
                self.counts["failed"] += 1
                log.exception("listening to KV events failed", at=at)
            await asyncio.sleep(_BIND_AGAIN_S)

    async def _listen_once(self, at: str) -> None:
        socket, complaints = self._sockets.open(zmq.SUB), Complaints(self.counts, at=at)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
            socket.bind(at)
            while True:
                try:
                    self._pass_on(await _read(parse_frames, await socket.recv_multipart()))
                except BadEvents as error:
                    complaints.bad(error)
                await asyncio.sleep(0)
        finally:
            socket.close()

    def _pass_on(self, batch: Batch) -> None:
        queue = self._waiting.get((address_in(batch.topic) or "", batch.rank))
        if queue is None:
            self.counts["strangers"] += 1
        elif queue.full():
            self.counts["overflows"] += 1
        else:
            queue.put_nowait(batch)

    async def _places(self, endpoint: str) -> Places | None:
        """Where the endpoint's events come out; None if it cannot be asked now."""
        try:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            url = f"http://{endpoint}{SOURCES_PATH}"
            async with self._client.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status >= _HTTP_SERVER_ERROR:
                    return None
                told = places_told(await _page(answer)) if answer.status == _HTTP_OK else {}
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        except ValueError as error:
            log.warning("engine does not say where its KV events are", endpoint=endpoint, error=str(error)[:200])
            told = {}
        return told or places_configured(self._events)


async def _page(answer: aiohttp.ClientResponse) -> bytes:
    """What it says. Raises ValueError if that is too much."""
    page = b""
    while len(page) <= _LARGEST_PAGE_BYTES and not answer.content.at_eof():
        page += await answer.content.read(_LARGEST_PAGE_BYTES + 1 - len(page))
    if len(page) > _LARGEST_PAGE_BYTES:
        raise ValueError(f"more than {_LARGEST_PAGE_BYTES} bytes")
    return page


def _from(queue: asyncio.Queue[Batch]) -> Receive:
    async def receive(within_s: float | None) -> Batch | None:
        try:
            async with asyncio.timeout(within_s):
                return await queue.get()
        except TimeoutError:
            return None

    return receive
