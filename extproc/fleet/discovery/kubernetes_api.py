"""A Kubernetes API server: how it is reached, and a collection of its objects mirrored by list and watch.

The protocol: list everything with its version, then watch the changes from that version on. A version is kept for some
minutes only; when it is gone (410) everything is listed again. Whatever fails, what was mirrored last stays, and the
next try comes after a pause that grows. Not here: what the objects mean (kubernetes_objects.py).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Generic, NoReturn, Protocol, TypeVar

import aiohttp
import msgspec
import structlog

from extproc.config.sections.endpoint_sources import Kubernetes
from extproc.fleet.discovery.kubernetes_objects import Metadata

log = structlog.get_logger(__name__)

_MOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE_OBJECTS = 100
"""So few that parsing a page does not hold up decisions: a pod has some ten kilobytes."""
_LARGEST_ANSWER_BYTES = 32 * 1024 * 1024
"""Of a page or an event. Kubernetes' own bound is 1.5 MB an object."""
_FIRST_PAUSE_S = 0.5
"""After the first failure in a row; doubled with each further one."""
_SHORTEST_WATCH_S = 1.0
"""A watch that ends sooner without a word is a failure: else we would ask again without end."""


class _Object(Protocol):
    @property
    def metadata(self) -> Metadata: ...


_Kind = TypeVar("_Kind", bound=_Object)


class Unread(Exception):
    """An answer that cannot be used; `reason` is one of a fixed set of words."""

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(str(detail))
        self.reason = reason


