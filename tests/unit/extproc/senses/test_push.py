"""Listening to pushes: whose count, what a gap and a silence mean, and that no sender harms us."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.senses import push as module
from extproc.senses.messages import FellSilent, Heard, from_senses
from extproc.senses.messages import encode_body as encode_report
from extproc.senses.push import Ears, Listener
from vllm_adapters.metrics import EngineFigures
from vllm_adapters.pushed import LARGEST_MESSAGE_BYTES, FinishedRequest, Pushed

HANG_S = 60
SERVER_PORT = 8001


def message(seq: int, **fields: Any) -> bytes:
    """What the plugin of the engine at SERVER_PORT sends."""
    engine = fields.pop("engine", {"running": seq})
    return msgspec.msgpack.encode({"v": 1, "run": "a1", "seq": seq, "phase": "serving", "engines": [engine]} | fields)


async def eventually(check: Callable[[], bool]) -> None:
    """Until it holds."""
    async with asyncio.timeout(HANG_S):
        while not check():  # noqa: ASYNC110 - what is waited for comes over a socket
            await asyncio.sleep(0.001)


class House:
    """A listener, and a socket in the place of the plugin."""

    def __init__(self) -> None:
        self.reports: list[Heard | FellSilent] = []
        self.wakes = 0
        self.ears = Ears()
        self.wants_requests = False
        self.listener = Listener(
            f"127.0.0.1:{SERVER_PORT}", self.ears, self._report, self._wake, lambda: self.wants_requests
        )
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def _report(self, report: Heard | FellSilent) -> None:
        self.reports.append(from_senses(encode_report(report)))  # type: ignore[arg-type] # as it travels

    def _wake(self) -> None:
        self.wakes += 1

    def page(self, **figures: Any) -> EngineFigures:
        """The engine's page."""
        return EngineFigures(running=0, waiting=0, **{"stats_port": self.port, "stats_run": "a1"} | figures)

    async def listen(self) -> None:
        """Read the page, and wait until the listener has connected."""
        self.listener.told(self.page())
        async with asyncio.timeout(HANG_S):
            await self.socket.recv()

    async def send(self, *messages: bytes) -> None:
        """Push."""
        for one in messages:
            await self.socket.send(one)

    @property
    def heard(self) -> list[Heard]:
        """Reports of messages."""
        return [report for report in self.reports if isinstance(report, Heard)]

    @property
    def pushed(self) -> list[Pushed]:
        """What was taken."""
        return [report.pushed for report in self.heard if report.pushed is not None]

    def total(self, what: str) -> int:
        """One count over all reports."""
        return sum(getattr(report, what) for report in self.heard)

    async def close(self) -> None:
        """End all."""
        self.listener.close()
        if self.listener.task is not None:
            await asyncio.gather(self.listener.task, return_exceptions=True)
        self.ears.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One that is closed at the end."""
    made = House()
    yield made
    await made.close()


async def test_an_engine_that_pushes_is_found_by_its_page(house: House) -> None:
    """Until then nobody connects anywhere; from then on its messages are reported."""
    house.listener.told(house.page(stats_port=None))
    assert house.listener.task is None
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: house.listener.live)
    assert house.pushed[0].figures.running == 1


async def test_what_happened_in_messages_read_together_is_reported_together(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest state, the sum of first tokens, the highest usage of all."""
    monkeypatch.setattr(module, "_SHORTEST_GAP_S", 0.2)
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: bool(house.pushed))
    await house.send(
        message(2, first_tokens=2, largest_request_tokens=9, engine={"kv_used": 0.1, "kv_peak": 0.9}),
        message(3, first_tokens=3, engine={"running": 5, "kv_used": 0.2, "kv_peak": 0.3}),
    )
    await eventually(lambda: house.total("taken") == 3)
    last = house.pushed[-1]
    assert len(house.pushed) == 2
    assert (last.seq, last.figures.running, last.first_tokens, last.kv_peak) == (3, 5, 5, 0.9)
    assert last.largest_request_tokens == 9


async def test_a_gap_in_the_numbers_is_a_loss(house: House) -> None:
    """Counted; what comes is taken. What was before we listened is no loss."""
    await house.listen()
    await house.send(message(7), message(8), message(12))
    await eventually(lambda: house.total("taken") == 3)
    assert house.total("lost") == 3


