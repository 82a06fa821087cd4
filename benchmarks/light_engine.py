"""An engine that costs next to nothing: what a bench of ours wants to see is not its own load's cost.

Answers as vLLM would, far enough for our probes and scrapes; a streamed answer is a first token and then one more
every `every_s` seconds, until its client leaves or so many have come. Bodies are counted, not read. One process, one
port per engine, ended by SIGTERM.

    python -m benchmarks.light_engine 8001,8002 --every-s 5
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

import typer
import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb"\r\nx-tokens: *(\d+)", re.IGNORECASE)
_MODELS = b'{"object":"list","data":[{"id":"sim","object":"model","max_model_len":30000000}]}'
_METRICS = (
    b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"sim\"} 0\n"
    b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"sim\"} 0\n"
    b"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"sim\"} 0.1\n"
)  # fmt: skip
_WHOLE = (
    b'{"id":"x","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
_TOKEN = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"w "}}]}\n\n'
_END = b"data: [DONE]\n\n"


class _Connection(asyncio.Protocol):
    """One connection of Envoy's or a probe's, one request at a time."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._head = b""
        self._body_left = -1
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        if self._body_left > 0:
            self._body_left -= len(data)
        else:
            self._head += data
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            length = _LENGTH.search(head)
            self._body_left = (int(length[1]) if length else 0) - len(rest)
            self._head = head
        if self._body_left <= 0:
            head, self._head, self._body_left = self._head, b"", -1
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        tokens = _TOKENS.search(head)
        if tokens:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            self._transport.write(b"transfer-encoding: chunked\r\n\r\n" + _chunk(_TOKEN))
            self._next(int(tokens[1]) - 1)
        elif head.startswith(b"GET /metrics"):
            self._whole(b"text/plain", _METRICS)
        else:
            self._whole(b"application/json", _MODELS if head.startswith(b"GET") else _WHOLE)

    def _whole(self, kind: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)

    def _next(self, left: int) -> None:
        """One more token when its time has come, or the end."""
        if left <= 0:
            self._transport.write(_chunk(_END) + b"0\r\n\r\n")
        else:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._token, left)

    def _token(self, left: int) -> None:
        self._transport.write(_chunk(_TOKEN))
        self._next(left - 1)

    def connection_lost(self, _error: Exception | None) -> None:
        """The client has left."""
        if self._timer is not None:
            self._timer.cancel()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(ports: list[int], every_s: float) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: _Connection(every_s), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def main(ports: str, every_s: float = 5.0) -> None:
    """Serve until killed."""
    uvloop.run(_serve([int(port) for port in ports.split(",")], every_s))


if __name__ == "__main__":
    typer.run(main)
