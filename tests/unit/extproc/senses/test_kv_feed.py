"""KV events over real ZMQ sockets, from publishers that behave as vLLM's does."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from structlog.testing import capture_logs

from extproc.senses import kv_feed as module
from extproc.senses.kv_feed import KvFeed, Reader, Sockets, Source, Step, places_configured
from extproc.senses.messages import KvEvents
from policies.placement.precise_index import PreciseIndex
from vllm_adapters.kv_events import BadEvents, Batch, Place, parse_frames, token_bytes

HANG_GUARD_S = 30
HOST = "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD_S):
        while not true():  # noqa: ASYNC110 - what is waited for happens in code that tells nobody
            await asyncio.sleep(0.01)


def _bind(socket: zmq.asyncio.Socket, at: str) -> None:
    """ZMQ frees a port a moment after its socket was closed."""
    end_s = time.monotonic() + HANG_GUARD_S
    while True:
        try:
            socket.bind(at)
        except zmq.ZMQError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)
        else:
            return


class Engine:
    """A publisher as in vLLM: numbered messages, the last `kept` of which it says again."""

    def __init__(self, *, events: str, replay: int | None = None, topic: str = "", rank: int | None = None) -> None:
        self._at, self._replay_port, self._topic, self._rank = events, replay, topic.encode(), rank
        self.kept = 100
        self.start()

    def start(self) -> None:
        """Start, or start anew: numbers begin at 0, and nothing is remembered."""
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        if "*" in self._at:
            _bind(self._pub, self._at)
        else:
            self._pub.connect(self._at)
        self._said: list[bytes] = []
        self._now_s = getattr(self, "_now_s", 0.0)
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        if self._replay_port is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            _bind(self._router, f"tcp://*:{self._replay_port}")
            self._replaying = asyncio.create_task(self._replay(self._router))

    async def stop(self) -> None:
        """Close everything."""
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        for one in (self._pub, self._router):
            if one is not None:
                one.close()

    async def say(self, *events: Any, heard: bool = True) -> None:
        """Publish one message; or lose it on the way."""
        self._now_s += 1
        payload = msgspec.msgpack.encode([self._now_s, list(events), self._rank])
        self._said.append(payload)
        if heard:
            await self._pub.send_multipart([self._topic, (len(self._said) - 1).to_bytes(8, "big"), payload])

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, first = await router.recv_multipart()
            for number, payload in list(enumerate(self._said))[-self.kept :]:
                if number >= int.from_bytes(first, "big"):
                    await router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def _stored(number: int, parent: int | None = None) -> list[Any]:
    """Block `number`, of one token with the same number."""
    return ["BlockStored", [number], parent, [number], 1, None, "GPU", None, [None], 0]


class Rig:
    """A feed of one pool over the endpoint of one HTTP server."""

    def __init__(self, events: KvEvents, endpoint: str, client: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.index = PreciseIndex(1_000)
        self.feed = KvFeed(events, self.index, client)
        self.feed.watch([endpoint])

    def holds(self, *tokens: int, endpoint: str | None = None) -> int:
        """Of these and one more."""
        asked = endpoint or self.endpoint
        return self.index.match(token_bytes([*tokens, 99]), None, None, [asked]).tokens[asked]

    @property
    def known(self) -> bool:
        """Everything that the endpoint holds."""
        return self.index.is_known(self.endpoint)


@asynccontextmanager
async def _rig(events: KvEvents, sources: dict[str, Any] | None = None) -> AsyncIterator[Rig]:
    """`sources`: what the engine says of itself; None for one that cannot."""

    async def tell(_: web.Request) -> web.Response:
        return web.Response(status=404) if sources is None else web.json_response(sources)

    app = web.Application()
    app.router.add_get("/kv_event_sources", tell)
    runner = web.AppRunner(app)
    await runner.setup()
    port = _free_port()
    await web.TCPSite(runner, HOST, port).start()
    async with aiohttp.ClientSession() as client:
        rig = Rig(events, f"{HOST}:{port}", client)
        yield rig
        await rig.feed.close()
    await runner.cleanup()


async def _say_until(engine: Engine, true: Callable[[], bool], *events: Any) -> None:
    """Publish again and again until it is heard: who subscribes late hears nothing of what was said before."""
    async with asyncio.timeout(HANG_GUARD_S):
        while not true():
            await engine.say(*events)
            await asyncio.sleep(0.05)


# -- which message comes next


def _batch(sequence: int, time_s: float = 1.0) -> Batch:
    return Batch("", sequence, time_s, 0, ())


def test_messages_are_judged_by_their_number() -> None:
    """The next one, one we had, one too early, and one that is new although its number is lower."""
    reader = Reader()
    assert reader.judge(_batch(0)) is Step.NEXT
    assert reader.judge(_batch(3)) is Step.GAP
    reader.took(_batch(3, 5.0))
    assert reader.judge(_batch(4)) is Step.NEXT
    assert reader.judge(_batch(5)) is Step.GAP
    assert reader.judge(_batch(3, 5.0)) is Step.OLD
    assert reader.judge(_batch(0, 6.0)) is Step.RESTART


def test_a_ranks_ports_are_its_number_above_the_first() -> None:
    """As vLLM counts them."""
    assert places_configured(KvEvents(port=5557, replay_port=6000, ranks=2)) == {
        0: Place(5557, 6000),
        1: Place(5558, 6001),
    }


# -- over sockets


async def test_events_of_an_engine_that_binds_are_followed() -> None:
    """From its first message on everything is known."""
    port = _free_port()
    async with _rig(KvEvents(port=port)) as rig:
        engine = Engine(events=f"tcp://*:{port}")
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        await engine.say(_stored(2, 1))
        await _until(lambda: rig.holds(1, 2) == 2)
        assert rig.known
        await engine.say(["BlockRemoved", [2], "GPU"])
        await _until(lambda: rig.holds(1, 2) == 1)
        await engine.stop()


async def test_who_joins_late_hears_everything_again() -> None:
    """By the port that the engine itself names, which counts for more than the config's."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    await engine.say(_stored(1))
    await engine.say(_stored(2, 1))
    told = {"0": {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}}
    async with _rig(KvEvents(port=1), told) as rig:
        await _until(lambda: rig.holds(1, 2) == 2 and rig.known)
        await engine.say(_stored(3, 2), heard=False)
        await _say_until(engine, lambda: rig.holds(1, 2, 3) == 3)
    await engine.stop()


