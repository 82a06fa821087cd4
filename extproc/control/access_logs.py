"""The two access logs that Envoy streams to us: one entry per request, and one per attempt that went differently.

Not here: reading them (extproc/wire/access_log.py).

Rejected: every attempt in the upstream log. Two more messages for each request would cost more than the decision; the
filter below lets an ordinary request, served by its first choice, pass in silence.

Rejected: gathering entries for some milliseconds. One less message for us to read saves a hundredth of a request's CPU
on the lane and a twentieth on grpcio; but what waits for an entry waits longer (a breaker's trial, an Idempotency-Key
after a failure, what a tenant has really used), and Envoy keeps what it has gathered when it ends.
"""

from __future__ import annotations

from datetime import timedelta

from extproc.config.schema import Config
from extproc.control import envoy_types as envoy
from extproc.control.clusters import pointsman_grpc_service, service_for
from extproc.names import ACCESS_LOG_SOCKET, ATTEMPT_HEADER, FIRST_CHOICE_HEADER, REQUEST_ID_HEADER

REQUEST_LOG = "pointsman"
UPSTREAM_LOG = "pointsman-upstream"
TTFT_TAG = "ttft_us"

# time_to_first_upstream_rx_byte is the response headers; the engine sends those before its first token
_TTFT = "%COMMON_DURATION(US_TX_END:US_RX_BODY_BEG:us)%"
_FAILED = "response.flags != 0 || response.code >= 500"
# a second attempt is told of even at the first choice, so that "no word" always means "the first choice, first attempt"
_ELSEWHERE = (
    f"request.headers['{ATTEMPT_HEADER}'] != '1'"
    f" || ('{FIRST_CHOICE_HEADER}' in request.headers && upstream.address != request.headers['{FIRST_CHOICE_HEADER}'])"
)


def request_log(config: Config) -> envoy.AccessLog:
    """One entry per request, sent as the request ends."""
    return _grpc_log(config, REQUEST_LOG, [envoy.CustomTag(tag=TTFT_TAG, value=_TTFT)], [REQUEST_ID_HEADER], None)


def upstream_log(config: Config) -> envoy.AccessLog:
    """Two kinds of entry, both at once: an attempt failed; another than the first choice and attempt has begun."""
    return _grpc_log(
        config,
        UPSTREAM_LOG,
        [],
        [REQUEST_ID_HEADER, ATTEMPT_HEADER],
        envoy.AccessLogFilter(
            or_filter=envoy.OrFilter(
                filters=[
                    _when(envoy.AccessLogType.UpstreamEnd, _FAILED),
                    _when(envoy.AccessLogType.UpstreamPoolReady, _ELSEWHERE),
                ]
            )
        ),
    )


def cel_filter(expression: str) -> envoy.AccessLogFilter:
    """An access-log filter from a CEL expression; one that fails to evaluate counts as false."""
    return envoy.AccessLogFilter(
        extension_filter=envoy.ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=envoy.pack(envoy.ExpressionFilter(expression=expression)),
        )
    )


def _when(moment: int, expression: str) -> envoy.AccessLogFilter:
    at = envoy.AccessLogFilter(log_type_filter=envoy.LogTypeFilter(types=[moment]))
    return envoy.AccessLogFilter(and_filter=envoy.AndFilter(filters=[at, cel_filter(expression)]))


def _grpc_log(
    config: Config, name: str, tags: list[envoy.CustomTag], headers: list[str], only: envoy.AccessLogFilter | None
) -> envoy.AccessLog:
    return envoy.AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=only,
        typed_config=envoy.pack(
            envoy.HttpGrpcAccessLogConfig(
                common_config=envoy.CommonGrpcAccessLogConfig(
                    log_name=name,
                    transport_api_version=envoy.ApiVersion.V3,
                    grpc_service=pointsman_grpc_service(service_for(config, ACCESS_LOG_SOCKET)),
                    # 0 sends each entry at once (1-10 ms after the end); the default gathers for up to a second
                    buffer_size_bytes=envoy.number(0),
                    buffer_flush_interval=timedelta(seconds=1),
                    custom_tags=tags,
                ),
                additional_request_headers_to_log=headers,
            )
        ),
    )