async def test_an_old_message_is_ignored(house: House) -> None:
    """The state that it tells is not the present one."""
    await house.listen()
    await house.send(message(5), message(4), message(5), message(6))
    await eventually(lambda: house.total("taken") == 2)
    assert house.total("ignored") == 2
    assert [pushed.seq for pushed in house.pushed][-1] == 6


async def test_another_engine_at_the_port_does_not_count(house: House) -> None:
    """Engines that share a host take each other's ports; neither its figures nor its drain are this endpoint's."""
    await house.listen()
    await house.send(message(1, run="b2", server_port=8002, phase="draining"), message(1, run="c3"))
    await eventually(lambda: house.total("ignored") == 2)
    assert not house.listener.live
    assert house.pushed == []


async def test_the_same_server_started_anew_counts_before_its_page_can_be_read(house: House) -> None:
    """It says that it is the one at our endpoint's port. It begins its numbers, and its counters, anew."""
    await house.listen()
    house.listener.told(house.page(generated_tokens=1_000.0))
    await house.send(message(90, engine={"generated": 1_000}))
    await house.send(message(1, run="b2", server_port=SERVER_PORT, phase="loading", engines=[]))
    await house.send(message(2, run="b2", server_port=SERVER_PORT))
    await eventually(lambda: house.total("taken") == 3)
    assert house.total("lost") == 0


async def test_one_that_answers_and_says_that_it_loads_is_not_believed(house: House) -> None:
    """A plugin that has lost its engine would keep the endpoint out for ever."""
    await house.listen()
    await house.send(message(1, phase="loading", engines=[]))
    await eventually(lambda: house.total("ignored") == 1)
    assert not house.listener.live


async def test_a_message_older_than_the_page_is_ignored(house: House) -> None:
    """Its counters would seem to fall, which looks like a restart."""
    await house.listen()
    house.listener.told(house.page(prefix_queries_tokens=500.0))
    await house.send(message(1, engine={"prefix_queries": 499}), message(2, engine={"prefix_queries": 500}))
    await eventually(lambda: house.total("taken") == 1)
    assert house.total("ignored") == 1


async def test_silence_brings_the_page_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three heartbeats without a message that counts, once; and pushes are taken up again when they come."""
    monkeypatch.setattr(module, "SILENCE_S", 0.1)
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: house.listener.live)
    await eventually(lambda: bool(house.wakes))
    assert not house.listener.live
    await house.send(message(2))
    await eventually(lambda: house.listener.live)
    assert [report for report in house.reports if isinstance(report, FellSilent)] == [FellSilent("127.0.0.1:8001")]


async def test_what_does_not_count_breaks_no_silence(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a plugin that its engine no longer reaches: its page is ahead of what it pushes."""
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: house.listener.live)
    house.listener.told(house.page(generated_tokens=10.0))
    seq = 1
    while house.listener.live:
        seq += 1
        await house.send(message(seq, engine={"generated": 9}), b"noise")
        await asyncio.sleep(0.01)
    assert house.total("malformed") > 0
    assert house.total("taken") == 1


async def test_a_page_that_names_another_port_moves_the_ear(house: House) -> None:
    """And one that names none ends the listening, and the preference."""
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: house.listener.live)
    first = house.listener.task
    other = house.context.socket(zmq.PUB)
    house.listener.told(house.page(stats_port=other.bind_to_random_port("tcp://127.0.0.1")))
    assert not house.listener.live
    assert house.listener.task is not first
    house.listener.told(house.page(stats_port=None))
    await asyncio.gather(first, house.listener.task, return_exceptions=True)  # type: ignore[arg-type]
    assert house.ears.listening == 0
    other.close()