async def test_an_engine_that_said_nothing_yet_is_known_to_hold_nothing() -> None:
    """Its replay is empty."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _until(lambda: rig.known)
    await engine.stop()


async def test_who_joins_too_late_is_blind() -> None:
    """What the engine has forgotten cannot be heard again; what it holds in part does not count as known."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    engine.kept = 1
    await engine.say(_stored(1))
    await engine.say(_stored(7))
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _until(lambda: rig.holds(7) == 1)
        assert not rig.known
    await engine.stop()


async def test_a_gap_is_filled_by_hearing_again() -> None:
    """Nothing is lost, and it is counted."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        await engine.say(_stored(2, 1), heard=False)
        await engine.say(_stored(3, 2), heard=False)
        await _say_until(engine, lambda: rig.holds(1, 2, 3) == 3)
        assert rig.known
        assert rig.feed.counts["gaps"] >= 1
        assert rig.feed.counts["lost"] == 0
    await engine.stop()


async def test_a_gap_that_stays_makes_the_endpoint_blind() -> None:
    """Everything known of it is forgotten, until it holds nothing or has turned over."""
    port = _free_port()
    async with _rig(KvEvents(port=port)) as rig:
        engine = Engine(events=f"tcp://*:{port}")
        await _say_until(engine, lambda: rig.known and rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        await engine.say(_stored(2, 1), heard=False)
        await engine.say(_stored(7))
        await _until(lambda: rig.holds(7) == 1)
        assert rig.holds(1) == 0
        assert not rig.known
        assert rig.feed.counts["lost"] == 1
        await engine.say(["AllBlocksCleared"])
        await _until(lambda: rig.known)
        await engine.stop()


async def test_an_engine_that_restarts_is_forgotten() -> None:
    """Its numbers begin anew; what it held is gone, and what it has said since is heard, though nobody was there."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        for _ in range(3):
            await engine.say()
        await engine.stop()
        engine.start()
        await engine.say(_stored(4), heard=False)
        await _say_until(engine, lambda: rig.holds(5) == 1, _stored(5))
        assert rig.holds(1) == 0
        assert rig.holds(4) == 1
        assert rig.known
        assert rig.feed.counts["restarts"] == 1
    await engine.stop()


