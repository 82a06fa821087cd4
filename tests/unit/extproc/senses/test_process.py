"""The senses process's end of the socket: what it keeps of what nobody takes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from extproc.senses import process as module
from extproc.senses.messages import (
    Alive,
    Exported,
    FellSilent,
    Frames,
    FromSenses,
    Heard,
    Index,
    Indexed,
    KvEvents,
    Match,
    Matched,
    PreciseOf,
    Probed,
    Scraped,
    Tried,
    encode,
    from_senses,
)
from extproc.senses.process import Port
from policies.lifecycle import Evidence

A = "10.0.0.1:8000"
BOUND = 1_000
HANG_GUARD_S = 60


class Transport(asyncio.Transport):
    """One whose other end takes nothing while `waiting`."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.closing = False
        self._frames = Frames()
        self.written: list[FromSenses] = []
        self.writes = 0

    def get_write_buffer_size(self) -> int:
        """What waits, in bytes."""
        return self.waiting

    def is_closing(self) -> bool:
        """Nobody is there any more."""
        return self.closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Whole messages."""
        self.writes += 1
        self.written += [from_senses(body) for body in self._frames.feed(bytes(data))]


class Prefixes:
    """Precise indexes that count how often they told of themselves."""

    told = 0

    def tell(self) -> None:
        """Report how every index is."""
        self.told += 1


class House:
    """A port."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.port = Port(BOUND)
        self.port.connection_made(self.transport)

    async def beats(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        """So many heartbeats, each after as many turns of the loop."""
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.0)
        beating = asyncio.create_task(self.port.beat())
        for _ in range(times):
            await asyncio.sleep(0)
        beating.cancel()


REPEATED: list[FromSenses] = [
    Scraped(A), Heard(A), Exported(A), Probed(A, Evidence.PROBE_OK), Indexed("p", 1, 0), Alive(),
]  # fmt: skip
AWAITED: list[FromSenses] = [Matched(1), Tried(A, 200), FellSilent(A)]


async def test_beyond_the_bound_only_what_is_awaited_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody reads; the rest is counted, and told once somebody does."""
    house = House()
    house.transport.waiting = BOUND + 1
    for message in [*REPEATED, *AWAITED]:
        house.port.report(message)
    assert house.transport.written == AWAITED
    house.transport.waiting = 0
    await house.beats(monkeypatch, 1)
    assert house.transport.written[len(AWAITED)] == Alive(dropped=len(REPEATED))


async def test_up_to_the_bound_everything_is_sent() -> None:
    """In order."""
    house = House()
    house.transport.waiting = BOUND
    for message in [*REPEATED, *AWAITED]:
        house.port.report(message)
    assert house.transport.written == [*REPEATED, *AWAITED]


async def test_pages_are_reported_together() -> None:
    """After a moment, or with what somebody waits for; nothing is told out of turn."""
    house = House()
    house.port.report(Scraped(A))
    house.port.report(Scraped("10.0.0.2:8000"))
    assert house.transport.writes == 0
    house.port.report(Tried(A, 200))
    assert (house.transport.writes, len(house.transport.written)) == (1, 3)
    house.port.report(Scraped(A))
    async with asyncio.timeout(HANG_GUARD_S):
        while house.transport.writes < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    assert house.transport.written == [Scraped(A), Scraped("10.0.0.2:8000"), Tried(A, 200), Scraped(A)]


async def test_what_is_counted_waits_until_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat beyond the bound is left out, and with it what the indexes have counted: told, it would be lost."""
    house, prefixes = House(), Prefixes()
    house.transport.waiting = BOUND + 1
    house.port.report(Scraped(A))
    house.port.prefixes = prefixes  # type: ignore[assignment]
    await house.beats(monkeypatch, 5)
    assert (prefixes.told, house.transport.written) == (0, [])
    house.transport.waiting = 0
    await house.beats(monkeypatch, 1)
    assert prefixes.told > 0
    assert house.transport.written[0] == Alive(dropped=1)


async def test_nothing_is_written_to_nobody() -> None:
    """Watchers that are dropped as the process ends still report."""
    house = House()
    house.transport.closing = True
    house.port.report(Tried(A))
    assert house.transport.written == []


def test_the_end_waits_for_no_template(tmp_path: Path) -> None:
    """One that does not end keeps a thread busy for ever; the process ends with its socket all the same."""
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))  # noqa: S106 - no secret
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abcdefgh") + "{% endfor %}" * 8
    (tmp_path / "chat_template.jinja").write_text("{% if messages | length > 1 %}" + loops + "{% endif %}?")
    spec = PreciseOf("p", [], KvEvents(), str(tmp_path), 1_000, {"gpu": 1.0, "cpu": 1.0, "disk": 1.0}, 10, 1_000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(HANG_GUARD_S)
        command = [sys.executable, "-P", "-m", "extproc.senses", str(theirs.fileno()), "1000000", "error", "auto"]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        ours.sendall(encode(Index([spec])))
        frames, ready = Frames(), False
        while not ready:
            ours.sendall(encode(_question(messages=1)))
            answers = [from_senses(body) for body in frames.feed(ours.recv(65_536))]
            ready = any(isinstance(answer, Matched) and answer.why is None for answer in answers)
        ours.sendall(encode(_question(messages=2)))
        ours.shutdown(socket.SHUT_WR)
        try:
            assert process.wait(HANG_GUARD_S) == 0
        finally:
            process.kill()


def _question(messages: int) -> Match:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * messages})
    return Match(1, "p", "/v1/chat/completions", body.encode())