async def test_what_is_too_large_never_gets_here(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is cut, and made again after a while; what is sent then is heard."""
    monkeypatch.setattr(module, "_DEAF_AFTER_S", 0.05)
    await house.listen()
    await house.send(b"x" * (LARGEST_MESSAGE_BYTES + 1))
    async with asyncio.timeout(HANG_S):
        seq = 0
        while not house.listener.live:
            seq += 1
            await house.send(message(seq))
            await asyncio.sleep(0.01)
    assert house.total("malformed") == 0


async def test_an_endless_sender_is_read_in_turns(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many messages, then a pause; what is not read in time is dropped on the way, and shows as lost."""
    monkeypatch.setattr(module, "_MOST_PER_TURN", 5)
    await house.listen()
    for seq in range(1, 2_000):
        await house.send(message(seq))
    await eventually(lambda: house.total("taken") + house.total("lost") > 50)
    assert max(report.taken + report.malformed for report in house.heard) == 5


async def test_messages_that_take_long_to_read_are_read_one_a_turn(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pause after each that others need more: sixty-four large ones in a row would hold up all figures."""
    used_s, pauses = itertools.count(), list[float]()
    sleep = asyncio.sleep

    async def paused(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(module, "thread_time", lambda: next(used_s))  # a second a message
    await house.listen()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", paused)
        await house.send(*(message(seq) for seq in range(1, 20)))
        await eventually(lambda: house.total("taken") == 19)
    assert max(report.taken for report in house.heard) == 1
    assert 10.0 in pauses


async def test_a_listener_reports_more_rarely_in_a_large_fleet(house: House) -> None:
    """All of them together report no more often than the decision loop can take."""
    house.ears.listening = 1
    assert house.ears.gap_s == 0.01
    house.ears.listening = 50
    assert house.ears.gap_s == 0.1
    house.ears.listening = 4_000
    assert house.ears.gap_s == 0.2
    house.ears.listening = 0


async def test_without_a_socket_left_listening_is_tried_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scraping goes on meanwhile. It is counted, and when there is one, pushes are heard."""
    subscribe = house.ears.subscribe

    def fail_twice(host: str, port: int) -> zmq.asyncio.Socket:
        if house.total("deaf") < 2:
            raise OSError(errno.EMFILE, "no file left")
        return subscribe(host, port)

    monkeypatch.setattr(module, "_LISTEN_AGAIN_S", 0.01)
    monkeypatch.setattr(house.ears, "subscribe", fail_twice)
    await house.listen()
    assert house.total("deaf") == 2
    assert not house.listener.live
    await house.send(message(1))
    await eventually(lambda: house.listener.live)


async def test_a_fault_while_listening_brings_the_page_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes count no more until listening has begun anew; else the endpoint had no figures for ever."""
    monkeypatch.setattr(module, "_LISTEN_AGAIN_S", 0.01)
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: house.listener.live)
    with monkeypatch.context() as patch:
        patch.setattr(house.listener, "_is_new", lambda _: 1 / 0)
        await house.send(message(2))
        await eventually(lambda: house.total("deaf") == 1)
    assert not house.listener.live
    assert house.wakes == 1
    await house.socket.recv()  # it left,
    await house.socket.recv()  # and came again
    await house.send(message(3))
    await eventually(lambda: house.listener.live)
    assert house.ears.listening == 1


async def test_a_socket_that_cannot_be_set_up_is_closed(house: House) -> None:
    """Or each try would take one for good."""
    made = []

    class Watched(zmq.asyncio.Socket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)  # type: ignore[misc] # as pyzmq declares it
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.asyncio, "Socket", Watched)
        with pytest.raises(OSError, match="Invalid argument"):
            house.ears.subscribe("no host", 1)
    (left,) = made
    was_closed = left.closed
    left.close()  # or the context waits for it for ever
    assert was_closed


async def test_single_requests_go_no_further_unless_they_are_wanted(house: House) -> None:
    """They are most of a message."""
    await house.listen()
    ended = ["r1", "stop", 5, 5, 0, 1.0, 0.0]
    await house.send(message(1, finished=[ended], ttfts_s=[0.1], first_tokens=1))
    await eventually(lambda: bool(house.pushed))
    assert (house.pushed[0].finished, house.pushed[0].ttfts_s, house.pushed[0].first_tokens) == ((), (), 1)
    house.wants_requests = True
    await house.send(message(2, finished=[ended], ttfts_s=[0.1]))
    await eventually(lambda: len(house.pushed) > 1)
    assert (house.pushed[-1].finished, house.pushed[-1].ttfts_s) == ((FinishedRequest(*ended),), ())


async def test_of_requests_that_ended_all_are_told_up_to_a_bound(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of messages that are read together; beyond the bound they are counted."""
    monkeypatch.setattr(module, "_SHORTEST_GAP_S", 0.2)
    monkeypatch.setattr(module, "MOST_FINISHED", 3)
    house.wants_requests = True
    await house.listen()
    await house.send(message(1))
    await eventually(lambda: bool(house.pushed))
    for seq in (2, 3):
        listed = [[f"r{seq}{n}", "stop", 5, 5, 0, 1.0, 0.0] for n in range(2)]
        await house.send(message(seq, finished=listed, left_out=1))
    await eventually(lambda: house.total("taken") == 3)
    assert [request.request_id for request in house.pushed[-1].finished] == ["r20", "r21", "r30"]
    assert house.pushed[-1].left_out == 3