async def test_metrics_that_tell_of_a_restart_are_believed() -> None:
    """Unless the events have told of it already: then nothing is forgotten twice."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        rig.feed.restarted(rig.endpoint, 0.5)
        assert rig.holds(1) == 1
        rig.feed.restarted(rig.endpoint, 1e9)
        assert rig.holds(1) == 0
        assert not rig.known
        await _until(lambda: rig.holds(1) == 1)  # the engine is the same, and says it again
    await engine.stop()


async def test_engines_that_connect_to_us_are_told_apart_by_topic() -> None:
    """Two endpoints into one socket; who is none of ours is counted and ignored."""
    bind = f"tcp://{HOST}:{_free_port()}"
    other = f"{HOST}:9"
    told = {"0": {"endpoint": bind, "replay_endpoint": None}}
    async with _rig(KvEvents(bind=bind), told) as rig:
        here = Engine(events=bind, topic=f"kv@{rig.endpoint}@m")
        there = Engine(events=bind, topic=f"kv@{other}@m")
        await _say_until(here, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        await _say_until(there, lambda: rig.feed.counts["strangers"] > 0, _stored(2))
        assert rig.index.match(token_bytes([2, 9]), None, None, [other]).tokens[other] == 0
        assert rig.holds(2) == 0
        await here.stop()
        await there.stop()


async def test_a_gap_of_an_engine_that_connects_to_us_is_filled_too() -> None:
    """Its replay it binds all the same."""
    bind, replay = f"tcp://{HOST}:{_free_port()}", _free_port()
    told = {"0": {"endpoint": bind, "replay_endpoint": f"tcp://*:{replay}"}}
    async with _rig(KvEvents(bind=bind), told) as rig:
        engine = Engine(events=bind, replay=replay, topic=f"kv@{rig.endpoint}@m")
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        await engine.say(_stored(2, 1), heard=False)
        await engine.say(_stored(3, 2), heard=False)
        await _say_until(engine, lambda: rig.holds(1, 2, 3) == 3)
        assert rig.known
        await engine.stop()


async def test_ranks_behind_one_address_are_followed_each() -> None:
    """Each on a port of its own; what one of two holds counts half."""
    ports = {rank: _free_port() for rank in (0, 1)}
    told = {str(rank): {"endpoint": f"tcp://*:{port}"} for rank, port in ports.items()}
    async with _rig(KvEvents(), told) as rig:
        engines = [Engine(events=f"tcp://*:{port}", rank=rank) for rank, port in ports.items()]
        both = _stored(1), _stored(2, 1)
        await _say_until(engines[0], lambda: rig.holds(1, 2) == 1, ["AllBlocksCleared"], *both)
        assert not rig.known
        await _say_until(engines[1], lambda: rig.holds(1, 2) == 2, ["AllBlocksCleared"], *both)
        assert rig.known
        for engine in engines:
            await engine.stop()


async def test_what_is_no_event_is_counted_and_does_no_harm() -> None:
    """The next message is heard, after the gap that the bad one leaves."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}", replay=replay)
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        await _say_until(engine, lambda: rig.holds(1) == 1 and rig.feed.counts["batches"] > 3, _stored(1))
        await engine._pub.send_multipart([b"", b"x"])
        await engine.say(_stored(2, 1), heard=False)
        await _say_until(engine, lambda: rig.holds(1, 2) == 2)
        assert rig.feed.counts["bad"] == 1
    await engine.stop()


