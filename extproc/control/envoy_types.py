"""The Envoy messages we build, under one roof.

Not here: what goes into them (listener.py, clusters.py, access_logs.py).

Rejected: envoy-data-plane, whose typed messages mypy can check. Importing them and building the first one of each kind
cost a second and a half of CPU, in the launcher and in the decision process: most of the time until the first request
is served. Rejected: building plain dicts. These messages refuse a misspelt field when they are built, and the tests
build every one of them and have Envoy load it; a dict would be refused by the operator's Envoy.
"""

from collections.abc import Mapping
from typing import Any

from envoy.config.accesslog.v3.accesslog_pb2 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    ExtensionFilter,
    LogTypeFilter,
    OrFilter,
)
from envoy.config.bootstrap.v3.bootstrap_pb2 import Admin, Bootstrap
from envoy.config.cluster.v3.circuit_breaker_pb2 import CircuitBreakers
from envoy.config.cluster.v3.cluster_pb2 import Cluster, LoadBalancingPolicy
from envoy.config.common.mutation_rules.v3.mutation_rules_pb2 import HeaderMutation, HeaderMutationRules
from envoy.config.core.v3.address_pb2 import Address, Pipe, SocketAddress
from envoy.config.core.v3.backoff_pb2 import BackoffStrategy
from envoy.config.core.v3.base_pb2 import DataSource, HeaderValue, HeaderValueOption, Node, TransportSocket
from envoy.config.core.v3.base_pb2 import RetryPolicy as GrpcRetryPolicy
from envoy.config.core.v3.config_source_pb2 import (
    AggregatedConfigSource,
    ApiConfigSource,
    ApiVersion,
    ConfigSource,
)
from envoy.config.core.v3.extension_pb2 import TypedExtensionConfig
from envoy.config.core.v3.grpc_service_pb2 import GrpcService
from envoy.config.core.v3.http_uri_pb2 import HttpUri
from envoy.config.core.v3.protocol_pb2 import (
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    Http3ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
    QuicKeepAliveSettings,
)
from envoy.config.core.v3.protocol_pb2 import QuicProtocolOptions as ConnectionQuicOptions
from envoy.config.core.v3.substitution_format_string_pb2 import SubstitutionFormatString
from envoy.config.endpoint.v3.endpoint_components_pb2 import Endpoint, LbEndpoint, LocalityLbEndpoints
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.config.listener.v3.listener_components_pb2 import Filter, FilterChain
from envoy.config.listener.v3.listener_pb2 import Listener
from envoy.config.listener.v3.quic_config_pb2 import QuicProtocolOptions
from envoy.config.listener.v3.udp_listener_config_pb2 import UdpListenerConfig
from envoy.config.route.v3.route_components_pb2 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    Route,
    RouteAction,
    RouteMatch,
    VirtualHost,
)
from envoy.config.route.v3.route_pb2 import RouteConfiguration
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.extensions.access_loggers.filters.cel.v3.cel_pb2 import ExpressionFilter
from envoy.extensions.access_loggers.grpc.v3.als_pb2 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
from envoy.extensions.filters.http.ext_proc.v3.ext_proc_pb2 import (
    ExternalProcessor,
    ExtProcOverrides,
    ExtProcPerRoute,
    HeaderForwardingRules,
    MetadataOptions,
)
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.extensions.filters.http.jwt_authn.v3.config_pb2 import (
    JwksAsyncFetch,
    JwtAuthentication,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    JwtRequirementOrList,
    RemoteJwks,
    RequirementRule,
)
from envoy.extensions.filters.http.router.v3.router_pb2 import Router
from envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2 import (
    HttpConnectionManager,
    HttpFilter,
    LocalReplyConfig,
    ResponseMapper,
)
from envoy.extensions.http.early_header_mutation.header_mutation.v3.header_mutation_pb2 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy.extensions.load_balancing_policies.least_request.v3.least_request_pb2 import LeastRequest
from envoy.extensions.load_balancing_policies.override_host.v3.override_host_pb2 import OverrideHost
from envoy.extensions.load_balancing_policies.round_robin.v3.round_robin_pb2 import RoundRobin
from envoy.extensions.load_balancing_policies.subset.v3.subset_pb2 import Subset
from envoy.extensions.retry.host.previous_hosts.v3.previous_hosts_pb2 import PreviousHostsPredicate
from envoy.extensions.transport_sockets.quic.v3.quic_transport_pb2 import QuicDownstreamTransport
from envoy.extensions.transport_sockets.tls.v3.common_pb2 import (
    CertificateValidationContext,
    SubjectAltNameMatcher,
    TlsCertificate,
)
from envoy.extensions.transport_sockets.tls.v3.tls_pb2 import (
    CommonTlsContext,
    DownstreamTlsContext,
    UpstreamTlsContext,
)
from envoy.extensions.upstreams.http.v3.http_protocol_options_pb2 import (
    HttpProtocolOptions as UpstreamHttpProtocolOptions,
)
from envoy.type.matcher.v3.string_pb2 import ListStringMatcher, StringMatcher
from envoy.type.metadata.v3.metadata_pb2 import MetadataKey
from envoy.type.tracing.v3.custom_tag_pb2 import CustomTag
from google.protobuf.any_pb2 import Any as ProtoAny
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import BoolValue, UInt32Value, UInt64Value
from xds.type.v3.typed_struct_pb2 import TypedStruct

