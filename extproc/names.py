"""The names that Envoy, its generated configuration and we must spell alike. Nothing but names."""

from __future__ import annotations

# Request headers we set, and with which Envoy picks cluster and endpoint
DESTINATION_HEADER = "x-gateway-destination-endpoint"
CLUSTER_HEADER = "x-pointsman-cluster"
FIRST_CHOICE_HEADER = "x-pointsman-endpoint"
REQUEST_ID_HEADER = "x-pointsman-request-id"
MODEL_HEADER = "x-pointsman-model"
STREAMED_HEADER = "x-pointsman-streamed"
"""The answer is wanted as a stream, so that silence means something."""

ATTEMPT_HEADER = "x-envoy-attempt-count"
"""How often Envoy has tried the request, the present try included; on requests to engines."""

IDEMPOTENCY_HEADER = "idempotency-key"

CREDENTIAL_HEADERS = ("authorization", "x-api-key")
"""Where clients put their keys and tokens: OpenAI's the first, Anthropic's the second."""

FORWARDED_FOR_HEADER = "x-forwarded-for"
"""Our own Envoy appends whom it was called by; what stands before that a client may have written itself."""

# Dynamic metadata
LB_NAMESPACE = "envoy.lb"
"""Holds DESTINATION_HEADER from us and SERVED_KEY from the gateway: the endpoint-picker protocol."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "pointsman"
USAGE_NAMESPACE = "pointsman.usage"

JWT_NAMESPACE = "envoy.filters.http.jwt_authn"
"""Where Envoy's filter of that name puts what it verified, under JWT_KEY."""
JWT_KEY = "pointsman"

EXT_PROC_SOCKET = "ext_proc.sock"
ACCESS_LOG_SOCKET = "access_log.sock"
"""The lane's, in its folder."""

HOLD_METADATA = "x-pointsman-hold-s"
"""Metadata of Envoy's ext_proc calls: so many seconds it waits for each answer of ours."""

OWN_DETAILS = "pointsman_"
"""How Envoy's response_code_details begin where the answer was ours."""
RETRY_ON = "connect-failure,refused-stream,reset-before-request,reset,retriable-status-codes"
"""Only before any byte of the answer: Envoy does not retry once response headers have gone to the client."""
RETRY_AFTER_S = 1
"""An endpoint is back within a second of answering, so that is when trying again makes sense."""

STRIPPED_HEADERS = (
    DESTINATION_HEADER,
    SUBSET_KEY,
    SERVED_KEY,
    CLUSTER_HEADER,
    FIRST_CHOICE_HEADER,
    MODEL_HEADER,
    "x-pointsman-parent",
    REQUEST_ID_HEADER,
    "x-pointsman-decision",
    STREAMED_HEADER,
    "x-pointsman-tenant",
)
"""What no client may send: our own Envoy removes it before anything else reads it."""
FORGED_HEADERS = frozenset(STRIPPED_HEADERS) - {
    DESTINATION_HEADER,
    CLUSTER_HEADER,
    FIRST_CHOICE_HEADER,
    REQUEST_ID_HEADER,
}
"""Of these, what a decision does not overwrite: where a gateway is not ours, the decision removes it."""