async def test_a_flood_of_rubbish_lets_others_have_their_turn_and_the_log_its_peace() -> None:
    """All of it is there at once, so nothing that is awaited waits; it is all counted, and one line says so."""
    counts: Counter[str] = Counter()

    async def receive(_within_s: float | None) -> Batch | None:
        if counts["bad"] == 1_000:
            await asyncio.Event().wait()
        raise BadEvents("rubbish")

    with capture_logs() as logs:
        task = asyncio.create_task(Source("e", 0, PreciseIndex(10), counts, receive, Sockets()).run())
        for _ in range(3):
            await asyncio.sleep(0)
        assert counts["bad"] <= 3
        await _until(lambda: counts["bad"] == 1_000)
    task.cancel()
    assert len([line for line in logs if line["event"] == "no KV events"]) == 1


async def test_after_a_message_that_takes_long_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was one or not: ten times as long as it took. After a short one nobody waits."""
    times, pauses = iter([0.0, 2.0, 2.0, 4.0, 4.0, 4.001]), list[float]()

    async def paused(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr(module, "thread_time", lambda: next(times))
    monkeypatch.setattr(asyncio, "sleep", paused)
    assert await module._read(len, [b""]) == 1
    with pytest.raises(BadEvents):
        await module._read(parse_frames, [])
    assert await module._read(len, [b""]) == 1
    assert pauses == [20.0, 20.0]


async def test_an_engine_without_events_stays_blind() -> None:
    """It does not say where they are, nor does the config; nothing is tried at random."""
    async with _rig(KvEvents(), {}) as rig:
        with capture_logs() as logs:
            await _until(lambda: bool(logs))
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert not rig.known


async def test_an_endpoint_that_leaves_is_forgotten() -> None:
    """With all that it held."""
    port = _free_port()
    async with _rig(KvEvents(port=port)) as rig:
        engine = Engine(events=f"tcp://*:{port}")
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
        rig.feed.watch([])
        assert rig.holds(1) == 0
        await engine.say(_stored(1))
        await asyncio.sleep(0.2)
        assert len(rig.index) == 0
        await engine.stop()


async def test_an_endpoint_that_leaves_while_it_speaks_does_not_come_back() -> None:
    """Not one message is taken after that, however many wait; and nothing of it is kept."""
    bind = f"tcp://{HOST}:{_free_port()}"
    async with _rig(KvEvents(bind=bind), {"0": {"endpoint": bind}}) as rig:
        await _until(lambda: bool(rig.feed._waiting))
        for number in range(100):
            rig.feed._pass_on(Batch(f"kv@{rig.endpoint}@m", number, 1.0, 0, ()))
        while not rig.feed.counts["batches"]:  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)
        rig.feed.watch([])
        taken = rig.feed.counts["batches"]
        assert taken < 90
        for _ in range(10):
            await asyncio.sleep(0)
        assert rig.feed.counts["batches"] == taken
        assert [rig.index._engines, rig.feed._sources, rig.feed._waiting] == [{}, {}, {}]


async def test_a_rank_that_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its queue, nor a reader whose old messages make every restart look unheard of."""
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.01)
    bind = f"tcp://{HOST}:{_free_port()}"
    told = {str(rank): {"endpoint": bind} for rank in (0, 1)}
    async with _rig(KvEvents(bind=bind), told) as rig:
        await _until(lambda: len(rig.feed._waiting) == len(rig.feed._sources) == 2)
        del told["1"]
        await _until(lambda: len(rig.feed._waiting) == len(rig.feed._sources) == 1)
        rig.feed._sources[rig.endpoint, 0].reader.last_at_s = 2.0
        rig.feed.restarted(rig.endpoint, 1.0)
        assert rig.feed.counts["restarts"] == 0


async def test_sockets_are_bounded_by_us_and_not_by_what_all_share() -> None:
    """A thousand is what ZMQ has room for unless it is told; the fleet may have as many engines."""
    sockets = Sockets()
    opened = sockets.open(zmq.SUB)
    assert sockets._context is not None
    assert sockets._context is not zmq.asyncio.Context.instance()
    assert sockets._context.get(zmq.MAX_SOCKETS) == module._MOST_SOCKETS
    sockets.close()
    assert opened.closed


