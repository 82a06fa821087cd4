"""Envoy clusters: one per pool, and the one that leads to us.

Not here: who is in a pool (xds.py) and which route leads to it (listener.py).

Rejected: ORIGINAL_DST clusters for pools. They connect to whatever the header says, take no list, and retry the same
dead host. Rejected: outlier detection and active health checks. Envoy's override_host ignores both, so they would cost
traffic and decide nothing: policies/lifecycle.py has the one answer to "may it take traffic".
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Literal

from extproc.config.schema import Config, Pool
from extproc.config.sections.fields import is_name
from extproc.control import envoy_types as envoy
from extproc.names import (
    ACCESS_LOG_SOCKET,
    DESTINATION_HEADER,
    EXT_PROC_SOCKET,
    HOLD_METADATA,
    LB_NAMESPACE,
    SERVED_KEY,
)

POINTSMAN_CLUSTER = "pointsman_grpc"
LANE_CLUSTERS = {EXT_PROC_SOCKET: "pointsman_lane", ACCESS_LOG_SOCKET: "pointsman_lane_log"}
"""By the socket each leads to."""

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_LARGEST_WINDOW = 2**31 - 1
_SMALLEST_WINDOW = 2**16 - 1

Via = Literal["ads", "own_stream"]
"""How an Envoy hears of a pool's addresses: on its ADS stream, or on another beside a foreign control plane's."""


def pool_cluster(config: Config, pool: Pool, via: Via = "ads") -> envoy.Cluster:
    """The cluster of one pool. It goes where our header says, and nowhere else if `wire.strict_pin`."""
    return envoy.Cluster(
        name=pool.cluster_name,
        type=envoy.Cluster.EDS,
        eds_cluster_config=envoy.Cluster.EdsClusterConfig(eds_config=_address_source(via)),
        connect_timeout=timedelta(milliseconds=config.timeouts.connect_ms),
        # else a removed address stays pickable for as long as it looks healthy
        ignore_health_on_host_removal=True,
        load_balancing_policy=_policy("envoy.load_balancing_policies.override_host", _override_host(config)),
        circuit_breakers=_breakers(config),
        typed_extension_protocol_options={_HTTP_OPTIONS: envoy.pack(_engine_protocol(config, pool))},
    )


def own_pool_clusters(config: Config, via: Via = "ads") -> list[envoy.Cluster]:
    """The clusters of all pools but those whose `cluster` names one that the platform team keeps."""
    return [pool_cluster(config, pool, via) for pool in config.pools if pool.cluster is None]


def pointsman_cluster(config: Config) -> envoy.Cluster:
    """The cluster that carries ext_proc, access logs and xDS to us."""
    address = config.listen.envoy_dials
    # a mixed name: IPv4 first, since that is what `0.0.0.0` in `listen` hears
    kind, family = envoy.Cluster.STATIC, envoy.Cluster.AUTO
    if is_name(address):
        kind, family = envoy.Cluster.STRICT_DNS, envoy.Cluster.V4_PREFERRED
    return envoy.Cluster(
        name=POINTSMAN_CLUSTER,
        type=kind,
        dns_lookup_family=family,
        # a second connection opens beyond 1024 streams; 1 s was too short for it when Python was busy
        connect_timeout=timedelta(seconds=5),
        per_connection_buffer_limit_bytes=envoy.number(body_window(config)),
        load_assignment=load_assignment(POINTSMAN_CLUSTER, [address]),
        circuit_breakers=_breakers(config),
        typed_extension_protocol_options={_HTTP_OPTIONS: envoy.pack(_grpc_protocol(config))},
    )


def lane_clusters(config: Config) -> list[envoy.Cluster]:
    """One cluster per socket of the lane, if there is one."""
    folder = config.listen.lane_folder
    return (
        []
        if folder is None
        else [_lane_cluster(config, name, folder / socket) for socket, name in LANE_CLUSTERS.items()]
    )


def _lane_cluster(config: Config, name: str, path: Path) -> envoy.Cluster:
    pipe = envoy.LbEndpoint(endpoint=envoy.Endpoint(address=envoy.Address(pipe=envoy.Pipe(path=str(path)))))
    return envoy.Cluster(
        name=name,
        type=envoy.Cluster.STATIC,
        connect_timeout=timedelta(seconds=5),
        per_connection_buffer_limit_bytes=envoy.number(body_window(config)),
        load_assignment=envoy.ClusterLoadAssignment(
            cluster_name=name, endpoints=[envoy.LocalityLbEndpoints(lb_endpoints=[pipe])]
        ),
        circuit_breakers=_breakers(config),
        typed_extension_protocol_options={_HTTP_OPTIONS: envoy.pack(_grpc_protocol(config))},
    )


def service_for(config: Config, socket: str) -> str:
    """The cluster that carries the method served at one of the lane's sockets."""
    return POINTSMAN_CLUSTER if config.listen.lane_folder is None else LANE_CLUSTERS[socket]


