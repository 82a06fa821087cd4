"""The generated configuration against a real Envoy: it loads, holds what was measured to matter, and follows xDS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import certifi
import grpc
import httpx
import pytest
import yaml
from aiohttp import web
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2

from extproc.config.schema import Config
from extproc.control.envoy_config import bootstrap, filters, pool_cluster, to_yaml
from extproc.control.xds import Snapshot, XdsServer

ROOT = Path(__file__).parents[2]
MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
XDS_SERVICES = (
    ("envoy.service.discovery.v3.AggregatedDiscoveryService", "StreamAggregatedResources"),
    ("envoy.service.endpoint.v3.EndpointDiscoveryService", "StreamEndpoints"),
)
POOL = {"name": "chat", "models": ["m"], "endpoints": {"static": ["127.0.0.1:8001"]}}
CONFIGS: dict[str, dict[str, Any]] = {
    "smallest": {"pools": [POOL]},
    "everything": {
        "listen": {"http": "[::1]:8080", "grpc": "[::1]:9004"},
        "pools": [
            POOL,
            {**POOL, "name": "code", "models": ["c"], "cluster": "of-the-platform"},
            {**POOL, "name": "empty", "models": ["e"], "endpoints": {"static": []}},
        ],
        "wire": {"response_headers": ["request_id", "endpoint", "model"], "strict_pin": False},
        "timeouts": {"connect_ms": 250, "stream_idle_s": 60, "upstream_idle_s": 0.5},
        "retries": {"attempts": 5, "statuses": [500, 502, 503, 504]},
    },
    "nothing extra": {"pools": [POOL], "wire": {"response_headers": []}, "retries": {"attempts": 0, "statuses": []}},
    "guarded": {
        "pools": [POOL],
        "access": {
            "api_keys_file": "keys.yaml",
            "jwt": {
                "issuer": "i",
                "audiences": ["a"],
                "jwks_uri": "https://127.0.0.1/keys",
                "jwks_ca": certifi.where(),
            },
            "tenant_header": "x-tenant",
        },
    },
    "tokens alone": {
        "pools": [POOL],
        "access": {"jwt": {"issuer": "i", "audiences": [], "jwks_uri": "http://127.0.0.1:8000/keys"}},
    },
    "tiny limits": {"pools": [POOL], "limits": {"request_body_bytes": 1, "envoy_connections": 1}},
    "found by name": {
        "pools": [POOL],
        "listen": {"grpc": "0.0.0.0:9004", "grpc_from_envoy": "pointsman.llm.svc:9004"},
    },
    "huge limits": {"pools": [POOL], "limits": {"request_body_bytes": 2**31 - 1, "envoy_connections": 2**31 - 1}},
}


def envoy_binary() -> str:
    """The Envoy of this environment."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    assert found is not None, "these tests need an Envoy: the extra [embedded] brings one"
    return found


