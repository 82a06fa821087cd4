"""Routes: one for requests we have decided, one for all others.

Not here: where a decided request goes; the header we set names the cluster.

Rejected: failing closed in the ext_proc filter itself (`failure_mode_allow: false`). That cuts every running answer
when our process dies. With the filter open and the undecided route answering 503, new requests fail and old ones live
on.
"""

from __future__ import annotations

import json
from datetime import timedelta

from extproc.config.schema import Config
from extproc.control import envoy_types as envoy
from extproc.control.clusters import body_window
from extproc.control.local_replies import set_header
from extproc.error_object import error_object
from extproc.names import (
    CLUSTER_HEADER,
    FIRST_CHOICE_HEADER,
    METADATA_NAMESPACE,
    MODEL_HEADER,
    REQUEST_ID_HEADER,
    RETRY_AFTER_S,
    RETRY_ON,
    STREAMED_HEADER,
)

_RESPONSE_HEADERS = {
    "request_id": (REQUEST_ID_HEADER, f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:request_id)%"),
    # who served, not who was picked first
    "endpoint": (FIRST_CHOICE_HEADER, "%UPSTREAM_REMOTE_ADDRESS%"),
    "model": (MODEL_HEADER, f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:model)%"),
}
EXT_PROC = "envoy.filters.http.ext_proc"
_UNDECIDED = error_object("server_error", "router_unavailable", "No routing decision is available. Try again shortly.")


def route_configuration(config: Config) -> envoy.RouteConfiguration:
    """Our routes under one virtual host for every authority."""
    return envoy.RouteConfiguration(
        name="pointsman", virtual_hosts=[virtual_host(config)], response_headers_to_add=_http3_offer(config)
    )


def virtual_host(config: Config) -> envoy.VirtualHost:
    """The routes and the headers that clients see."""
    return envoy.VirtualHost(
        name="pointsman",
        domains=["*"],
        routes=[*_decided_routes(config), _undecided_call(), _undecided_route(config)],
        # the upstream log's filter and its entries need to know which attempt they speak of
        include_request_attempt_count=True,
        response_headers_to_add=[set_header(*_RESPONSE_HEADERS[name]) for name in config.wire.response_headers],
    )


def _http3_offer(config: Config) -> list[envoy.HeaderValueOption]:
    """Tells clients, who always come by TCP first, that they may come by QUIC the next day long."""
    if config.listen.http3 is None:
        return []
    port = config.listen.http3.rpartition(":")[2]
    return [set_header("alt-svc", f'h3=":{port}"; ma=86400')]


def _decided_routes(config: Config) -> list[envoy.Route]:
    """Streamed answers have a route of their own where silence ends them: a whole one is silent until it is there."""
    routes = [_decided_route(config, "decided", CLUSTER_HEADER)]
    if config.timeouts.silence_s is not None:
        streamed = _decided_route(config, "decided_streamed", CLUSTER_HEADER, STREAMED_HEADER)
        streamed.route.retry_policy.per_try_idle_timeout.FromTimedelta(timedelta(seconds=config.timeouts.silence_s))
        routes.insert(0, streamed)
    return routes


def _decided_route(config: Config, name: str, *having: str) -> envoy.Route:
    """For requests that have these headers."""
    return envoy.Route(
        name=name,
        match=envoy.RouteMatch(
            prefix="/", headers=[envoy.HeaderMatcher(name=header, present_match=True) for header in having]
        ),
        request_body_buffer_limit=envoy.UInt64Value(value=body_window(config)),
        route=envoy.RouteAction(
            cluster_header=CLUSTER_HEADER,
            # a limit for all would cut long answers: each request brings its own, and silence ends a stream
            timeout=timedelta(0),
            idle_timeout=timedelta(seconds=config.timeouts.stream_idle_s),
            retry_policy=_retry_policy(config),
        ),
    )


def _undecided_route(config: Config) -> envoy.Route:
    return envoy.Route(
        name="undecided",
        match=envoy.RouteMatch(prefix="/"),
        # every request matches here first, while its body arrives: this is the limit that counts
        request_body_buffer_limit=envoy.UInt64Value(value=body_window(config)),
        direct_response=envoy.DirectResponseAction(
            status=503, body=envoy.DataSource(inline_string=json.dumps(_UNDECIDED))
        ),
        response_headers_to_add=[
            set_header("content-type", "application/json"),
            set_header("retry-after", str(RETRY_AFTER_S)),
        ],
    )


def _undecided_call() -> envoy.Route:
    """The same for gRPC calls. They are decided by their headers: the messages of a stream may never end.

    Envoy makes a gRPC status of the answer, UNAVAILABLE, and its message of the body.
    """
    mode = processing_mode(envoy.ProcessingMode.NONE)
    settings = envoy.ExtProcPerRoute(overrides=envoy.ExtProcOverrides(processing_mode=mode))
    return envoy.Route(
        name="undecided_grpc",
        match=envoy.RouteMatch(prefix="/", grpc=envoy.RouteMatch.GrpcRouteMatchOptions()),
        direct_response=envoy.DirectResponseAction(
            status=503, body=envoy.DataSource(inline_string=_UNDECIDED["error"]["message"] or "")
        ),
        typed_per_filter_config={EXT_PROC: envoy.pack(settings)},
    )


def processing_mode(bodies: int) -> envoy.ProcessingMode:
    """What of a request and its answer is shown to us."""
    send, skip = envoy.ProcessingMode.SEND, envoy.ProcessingMode.SKIP
    return envoy.ProcessingMode(
        request_header_mode=send,
        request_body_mode=bodies,
        request_trailer_mode=skip,
        response_header_mode=skip,
        response_body_mode=envoy.ProcessingMode.NONE,
        # engines send no trailers, so this costs nothing; but it keeps our stream open until the answer ends, which
        # makes the stream itself the count of requests in flight
        response_trailer_mode=send,
    )


def _retry_policy(config: Config) -> envoy.RetryPolicy:
    return envoy.RetryPolicy(
        retry_on=RETRY_ON,
        retriable_status_codes=list(config.retries.statuses),
        num_retries=envoy.number(config.retries.attempts),
        retry_back_off=envoy.RetryPolicy.RetryBackOff(
            base_interval=timedelta(milliseconds=5), max_interval=timedelta(milliseconds=50)
        ),
        # matters once our list is used up: the fallback must not choose the host that just failed
        retry_host_predicate=[
            envoy.RetryPolicy.RetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=envoy.pack(envoy.PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=5,
    )
