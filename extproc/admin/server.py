"""The operator's HTTP API, and the metrics page on its own port. Loopback unless told otherwise.

Reads what the system knows and may drain an endpoint. What takes long for a large fleet (decisions, refusals, the
metrics page, and putting anything into JSON) is done in one thread beside the decision loop, one answer after the
other, so that many who ask do not together take the interpreter from the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from prometheus_client import CONTENT_TYPE_LATEST

from extproc.addresses import why_not_bound
from extproc.error_object import error_object
from extproc.request.apis import JSON_PATHS

log = structlog.get_logger(__name__)

_MOST_DECISIONS = 1_000
_LONGEST_NUMBER = 9
_LARGEST_BODY_BYTES = 64 * 1024 * 1024

_CODES = {
    400: "invalid_request",
    403: "other_origin",
    404: "unknown_path",
    405: "method_not_allowed",
    413: "body_too_large",
    500: "internal_error",
}
"""By status, where nothing more is to be said: the words that clients get for the same faults; `other_origin`, which is
none of theirs, is this API's alone."""
_SERVER_ERROR = 500

_Result = TypeVar("_Result")
_P = ParamSpec("_P")


class Operations(Protocol):
    """What the admin API may ask of the running system.

    `decisions`, `refusals` and `metrics_page` are called in another thread than the decision loop's, all else in it.
    """

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served, and why not."""

    def describe_fleet(self) -> list[dict[str, Any]]:
        """Every endpoint."""

    def breakers(self) -> dict[str, Any]:
        """The breakers of models and zones."""

    def decisions(self, limit: int, request_id: str | None) -> list[dict[str, Any]]:
        """The newest decisions."""

    def refusals(self, limit: int) -> list[dict[str, Any]]:
        """The newest refusals."""

    async def explain(self, path: str, body: bytes, tenant: str | None) -> dict[str, Any]:
        """Where a body would go now, if `tenant` sent it. `path` is one of JSON_PATHS."""

    def queues(self) -> dict[str, Any]:
        """Who waits, by pool."""

    def tenants(self) -> dict[str, Any]:
        """What each tenant seen of late has running, has left and has spent."""

    def profiles(self) -> dict[str, Any]:
        """What each pool's model turned out to cost."""

    def config(self) -> dict[str, Any]:
        """The generation in force."""

    def drain(self, address: str, *, drain: bool) -> bool:
        """Drain an endpoint or take it back; False if there is no such endpoint."""

    def metrics_page(self) -> bytes:
        """The Prometheus page."""


class AdminServer:
    """Two listeners: admin and metrics."""

    def __init__(self, operations: Operations, *, admin: str, metrics: str) -> None:
        self._operations = operations
        self._addresses = (admin, metrics)
        self._runners: list[web.AppRunner] = []
        self._thread = ThreadPoolExecutor(1, "admin")

    async def start(self) -> None:
        """Listen on both. Raises OSError if an address is taken."""
        admin, metrics = self._addresses
        await self._listen(self._admin_app(), "admin.listen", admin)
        await self._listen(self._metrics_app(), "observe.metrics", metrics)

    async def _listen(self, app: web.Application, field: str, address: str) -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        host, _, port = address.rpartition(":")
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            raise OSError(f"{field}: cannot listen on {address}: {why_not_bound(error)}") from error

    async def stop(self) -> None:
        """Stop listening."""
        for runner in self._runners:
            await runner.cleanup()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _beside(self, work: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    async def _told(self, document: Any, status: int = 200) -> web.Response:  # noqa: ANN401 - as `_json`
        return await self._beside(_json, document, status)

    def _metrics_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    def _admin_app(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_BODY_BYTES, middlewares=[_json_errors])
        app.router.add_get("/livez", _live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/v1/fleet", self._fleet)
        app.router.add_get("/v1/decisions", self._decisions)
        app.router.add_get("/v1/refusals", self._refusals)
        app.router.add_post("/v1/explain", self._explain)
        app.router.add_get("/v1/profiles", self._profiles)
        app.router.add_get("/v1/tenants", self._tenants)
        app.router.add_get("/v1/queues", self._queues)
        app.router.add_get("/v1/config", self._config)
        app.router.add_post("/v1/endpoints/{endpoint:[^/]+}:{verb:drain|undrain}", self._drain)
        return app

    async def _metrics(self, _request: web.Request) -> web.Response:
        page = await self._beside(self._operations.metrics_page)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _ready(self, _request: web.Request) -> web.Response:
        ready, why = self._operations.ready()
        return _json({"ready": ready, "reason": why}, 200 if ready else 503)

    async def _fleet(self, _request: web.Request) -> web.Response:
        fleet = {"endpoints": self._operations.describe_fleet(), "breakers": self._operations.breakers()}
        return await self._told(fleet)

    async def _decisions(self, request: web.Request) -> web.Response:
        limit, request_id = _limit(request), request.query.get("request_id")
        return await self._told({"decisions": await self._beside(self._operations.decisions, limit, request_id)})

    async def _refusals(self, request: web.Request) -> web.Response:
        limit = _limit(request)
        return await self._told({"refusals": await self._beside(self._operations.refusals, limit)})

    async def _explain(self, request: web.Request) -> web.Response:
        """POST the body a client would send; `?path=` names the API, chat completions unless told; `?tenant=` whose."""
        path, tenant = request.query.get("path", "/v1/chat/completions"), request.query.get("tenant")
        if path not in JSON_PATHS:
            message = f"not a path with a JSON body: {path[:200]}; there are: {', '.join(JSON_PATHS)}"
            return _error(400, message, param="path")
        return await self._told(await self._operations.explain(path, await request.read(), tenant))

    async def _queues(self, _request: web.Request) -> web.Response:
        return await self._told({"queues": self._operations.queues()})

    async def _tenants(self, _request: web.Request) -> web.Response:
        return await self._told({"tenants": self._operations.tenants()})

    async def _profiles(self, _request: web.Request) -> web.Response:
        return await self._told({"profiles": self._operations.profiles()})

    async def _config(self, _request: web.Request) -> web.Response:
        return await self._told(self._operations.config())

    async def _drain(self, request: web.Request) -> web.Response:
        endpoint, verb = request.match_info["endpoint"], request.match_info["verb"]
        if not self._operations.drain(endpoint, drain=verb == "drain"):
            return _error(404, f"no endpoint {endpoint[:200]}", "unknown_endpoint")
        return _json({"endpoint": endpoint, "done": verb})


def _limit(request: web.Request) -> int:
    """`?limit=`, 20 unless told. Raises HTTPBadRequest."""
    limit = request.query.get("limit", "20")
    if not limit.isdecimal() or len(limit) > _LONGEST_NUMBER:
        raise web.HTTPBadRequest(reason="limit must be a whole number")
    return min(int(limit), _MOST_DECISIONS)


async def _live(_request: web.Request) -> web.Response:
    return _json({"live": True})


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error is JSON, in one shape; and no page of another origin may have an operator's browser ask.

    Not that "not ready" is one: it is what /readyz was asked for, whatever its status.
    """
    try:
        return _forbidden() if _foreign(request) else await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except (web.RequestPayloadError, ContentEncodingError):
        return _error(400, "the body cannot be read: it is not what its headers say")
    except Exception:
        log.exception("admin request failed", path=request.path)
        return _error(500, "internal error")


def _forbidden() -> web.Response:
    return _error(403, "requests of other origins are not answered")


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> web.Response:
    """An error in the one shape that clients of the fleet get as well."""
    kind = "invalid_request_error" if status < _SERVER_ERROR else "server_error"
    fields = error_object(kind, code or _CODES.get(status, _CODES[400]), message, param)
    return _json(fields, status)


def _foreign(request: web.Request) -> bool:
    """A browser sends this for a page that is not ours; loopback does not keep such pages away."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.host


def _json(document: Any, status: int = 200) -> web.Response:  # noqa: ANN401 - whatever JSON can hold
    return web.Response(
        body=msgspec.json.format(msgspec.json.encode(document)), status=status, content_type="application/json"
    )
