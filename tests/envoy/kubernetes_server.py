"""A stand-in for a Kubernetes API server: objects, list and watch over HTTP, and the ways in which these go wrong.

Payloads have the published schema's shape. Not here: anything an engine or Envoy does.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PODS = "/api/v1/namespaces/llm/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"


@dataclass(eq=False)
class Watch:
    """Somebody who watches a path."""

    path: str
    query: dict[str, str]
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class Kubernetes:
    """The objects and who watches them. All but `serving` belongs to the loop that serves."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {PODS: {}, SLICES: {}, POOLS: {}}
        self.version = 1
        self.oldest = 1  # versions before this are gone
        self.token: str | None = None  # what a caller must show
        self.status: int | None = None  # the answer to everything
        self.raw_list: bytes | None = None  # the answer to every list
        self.gone_in_stream = False  # 410 as an event, not as a status
        self.hold_lists: asyncio.Event | None = None  # lists are answered when it is set
        self.asked: list[dict[str, str]] = []  # the query of each request, and its path
        self.url = ""
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._watches: list[Watch] = []

    # -- objects

    def put(self, path: str, item: dict[str, Any]) -> None:
        """Add or change."""
        name = item["metadata"]["name"]
        how = "MODIFIED" if name in self.objects[path] else "ADDED"
        self._happen(path, how, item)
        self.objects[path][name] = self._events[-1][3]

    def delete(self, path: str, name: str) -> None:
        """Remove."""
        self._happen(path, "DELETED", self.objects[path].pop(name))

    def _happen(self, path: str, how: str, item: dict[str, Any]) -> None:
        """A change, told to those who select the object."""
        self.version += 1
        versioned = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._events.append((self.version, path, how, versioned))
        for watch in self._watches:
            if watch.path == path and selected(versioned, watch.query):
                watch.queue.put_nowait(event(how, versioned))

    def forget(self) -> None:
        """Compact: no version but the newest can be watched from."""
        self.version += 1
        self.oldest = self.version
        self._events.clear()

    # -- watches

    @property
    def watches(self) -> int:
        """How many are open."""
        return len(self._watches)

    def send(self, path: str, data: bytes | None) -> None:
        """To every watch of `path`; None ends it."""
        for watch in self._watches:
            if watch.path == path:
                watch.queue.put_nowait(data)

    def bookmark(self, path: str) -> None:
        """Tell the newest version."""
        self.send(path, event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}))

    def end_watches(self) -> None:
        """As the server does when their time is over."""
        for path in self.objects:
            self.send(path, None)

    # -- HTTP

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
        query = dict(request.query)
        self.asked.append({**query, "path": request.path})
        if self.status is not None:
            return status(self.status)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return status(401)
        if request.path not in self.objects:
            return status(404)
        return await (self._watch(request, query) if "watch" in query else self._list(request.path, query))

    async def _list(self, path: str, query: dict[str, str]) -> web.Response:
        if self.hold_lists is not None:
            await self.hold_lists.wait()
        if self.raw_list is not None:
            return web.Response(body=self.raw_list, content_type="application/json")
        begin, _, version = query.get("continue", f"0/{self.version}").partition("/")
        if int(version) < self.oldest:
            return status(410)
        found = [item for item in self.objects[path].values() if selected(item, query)]
        end = int(begin) + int(query.get("limit", len(found) or 1))
        metadata = {"resourceVersion": version, **({"continue": f"{end}/{version}"} if end < len(found) else {})}
        return web.json_response({"kind": "List", "metadata": metadata, "items": found[int(begin) : end]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        since = int(query["resourceVersion"])
        if since < self.oldest and not self.gone_in_stream:
            return status(410)
        watch = Watch(request.path, query)
        if since < self.oldest:
            watch.queue.put_nowait(event("ERROR", GONE))
            watch.queue.put_nowait(None)
        for version, path, how, item in self._events:
            if version > since and path == request.path and selected(item, query):
                watch.queue.put_nowait(event(how, item))
        response = web.StreamResponse()
        await response.prepare(request)
        self._watches.append(watch)
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                await self._stream(watch, response, request.transport)
        except TimeoutError:
            pass
        finally:
            self._watches.remove(watch)
        return response

    @staticmethod
    async def _stream(watch: Watch, response: web.StreamResponse, transport: asyncio.Transport | None) -> None:
        while (data := await watch.queue.get()) is not None:
            await response.write(data)
            if not data.endswith(b"\n") and transport is not None:
                transport.close()  # cut within an event
                return

    async def start(self) -> web.AppRunner:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        return runner

    @contextmanager
    def serving(self) -> Iterator[Callable[..., None]]:
        """Serve from a thread of our own; yields what calls a method there."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self.start(), loop).result()

        async def call(method: Callable[..., None], *args: Any) -> None:
            method(*args)

        yield lambda method, *args: asyncio.run_coroutine_threadsafe(call(method, *args), loop).result()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


GONE = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
        "message": "too old resource version", "metadata": {}}  # fmt: skip


def event(how: str, item: dict[str, Any]) -> bytes:
    """One line of a watch."""
    return json.dumps({"type": how, "object": item}).encode() + b"\n"


def status(code: int) -> web.Response:
    """An error as the API server words it."""
    return web.json_response({**GONE, "code": code, "message": f"status {code}"}, status=code)


def selected(item: dict[str, Any], query: dict[str, str]) -> bool:
    """By equality of labels, or by name."""
    labels = item["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in ("", item["metadata"]["name"])


# -- objects


def pod(
    name: str,
    *ips: str,
    ready: bool = True,
    terminating: bool = False,
    phase: str = "Running",
    ports: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A pod of one engine."""
    declared = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in (ports or {}).items()]
    metadata: dict[str, Any] = {
        "name": name, "namespace": "llm", "uid": f"uid-{name}", "creationTimestamp": "2026-11-29T10:00:00Z",
        "labels": {"app": "vllm", **(labels or {})},
    }  # fmt: skip
    if terminating:
        metadata |= {"deletionTimestamp": "2026-11-29T11:00:00Z", "deletionGracePeriodSeconds": 120}
    addresses = {"podIP": ips[0], "podIPs": [{"ip": ip} for ip in ips]} if ips else {}
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
        {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None},
    ]
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
        "spec": {"nodeName": "gpu-1", "containers": [{"name": "vllm", "image": "vllm", "ports": declared}]},
        "status": {"phase": phase, "hostIP": "192.168.0.1", "conditions": conditions, **addresses},
    }  # fmt: skip


def endpoint(address: str, pod_name: str | None = None, **conditions: bool | None) -> dict[str, Any]:
    """An endpoint of a slice."""
    target = {"targetRef": {"kind": "Pod", "namespace": "llm", "name": pod_name}} if pod_name else {}
    return {"addresses": [address], "conditions": conditions, "nodeName": "gpu-1", **target}


def endpoint_slice(
    name: str, *endpoints: dict[str, Any], family: str = "IPv4", ports: dict[str, int] | None = None
) -> dict[str, Any]:
    """A slice of the Service `vllm`."""
    listed = [{"name": port, "port": number, "protocol": "TCP"} for port, number in (ports or {"": 8000}).items()]
    metadata = {"name": name, "namespace": "llm", "labels": {"kubernetes.io/service-name": "vllm"}}
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata,
        "addressType": family, "endpoints": list(endpoints), "ports": listed,
    }  # fmt: skip


def inference_pool(name: str, *ports: int, **labels: str) -> dict[str, Any]:
    """An InferencePool."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {
            "selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"group": "", "kind": "Service", "name": "pointsman", "port": {"number": 9002}},
        },
    }  # fmt: skip
