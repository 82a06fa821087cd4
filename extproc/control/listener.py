"""The listeners: the HTTP connection manager and its filters, in the order a request meets them.

Not here: routes.py, local_replies.py, access_logs.py, which this puts together.

Rejected: ext_proc as an upstream filter. In Envoy 1.40 a message above 1 MiB there crashes the process.
"""

from __future__ import annotations

from datetime import timedelta

from extproc.config.schema import Config
from extproc.config.sections.listen import Tls
from extproc.config.sections.queueing import HOLD_S
from extproc.control import envoy_types as envoy
from extproc.control.access_logs import request_log, upstream_log
from extproc.control.authentication import authentication_filters
from extproc.control.clusters import (
    body_window,
    http2,
    pointsman_grpc_service,
    service_for,
    socket_address,
)
from extproc.control.local_replies import local_replies
from extproc.control.routes import EXT_PROC, processing_mode, route_configuration
from extproc.names import (
    CREDENTIAL_HEADERS,
    EXT_PROC_SOCKET,
    FORWARDED_FOR_HEADER,
    IDEMPOTENCY_HEADER,
    JWT_NAMESPACE,
    LB_NAMESPACE,
    METADATA_NAMESPACE,
    STRIPPED_HEADERS,
    USAGE_NAMESPACE,
)

_FORWARDED = (
    ":method",
    ":path",
    "content-type",
    "content-length",
    "content-encoding",
    "x-session-id",
    "x-request-id",
    "x-vllm-priority",
    IDEMPOTENCY_HEADER,
    FORWARDED_FOR_HEADER,
    "x-llm-d-slo-ttft-ms",
)
_FORWARDED_PREFIXES = ("x-pointsman-", "x-gateway-")
_MOST_HEADERS = 130


def listeners(config: Config) -> list[envoy.Listener]:
    """The public listener, and with `listen.http3` another for the same over QUIC."""
    return [_tcp_listener(config)] if config.listen.http3 is None else [_tcp_listener(config), _quic_listener(config)]


def _tcp_listener(config: Config) -> envoy.Listener:
    public = listener_settings(config)
    public.name = "pointsman"
    # else a second Envoy on the same port starts without a word, and the kernel deals it half of the connections
    public.enable_reuse_port.value = False
    public.address.CopyFrom(socket_address(config.listen.http))
    socket = None if config.listen.http_tls is None else _tls_socket(config.listen.http_tls)
    public.filter_chains.append(_filter_chain(http_connection_manager(config), socket))
    return public


def _quic_listener(config: Config) -> envoy.Listener:
    """The same over QUIC. Of several Envoys on one port the kernel deals each a part: UDP leaves no choice."""
    manager = http_connection_manager(config)
    manager.codec_type = envoy.HttpConnectionManager.HTTP3
    manager.http3_protocol_options.quic_protocol_options.CopyFrom(_quic_options())
    public = listener_settings(config)
    public.name = "pointsman_http3"
    public.address.CopyFrom(socket_address(config.listen.http3 or ""))
    public.address.socket_address.protocol = envoy.SocketAddress.UDP
    public.udp_listener_config.quic_options.SetInParent()
    public.filter_chains.append(_filter_chain(manager, _quic_socket(config)))
    return public


def _quic_options() -> envoy.ConnectionQuicOptions:
    # an engine may be silent for minutes before its first token: our pings keep the connection, not the 300 s default
    pings = envoy.QuicKeepAliveSettings(initial_interval=timedelta(seconds=10), max_interval=timedelta(seconds=60))
    return envoy.ConnectionQuicOptions(max_concurrent_streams=envoy.number(1024), connection_keepalive=pings)


def _filter_chain(manager: envoy.HttpConnectionManager, socket: envoy.TransportSocket | None) -> envoy.FilterChain:
    name = "envoy.filters.network.http_connection_manager"
    return envoy.FilterChain(
        filters=[envoy.Filter(name=name, typed_config=envoy.pack(manager))], transport_socket=socket
    )


def _tls_socket(tls: Tls) -> envoy.TransportSocket:
    context = _tls_context(tls, ["h2", "http/1.1"])
    return envoy.TransportSocket(name="envoy.transport_sockets.tls", typed_config=envoy.pack(context))


def _quic_socket(config: Config) -> envoy.TransportSocket:
    if config.listen.http_tls is None:
        raise AssertionError("the config refuses http3 without http_tls")
    # no early data: a replayed request would be paid for twice
    transport = envoy.QuicDownstreamTransport(
        downstream_tls_context=_tls_context(config.listen.http_tls, ["h3"]), enable_early_data=envoy.flag(on=False)
    )
    return envoy.TransportSocket(name="envoy.transport_sockets.quic", typed_config=envoy.pack(transport))


def _tls_context(tls: Tls, protocols: list[str]) -> envoy.DownstreamTlsContext:
    client_ca = None
    if tls.client_ca is not None:
        client_ca = envoy.CertificateValidationContext(trusted_ca=envoy.DataSource(filename=str(tls.client_ca)))
    common = envoy.CommonTlsContext(
        alpn_protocols=protocols,
        tls_certificates=[
            envoy.TlsCertificate(
                certificate_chain=envoy.DataSource(filename=str(tls.certificate)),
                private_key=envoy.DataSource(filename=str(tls.key)),
            )
        ],
        validation_context=client_ca,
    )
    return envoy.DownstreamTlsContext(
        common_tls_context=common, require_client_certificate=envoy.flag(on=client_ca is not None)
    )


def listener_settings(config: Config) -> envoy.Listener:
    """What we need of any listener."""
    # the routes' limit alone is not enough: without this one HTTP/1 bodies of 31 MiB were refused
    return envoy.Listener(per_connection_buffer_limit_bytes=envoy.number(body_window(config)))


def http_connection_manager(config: Config) -> envoy.HttpConnectionManager:
    """Everything between a client's connection and the routes."""
    manager = http_settings(config)
    manager.stat_prefix = "pointsman"
    manager.route_config.CopyFrom(route_configuration(config))
    manager.http_filters.extend(http_filters(config))
    manager.access_log.append(request_log(config))
    manager.early_header_mutation_extensions.append(header_stripping(config))
    manager.local_reply_config.CopyFrom(local_replies())
    return manager


def http_settings(config: Config) -> envoy.HttpConnectionManager:
    """What we need of any HTTP connection manager beside its filters, routes and logs."""
    manager = envoy.HttpConnectionManager(
        http2_protocol_options=http2(config, max_concurrent_streams=envoy.number(1024)),
        use_remote_address=envoy.flag(on=True),
        generate_request_id=envoy.flag(on=True),
        # the engine's own server header is part of its answer
        server_header_transformation=envoy.HttpConnectionManager.PASS_THROUGH,
        upgrade_configs=[
            envoy.HttpConnectionManager.UpgradeConfig(upgrade_type="websocket", filters=_upgrade_filters(config))
        ],
    )
    # 100 by default, and what we and Envoy add counts as well: a client with 90 of its own got a 500
    manager.common_http_protocol_options.max_headers_count.value = _MOST_HEADERS
    _set_timeouts(manager, config)
    _set_path_rules(manager)
    return manager


def http_filters(config: Config) -> list[envoy.HttpFilter]:
    """Verified tokens, usage extraction, ext_proc, router. Responses meet them in the opposite order."""
    decide = _ext_proc_filter(config, envoy.ProcessingMode.BUFFERED)
    return [*authentication_filters(config), _usage_filter(), decide, _router_filter(config)]


def _upgrade_filters(config: Config) -> list[envoy.HttpFilter]:
    """The same for a WebSocket, whose request never ends: a buffered one would never be sent on."""
    decide = _ext_proc_filter(config, envoy.ProcessingMode.NONE)
    return [*authentication_filters(config), decide, _router_filter(config)]


def header_stripping(config: Config) -> envoy.TypedExtensionConfig:
    """Removes, before anything else reads them, the headers by which a client could choose its own endpoint."""
    return envoy.extension(
        "envoy.http.early_header_mutation.header_mutation",
        envoy.EarlyHeaderMutation(
            mutations=[
                envoy.HeaderMutation(remove=name) for name in STRIPPED_HEADERS if name != config.access.tenant_header
            ]
        ),
    )


