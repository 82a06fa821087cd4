"""gRPC engines behind a real Envoy: every kind of call, both ways as it happens, and refusals gRPC clients read."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from grpc_engine import SERVICE
from harness import HANG_GUARD_S, Engine, System, chat, eventually, free_ports, pool_of

UNARY, SERVER_STREAM = f"/{SERVICE}/Unary", f"/{SERVICE}/ServerStream"
CLIENT_STREAM, BIDIRECTIONAL = f"/{SERVICE}/ClientStream", f"/{SERVICE}/Bidirectional"
TO_OTHER = (("x-gateway-model-name", "other"),)


class GrpcEngine:
    """One engine in its own process."""

    def __init__(self, port: int, name: str) -> None:
        self.address, self.name = f"127.0.0.1:{port}", name
        self._command = [sys.executable, str(Path(__file__).with_name("grpc_engine.py")), str(port), name]
        self.start()

    def start(self) -> None:
        """Start (again) on the same port."""
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class House:
    """A system over two pools of gRPC engines, `generate` (a, b) and `other` (c), and one that chats over HTTP."""

    system: System
    engines: dict[str, GrpcEngine]

    def channel(self) -> grpc.aio.Channel:
        """A connection to Envoy."""
        return grpc.aio.insecure_channel(self.system.url.removeprefix("http://"))

    def wait_idle(self) -> None:
        """Until nothing is in flight."""
        eventually(lambda: not any(self.system.in_flight().values()), "nothing is in flight")


@pytest.fixture(scope="module")
def house(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of this module."""
    calls = {name: GrpcEngine(port, name) for name, port in zip("abc", free_ports(3), strict=True)}

    def pool(name: str, *members: str) -> dict[str, object]:
        addresses = [calls[member].address for member in members]
        return {"name": name, "models": [name], "endpoints": {"static": addresses}, "protocol": "grpc"}

    rules = [
        {"prefix": f"/{SERVICE}", "pool": "generate"},
        {"prefix": f"/{SERVICE}", "pool": "other", "headers": dict(TO_OTHER)},
        {"prefix": "/empty.Service", "pool": "empty"},
    ]
    pools = [pool("generate", "a", "b"), pool("other", "c"), pool("empty"), pool_of(engines)]
    # three failed calls of fewer than thirty would keep a killed engine out for minutes after it is back
    breakers = {"endpoint": None}
    system = System(
        tmp_path_factory.mktemp("grpc"), {"pools": pools, "routing": {"paths": rules}, "breakers": breakers}
    )
    system.start()
    system.wait_pickable(*(engine.address for engine in (*calls.values(), *engines)))
    yield House(system, calls)
    system.stop()
    for engine in calls.values():
        engine.kill()
    print(system.log.read_text()[-6000:])


# -- every kind of call


async def test_unary_calls_go_to_the_pool_of_their_path(house: House) -> None:
    """To each of its endpoints in time, and to none of another pool."""
    async with house.channel() as channel:
        calls = [channel.unary_unary(UNARY)(b"%d" % n, timeout=HANG_GUARD_S) for n in range(40)]
        answers = [await call for call in calls]
    assert [answer.split()[1] for answer in answers] == [b"%d" % n for n in range(40)]
    assert {answer.split()[0] for answer in answers} == {b"a", b"b"}
    house.wait_idle()


async def test_a_header_decides_between_rules_of_one_path(house: House) -> None:
    """The rule that asks for a header comes first; with another value, or none, it does not hold."""
    async with house.channel() as channel:
        call = channel.unary_unary(UNARY)
        assert await call(b"x", metadata=TO_OTHER, timeout=HANG_GUARD_S) == b"c x"
        wrong = (("x-gateway-model-name", "somebody"),)
        assert (await call(b"x", metadata=wrong, timeout=HANG_GUARD_S))[:1] in b"ab"


async def test_an_engines_messages_come_as_it_sends_them(house: House) -> None:
    """Ten thousand in a row, whole, with its trailers; the stream costs us two messages."""
    before = house.system.total("pointsman_ext_proc_messages_total")
    async with house.channel() as channel:
        call = channel.unary_stream(SERVER_STREAM)(b"10000", timeout=HANG_GUARD_S)
        messages = [message async for message in call]
        trailers = dict(await call.trailing_metadata())
    assert [message.split()[1] for message in messages] == [b"%d" % n for n in range(10_000)]
    assert trailers["engine"] == messages[0].split()[0].decode()
    house.wait_idle()
    assert house.system.total("pointsman_ext_proc_messages_total") - before == 2  # headers, and the answer's trailers


async def test_a_client_may_send_as_long_as_it_likes(house: House) -> None:
    """More messages than any buffer would hold."""

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 500_000

    async with house.channel() as channel:
        answer = await channel.stream_unary(CLIENT_STREAM)(messages(), timeout=HANG_GUARD_S)
    assert answer.split()[1] == b"200"
    house.wait_idle()


