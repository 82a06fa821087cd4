"""A simulated vLLM on a socket: the engine model behind vLLM's HTTP surface, with faults on demand.

For tests, demos and benchmarks of the router; the text it answers with is nonsense by design. What vLLM does not
have stands under `/sim`: `POST` to `/sim/faults`, `/sim/release`, `/sim/abort`; `GET` of `/sim/state`, `/sim/requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from vllm_adapters.simulator import exposition, faults
from vllm_adapters.simulator.api import DONE, Answer, ApiError, Ask, Reader, Usage
from vllm_adapters.simulator.books import Books, Record
from vllm_adapters.simulator.dialects import Dialect, Message, Responses, Spoken, anthropic_error, stream_of
from vllm_adapters.simulator.engine import PromptTooLarge
from vllm_adapters.simulator.exchange import Cut, Exchange
from vllm_adapters.simulator.faults import Faults
from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.pacing import PacedEngine, Ticket
from vllm_adapters.simulator.pooling import ANSWERERS, Posted
from vllm_adapters.simulator.pushing import Pusher
from vllm_adapters.simulator.text import TOKEN_BYTES, block_hashes
from vllm_adapters.stat_logger.wire import Finished

VERSION = "0.32.0"  # of the vLLM whose surface this is
KEEP_ALIVE_S = 5.0  # an idle connection is closed after this: vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE
LARGEST_BODY_BYTES = 64 << 20
_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"
_RESPONSES = "/v1/responses"
_STORED = "/v1/responses/{id}"
_MESSAGES = "/v1/messages"
_SHUTDOWN_S = 1.0  # what is still running that long after everything was cancelled, is cut off

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SimulatedServer:
    """One simulated engine on `options.port` + `index` (0: a free port, known once started).

    Several may live in one process. `engine` is the pure model, `books` what really happened.
    """

    def __init__(self, options: SimOptions, index: int = 0) -> None:
        self.options = options
        self.engine = options.engine()
        self.books = Books(options.record)
        self.faults = faults.NONE
        self.port = options.port + index if options.port else 0
        self._reader = Reader(options.models, options.max_model_len)
        self._responses = Responses(self._reader)
        self._dialects: dict[str, Callable[[bytes, str], Dialect]] = {
            _RESPONSES: self._responses.read,
            _MESSAGES: partial(Message.read, self._reader),
        }
        self._paced = PacedEngine(self.engine, options.speed)
        self._released = asyncio.Event()
        self._stopping = asyncio.Event()
        self._quiet = asyncio.Event()  # no generation request is being handled
        self._quiet.set()
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._outage: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._pusher: Pusher | None = None
        self._stats_port = None if options.stats_port is None else options.stats_port and options.stats_port + index

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.options.host}:{self.port}"

    @property
    def url(self) -> str:
        """Of the root, without a slash at the end."""
        return f"http://{self.address}"

    def cached_tokens(self, body: bytes, *, chat: bool = True) -> int:
        """How many tokens of this request's prompt are in the cache now, in whole blocks. Raises ApiError."""
        ask = self._reader.read(body, chat=chat)
        size = self.options.block_size
        return self.engine.holds(block_hashes(ask.prompt, ask.seed, size)) * size

    # -- life

    async def start(self) -> None:
        """Listen and run."""
        self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,  # a client that leaves frees its place at once
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        await self._listen()
        self._spawn(self._paced.run())
        if self._stats_port is not None:
            address = f"tcp://{self.options.host}:{self._stats_port}"
            self._pusher = Pusher(address, self.engine, self.books, lambda: self.port)
            self._spawn(self._pusher.run())

    async def stop(self, drain_s: float = 0.0) -> None:
        """As vLLM on SIGTERM: running requests end at once with finish_reason "abort"; or get `drain_s` to finish.

        While draining new requests are answered 500 and everything else goes on. One that pushes says so first.
        """
        if self._pusher is not None:
            await self._pusher.drain()
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._quiet.wait()
        self._stopping.set()
        self._paced.moving.set()
        self._paced.cancel_all()
        self.release()
        await self._clean_up()

    async def kill(self) -> None:
        """As SIGKILL: every connection ends here and now."""
        self._stopping.set()
        for connection in self._connections():
            if connection.transport is not None:
                connection.transport.abort()
        await self._clean_up()

    async def _clean_up(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self) -> None:
        if self._runner is None:
            raise RuntimeError("the server was not started")
        self._site = web.TCPSite(self._runner, self.options.host, self.port)
        try:
            await self._site.start()
        except OSError as error:
            raise OSError(f"cannot listen on {self.options.host}:{self.port}: {_why_not_bound(error)}") from error
        self.port = self._site.port

    def _connections(self) -> list[Any]:
        server = self._runner.server if self._runner is not None else None
        return [] if server is None else server.connections

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # what went wrong goes to the event loop's exception handler

    # -- faults

    def set_faults(self, shown: Faults) -> None:
        """Show these faults from now on. What was frozen or refused goes on when they no longer say so."""
        self.faults = shown
        if self._pusher is not None:
            self._pusher.silent = shown.silent_pushes
        if shown.freeze:
            self._paced.moving.clear()
        else:
            self._paced.moving.set()
        if self._outage is not None:
            self._outage.cancel()
        if shown.refuse_s and self._runner is not None:
            self._outage = self._spawn(self._refuse(shown.refuse_s))
        elif self._outage is not None and self._site is None:
            self._outage = self._spawn(self._listen())

    def release(self) -> None:
        """Let every answer held open by a fault end."""
        self._released.set()
        self._released = asyncio.Event()

    async def _refuse(self, seconds: float) -> None:
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        for connection in self._connections():
            connection.close()  # after what it is busy with
        await asyncio.sleep(seconds)
        await self._listen()

    # -- routes

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._gate], client_max_size=LARGEST_BODY_BYTES)
        for path in (_CHAT, _COMPLETION, _RESPONSES, _MESSAGES, *ANSWERERS):
            app.router.add_post(path, self._inference)
        app.router.add_post(_STORED + "/cancel", self._inference)
        app.router.add_get(_STORED, self._inference)
        app.router.add_get("/v1/realtime", self._realtime)
        for path, handler in {
            "/v1/models": self._models,
            "/health": self._health,
            "/version": self._version,
            "/metrics": self._metrics,
            "/sim/state": self._state,
            "/sim/requests": self._requests,
        }.items():
            app.router.add_get(path, handler)
        app.router.add_post("/sim/faults", self._change_faults)
        app.router.add_post("/sim/release", self._release)
        app.router.add_post("/sim/abort", self._abort)
        app.on_response_prepare.append(_sign)
        return app

    @web.middleware
    async def _gate(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.method == "GET" and not request.path.startswith("/sim/"):
            await self._paced.moving.wait()
        try:
            return await handler(request)
        except web.HTTPException as error:  # FastAPI's shape, not OpenAI's
            return web.json_response({"detail": error.reason}, status=error.status)

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"object": "model", "created": int(self.books.started_at_s), "owned_by": "vllm", "parent": None}
        entry |= {"root": self.options.models[0], "max_model_len": self.options.max_model_len, "permission": []}
        data = [{"id": name, **entry} for name in self.options.models]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.faults.metrics_status is not None:
            return web.Response(status=self.faults.metrics_status)
        page = exposition.render(self.engine, self.books, self.options.models[0], self.options.metrics)
        if self._pusher is not None:
            page += self._pusher.exposition
        return web.Response(body=page.encode(), headers={"Content-Type": exposition.CONTENT_TYPE})

    # -- control

    async def _change_faults(self, request: web.Request) -> web.Response:
        try:
            self.set_faults(faults.read(await request.read()))
        except msgspec.DecodeError as error:
            return web.json_response({"detail": str(error)}, status=400)
        return web.json_response(msgspec.to_builtins(self.faults))

    async def _release(self, _: web.Request) -> web.Response:
        self.release()
        return web.json_response({})

    async def _abort(self, _: web.Request) -> web.Response:
        """As vLLM's `/pause?mode=abort`, and on at once: what runs ends with a 200 and finish_reason "abort"."""
        self._paced.cancel_all()
        return web.json_response({})

    async def _state(self, _: web.Request) -> web.Response:
        engine = self.engine
        figures = {
            "running": engine.running + self.books.held,
            "waiting": engine.waiting,
            "kv_used": engine.kv_used,
            "prefix_queries_tokens": engine.prefix_queries_tokens_total,
            "prefix_hits_tokens": engine.prefix_hits_tokens_total,
            "prompt_tokens": engine.prompt_tokens_total,
            "generation_tokens": engine.generation_tokens_total,
            "preemptions": engine.preemptions_total,
        }
        return web.json_response(self.books.as_json() | figures)

    async def _requests(self, _: web.Request) -> web.Response:
        return web.json_response([record.as_json() for record in self.books.records])

    # -- generation

    async def _inference(self, request: web.Request) -> web.StreamResponse:
        """Any request of clients: with its faults, on the books from its headers to the end of its answer."""
        books = self.books
        books.in_flight += 1
        self._quiet.clear()
        exchange = Exchange(request, self.faults, self._record(request))
        try:
            response = await self._respond(exchange)
        except Cut:
            books.failed += 1
            return web.Response()  # to a connection that is gone
        except (asyncio.CancelledError, ConnectionError):
            if not self._stopping.is_set():
                books.aborted += 1
            raise
        finally:
            books.in_flight -= 1
            if not books.in_flight:
                self._quiet.set()
            if exchange.ticket is not None:
                self._paced.abort(exchange.ticket)
        if response.status == web.HTTPOk.status_code:
            books.served += 1
        else:
            books.failed += 1
        return response

    def _record(self, request: web.Request) -> Record | None:
        if not self.options.record:
            return None
        record = Record(request.path, request.headers.items())
        self.books.records.append(record)
        return record

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        body = await request.read()
        if exchange.record is not None:
            exchange.record.body = body
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        try:
            if request.path in {_CHAT, _COMPLETION}:
                return await self._generate(exchange, body, request_id)
            await self._show_early_faults(exchange)
            if request.path in self._dialects:
                return await self._speak(exchange, self._dialects[request.path](body, request_id))
            return exchange.whole(200, msgspec.json.encode(self._at_once(request, body, request_id)))
        except ApiError as error:
            anthropic = request.path.startswith(_MESSAGES)
            return exchange.whole(error.status, anthropic_error(error) if anthropic else error.body)

    def _at_once(self, request: web.Request, body: bytes, request_id: str) -> dict[str, Any]:
        """An answer that no token has to be generated for."""
        if request.path in ANSWERERS:
            posted = Posted(body, request.headers.get("Content-Type", ""), request_id)
            return ANSWERERS[request.path](self._reader, posted)
        return self._responses.find(request.match_info["id"])

    async def _speak(self, exchange: Exchange, dialect: Dialect) -> web.StreamResponse:
        """A chat in another API's words."""
        ask = self._reader.read(dialect.as_chat(), chat=True)
        exchange.ticket = ticket = self._submit(ask, exchange.faults)
        while not ticket.done:
            await ticket.more(ticket.produced)
        await self._hold(exchange)
        reason = self._count_end(Answer(ask, "", 0), ticket)
        text = ask.answer[: ticket.produced * TOKEN_BYTES].decode(errors="replace")
        answer = dialect.whole(Spoken(ask.model, text, _usage(ticket), reason))
        if not dialect.stream:
            return exchange.whole(200, msgspec.json.encode(answer))
        response = await exchange.begin()
        await exchange.write(response, stream_of(dialect, answer), last=True)
        return response

    async def _realtime(self, request: web.Request) -> web.WebSocketResponse:
        """Says again what it is told, until the client leaves. In flight as long as that takes."""
        self._record(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.books.in_flight += 1
        try:
            async for message in socket:
                await (
                    socket.send_bytes(message.data)
                    if isinstance(message.data, bytes)
                    else socket.send_str(message.data)
                )
        finally:
            self.books.in_flight -= 1
        self.books.served += 1
        return socket

    async def _generate(self, exchange: Exchange, body: bytes, request_id: str) -> web.StreamResponse:
        ask, ticket = await self._accept(exchange, body, chat=exchange.request.path == _CHAT)
        answer = Answer(ask, request_id, int(time.time()))
        if ask.stream:
            return await self._stream(exchange, answer, ticket)
        return await self._answer(exchange, answer, ticket)

    async def _accept(self, exchange: Exchange, body: bytes, *, chat: bool) -> tuple[Ask, Ticket]:
        await self._show_early_faults(exchange)
        if self._draining:
            raise ApiError(500, "cannot schedule new futures after shutdown")
        ask = self._reader.read(body, chat=chat)
        exchange.ticket = ticket = self._submit(ask, exchange.faults)
        return ask, ticket

    async def _show_early_faults(self, exchange: Exchange) -> None:
        own = exchange.request.headers.get(faults.HEADER)
        if own is not None:
            try:
                exchange.faults = faults.read(own)
            except msgspec.DecodeError as error:
                raise ApiError(400, f"{faults.HEADER}: {error}") from error
        shown = exchange.faults
        await asyncio.sleep(shown.delay_headers_s)
        if own is not None and shown.freeze:
            await self._stopping.wait()
            exchange.close(reset=False)
            raise Cut
        await self._paced.moving.wait()
        if shown.reset_before_headers:
            exchange.close(reset=True)
            raise Cut
        if shown.status is not None:
            raise ApiError(shown.status, "a simulated fault")

    def _submit(self, ask: Ask, shown: Faults) -> Ticket:
        size = self.options.block_size
        hashes = block_hashes(ask.prompt + ask.answer, ask.seed, size)
        tokens = min(ask.output_tokens, shown.hold or ask.output_tokens)
        try:
            return self._paced.submit(hashes, ask.prompt_tokens, tokens)
        except PromptTooLarge as error:
            raise ApiError(400, str(error), param="input_tokens") from error

    async def _answer(self, exchange: Exchange, answer: Answer, ticket: Ticket) -> web.StreamResponse:
        cut_after = exchange.faults.cut_after_tokens
        produced = 0
        while not ticket.done:
            produced = await ticket.more(produced)
            if cut_after is not None and produced >= cut_after:
                exchange.close(reset=False)
                raise Cut
        await self._hold(exchange)
        reason = self._count_end(answer, ticket)
        return exchange.whole(200, answer.whole(ticket.produced, reason, _usage(ticket)))

    async def _stream(self, exchange: Exchange, answer: Answer, ticket: Ticket) -> web.StreamResponse:
        response = await exchange.begin()
        last = await self._write_tokens(exchange, response, answer, ticket)
        await self._hold(exchange)
        ending = last(self._count_end(answer, ticket))
        if answer.ask.include_usage:
            ending += answer.usage(_usage(ticket))
        await exchange.write(response, ending + DONE, last=True)
        return response

    async def _write_tokens(
        self, exchange: Exchange, response: web.StreamResponse, answer: Answer, ticket: Ticket
    ) -> Callable[[str], bytes]:
        """Write the tokens; what writes the end. The last token comes with the reason, unless a fault interferes."""
        cut_after, complete = exchange.faults.cut_after_tokens, answer.ask.output_tokens
        withheld = 1 if cut_after is None and exchange.faults.hold is None else 0
        sent, data = 0, answer.opening()
        while not ticket.done or sent < ticket.produced:
            produced = await ticket.more(sent)
            if cut_after is not None:
                produced = min(produced, cut_after)
            if produced > sent:
                data += answer.tokens(sent, min(produced, complete - withheld))
                await exchange.write(response, data)
                sent, data = produced, b""
            if sent == cut_after:
                exchange.close(reset=False)
                raise Cut
        return answer.last if withheld and sent == complete else answer.closing

    async def _hold(self, exchange: Exchange) -> None:
        if exchange.faults.hold is None or self._stopping.is_set():
            return
        self.books.held += 1
        try:
            await self._released.wait()
        finally:
            self.books.held -= 1

    def _count_end(self, answer: Answer, ticket: Ticket) -> str:
        """The finish_reason, counted as vLLM does."""
        reason = "abort" if ticket.cancelled else answer.finish_reason()
        told, used = "stop" if reason == "tool_calls" else reason, _usage(ticket)
        self.books.finished[told] += 1
        self.books.ended.append(
            Finished(answer.engine_id, told, used.prompt_tokens, used.completion_tokens, used.cached_tokens, 0.0, 0.0)
        )
        return reason


def _usage(ticket: Ticket) -> Usage:
    return Usage(ticket.request.prompt_tokens, ticket.produced, ticket.request.cached_tokens)


async def _sign(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "uvicorn"
    response.headers["Vary"] = "Origin"


async def serve(options: SimOptions, listening: Callable[[str], None] | None = None) -> None:
    """Run `options.count` engines on consecutive ports until cancelled; `listening` hears in a line where they are."""
    servers = [SimulatedServer(options, index) for index in range(options.count)]
    try:
        for server in servers:
            await server.start()
        if listening is not None:
            listening(_where(options, [server.port for server in servers]))
        await asyncio.Event().wait()
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def _why_not_bound(error: OSError) -> str:
    """In words; asyncio's are its own and have the error's number."""
    if error.errno == errno.EADDRINUSE:
        return "the address is already in use; does another simulator run?"
    has_own_words = isinstance(error, socket.gaierror) or not error.errno
    return str(error.strerror or error) if has_own_words else os.strerror(error.errno or 0)


def _where(options: SimOptions, ports: Sequence[int]) -> str:
    shown = f"{ports[0]}-{ports[-1]}" if options.port and len(ports) > 1 else ", ".join(map(str, ports))
    engines = f"{len(ports)} engine{'s' if len(ports) > 1 else ''}"
    return f"{engines} at {options.host}:{shown}, model {', '.join(options.models)}"
