"""What the wire benchmarks measure on: four ways from a client to sixteen constant engines, all up at the same time.

- `no ext_proc`: Envoy alone;
- `no-op`: Envoy asking a grpc.aio server that decides nothing (noop_server.py);
- `grpcio`, `lane`: `pointsman up` as it is, by either transport.

The engines are listeners of one more Envoy, which give always the same answer, and for as long as the rig stands the
same metrics and models: they cost next to nothing and never fill up. Nothing of the product is left out but that:
sixteen endpoints are scraped, probed, priced by marginal cost and counted; every request is told of by the access log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from harness import HANG_GUARD_S, Engine, System, eventually, free_ports  # of the tests over a real Envoy

from extproc.launcher import ALLOCATOR, find_envoy

ENGINES = 16
NO_EXT_PROC, NO_OP, GRPCIO, LANE = "no ext_proc", "no-op", "grpcio", "lane"
_WINDOW = 33 << 20
_IDLE_S = 5.0
_TYPES = "type.googleapis.com/envoy.extensions"
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "sim",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "so it is"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 500, "completion_tokens": 3, "total_tokens": 503},
    }
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to the engines: where a client comes in, and the processes that it costs.

    `idle_share`: of a core, what the decision process takes without any request: sixteen engines are watched.
    """

    name: str
    port: int
    envoy: int
    decider: int | None
    idle_share: float = 0.0


@dataclass(frozen=True)
class Run:
    """One run of load over one way: microseconds of CPU per request beside what the load generator tells.

    `decider_us`: without what it takes when idle, which on a slow machine would be shared by fewer requests.
    """

    decider_us: float
    envoy_us: float
    count: int
    per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    bad: int


def measure(way: Way, *options: str) -> Run:
    """Put load on one way and see what it costs whom."""
    before, began = (_cpu_s(way.decider), _cpu_s(way.envoy)), time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.http_load", str(way.port), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603 - our own
    told = json.loads(done.stdout)
    decider_s, envoy_s = _cpu_s(way.decider) - before[0], _cpu_s(way.envoy) - before[1]
    count = max(1, told["count"])
    decider_s -= way.idle_share * (time.perf_counter() - began)
    return Run(decider_us=1e6 * decider_s / count, envoy_us=1e6 * envoy_s / count, **told)