async def test_both_sides_talk_in_turn(house: House) -> None:
    """Each message is answered before the next is sent, at one engine, in flight for as long as the call lasts."""
    async with house.channel() as channel:
        call = channel.stream_stream(BIDIRECTIONAL)(timeout=HANG_GUARD_S)
        names = set()
        for number in range(50):
            await call.write(b"%d" % number)
            name, answer = (await call.read()).split()
            names.add(name.decode())
            assert answer == b"%d" % number
        counts = await asyncio.to_thread(house.system.in_flight)
        assert {counts[house.engines[name].address] for name in names} == {1}
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    assert len(names) == 1
    house.wait_idle()


# -- what goes wrong


async def test_the_engines_own_status_arrives(house: House) -> None:
    """With its message and its trailers."""
    async with house.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(UNARY)(b"fail", timeout=HANG_GUARD_S)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "as asked")
    assert "engine" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [
        ("/empty.Service/Call", grpc.StatusCode.UNAVAILABLE, "no endpoint of pool empty can take the request now"),
        ("/unheard.Of/Call", grpc.StatusCode.UNIMPLEMENTED, "no such path: /unheard.Of/Call"),
        ("/sleep/Call", grpc.StatusCode.UNIMPLEMENTED, "administration"),
    ],
)
async def test_a_refusal_is_a_grpc_status(house: House, method: str, code: grpc.StatusCode, words: str) -> None:
    """In words, without waiting for the client's messages to end."""
    async with house.channel() as channel:
        refusal = await _refusal(channel, method)
    assert refusal.code() is code
    assert words in (refusal.details() or "")
    assert "{" not in (refusal.details() or "")


async def _refusal(channel: grpc.aio.Channel, method: str) -> grpc.aio.AioRpcError:
    """How a call is refused. Asked again where that overtook the message: this client then says INTERNAL of itself."""
    for _ in range(20):
        call = channel.stream_stream(method)(timeout=HANG_GUARD_S)
        try:
            await call.write(b"first of many")
            await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                return error
    raise AssertionError("every refusal overtook the message")


async def test_an_engine_that_dies_ends_its_calls_alone(house: House) -> None:
    """The client of a broken stream hears of it at once; new calls go elsewhere, and come back when it does."""
    async with house.channel() as channel:
        call = channel.unary_stream(SERVER_STREAM)(b"hold", timeout=HANG_GUARD_S)
        engine = house.engines[(await call.read()).split()[0].decode()]
        engine.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
        unary = channel.unary_unary(UNARY)
        answers = {(await unary(b"x", timeout=HANG_GUARD_S)).split()[0].decode() for _ in range(20)}
        assert answers == {"a", "b"} - {engine.name}
        house.wait_idle()
        engine.start()
        house.system.wait_pickable(engine.address)
        answers = [(await unary(b"x", timeout=HANG_GUARD_S)).split()[0].decode() for _ in range(20)]
        assert engine.name in answers


async def test_an_engine_that_dies_before_its_answer_is_unavailable(house: House) -> None:
    """The only one of its pool: Envoy says so itself, as a status in words."""
    async with house.channel() as channel:
        call = channel.stream_unary(CLIENT_STREAM)(metadata=TO_OTHER, timeout=HANG_GUARD_S)
        await call.write(b"one of many")
        engine = house.engines["c"]
        await asyncio.to_thread(eventually, lambda: house.system.in_flight()[engine.address] == 1, "it is under way")
        engine.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    engine.start()
    house.system.wait_pickable(engine.address)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (caught.value.details() or "").startswith("The gateway could not complete the call (")


async def test_a_client_that_leaves_gives_its_place_back(house: House) -> None:
    """Cancelled in the middle of a call of either kind."""
    async with house.channel() as channel:
        held = channel.unary_stream(SERVER_STREAM)(b"hold", timeout=HANG_GUARD_S)
        talk = channel.stream_stream(BIDIRECTIONAL)(timeout=HANG_GUARD_S)
        await talk.write(b"x")
        assert await held.read()
        assert await talk.read()
        assert sum((await asyncio.to_thread(house.system.in_flight)).values()) == 2
        held.cancel()
        talk.cancel()
    house.wait_idle()


def test_http_pools_are_served_beside(house: House) -> None:
    """Over HTTP/1.1, as ever."""
    answer = httpx.post(f"{house.system.url}/v1/chat/completions", json=chat(), timeout=HANG_GUARD_S)
    assert answer.status_code == 200


async def test_without_us_calls_fail_closed_with_a_status(
    make_system: Callable[..., System], engines: list[Engine]
) -> None:
    """Envoy's own answer, from the undecided route, as a gRPC client reads it."""
    system = make_system(pools=[pool_of(engines)], routing={"paths": [{"prefix": "/a.B", "pool": "chat"}]})
    system.process.send_signal(19)  # SIGSTOP: the launcher must not start it again
    try:
        system.kill_decision_process()
        async with grpc.aio.insecure_channel(system.url.removeprefix("http://")) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/a.B/Call")(b"x", timeout=HANG_GUARD_S)
    finally:
        system.process.send_signal(18)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "No routing decision is available. Try again shortly."