def validate(document: Mapping[str, Any], folder: Path) -> str:
    """Load a bootstrap with `envoy --mode validate` and return its log; fail if it does not load."""
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(dict(document)))
    done = subprocess.run(
        [envoy_binary(), "--mode", "validate", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def plain(parts: Any) -> Any:
    """What Envoy reads."""
    return yaml.safe_load(to_yaml(parts))


def manager_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of a bootstrap."""
    manager: dict[str, Any] = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    return dict(manager["typed_config"])


def in_a_foreign_envoy(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A minimal bootstrap of somebody else's with our sections put where the README says."""
    manager = {"@type": MANAGER, "stat_prefix": "theirs", **sections["http_connection_manager"]}
    manager["route_config"] = {"virtual_hosts": [sections["virtual_host"]]}
    for key in ("early_header_mutation_extensions", "http_filters", "local_reply_config", "access_log"):
        manager[key] = sections[key]
    listener = {
        "name": "theirs",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 10_000}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        **sections["listener"],
    }
    return {
        "node": {"id": "theirs", "cluster": "theirs"},
        "static_resources": {"listeners": [listener], "clusters": sections["clusters"]},
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: Unix sockets allow about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="pm-") as name:
        yield Path(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_bootstrap_loads(name: str, folder: Path) -> None:
    """Envoy loads the generated bootstrap of every kind of config."""
    config = Config.model_validate(CONFIGS[name])
    log = validate(plain(bootstrap(config, admin_socket=str(folder / "admin.sock"))), folder)
    assert "deprecated" not in log.lower()


def test_a_listener_for_http3_loads(folder: Path) -> None:
    """Beside the TCP listener, at the same port, with the same filters; without `http3` there is none."""
    pem = {"certificate": str(folder / "c.pem"), "key": str(folder / "k.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=x", "-keyout", pem["key"], "-out", pem["certificate"]]
    subprocess.run(command, check=True, capture_output=True)
    listen = {"http": "127.0.0.1:8443", "http_tls": pem}
    alone = plain(bootstrap(Config.model_validate({"pools": [POOL], "listen": listen})))
    both = plain(bootstrap(Config.model_validate({"pools": [POOL], "listen": {**listen, "http3": "127.0.0.1:8443"}})))
    assert "deprecated" not in validate(both, folder).lower()
    (tcp,) = alone["static_resources"]["listeners"]
    assert "alt-svc" not in json.dumps(alone)
    managers = [one["filter_chains"][0]["filters"][0] for one in both["static_resources"]["listeners"]]
    filters_of = [manager["typed_config"]["http_filters"] for manager in managers]
    stripping = [manager["typed_config"]["early_header_mutation_extensions"] for manager in managers]
    assert filters_of[0] == filters_of[1] == tcp["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    assert stripping[0] == stripping[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_filters_load_in_a_foreign_envoy(name: str, folder: Path) -> None:
    """Envoy loads the generated sections when they are put where the README says."""
    log = validate(in_a_foreign_envoy(plain(filters(Config.model_validate(CONFIGS[name])))), folder)
    assert "deprecated" not in log.lower()


@pytest.mark.parametrize("strict", [True, False])
def test_pool_cluster_loads(strict: bool, folder: Path) -> None:  # noqa: FBT001 - a test parameter
    """Envoy loads the cluster that xDS serves, with and without strict pinning."""
    config = Config.model_validate({"pools": [POOL], "wire": {"strict_pin": strict}})
    document = plain(bootstrap(config))
    document["static_resources"]["clusters"].append(plain(pool_cluster(config, config.pools[0])))
    validate(document, folder)


@pytest.mark.parametrize(("file", "make"), [("bootstrap.yaml", bootstrap), ("filters.yaml", filters)])
def test_example_files_are_what_we_generate(file: str, make: Callable[[Config], Any]) -> None:
    """The YAML shown to platform teams is exactly what `pointsman envoy` prints for the config beside it."""
    config = Config.model_validate(yaml.safe_load((ROOT / "envoy/pointsman.yaml").read_text()))
    assert (ROOT / "envoy" / file).read_text() == to_yaml(make(config))


def test_landmines_of_the_connection_manager() -> None:
    """Settings of the HTTP connection manager without which something was measured to break."""
    manager = manager_of(plain(bootstrap(Config.model_validate(CONFIGS["smallest"]))))
    stripped = {one["remove"] for one in manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]}
    assert {"x-gateway-destination-endpoint", "x-pointsman-cluster", "x-pointsman-tenant"} <= stripped
    assert manager["stream_idle_timeout"] == "900s"
    assert manager["delayed_close_timeout"] == "0.050s"
    assert manager["normalize_path"]
    assert manager["merge_slashes"]
    assert manager["http2_protocol_options"]["initial_stream_window_size"] > 32 * 1024 * 1024
    log = manager["access_log"][0]["typed_config"]["common_config"]
    assert (log["log_name"], log["buffer_size_bytes"]) == ("pointsman", 0)


def test_landmines_of_ext_proc() -> None:
    """Settings of the ext_proc filter without which something was measured to break."""
    manager = manager_of(plain(bootstrap(Config.model_validate(CONFIGS["smallest"]))))
    ext_proc = next(one for one in manager["http_filters"] if one["name"].endswith("ext_proc"))["typed_config"]
    assert ext_proc["failure_mode_allow"]
    assert ext_proc["message_timeout"] == "600s"
    assert ext_proc["mutation_rules"] == {"allow_all_routing": True, "allow_envoy": True}
    assert ext_proc["metadata_options"]["receiving_namespaces"]["untyped"] == ["envoy.lb", "pointsman"]
    mode = ext_proc["processing_mode"]
    assert (mode["request_body_mode"], mode["response_header_mode"]) == ("BUFFERED", "SKIP")
    assert (mode.get("response_body_mode", "NONE"), mode["response_trailer_mode"]) == ("NONE", "SEND")


def test_landmines_of_the_routes() -> None:
    """A decided request follows our header without a total timeout; an undecided one is answered 503 in JSON."""
    host = manager_of(plain(bootstrap(Config.model_validate(CONFIGS["smallest"]))))["route_config"]["virtual_hosts"][0]
    decided, undecided_grpc, undecided = host["routes"]
    assert decided["match"]["headers"] == [{"name": "x-pointsman-cluster", "present_match": True}]
    assert (decided["route"]["cluster_header"], decided["route"]["timeout"]) == ("x-pointsman-cluster", "0s")
    assert decided["route"]["retry_policy"]["num_retries"] == 1
    assert undecided["direct_response"]["status"] == undecided_grpc["direct_response"]["status"] == 503
    # a stream's messages may never end: what waited for them would wait for ever
    (ext_proc,) = undecided_grpc["typed_per_filter_config"].values()
    assert ext_proc["overrides"]["processing_mode"].get("request_body_mode", "NONE") == "NONE"
    error = json.loads(undecided["direct_response"]["body"]["inline_string"])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    # the limit, and room for what we may add to a body: an alias can be shorter than the model's name
    assert {int(route["request_body_buffer_limit"]) for route in (decided, undecided)} == {32 * 1024 * 1024 + 65_536}


def test_landmines_of_the_clusters() -> None:
    """Breakers, windows and keep-alives that streams of whole answers need, and no policy behind our back."""
    config = Config.model_validate(CONFIGS["smallest"])
    [grpc_cluster] = plain(bootstrap(config))["static_resources"]["clusters"]
    pool = plain(pool_cluster(config, config.pools[0]))
    for cluster in (grpc_cluster, pool):
        assert set(cluster["circuit_breakers"]["thresholds"][0].values()) == {100_000}
    [options] = grpc_cluster["typed_extension_protocol_options"].values()
    http2 = options["explicit_http_config"]["http2_protocol_options"]
    assert http2["connection_keepalive"] == {"interval": "5s", "timeout": "5s"}
    assert pool["ignore_health_on_host_removal"]
    assert "outlier_detection" not in pool
    assert "health_checks" not in pool
    assert "pointsman-never" in str(pool["load_balancing_policy"])


@pytest.mark.parametrize(
    ("listen", "kind", "address"),
    [
        ({"grpc": "0.0.0.0:9004"}, "STATIC", "127.0.0.1"),
        ({"grpc": "0.0.0.0:9004", "grpc_from_envoy": "10.0.0.9:9004"}, "STATIC", "10.0.0.9"),
        ({"grpc": "0.0.0.0:9004", "grpc_from_envoy": "pointsman.llm.svc:9004"}, "STRICT_DNS", "pointsman.llm.svc"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_envoy_is_told_where_we_are(listen: dict[str, str], kind: str, address: str, *, whole: bool) -> None:
    """Both outputs name the address that was said, looked up if it is a name; never a wildcard."""
    config = Config.model_validate({"pools": [POOL], "listen": listen})
    document = plain(bootstrap(config))["static_resources"] if whole else plain(filters(config))
    cluster = next(one for one in document["clusters"] if one["name"] == "pointsman_grpc")
    [host] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert cluster["type"] == kind
    assert host["endpoint"]["address"]["socket_address"] == {"address": address, "port_value": 9004}


def test_foreign_clusters_are_left_alone() -> None:
    """A pool whose cluster belongs to the platform team gets none from us."""
    sections = plain(filters(Config.model_validate(CONFIGS["everything"])))
    assert [one["name"] for one in sections["clusters"]] == ["pointsman_grpc", "pool_chat", "pool_empty"]


_KINDS = {6: "end", 7: "attempt began", 9: "attempt ended"}


class Counted:
    """XdsEvents as a list."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def pushed(self, type_name: str) -> None:
        """Sent."""
        self.seen.append(("pushed", type_name))

    def acked(self, type_name: str) -> None:
        """Taken over."""
        self.seen.append(("acked", type_name))

    def nacked(self, type_name: str, detail: str) -> None:
        """Refused."""
        self.seen.append(("nacked", f"{type_name}: {detail}"))

    def connected(self, count: int) -> None:
        """Envoys connected."""
        self.seen.append(("connected", str(count)))

    def refused(self) -> None:
        """A stream beyond the bound."""
        self.seen.append(("refused", ""))


class World:
    """A real Envoy, our xDS server and a way to wait for either."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.events = Counted()
        self.changed = asyncio.Event()
        self.xds = XdsServer(self.events, self.changed.set)
        self._version = 0
        self.answers: dict[str, external_processor_pb2.ProcessingResponse] = {}
        self.entries: list[tuple[str, HTTPAccessLogEntry]] = []
        self._discoveries: set[asyncio.Task[None]] = set()

    async def discover(self, requests: AsyncIterator[bytes], context: object) -> None:
        """xDS, until told to hang up."""
        stream = asyncio.create_task(self.xds.stream(requests, context))
        self._discoveries.add(stream)
        try:
            await asyncio.wait([stream])
        finally:
            stream.cancel()

    def hang_up(self) -> None:
        """End every xDS stream, as our restart would."""
        for stream in self._discoveries:
            stream.cancel()

    async def process(self, requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        """ext_proc: answers the headers of a bodyless request as `answers` says for its path, else not at all."""
        async for message in requests:
            request = external_processor_pb2.ProcessingRequest.FromString(message)
            if request.HasField("request_headers"):
                headers = {one.key: one.raw_value.decode() for one in request.request_headers.headers.headers}
                if headers[":path"] in self.answers:
                    yield self.answers[headers[":path"]].SerializeToString()

    async def collect(self, messages: AsyncIterator[bytes], _context: object) -> bytes:
        """The access-log service: keeps every entry under its log's name."""
        name = ""
        async for message in messages:
            decoded = als_pb2.StreamAccessLogsMessage.FromString(message)
            name = decoded.identifier.log_name or name
            self.entries += [(name, entry) for entry in decoded.http_logs.log_entry]
            self.changed.set()
        return b""

    async def until_logged(self, path: str, *kinds: str) -> None:
        """Wait until these entries of a request are there. Each log is a stream of its own: no order among them."""
        async with asyncio.timeout(60):
            while not set(kinds) <= set(self.logged(path)):
                self.changed.clear()
                await self.changed.wait()

    def logged(self, path: str) -> list[str]:
        """The entries of one request, by log and kind."""
        entries = [(name, one) for name, one in self.entries if one.request.path == path]
        return [f"{name} {_KINDS[one.common_properties.access_log_type]}" for name, one in entries]

    def publish(self, *, connect_ms: int = 1_000, **pools: set[str]) -> None:
        """Publish these pools."""
        raw = [{"name": name, "models": [name], "endpoints": {"static": []}} for name in pools]
        config = Config.model_validate({"pools": raw, "timeouts": {"connect_ms": connect_ms}})
        self._version += 1
        assignments = {f"pool_{name}": frozenset(addresses) for name, addresses in pools.items()}
        self.xds.publish(Snapshot(str(self._version), _patient_clusters(config), assignments))

    async def until_acknowledged(self, pool: str, addresses: set[str]) -> None:
        """Wait until Envoy has taken these addresses over."""
        await self.until(lambda: self.xds.acknowledged(f"pool_{pool}") == addresses)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this holds of what the xDS server knows."""
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def hosts(self, until: Callable[[dict[str, set[str]]], bool]) -> dict[str, set[str]]:
        """The active hosts by cluster that Envoy reports, once they are as wanted."""
        async with asyncio.timeout(60):
            while True:
                found = _hosts(await self._admin("/clusters?format=json"))
                if until(found):
                    return found
                await asyncio.sleep(0.02)

    async def active(self, until: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The clusters that xDS gave and Envoy uses (not those still warming), once they are as wanted."""
        async with asyncio.timeout(60):
            while True:
                found = _clusters(await self._admin("/config_dump?resource=dynamic_active_clusters"))
                if until(found):
                    return found
                await asyncio.sleep(0.02)

    async def _admin(self, path: str) -> Any:
        transport = httpx.AsyncHTTPTransport(uds=str(self.folder / "admin.sock"))
        async with httpx.AsyncClient(transport=transport, base_url="http://envoy") as client:
            while True:
                try:
                    return (await client.get(path)).json()
                except httpx.TransportError:  # still starting
                    await asyncio.sleep(0.02)

    async def listening(self, client: httpx.AsyncClient) -> None:
        """Wait until Envoy answers requests, with whatever."""
        self.answers["/up"] = refused(200, b"")
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.get("/up")
                except httpx.TransportError:
                    await asyncio.sleep(0.02)
                else:
                    return

    async def until_idle(self) -> None:
        """Wait until every response sent has been answered."""
        async with asyncio.timeout(60):
            while sum(one == "pushed" for one, _ in self.events.seen) > sum(
                one == "acked" for one, _ in self.events.seen
            ):
                self.changed.clear()
                await self.changed.wait()


def _hosts(status: Mapping[str, Any]) -> dict[str, set[str]]:
    return {
        one["name"]: {_address(host) for host in one.get("host_statuses", [])} for one in status["cluster_statuses"]
    }


def _clusters(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one["cluster"] for one in dump.get("configs", [])]


def _address(host: Mapping[str, Any]) -> str:
    found = host["address"]["socket_address"]
    return f"{found['address']}:{found['port_value']}"


def _patient_clusters(config: Config) -> dict[str, bytes]:
    """The pools' clusters, made to wait for their addresses for ever: what only happens to work in the end, hangs."""
    clusters = [pool_cluster(config, pool) for pool in config.pools]
    for cluster in clusters:
        assert cluster.eds_cluster_config
        assert cluster.eds_cluster_config.eds_config
        cluster.eds_cluster_config.eds_config.initial_fetch_timeout = timedelta(0)
    return {cluster.name: cluster.SerializeToString() for cluster in clusters}


def free_port() -> int:
    """A loopback port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(document: dict[str, Any], world: World) -> AsyncIterator[World]:
    """Envoy with this bootstrap, and everything it talks to."""
    server = grpc.aio.server(
        options=[
            # Envoy's keep-alive pings every 5 s; grpcio's own limits would answer them with "too many pings"
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    both_ways, one_way = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    handlers = {service: (method, both_ways(world.discover)) for service, method in XDS_SERVICES}
    handlers["envoy.service.ext_proc.v3.ExternalProcessor"] = ("Process", both_ways(world.process))
    handlers["envoy.service.accesslog.v3.AccessLogService"] = ("StreamAccessLogs", one_way(world.collect))
    for service, (method, handler) in handlers.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(world.config.listen.grpc)
    await server.start()
    path = world.folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(document))
    process = await asyncio.create_subprocess_exec(
        envoy_binary(), "-c", str(path), "--disable-hot-restart", "--concurrency", "1", "-l", "error"
    )
    try:
        yield world
    finally:
        process.terminate()
        await process.wait()
        await server.stop(None)


def live_config() -> Config:
    """A config on ports nobody uses."""
    listen = {"http": f"127.0.0.1:{free_port()}", "grpc": f"127.0.0.1:{free_port()}"}
    return Config.model_validate({"listen": listen, "pools": [POOL]})


async def test_envoy_follows_our_xds(folder: Path) -> None:
    """A real Envoy takes clusters and addresses over as they come and go, and its ACKs reach `acknowledged`."""
    config = live_config()
    document = plain(bootstrap(config, admin_socket=str(folder / "admin.sock")))
    async with running(document, World(config, folder)) as world:
        world.publish(chat={"127.0.0.1:8001"})
        found = await world.hosts(lambda hosts: "pool_chat" in hosts)
        assert found["pool_chat"] == {"127.0.0.1:8001"}

        world.publish(chat={"127.0.0.1:8001", "127.0.0.1:8002"})
        assert world.xds.acknowledged("pool_chat") == {"127.0.0.1:8001"}
        await world.until_acknowledged("chat", {"127.0.0.1:8001", "127.0.0.1:8002"})

        world.publish(chat={"127.0.0.1:8002"}, code={"127.0.0.1:8003"})
        assert world.xds.acknowledged("pool_chat") == {"127.0.0.1:8002"}
        assert world.xds.acknowledged("pool_code") == frozenset()
        await world.until_acknowledged("code", {"127.0.0.1:8003"})
        assert {one["name"] for one in await world.active(bool)} == {"pool_chat", "pool_code"}
        await world.hosts(lambda hosts: hosts.get("pool_code") == {"127.0.0.1:8003"})
        await world.hosts(lambda hosts: hosts["pool_chat"] == {"127.0.0.1:8002"})

        world.publish(chat={"127.0.0.1:8002"})
        await world.hosts(lambda hosts: "pool_code" not in hosts)
        assert not [seen for seen in world.events.seen if seen[0] == "nacked"]


async def test_an_envoy_that_returns_is_told_from_a_new_one(folder: Path) -> None:
    """It names the version it holds and the clusters it has, so that one added while it was away is not believed."""
    config = live_config()
    document = plain(bootstrap(config, admin_socket=str(folder / "admin.sock")))
    async with running(document, World(config, folder)) as world:
        world.publish(chat={"127.0.0.1:8001"})
        await world.until_idle()
        await world.hosts(lambda hosts: hosts.get("pool_chat") == {"127.0.0.1:8001"})
        [first] = world.xds._streams
        world.hang_up()
        await world.until(lambda: not world.xds._streams)
        world.publish(chat={"127.0.0.1:8001"}, code={"127.0.0.1:8002"})
        await world.hosts(lambda hosts: hosts.get("pool_code") == {"127.0.0.1:8002"})
        [second] = world.xds._streams
        assert (first.session._returns, second.session._returns) == (False, True)
        assert second.session._came_with == {"pool_chat"}


async def test_a_changed_cluster_does_not_wait_to_warm(folder: Path) -> None:
    """When a cluster's own settings change, Envoy swaps it at once, since its addresses are sent along again."""
    config = live_config()
    document = plain(bootstrap(config, admin_socket=str(folder / "admin.sock")))
    async with running(document, World(config, folder)) as world:
        world.publish(chat={"127.0.0.1:8001"}, code={"127.0.0.1:8002"})
        await world.hosts(lambda hosts: {"pool_chat", "pool_code"} <= hosts.keys())
        await world.until_idle()
        world.publish(connect_ms=777, chat={"127.0.0.1:8001"}, code={"127.0.0.1:8002"})
        found = await world.active(lambda clusters: {one["connect_timeout"] for one in clusters} == {"0.777s"})
        assert {one["name"] for one in found} == {"pool_chat", "pool_code"}


async def test_a_foreign_envoy_follows_our_addresses(folder: Path) -> None:
    """The clusters of `filters` hear of addresses on a stream of their own, without our ADS."""
    config = live_config()
    document = in_a_foreign_envoy(plain(filters(config)))
    document["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = free_port()
    document["admin"] = {"address": {"pipe": {"path": str(folder / "admin.sock")}}}
    async with running(document, World(config, folder)) as world:
        world.publish(chat={"127.0.0.1:8001"})
        await world.hosts(lambda hosts: hosts.get("pool_chat") == {"127.0.0.1:8001"})
        world.publish(chat={"127.0.0.1:8002"})
        await world.until_acknowledged("chat", {"127.0.0.1:8002"})
        await world.hosts(lambda hosts: hosts.get("pool_chat") == {"127.0.0.1:8002"})


def routed(*addresses: str) -> external_processor_pb2.ProcessingResponse:
    """Our answer to a request: this cluster, these addresses in this order."""
    response = external_processor_pb2.ProcessingResponse()
    common = response.request_headers.response
    common.clear_route_cache = True
    headers = {
        "x-pointsman-cluster": "pool_chat",
        "x-gateway-destination-endpoint": ",".join(addresses),
        "x-pointsman-endpoint": addresses[0],
        "x-pointsman-request-id": "some-id",
    }
    for key, value in headers.items():
        header = base_pb2.HeaderValue(key=key, raw_value=value.encode())
        common.header_mutation.set_headers.append(
            base_pb2.HeaderValueOption(header=header, append_action="OVERWRITE_IF_EXISTS_OR_ADD")
        )
    return response


def refused(status: int, body: bytes) -> external_processor_pb2.ProcessingResponse:
    """A refusal of ours."""
    response = external_processor_pb2.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code, immediate.body, immediate.details = status, body, "pointsman_test"
    header = base_pb2.HeaderValue(key="content-type", raw_value=b"application/json")
    immediate.headers.set_headers.append(base_pb2.HeaderValueOption(header=header))
    return response


@asynccontextmanager
async def engine(may_answer: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Something that answers every request, once it may; its address."""

    async def answer(_request: web.Request) -> web.Response:
        if may_answer is not None:
            await may_answer.wait()
        return web.json_response({"ok": True}, headers={"server": "an-engine"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(folder: Path, *addresses: str) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """An Envoy that has these addresses in its pool, and a client of it."""
    config = live_config()
    document = plain(bootstrap(config, admin_socket=str(folder / "admin.sock")))
    async with (
        running(document, World(config, folder)) as world,
        httpx.AsyncClient(base_url=f"http://{config.listen.http}", timeout=60) as client,
    ):
        world.publish(chat=set(addresses))
        await world.hosts(lambda hosts: hosts.get("pool_chat") == set(addresses))
        await world.listening(client)
        yield world, client


BEGAN, ENDED, END = "pointsman-upstream attempt began", "pointsman-upstream attempt ended", "pointsman end"


async def test_upstream_log_speaks_of_the_unexpected_only(folder: Path) -> None:
    """A first choice that serves is not worth an entry; a failed attempt, another address and a retry are."""
    dead = f"127.0.0.1:{free_port()}"
    async with engine() as alive, serving(folder, dead, alive) as (world, client):
        world.answers = {
            "/first": routed(alive),
            "/failover": routed(dead, alive),
            "/skipped": routed("127.0.0.1:1", alive),
            "/down": routed(dead),
        }
        statuses = [(await client.get(path)).status_code for path in world.answers]
        assert statuses == [200, 200, 200, 503]
        await world.until_logged("/failover", ENDED, BEGAN, END)
        await world.until_logged("/skipped", BEGAN, END)
        await world.until_logged("/down", ENDED, END)
        # entries of one log keep their order, so one for the first request would have come before these
        assert world.logged("/first") == [END]
        logged = [entry for name, entry in world.entries if name == "pointsman-upstream"]
        assert {entry.request.request_headers["x-pointsman-request-id"] for entry in logged} == {"some-id"}
        failover = [one.request.request_headers for one in logged if one.request.path == "/failover"]
        assert [headers["x-envoy-attempt-count"] for headers in failover] == ["1", "2"]


async def test_a_move_is_told_while_the_answer_runs(folder: Path) -> None:
    """That another address serves is told at once: the engine here answers only after we have heard of it."""
    dead = f"127.0.0.1:{free_port()}"
    heard = asyncio.Event()
    async with engine(heard) as alive, serving(folder, dead, alive) as (world, client):
        world.answers = {"/failover": routed(dead, alive)}
        answer = asyncio.create_task(client.get("/failover"))
        await world.until_logged("/failover", ENDED, BEGAN)
        assert END not in world.logged("/failover")
        heard.set()
        assert (await answer).status_code == 200


async def test_errors_are_json_and_ours_stay_as_written(folder: Path) -> None:
    """Envoy's own errors come out in OpenAI's shape; what we refuse arrives byte for byte."""
    ours = b'{"error":  {"message": "%RESPONSE_CODE% is not filled in"}}'
    async with serving(folder, "127.0.0.1:1") as (world, client):
        world.answers = {f"/ours/{status}": refused(status, ours) for status in (400, 404, 413, 429, 503, 504)}
        for path in list(world.answers):
            answer = await client.get(path)
            assert (answer.content, answer.status_code) == (ours, int(path.rpartition("/")[2]))
            assert answer.headers["content-type"] == "application/json"
        world.answers["/unknown"] = routed("127.0.0.1:2")
        answer = await client.get("/unknown")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "upstream_unavailable"
        assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")
        answer = await client.post("/large", content=b"x" * (33 * 1024 * 1024))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_headers_for_clients(folder: Path) -> None:
    """The engine's server header survives; a figure that is not known is left out, not shown empty."""
    async with engine() as alive, serving(folder, alive) as (world, client):
        world.answers = {"/known": routed(alive), "/refused": refused(400, b"{}")}
        world.answers["/known"].dynamic_metadata.update({"pointsman": {"request_id": "some-id"}})
        answer = await client.get("/known")
        assert (answer.headers["server"], answer.headers["x-pointsman-request-id"]) == ("an-engine", "some-id")
        assert not [name for name in answer.headers if name.startswith("x-envoy-")]
        assert "x-pointsman-request-id" not in (await client.get("/refused")).headers


def test_credentials_are_shown_to_us_only_where_we_check_them() -> None:
    """By default neither header leaves Envoy for us; with tokens alone Envoy checks them itself."""

    def shown(name: str) -> set[str]:
        *_, decide, _ = manager_of(plain(bootstrap(Config.model_validate(CONFIGS[name]))))["http_filters"]
        patterns = decide["typed_config"]["forward_rules"]["allowed_headers"]["patterns"]
        return {pattern["exact"] for pattern in patterns if "exact" in pattern}

    credentials = {"authorization", "x-api-key"}
    assert not shown("smallest") & credentials
    assert not shown("tokens alone") & credentials
    assert shown("guarded") >= credentials | {"x-tenant"}