def _cpu_s(process: int | None) -> float:
    """What the threads of a process have had, by the scheduler's own clock."""
    if process is None:
        return 0.0
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def ways() -> Iterator[list[Way]]:
    """All four, with nothing left behind, also when told to end."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rig-")))
        engines, fronts = free_ports(ENGINES), free_ports(2)
        stack.enter_context(_envoy(folder / "engines.json", _engines(engines, *_pages(folder))))
        socket = folder / "noop.sock"
        no_op = stack.enter_context(_process(sys.executable, "-m", "benchmarks.noop_server", f"unix:{socket}"))
        reference = stack.enter_context(_envoy(folder / "fronts.json", _fronts(fronts, engines, socket)))
        found = [Way(NO_EXT_PROC, fronts[0], reference, None), Way(NO_OP, fronts[1], reference, no_op)]
        found += [stack.enter_context(_product(folder, name, engines)) for name in (GRPCIO, LANE)]
        for way in found:
            eventually(lambda way=way: _serves(way), f"{way.name} serves")
        yield _with_idle_shares(found)


def _with_idle_shares(found: list[Way]) -> list[Way]:
    before = [_cpu_s(way.decider) for way in found]
    time.sleep(_IDLE_S)
    return [
        replace(way, idle_share=(_cpu_s(way.decider) - began) / _IDLE_S)
        for way, began in zip(found, before, strict=True)
    ]


def _serves(way: Way) -> bool:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
    url = f"http://127.0.0.1:{way.port}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=HANG_GUARD_S).status_code == 200


@contextmanager
def _product(folder: Path, name: str, engines: list[int]) -> Iterator[Way]:
    own = folder / name
    own.mkdir()
    addresses = [f"127.0.0.1:{port}" for port in engines]
    pool = {"name": "chat", "models": ["sim"], "endpoints": {"static": addresses}, "policy": "default"}
    system = System(own, {"pools": [pool], "listen": {"lane": False} if name == GRPCIO else {}})
    system.start()
    try:
        system.wait_pickable(*addresses)
        port = int(system.url.rpartition(":")[2])
        yield Way(name, port, system.child("envoy.yaml"), system.child(" serve "))
    finally:
        system.stop()


@contextmanager
def _process(*command: str) -> Iterator[int]:
    environment = {**os.environ, **ALLOCATOR}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - our own, and Envoy
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(HANG_GUARD_S)


@contextmanager
def _envoy(file: Path, config: dict[str, Any]) -> Iterator[int]:
    file.write_text(json.dumps(config))
    quiet = ("--disable-hot-restart", "-l", "error", "--concurrency", "1")
    with _process(find_envoy(), "-c", str(file), *quiet) as pid:
        yield pid


def _pages(folder: Path) -> tuple[str, str]:
    """Metrics and models of an engine that has nothing to do."""
    engine = Engine(folder / "engine.log", free_ports(1)[0])
    try:
        engine.wait_ready()
        return engine.get("/metrics").text, engine.get("/v1/models").text
    finally:
        engine.stop()


# -- Envoy's configurations, those that are not the product's


def _engines(ports: list[int], metrics: str, models: str) -> dict[str, Any]:
    answers = [("/metrics", metrics), ("/v1/models", models), ("/", _ANSWER)]
    routes = [
        {
            "match": {"prefix": path},
            "direct_response": {"status": 200, "body": {"inline_string": text}},
            "response_headers_to_add": [
                {"header": {"key": "content-type", "value": "text/plain" if text is metrics else "application/json"}}
            ],
        }
        for path, text in answers
    ]
    whole = _filter("buffer", "buffer.v3.Buffer", max_request_bytes=_WINDOW)  # else it answers before it is asked
    return _static(
        [_listener(port, routes, [whole]) for port in ports], [], max_direct_response_body_size_bytes=1 << 20
    )


def _fronts(ports: list[int], engines: list[int], socket: Path) -> dict[str, Any]:
    """Port by port: without ext_proc, and with the server that decides nothing."""
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}]
    ask = _filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "no-op"}},
        message_timeout="600s",
        processing_mode={
            "request_header_mode": "SEND", "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SEND",
        },
    )  # fmt: skip
    to_engines = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in engines]
    http2 = {"initial_stream_window_size": _WINDOW, "initial_connection_window_size": 2 * _WINDOW}
    options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": http2},
        }
    }
    clusters = [
        _cluster("engines", to_engines),
        {**_cluster("no-op", [{"pipe": {"path": str(socket)}}]), "typed_extension_protocol_options": options},
    ]
    return _static([_listener(ports[0], routes, []), _listener(ports[1], routes, [ask])], clusters)


def _static(listeners: list[Any], clusters: list[Any], **of_routes: int) -> dict[str, Any]:
    for listener in listeners:
        listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"].update(of_routes)
    return {"node": {"id": "rig", "cluster": "rig"}, "static_resources": {"listeners": listeners, "clusters": clusters}}


def _listener(port: int, routes: list[Any], filters: list[Any]) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": str(port),
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [*filters, _filter("router", "router.v3.Router")],
    }
    return {
        "name": str(port),
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "per_connection_buffer_limit_bytes": _WINDOW,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _filter(name: str, kind: str, **fields: object) -> dict[str, Any]:
    return {
        "name": f"envoy.filters.http.{name}",
        "typed_config": {"@type": f"{_TYPES}.filters.http.{kind}", **fields},
    }


def _cluster(name: str, addresses: list[Any]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address}} for address in addresses]
    many = {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": _WINDOW,
        "circuit_breakers": {"thresholds": [many]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }
