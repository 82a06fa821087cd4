"""Envoy clusters: one per pool, and the one that leads to us.

Not here: who is in a pool (xds.py) and which route leads to it (listener.py).

Rejected: ORIGINAL_DST clusters for pools. They connect to whatever the header says, take no list, and retry the same
dead host. Rejected: outlier detection and active health checks. Envoy's override_host ignores both, so they would cost
traffic and decide nothing: policies/lifecycle.py has the one answer to "may it take traffic".
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from extproc.config.schema import Config, Pool, is_name
from extproc.control import envoy_types as envoy
from extproc.names import DESTINATION_HEADER, LB_NAMESPACE, SERVED_KEY

POINTSMAN_CLUSTER = "pointsman_grpc"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_LARGEST_WINDOW = 2**31 - 1
_SMALLEST_WINDOW = 2**16 - 1

Via = Literal["ads", "own_stream"]
"""How an Envoy hears of a pool's addresses: on its ADS stream, or on another beside a foreign control plane's."""


def pool_cluster(config: Config, pool: Pool, via: Via = "ads") -> envoy.Cluster:
    """The cluster of one pool. It goes where our header says, and nowhere else if `wire.strict_pin`."""
    return envoy.Cluster(
        name=pool.cluster_name,
        type=envoy.ClusterDiscoveryType.EDS,
        eds_cluster_config=envoy.ClusterEdsClusterConfig(eds_config=_address_source(via)),
        connect_timeout=timedelta(milliseconds=config.timeouts.connect_ms),
        # else a removed address stays pickable for as long as it looks healthy
        ignore_health_on_host_removal=True,
        load_balancing_policy=_policies("envoy.load_balancing_policies.override_host", _override_host(config)),
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
    kind, family = envoy.ClusterDiscoveryType.STATIC, envoy.ClusterDnsLookupFamily.AUTO
    if is_name(address):
        kind, family = envoy.ClusterDiscoveryType.STRICT_DNS, envoy.ClusterDnsLookupFamily.V4_PREFERRED
    return envoy.Cluster(
        name=POINTSMAN_CLUSTER,
        type=kind,
        dns_lookup_family=family,
        # a second connection opens beyond 1024 streams; 1 s was too short for it when Python was busy
        connect_timeout=timedelta(seconds=5),
        per_connection_buffer_limit_bytes=body_window(config),
        load_assignment=load_assignment(POINTSMAN_CLUSTER, [address]),
        circuit_breakers=_breakers(config),
        typed_extension_protocol_options={_HTTP_OPTIONS: envoy.pack(_grpc_protocol(config))},
    )


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
        initial_stream_window_size=window,
        initial_connection_window_size=min(2 * window, _LARGEST_WINDOW),
        **settings,  # type: ignore[arg-type]  # one of the message's own fields
    )


def pointsman_grpc_service(*, retry_quickly: bool = False) -> envoy.GrpcService:
    """How Envoy's gRPC clients (ext_proc, access log, xDS) reach us."""
    target = envoy.GrpcServiceEnvoyGrpc(cluster_name=POINTSMAN_CLUSTER)
    if retry_quickly:
        target.retry_policy = envoy.GrpcRetryPolicy(
            retry_back_off=envoy.BackoffStrategy(
                base_interval=timedelta(milliseconds=100), max_interval=timedelta(seconds=5)
            )
        )
    return envoy.GrpcService(envoy_grpc=target)


_PATIENCE_S = 2


def _address_source(via: Via) -> envoy.ConfigSource:
    # A cluster whose discovery never reports (its file is missing) must not keep a new Envoy from serving the others.
    source = envoy.ConfigSource(
        resource_api_version=envoy.ApiVersion.V3, initial_fetch_timeout=timedelta(seconds=_PATIENCE_S)
    )
    if via == "ads":
        source.ads = envoy.AggregatedConfigSource()
    else:
        source.api_config_source = xds_source(envoy.ApiConfigSourceApiType.GRPC)
    return source


def xds_source(api_type: envoy.ApiConfigSourceApiType = envoy.ApiConfigSourceApiType.GRPC) -> envoy.ApiConfigSource:
    """Our xDS server; Envoy tries again soon after we were away."""
    return envoy.ApiConfigSource(
        api_type=api_type,
        transport_api_version=envoy.ApiVersion.V3,
        grpc_services=[pointsman_grpc_service(retry_quickly=True)],
        set_node_on_first_message_only=True,
    )


def _override_host(config: Config) -> envoy.OverrideHost:
    return envoy.OverrideHost(
        override_host_sources=[
            envoy.OverrideHostOverrideHostSource(header=DESTINATION_HEADER),
            envoy.OverrideHostOverrideHostSource(metadata=_lb_key(DESTINATION_HEADER)),
        ],
        selected_host_key=_lb_key(SERVED_KEY),
        fallback_policy=_never() if config.wire.strict_pin else _least_request(),
    )


def _lb_key(key: str) -> envoy.MetadataKey:
    return envoy.MetadataKey(key=LB_NAMESPACE, path=[envoy.MetadataKeyPathSegment(key=key)])


def _never() -> envoy.LoadBalancingPolicy:
    # no address carries this key, so the subset is always empty: 503 instead of a choice behind our back
    return _policies(
        "envoy.load_balancing_policies.subset",
        envoy.Subset(
            fallback_policy=envoy.SubsetLbSubsetFallbackPolicy.NO_FALLBACK,
            subset_selectors=[envoy.SubsetLbSubsetSelector(keys=["pointsman-never"])],
            subset_lb_policy=_policies("envoy.load_balancing_policies.round_robin", envoy.RoundRobin()),
        ),
    )


def _least_request() -> envoy.LoadBalancingPolicy:
    return _policies("envoy.load_balancing_policies.least_request", envoy.LeastRequest())


def _policies(name: str, policy: envoy.Message) -> envoy.LoadBalancingPolicy:
    return envoy.LoadBalancingPolicy(
        policies=[envoy.LoadBalancingPolicyPolicy(typed_extension_config=envoy.extension(name, policy))]
    )


def _breakers(config: Config) -> envoy.CircuitBreakers:
    # the defaults of 1024 count streams that stay open for a whole answer: the 1025th would fail or wait inside Envoy
    most = config.limits.envoy_connections
    return envoy.CircuitBreakers(
        thresholds=[
            envoy.CircuitBreakersThresholds(
                max_connections=most, max_pending_requests=most, max_requests=most, max_retries=most
            )
        ]
    )


_HTTP1 = envoy.HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=envoy.Http1ProtocolOptions())
# without keep-alive pings: gRPC servers take offence at them and hang up
_HTTP2 = envoy.HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=envoy.Http2ProtocolOptions())


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
        explicit_http_config=envoy.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=http2(config, connection_keepalive=keepalive)
        )
    )
