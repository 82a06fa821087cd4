"""What a client sees when Envoy itself answers: the same JSON error shape as from us and from the engines.

Not here: our own refusals. They pass through the same rewriting in Envoy and must come out byte for byte as we wrote
them, so every rule below starts by telling Envoy's answers from ours.

Rejected: one rule for all with Envoy's text as the message. That text is empty for some answers and speaks of resets
and flags in others; a client's developer needs to know whether to send less, to wait, or to look at the engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.control import envoy_types as envoy
from extproc.control.access_logs import cel_filter
from extproc.error_object import error_object
from extproc.names import OWN_DETAILS, RETRY_AFTER_S

# an immediate answer without details is ours too: Envoy always gives its own a reason
_BY_ENVOY = (
    "response.code_details != ''"
    f" && !response.code_details.startsWith('{OWN_DETAILS}')"
    " && response.code_details != 'direct_response'"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    when: str
    type: str
    code: str
    message: str
    retry: bool = False


_KINDS = (
    _Kind(
        # as from us where a key would do as well
        "response.code_details == 'jwt_authn_access_denied{Jwt_is_missing}'",
        "invalid_request_error",
        "no_credentials",
        "no credentials: send a token as `Authorization: Bearer ...`",
    ),
    _Kind(
        # a token for another audience is a 403
        "(response.code == 401 || response.code_details.startsWith('jwt_authn'))",
        "invalid_request_error",
        "invalid_api_key",
        "No valid token: send one as `Authorization: Bearer ...` (%RESPONSE_CODE_DETAILS%).",
    ),
    _Kind(
        "response.code == 413",
        "invalid_request_error",
        "body_too_large",
        "The request body is larger than this gateway accepts.",
    ),
    _Kind(
        "response.code == 408",
        "invalid_request_error",
        "request_timeout",
        "The request did not arrive completely in time.",
    ),
    _Kind(
        "response.code == 503",
        "server_error",
        "upstream_unavailable",
        "No model server could take the request (%RESPONSE_CODE_DETAILS%). Try again shortly.",
        retry=True,
    ),
    _Kind(
        "response.code == 504",
        "server_error",
        "upstream_timeout",
        "The model server did not answer in time (%RESPONSE_CODE_DETAILS%).",
    ),
    _Kind(
        "response.code < 500",
        "invalid_request_error",
        "bad_request",
        "The gateway could not accept the request (%RESPONSE_CODE_DETAILS%).",
    ),
    _Kind(
        "response.code >= 500",
        "server_error",
        "gateway_error",
        "The gateway could not complete the request (%RESPONSE_CODE_DETAILS%).",
    ),
)


def local_replies() -> envoy.LocalReplyConfig:
    """Rules for Envoy's own answers, first match wins; what matches none is passed on as it is."""
    return envoy.LocalReplyConfig(mappers=[_grpc_mapper(), *[_mapper(kind) for kind in _KINDS]])


def set_header(name: str, value: str) -> envoy.HeaderValueOption:
    """A header that replaces whatever stood there and is left out where its value comes out empty."""
    return envoy.HeaderValueOption(
        header=envoy.HeaderValue(key=name, value=value),
        append_action=envoy.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _grpc_mapper() -> envoy.ResponseMapper:
    """For gRPC calls: Envoy makes a status of the answer, and its message of this text; JSON is for HTTP clients."""
    words = "The gateway could not complete the call (%RESPONSE_CODE_DETAILS%)."
    return envoy.ResponseMapper(
        filter=cel_filter(f"{_BY_ENVOY} && request.headers['content-type'].startsWith('application/grpc')"),
        body_format_override=envoy.SubstitutionFormatString(text_format_source=envoy.DataSource(inline_string=words)),
    )


def _mapper(kind: _Kind) -> envoy.ResponseMapper:
    body = envoy.Struct()
    body.update(error_object(kind.type, kind.code, kind.message))
    return envoy.ResponseMapper(
        filter=cel_filter(f"{_BY_ENVOY} && {kind.when}"),
        body_format_override=envoy.SubstitutionFormatString(json_format=body, content_type="application/json"),
        headers_to_add=[set_header("retry-after", str(RETRY_AFTER_S))] if kind.retry else [],
    )