_REASONS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "expired"}


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and what it wants to see."""

    url: str
    namespace: str
    ca_file: Path | None
    token_file: Path | None


def access_to(source: Kubernetes, environ: Mapping[str, str] = os.environ, mount: Path = _MOUNT) -> Access:
    """What `source` says, and for the rest what a cluster gives to its pods. It reads a file. Raises Unread."""
    if source.api_server is not None:
        url, ca_file, token_file = source.api_server.rstrip("/"), source.ca_file, source.token_file
        return Access(url, source.namespace or "default", ca_file, token_file)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise Unread("no_cluster", "we do not run in a cluster: give api_server")
    return Access(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        source.namespace or (mount / "namespace").read_text(encoding="utf-8").strip(),
        source.ca_file or mount / "ca.crt",
        source.token_file or mount / "token",
    )


class ApiServer:
    """Connections to one API server. Made anew after each failure, so that a new CA is taken up as well."""

    def __init__(self, access: Access, session: aiohttp.ClientSession) -> None:
        self.namespace = access.namespace
        self._access = access
        self._session = session

    @asynccontextmanager
    async def get(
        self, path: str, params: Mapping[str, str], *, within_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a good answer, which must end within `within_s`. Raises Unread."""
        headers = await self._headers()
        timeout = aiohttp.ClientTimeout(total=within_s)
        url = self._access.url + path
        async with self._session.get(
            url, params=params, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                detail = f"{path}: {response.status} {(await response.content.read(500)).decode(errors='replace')}"
                raise Unread(_REASONS.get(response.status, "http_status"), detail)
            yield response.content

    async def _headers(self) -> dict[str, str]:
        file = self._access.token_file
        if file is None:
            return {}
        token = await asyncio.to_thread(file.read_text, encoding="utf-8")
        return {"Authorization": f"Bearer {token.strip()}"}


@asynccontextmanager
async def connected(source: Kubernetes) -> AsyncIterator[ApiServer]:
    """An API server to ask; every way in which that fails within the block becomes Unread."""
    try:
        access = await asyncio.to_thread(access_to, source)
        tls = await asyncio.to_thread(ssl.create_default_context, cafile=access.ca_file)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
            yield ApiServer(access, session)
    except TimeoutError as error:
        raise Unread("timeout", "no answer in time, or no end of it") from error
    except aiohttp.ClientConnectorError as error:
        raise Unread("unreachable", error) from error
    except aiohttp.ClientError as error:
        raise Unread("disconnected", repr(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unread("malformed", error) from error
    except OSError as error:  # a file of ours cannot be read
        raise Unread("credentials", error) from error


@dataclass(frozen=True, slots=True)
class Collection(Generic[_Kind]):
    """Objects of one kind in the source's namespace: `path` with a place for it, as the API has it."""

    kind: type[_Kind]
    path: str
    params: Mapping[str, str]


class _ListMetadata(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion")
    next_page: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct, Generic[_Kind]):
    metadata: _ListMetadata
    items: list[_Kind] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Versioned(msgspec.Struct):
    metadata: Metadata


class Mirror(Generic[_Kind]):
    """Keeps `objects` (by name) as the API server has them, and tells of every change, and of every failure.

    `on_objects` is called when all are listed, after changes, and when a failure is over.
    """

    def __init__(
        self,
        source: Kubernetes,
        collection: Collection[_Kind],
        on_objects: Callable[[list[_Kind]], None],
        on_failure: Callable[[Unread], None],
    ) -> None:
        self.objects: dict[str, _Kind] = {}
        self._source = source
        self._collection = collection
        self._on_objects = on_objects
        self._on_failure = on_failure
        self._rng = Random()
        self._version: str | None = None  # None: list first
        self._failures = 0
        self._told = False
        self._object: msgspec.json.Decoder[_Kind] = msgspec.json.Decoder(collection.kind)
        self._page: msgspec.json.Decoder[_Page[_Kind]] = msgspec.json.Decoder(_Page[collection.kind])  # type: ignore[name-defined]

    async def follow(self) -> None:
        """Mirror until cancelled."""
        while True:
            try:
                await self._follow_until_failure()
            except Unread as why:
                self._fail(why)
            except Exception:
                log.exception("cannot mirror", path=self._collection.path)  # and goes on: nobody would notice the end
                self._fail(Unread("fault", "see the log"))
            await asyncio.sleep(self._pause_s())

    def _fail(self, why: Unread) -> None:
        self._failures += 1
        self._told = False
        if why.reason not in ("disconnected", "timeout", "unreachable"):
            self._version = None  # what we have may not be what there is: list again
        self._on_failure(why)

    def _pause_s(self) -> float:
        longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 16), self._source.retry_max_s)
        return longest_s * self._rng.uniform(0.5, 1)

    async def _follow_until_failure(self) -> NoReturn:
        async with connected(self._source) as api:
            if self._version is None:
                await self._list(api)
            while True:
                await self._watch(api)

    def _tell(self) -> None:
        self._told = True
        self._on_objects(list(self.objects.values()))

    # -- list

    async def _list(self, api: ApiServer) -> None:
        objects: dict[str, _Kind] = {}
        next_page = ""
        while True:
            page = self._page.decode(await self._read_page(api, next_page))
            objects |= {item.metadata.name: item for item in page.items or ()}
            self._check_bound(len(objects))
            next_page = page.metadata.next_page
            if not next_page:
                break
        self.objects = objects
        self._version = page.metadata.resource_version
        self._tell()

    async def _read_page(self, api: ApiServer, next_page: str) -> bytes:
        params = {**self._collection.params, "limit": str(_PAGE_OBJECTS)}
        if next_page:
            params["continue"] = next_page
        body = bytearray()
        async with api.get(self._path(api), params, within_s=self._source.timeout_s) as content:
            async for chunk in content.iter_any():
                body += chunk
                _check_length(body)
        return bytes(body)

    def _path(self, api: ApiServer) -> str:
        return self._collection.path.format(namespace=api.namespace)

    def _check_bound(self, objects: int) -> None:
        if objects > self._source.max_objects:
            raise Unread("too_many", f"more than max_objects, {self._source.max_objects}")

    # -- watch

    async def _watch(self, api: ApiServer) -> None:
        """Take changes until the API server ends the watch, as it does after the time we ask for."""
        source, clock = self._source, asyncio.get_running_loop().time
        params = {
            **self._collection.params, "watch": "true", "resourceVersion": self._version or "",
            "allowWatchBookmarks": "true", "timeoutSeconds": str(max(1, round(source.watch_s))),
        }  # fmt: skip
        began_s, took = clock(), False
        async with api.get(self._path(api), params, within_s=source.watch_s + source.timeout_s) as content:
            if not self._told:
                self._tell()
            async for lines in _lines(content):
                self._take(lines)
                took = True
        if not took and clock() - began_s < min(_SHORTEST_WATCH_S, source.watch_s / 2):
            raise Unread("disconnected", "a watch ended before it began")
        self._failures = 0

    def _take(self, lines: list[bytes]) -> None:
        changed = [self._take_one(msgspec.json.decode(line, type=_Event)) for line in lines]
        self._failures = 0
        if any(changed):
            self._tell()

    def _take_one(self, event: _Event) -> bool:
        """True if it is a change of the objects."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise Unread(_REASONS.get(status.code, "http_status"), f"{status.code} {status.message}")
        if event.type == "BOOKMARK":
            self._version = msgspec.json.decode(event.object, type=_Versioned).metadata.resource_version
            return False
        self._change(event.type, self._object.decode(event.object))
        return True

    def _change(self, how: str, item: _Kind) -> None:
        if how in ("ADDED", "MODIFIED"):
            self.objects[item.metadata.name] = item
            self._check_bound(len(self.objects))
        elif how == "DELETED":
            self.objects.pop(item.metadata.name, None)
        else:
            raise Unread("malformed", f"an event of type {how[:80]!r}")
        self._version = item.metadata.resource_version


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """Whole lines, as many at a time as have come. Raises Unread if the last one is cut."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        _check_length(rest)
        whole, newline, tail = bytes(rest).rpartition(b"\n")
        if newline:
            rest = bytearray(tail)
            yield [line for line in whole.split(b"\n") if line.strip()]
    if rest.strip():
        raise Unread("disconnected", "the watch was cut within an event")


def _check_length(body: bytearray) -> None:
    if len(body) > _LARGEST_ANSWER_BYTES:
        raise Unread("malformed", f"more than {_LARGEST_ANSWER_BYTES} bytes in one piece")