__all__ = (
    "AccessLog",
    "AccessLogFilter",
    "AccessLogType",
    "Address",
    "Admin",
    "AggregatedConfigSource",
    "AndFilter",
    "ApiConfigSource",
    "ApiVersion",
    "BackoffStrategy",
    "BoolValue",
    "Bootstrap",
    "CertificateValidationContext",
    "CircuitBreakers",
    "Cluster",
    "ClusterLoadAssignment",
    "CommonGrpcAccessLogConfig",
    "CommonTlsContext",
    "ConfigSource",
    "ConnectionQuicOptions",
    "CustomTag",
    "DataSource",
    "DirectResponseAction",
    "DownstreamTlsContext",
    "EarlyHeaderMutation",
    "Empty",
    "Endpoint",
    "ExpressionFilter",
    "ExtProcOverrides",
    "ExtProcPerRoute",
    "ExtensionFilter",
    "ExternalProcessor",
    "Filter",
    "FilterChain",
    "GrpcRetryPolicy",
    "GrpcService",
    "HeaderForwardingRules",
    "HeaderMatcher",
    "HeaderMutation",
    "HeaderMutationRules",
    "HeaderValue",
    "HeaderValueOption",
    "Http1ProtocolOptions",
    "Http2ProtocolOptions",
    "Http3ProtocolOptions",
    "HttpConnectionManager",
    "HttpFilter",
    "HttpGrpcAccessLogConfig",
    "HttpProtocolOptions",
    "HttpUri",
    "JwksAsyncFetch",
    "JwtAuthentication",
    "JwtHeader",
    "JwtProvider",
    "JwtRequirement",
    "JwtRequirementOrList",
    "KeepaliveSettings",
    "LbEndpoint",
    "LeastRequest",
    "ListStringMatcher",
    "Listener",
    "LoadBalancingPolicy",
    "LocalReplyConfig",
    "LocalityLbEndpoints",
    "LogTypeFilter",
    "Message",
    "MetadataKey",
    "MetadataOptions",
    "Node",
    "OrFilter",
    "OverrideHost",
    "Pipe",
    "PreviousHostsPredicate",
    "ProcessingMode",
    "ProtoAny",
    "QuicDownstreamTransport",
    "QuicKeepAliveSettings",
    "QuicProtocolOptions",
    "RemoteJwks",
    "RequirementRule",
    "ResponseMapper",
    "RetryPolicy",
    "RoundRobin",
    "Route",
    "RouteAction",
    "RouteConfiguration",
    "RouteMatch",
    "Router",
    "SocketAddress",
    "StringMatcher",
    "Struct",
    "SubjectAltNameMatcher",
    "Subset",
    "SubstitutionFormatString",
    "TlsCertificate",
    "TransportSocket",
    "TypedExtensionConfig",
    "TypedStruct",
    "UInt32Value",
    "UInt64Value",
    "UdpListenerConfig",
    "UpstreamHttpProtocolOptions",
    "UpstreamTlsContext",
    "VirtualHost",
    "extension",
    "flag",
    "number",
    "pack",
    "pack_extended",
    "pack_untyped",
)

_TYPE_PREFIX = "type.googleapis.com/"


def number(value: int) -> UInt32Value:
    """A number where Envoy tells "none given" from 0."""
    return UInt32Value(value=value)


def flag(*, on: bool) -> BoolValue:
    """A switch where Envoy tells "not said" from off."""
    return BoolValue(value=on)


def pack(message: Message) -> ProtoAny:
    """`message` as the `Any` that every extension point of Envoy takes."""
    packed = ProtoAny()
    packed.Pack(message, deterministic=True)  # else a map's order would make a new version of the same cluster
    return packed


def pack_untyped(type_name: str, fields: Mapping[str, Any]) -> ProtoAny:
    """A message of a type the stubs lack as an `Any`; Envoy checks its fields when it loads them."""
    untyped = TypedStruct(type_url=_TYPE_PREFIX + type_name)
    untyped.value.update(fields)
    return pack(untyped)


def pack_extended(message: Message, fields: Mapping[str, Any]) -> ProtoAny:
    """A message with fields that the stubs lack as an `Any`; Envoy checks these when it loads them."""
    known = MessageToDict(message, preserving_proto_field_name=True)
    return pack_untyped(message.DESCRIPTOR.full_name, {**known, **fields})


def extension(name: str, message: Message) -> TypedExtensionConfig:
    """`message` as a named extension."""
    return TypedExtensionConfig(name=name, typed_config=pack(message))
