"""Engines made by hand that fail in every way a network and a server can, on real sockets.

The simulated engines answer as vLLM does and cannot break a connection at any byte; these can do little else. Many live
in one thread. Each counts the requests it has seen, but for our own probes and trials, which it always answers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

PROMPT_TOKENS, ANSWER_TOKENS = 7, 3
USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS, "total_tokens": 10}
_T = TypeVar("_T")

Behaviour = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request and the connection it came on."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.writer = writer
        self.body = body
        self.stream = bool(body.get("stream"))

    async def send(self, data: bytes) -> None:
        """These bytes, now."""
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self, status: int = 200, kind: str = "application/json") -> None:
        """Response headers; the body follows in chunks."""
        head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        """A part of the body; an empty one ends it."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def reset(self) -> None:
        """Break the connection off with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def _event(document: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(document).encode()


def _token(number: int) -> bytes:
    return _event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": f"w{number} "}}]})


# -- what they do with a request


async def answer(exchange: Exchange) -> None:
    """As it should."""
    await _headers(exchange)
    await _rest(exchange)


async def _headers(exchange: Exchange) -> None:
    await exchange.begin(kind="text/event-stream" if exchange.stream else "application/json")


async def _rest(exchange: Exchange) -> None:
    if exchange.stream:
        for number in range(ANSWER_TOKENS):
            await exchange.chunk(_token(number))
        await exchange.chunk(_event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n")
    else:
        message = {"role": "assistant", "content": "w0 w1 w2 "}
        await exchange.chunk(json.dumps({"object": "chat.completion", "choices": [{"message": message}]}).encode()[:-1])
        await exchange.chunk(b', "usage": %s}' % json.dumps(USAGE).encode())
    await exchange.chunk(b"")


async def _part(exchange: Exchange) -> None:
    await _headers(exchange)
    for number in range(2):
        await exchange.chunk(_token(number) if exchange.stream else b'{"choices": '[number * 6 : number * 6 + 6])


async def never_answer(exchange: Exchange) -> None:  # noqa: ARG001 - a Behaviour
    """A black hole: everything is taken, nothing comes."""
    await asyncio.Event().wait()


async def reset_before_headers(exchange: Exchange) -> None:
    """The request was read, and that was all."""
    exchange.reset()


async def reset_after_headers(exchange: Exchange) -> None:
    """A part of the answer, and then a reset."""
    await _part(exchange)
    await asyncio.sleep(0.05)  # else the reset overtakes what was sent
    exchange.reset()


async def stall(exchange: Exchange) -> None:
    """A part of the answer, and then nothing any more."""
    await _part(exchange)
    await asyncio.Event().wait()


async def begin_slowly(exchange: Exchange) -> None:
    """As vLLM under load: the headers of a stream at once, the first token late."""
    if exchange.stream:
        await _headers(exchange)
        await asyncio.sleep(0.3)
        await _rest(exchange)
    else:
        await asyncio.sleep(0.3)
        await answer(exchange)


async def never_begin(exchange: Exchange) -> None:
    """The same, but the first token never comes."""
    if exchange.stream:
        await _headers(exchange)
    await asyncio.Event().wait()


def refuse_with(*statuses: int) -> Behaviour:
    """An error of these statuses in turn, in JSON."""
    turn = iter(())

    async def refuse(exchange: Exchange) -> None:
        nonlocal turn
        status = next(turn, None)
        if status is None:
            turn = iter(statuses)
            status = next(turn)
        await exchange.begin(status)
        await exchange.chunk(json.dumps({"error": {"message": "no", "code": status}}).encode())
        await exchange.chunk(b"")

    return refuse


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One after the other, over and over."""
    seen = 0

    async def act(exchange: Exchange) -> None:
        nonlocal seen
        seen += 1
        await behaviours[(seen - 1) % len(behaviours)](exchange)

    return act


# -- the engines


class FaultyEngine:
    """One engine; `behave` is what it does with requests, `seen` how many it has had."""

    def __init__(self, host: EngineThread, model: str, port: int) -> None:
        self.model = model
        self.behave: Behaviour = answer
        self.seen = 0
        self._host = host
        self._open: set[asyncio.StreamWriter] = set()
        self.address = f"127.0.0.1:{port}"
        self._server = host.run(asyncio.start_server(self._serve, "127.0.0.1", port))
        host.engines.append(self)

    def refuse_connections(self) -> None:
        """From now on nothing listens there, and what was connected is closed."""
        self._host.run(self.close())

    async def close(self) -> None:
        """The same, on their own loop."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while not writer.is_closing():
                await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side, or we, have had enough
        finally:
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        exchange = Exchange(writer, json.loads(body) if body else {})
        if path == "/v1/models":
            await exchange.begin()
            await exchange.chunk(json.dumps({"data": [{"id": self.model}]}).encode())
            await exchange.chunk(b"")
        elif method == "GET":
            await refuse_with(404)(exchange)
        elif "x-pointsman-probe" in headers:
            await answer(exchange)
        else:
            self.seen += 1
            await self.behave(exchange)


class EngineThread:
    """The loop on which such engines live."""

    def __init__(self) -> None:
        self.engines: list[FaultyEngine] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Done there, awaited here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        """End all of them."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for engine in self.engines:
            await engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