def load_assignment(cluster_name: str, addresses: Iterable[str]) -> envoy.ClusterLoadAssignment:
    """The addresses (`IP:port`, or `name:port` if Envoy is to look them up) of a cluster, in a stable order."""
    hosts = [envoy.LbEndpoint(endpoint=envoy.Endpoint(address=socket_address(one))) for one in sorted(addresses)]
    return envoy.ClusterLoadAssignment(
        cluster_name=cluster_name, endpoints=[envoy.LocalityLbEndpoints(lb_endpoints=hosts)]
    )


def socket_address(address: str) -> envoy.Address:
    """`IP:port`, IPv6 in brackets, or `name:port`, as Envoy spells it."""
    host, _, port = address.rpartition(":")
    return envoy.Address(socket_address=envoy.SocketAddress(address=host.strip("[]"), port_value=int(port)))


def body_window(config: Config) -> int:
    """Bytes that must fit in flight for the largest body to pass in one message."""
    # the allowance beyond the limit is for what we add to a body: an alias may be shorter than the model's name
    # with HTTP/2 a body that outgrows the stream's window counts as too large, whatever the buffer limits say
    return min(max(config.limits.request_body_bytes + 65_536, _SMALLEST_WINDOW), _LARGEST_WINDOW)


def http2(config: Config, **settings: object) -> envoy.Http2ProtocolOptions:
    """HTTP/2 with windows that hold the largest body, two of them per connection."""
    window = body_window(config)
    return envoy.Http2ProtocolOptions(
        initial_stream_window_size=envoy.number(window),
        initial_connection_window_size=envoy.number(min(2 * window, _LARGEST_WINDOW)),
        **settings,
    )


def pointsman_grpc_service(
    cluster: str = POINTSMAN_CLUSTER, *, retry_quickly: bool = False, hold_s: int | None = None
) -> envoy.GrpcService:
    """How Envoy's gRPC clients (ext_proc, access log, xDS) reach us. `hold_s`: how long that client waits for us."""
    backoff = envoy.BackoffStrategy(base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=5))
    policy = envoy.GrpcRetryPolicy(retry_back_off=backoff) if retry_quickly else None
    return envoy.GrpcService(
        envoy_grpc=envoy.GrpcService.EnvoyGrpc(cluster_name=cluster, retry_policy=policy),
        initial_metadata=[] if hold_s is None else [envoy.HeaderValue(key=HOLD_METADATA, value=str(hold_s))],
    )


_PATIENCE_S = 2


def _address_source(via: Via) -> envoy.ConfigSource:
    # A cluster whose discovery never reports (its file is missing) must not keep a new Envoy from serving the others.
    return envoy.ConfigSource(
        resource_api_version=envoy.ApiVersion.V3,
        initial_fetch_timeout=timedelta(seconds=_PATIENCE_S),
        ads=envoy.AggregatedConfigSource() if via == "ads" else None,
        api_config_source=xds_source() if via == "own_stream" else None,
    )


