"""The Envoy messages we build, under one roof.

Not here: what goes into them (listener.py, clusters.py, access_logs.py). The stubs' pydantic validators use a form that
newer pydantic deprecates; that is theirs to mend and nothing an operator can act on, so the warning is silenced here,
once, instead of wherever one of these types is needed. Importing this module costs about a second: import it lazily.

Rejected: building plain dicts. A misspelt field would then be found by Envoy at start instead of by mypy.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import betterproto2
from betterproto2 import Message
from pydantic.dataclasses import dataclass

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.accesslog.v3 import (
        AccessLog,
        AccessLogFilter,
        AndFilter,
        ExtensionFilter,
        LogTypeFilter,
        OrFilter,
    )
    from envoy_data_plane.envoy.config.bootstrap.v3 import (
        Admin,
        Bootstrap,
        BootstrapDynamicResources,
        BootstrapStaticResources,
    )
    from envoy_data_plane.envoy.config.cluster.v3 import (
        CircuitBreakers,
        CircuitBreakersThresholds,
        Cluster,
        ClusterDiscoveryType,
        ClusterDnsLookupFamily,
        ClusterEdsClusterConfig,
        LoadBalancingPolicy,
        LoadBalancingPolicyPolicy,
    )
    from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
        HeaderMutation,
        HeaderMutationRules,
    )
    from envoy_data_plane.envoy.config.core.v3 import (
        Address,
        AggregatedConfigSource,
        ApiConfigSource,
        ApiConfigSourceApiType,
        ApiVersion,
        BackoffStrategy,
        ConfigSource,
        DataSource,
        GrpcService,
        GrpcServiceEnvoyGrpc,
        HeaderValue,
        HeaderValueOption,
        HeaderValueOptionHeaderAppendAction,
        Http1ProtocolOptions,
        Http2ProtocolOptions,
        Http3ProtocolOptions,
        HttpProtocolOptions,
        HttpUri,
        KeepaliveSettings,
        Node,
        Pipe,
        QuicKeepAliveSettings,
        SocketAddress,
        SocketAddressProtocol,
        SubstitutionFormatString,
        TransportSocket,
        TypedExtensionConfig,
    )
    from envoy_data_plane.envoy.config.core.v3 import QuicProtocolOptions as ConnectionQuicOptions
    from envoy_data_plane.envoy.config.core.v3 import RetryPolicy as GrpcRetryPolicy
    from envoy_data_plane.envoy.config.endpoint.v3 import (
        ClusterLoadAssignment,
        Endpoint,
        LbEndpoint,
        LocalityLbEndpoints,
    )
    from envoy_data_plane.envoy.config.listener.v3 import (
        Filter,
        FilterChain,
        Listener,
        QuicProtocolOptions,
        UdpListenerConfig,
    )
    from envoy_data_plane.envoy.config.route.v3 import (
        DirectResponseAction,
        HeaderMatcher,
        RetryPolicy,
        RetryPolicyRetryBackOff,
        RetryPolicyRetryHostPredicate,
        Route,
        RouteAction,
        RouteConfiguration,
        RouteMatch,
        RouteMatchGrpcRouteMatchOptions,
        VirtualHost,
    )
    from envoy_data_plane.envoy.data.accesslog.v3 import AccessLogType
    from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import (
        ExpressionFilter,
    )
    from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
        CommonGrpcAccessLogConfig,
        HttpGrpcAccessLogConfig,
    )
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
        ExternalProcessor,
        ExtProcOverrides,
        ExtProcPerRoute,
        HeaderForwardingRules,
        MetadataOptions,
        MetadataOptionsMetadataNamespaces,
        ProcessingMode,
        ProcessingModeBodySendMode,
        ProcessingModeHeaderSendMode,
    )
    from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
        JwksAsyncFetch,
        JwtAuthentication,
        JwtHeader,
        JwtProvider,
        JwtRequirement,
        JwtRequirementOrList,
        RemoteJwks,
        RequirementRule,
    )
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import (
        Router,
        RouterUpstreamAccessLogOptions,
    )
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
        HttpConnectionManager,
        HttpConnectionManagerCodecType,
        HttpConnectionManagerPathWithEscapedSlashesAction,
        HttpConnectionManagerServerHeaderTransformation,
        HttpConnectionManagerUpgradeConfig,
        HttpFilter,
        LocalReplyConfig,
        ResponseMapper,
    )
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
        HeaderMutation as EarlyHeaderMutation,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
        OverrideHost,
        OverrideHostOverrideHostSource,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
    from envoy_data_plane.envoy.extensions.load_balancing_policies.subset.v3 import (
        Subset,
        SubsetLbSubsetFallbackPolicy,
        SubsetLbSubsetSelector,
    )
    from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
    from envoy_data_plane.envoy.extensions.transport_sockets.quic.v3 import QuicDownstreamTransport
    from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
        CertificateValidationContext,
        CommonTlsContext,
        DownstreamTlsContext,
        SubjectAltNameMatcher,
        SubjectAltNameMatcherSanType,
        TlsCertificate,
        UpstreamTlsContext,
    )
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
        HttpProtocolOptions as UpstreamHttpProtocolOptions,
    )
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
        HttpProtocolOptionsExplicitHttpConfig,
    )
    from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
    from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
    from envoy_data_plane.google.protobuf import Any as ProtoAny
    from envoy_data_plane.google.protobuf import Empty, Struct
    from envoy_data_plane.message_pool import default_message_pool

__all__ = (
    "AccessLog",
    "AccessLogFilter",
    "AccessLogType",
    "Address",
    "Admin",
    "AggregatedConfigSource",
    "AndFilter",
    "ApiConfigSource",
    "ApiConfigSourceApiType",
    "ApiVersion",
    "BackoffStrategy",
    "Bootstrap",
    "BootstrapDynamicResources",
    "BootstrapStaticResources",
    "CertificateValidationContext",
    "CircuitBreakers",
    "CircuitBreakersThresholds",
    "Cluster",
    "ClusterDiscoveryType",
    "ClusterDnsLookupFamily",
    "ClusterEdsClusterConfig",
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
    "GrpcServiceEnvoyGrpc",
    "HeaderForwardingRules",
    "HeaderMatcher",
    "HeaderMutation",
    "HeaderMutationRules",
    "HeaderValue",
    "HeaderValueOption",
    "HeaderValueOptionHeaderAppendAction",
    "Http1ProtocolOptions",
    "Http2ProtocolOptions",
    "Http3ProtocolOptions",
    "HttpConnectionManager",
    "HttpConnectionManagerCodecType",
    "HttpConnectionManagerPathWithEscapedSlashesAction",
    "HttpConnectionManagerServerHeaderTransformation",
    "HttpConnectionManagerUpgradeConfig",
    "HttpFilter",
    "HttpGrpcAccessLogConfig",
    "HttpProtocolOptions",
    "HttpProtocolOptionsExplicitHttpConfig",
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
    "LoadBalancingPolicyPolicy",
    "LocalReplyConfig",
    "LocalityLbEndpoints",
    "LogTypeFilter",
    "Message",
    "MetadataKey",
    "MetadataKeyPathSegment",
    "MetadataOptions",
    "MetadataOptionsMetadataNamespaces",
    "Node",
    "OrFilter",
    "OverrideHost",
    "OverrideHostOverrideHostSource",
    "Pipe",
    "PreviousHostsPredicate",
    "ProcessingMode",
    "ProcessingModeBodySendMode",
    "ProcessingModeHeaderSendMode",
    "ProtoAny",
    "QuicDownstreamTransport",
    "QuicKeepAliveSettings",
    "QuicProtocolOptions",
    "RemoteJwks",
    "RequirementRule",
    "ResponseMapper",
    "RetryPolicy",
    "RetryPolicyRetryBackOff",
    "RetryPolicyRetryHostPredicate",
    "RoundRobin",
    "Route",
    "RouteAction",
    "RouteConfiguration",
    "RouteMatch",
    "RouteMatchGrpcRouteMatchOptions",
    "Router",
    "RouterUpstreamAccessLogOptions",
    "SocketAddress",
    "SocketAddressProtocol",
    "StringMatcher",
    "Struct",
    "SubjectAltNameMatcher",
    "SubjectAltNameMatcherSanType",
    "Subset",
    "SubsetLbSubsetFallbackPolicy",
    "SubsetLbSubsetSelector",
    "SubstitutionFormatString",
    "TlsCertificate",
    "TransportSocket",
    "TypedExtensionConfig",
    "TypedStruct",
    "UdpListenerConfig",
    "UpstreamHttpProtocolOptions",
    "UpstreamTlsContext",
    "VirtualHost",
    "extension",
    "pack",
    "pack_untyped",
)

_TYPE_PREFIX = "type.googleapis.com/"


@dataclass(eq=False, repr=False, config={"extra": "forbid"})
class TypedStruct(Message):
    """A configuration Envoy knows and the stubs do not (yet): its type's name and its fields by name."""

    type_url: str = betterproto2.field(1, betterproto2.TYPE_STRING)
    value: "Struct | None" = betterproto2.field(2, betterproto2.TYPE_MESSAGE, optional=True)


default_message_pool.register_message("xds.type.v3", "TypedStruct", TypedStruct)


def pack(message: Message) -> ProtoAny:
    """`message` as the `Any` that every extension point of Envoy takes."""
    return ProtoAny.pack(message)


def pack_untyped(type_name: str, fields: Mapping[str, Any]) -> ProtoAny:
    """A message of a type the stubs lack as an `Any`; Envoy checks its fields when it loads them."""
    return ProtoAny.pack(TypedStruct(type_url=_TYPE_PREFIX + type_name, value=Struct.from_dict(fields)))


def extension(name: str, message: Message) -> TypedExtensionConfig:
    """`message` as a named extension."""
    return TypedExtensionConfig(name=name, typed_config=pack(message))