def _set_timeouts(manager: envoy.HttpConnectionManager, config: Config) -> None:
    # counts while a request waits for its decision too: the undecided route has no idle timeout of its own
    manager.stream_idle_timeout.FromTimedelta(timedelta(seconds=config.timeouts.stream_idle_s))
    manager.request_headers_timeout.FromSeconds(10)
    # a cut HTTP/1 stream reaches the client only after this; the default is a second
    manager.delayed_close_timeout.FromMilliseconds(50)


def _set_path_rules(manager: envoy.HttpConnectionManager) -> None:
    # the path we judge must be the path the engine sees: /v1/../sleep is not a chat request
    manager.normalize_path.value = True
    manager.merge_slashes = True
    manager.path_with_escaped_slashes_action = envoy.HttpConnectionManager.UNESCAPE_AND_FORWARD


def _usage_filter() -> envoy.HttpFilter:
    """Token usage from the answer into typed metadata.

    Rejected: json_to_metadata. It holds a JSON answer whole and turns one above the buffer limit into a 500; this
    filter only looks on. Without the protocol named, answers of /v1/completions are not recognised; with it those of
    the Responses, Messages and embeddings APIs are read as well.
    """
    return envoy.HttpFilter(
        name="envoy.filters.http.ai_protocol_manager",
        typed_config=envoy.pack_untyped(
            "envoy.extensions.filters.http.ai_protocol_manager.v3.AiProtocolManager",
            {
                "response_handling": {
                    "token_usage": {
                        "include_unconfigured_routes": True,
                        "default_llm_protocol": "OPENAI_CHAT_COMPLETIONS",
                        "metadata_namespace": USAGE_NAMESPACE,
                    }
                }
            },
        ),
    )


def _ext_proc_filter(config: Config, bodies: int) -> envoy.HttpFilter:
    return envoy.HttpFilter(
        name=EXT_PROC,
        typed_config=envoy.pack(
            envoy.ExternalProcessor(
                grpc_service=pointsman_grpc_service(service_for(config, EXT_PROC_SOCKET), hold_s=HOLD_S),
                processing_mode=processing_mode(bodies),
                # running answers must survive our death; the undecided route fails new requests closed
                failure_mode_allow=True,
                message_timeout=timedelta(seconds=HOLD_S),
                # without these two, routing headers and x-envoy-* timeouts from us are dropped in silence
                mutation_rules=envoy.HeaderMutationRules(
                    allow_all_routing=envoy.flag(on=True), allow_envoy=envoy.flag(on=True)
                ),
                forward_rules=envoy.HeaderForwardingRules(allowed_headers=_forwarded_headers(config)),
                metadata_options=_metadata(config),
            )
        ),
    )


def _metadata(config: Config) -> envoy.MetadataOptions:
    """What we may write, and what is told to us."""
    options = envoy.MetadataOptions()
    options.receiving_namespaces.untyped.extend((LB_NAMESPACE, METADATA_NAMESPACE))
    if config.access.jwt is not None:
        options.forwarding_namespaces.untyped.append(JWT_NAMESPACE)
    return options


def _forwarded_headers(config: Config) -> envoy.ListStringMatcher:
    names = [*_FORWARDED]
    if config.access.takes_keys:  # shown to us only if it is us who checks them
        names.extend(CREDENTIAL_HEADERS)
    if config.access.tenant_header is not None:
        names.append(config.access.tenant_header)
    exact = [envoy.StringMatcher(exact=name) for name in names]
    return envoy.ListStringMatcher(
        patterns=exact + [envoy.StringMatcher(prefix=prefix) for prefix in _FORWARDED_PREFIXES]
    )


def _router_filter(config: Config) -> envoy.HttpFilter:
    return envoy.HttpFilter(
        name="envoy.filters.http.router",
        typed_config=envoy.pack(
            envoy.Router(
                # drops x-envoy-upstream-service-time and its kind from answers; x-envoy-* timeouts from us still count
                suppress_envoy_headers=True,
                upstream_log=[upstream_log(config)],
                # tells of another address at once, not when its answer has ended
                upstream_log_options=envoy.Router.UpstreamAccessLogOptions(flush_upstream_log_on_upstream_stream=True),
            )
        ),
    )