async def test_a_source_that_cannot_listen_is_counted_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More and more rarely, in a line each; when there is a socket, events are heard."""
    port = _free_port()
    engine = Engine(events=f"tcp://*:{port}")
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    monkeypatch.setattr(module, "_MOST_SOCKETS", 1)
    with capture_logs() as logs:
        async with _rig(KvEvents(port=port)) as rig:
            await _until(lambda: rig.feed.counts["deaf"] >= 2)
            rig.feed._sockets.close()
            monkeypatch.setattr(module, "_MOST_SOCKETS", 100)
            await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
    assert {(entry["log_level"], "exc_info" in entry) for entry in logs} == {("warning", False)}
    await engine.stop()


async def test_an_engine_that_tells_too_much_of_itself_is_not_believed() -> None:
    """What the config says counts; the rest of the page is not even read."""
    port = _free_port()
    engine = Engine(events=f"tcp://*:{port}")
    told = {"0": {"endpoint": "tcp://*:1", "more": "x" * module._LARGEST_PAGE_BYTES}}
    async with _rig(KvEvents(port=port), told) as rig:
        await _say_until(engine, lambda: rig.holds(1) == 1, ["AllBlocksCleared"], _stored(1))
    await engine.stop()


def _source_that_replays(*replays: list[Batch], index: PreciseIndex) -> tuple[Source, list[int]]:
    """Its engine answers each replay with the next of these, the last again and again."""
    asked: list[int] = []
    left = list(replays)

    async def replay(first: int) -> AsyncGenerator[Batch, None]:
        asked.append(first)
        for batch in left.pop(0) if len(left) > 1 else left[0]:
            yield batch

    async def receive(_: float | None) -> Batch | None:
        await asyncio.Event().wait()
        return None

    source = Source("e", 0, index, Counter(), receive, Sockets(), "tcp://nowhere:1")
    source._replay = replay  # type: ignore[method-assign] # in the place of a socket
    return source, asked


async def test_an_engine_that_is_another_in_every_replay_is_heard_twice() -> None:
    """One that likes could have us hear it again without end."""
    index = PreciseIndex(10)
    index.keep_ranks("e", [0])
    hostile = [_batch(9, float(time_s)) for time_s in (1, 2, 3, 4)]
    source, asked = _source_that_replays(hostile, index=index)
    assert await source._hear_again(5) is False
    assert asked == [5, 0]


async def test_while_an_engine_says_again_it_may_hold_more() -> None:
    """Half of what it said is in the index, and a prompt in the other half would be sent elsewhere."""
    index = PreciseIndex(10)
    index.keep_ranks("e", [0])
    source, _ = _source_that_replays([], index=index)
    known: list[bool] = []

    async def replay(_: int) -> AsyncGenerator[Batch, None]:
        for number in range(3):
            yield _batch(number, float(number))
            known.append(index.is_known("e"))

    source._replay = replay  # type: ignore[method-assign] # in the place of a socket
    assert await source._hear_again(0)
    assert known == [False] * 3
    assert index.is_known("e")


async def test_a_replay_that_breaks_off_makes_nothing_known() -> None:
    """What came of it may be the smaller half, and what was dropped since would be promised."""
    index = PreciseIndex(10)
    index.keep_ranks("e", [0])
    source, _ = _source_that_replays([], index=index)

    async def replay(_: int) -> AsyncGenerator[Batch, None]:
        yield _batch(0, 0.0)
        raise TimeoutError

    source._replay = replay  # type: ignore[method-assign] # in the place of a socket
    await source._catch_up()
    assert not index.is_known("e")
    assert source.reader.next is None


async def test_a_replay_that_is_none_makes_nothing_known() -> None:
    """An engine that answers with something else has not said that it holds nothing."""
    port, replay = _free_port(), _free_port()
    engine = Engine(events=f"tcp://*:{port}")
    router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    _bind(router, f"tcp://*:{replay}")
    async with _rig(KvEvents(port=port, replay_port=replay)) as rig:
        client, *_ = await router.recv_multipart()
        await router.send_multipart([client, b"no", b"replay"])
        await _until(lambda: rig.feed.counts["bad"] == 1)
        await asyncio.sleep(0)
        assert not rig.known
    router.close()
    await engine.stop()