def xds_source() -> envoy.ApiConfigSource:
    """Our xDS server; Envoy tries again soon after we were away."""
    return envoy.ApiConfigSource(
        api_type=envoy.ApiConfigSource.GRPC,
        transport_api_version=envoy.ApiVersion.V3,
        grpc_services=[pointsman_grpc_service(retry_quickly=True)],
        set_node_on_first_message_only=True,
    )


def _override_host(config: Config) -> envoy.ProtoAny:
    policy = envoy.OverrideHost(
        override_host_sources=[
            envoy.OverrideHost.OverrideHostSource(header=DESTINATION_HEADER),
            envoy.OverrideHost.OverrideHostSource(metadata=_lb_key(DESTINATION_HEADER)),
        ],
        fallback_policy=_never() if config.wire.strict_pin else _least_request(),
    )
    return envoy.pack_extended(policy, {"selected_host_key": {"key": LB_NAMESPACE, "path": [{"key": SERVED_KEY}]}})


def _lb_key(key: str) -> envoy.MetadataKey:
    return envoy.MetadataKey(key=LB_NAMESPACE, path=[envoy.MetadataKey.PathSegment(key=key)])


def _never() -> envoy.LoadBalancingPolicy:
    # no address carries this key, so the subset is always empty: 503 instead of a choice behind our back
    subset = envoy.Subset(
        fallback_policy=envoy.Subset.NO_FALLBACK,
        subset_selectors=[envoy.Subset.LbSubsetSelector(keys=["pointsman-never"])],
        subset_lb_policy=_policy("envoy.load_balancing_policies.round_robin", envoy.pack(envoy.RoundRobin())),
    )
    return _policy("envoy.load_balancing_policies.subset", envoy.pack(subset))


def _least_request() -> envoy.LoadBalancingPolicy:
    return _policy("envoy.load_balancing_policies.least_request", envoy.pack(envoy.LeastRequest()))


def _policy(name: str, policy: envoy.ProtoAny) -> envoy.LoadBalancingPolicy:
    config = envoy.TypedExtensionConfig(name=name, typed_config=policy)
    return envoy.LoadBalancingPolicy(policies=[envoy.LoadBalancingPolicy.Policy(typed_extension_config=config)])


def _breakers(config: Config) -> envoy.CircuitBreakers:
    # the defaults of 1024 count streams that stay open for a whole answer: the 1025th would fail or wait inside Envoy
    most = envoy.number(config.limits.envoy_connections)
    return envoy.CircuitBreakers(
        thresholds=[
            envoy.CircuitBreakers.Thresholds(
                max_connections=most, max_pending_requests=most, max_requests=most, max_retries=most
            )
        ]
    )


_HTTP1 = envoy.UpstreamHttpProtocolOptions.ExplicitHttpConfig(http_protocol_options=envoy.Http1ProtocolOptions())
# without keep-alive pings: gRPC servers take offence at them and hang up
_HTTP2 = envoy.UpstreamHttpProtocolOptions.ExplicitHttpConfig(http2_protocol_options=envoy.Http2ProtocolOptions())


def _engine_protocol(config: Config, pool: Pool) -> envoy.UpstreamHttpProtocolOptions:
    return envoy.UpstreamHttpProtocolOptions(
        # below the engine's keep-alive, or a request meets a connection that is just being closed
        common_http_protocol_options=envoy.HttpProtocolOptions(
            idle_timeout=timedelta(seconds=config.timeouts.upstream_idle_s)
        ),
        explicit_http_config=_HTTP2 if pool.protocol == "grpc" else _HTTP1,
    )


def _grpc_protocol(config: Config) -> envoy.UpstreamHttpProtocolOptions:
    # the keep-alive bounds a hung process of ours to 10 s; running answers go on
    keepalive = envoy.KeepaliveSettings(interval=timedelta(seconds=5), timeout=timedelta(seconds=5))
    return envoy.UpstreamHttpProtocolOptions(
        explicit_http_config=envoy.UpstreamHttpProtocolOptions.ExplicitHttpConfig(
            http2_protocol_options=http2(config, connection_keepalive=keepalive)
        )
    )
