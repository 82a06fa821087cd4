"""Refusals as clients see them."""

from __future__ import annotations

import json

import pytest

from extproc.reply import refuse
from policies.types import Reason, Refusal


def test_a_refusal_is_openais_error_object() -> None:
    """Message, type, param and code, as JSON, under the refusal's status."""
    answer = refuse(Refusal(413, "invalid_request_error", 'too "large"', Reason.BODY_TOO_LARGE, param="messages"))
    assert answer.status == 413
    assert answer.reason == "body_too_large"
    assert answer.headers == (("content-type", "application/json"),)
    assert json.loads(answer.body) == {
        "error": {
            "message": 'too "large"',
            "type": "invalid_request_error",
            "param": "messages",
            "code": "body_too_large",
        }
    }


@pytest.mark.parametrize(
    ("reason", "code"),
    [(Reason.UNKNOWN_MODEL, "model_not_found")],
)
def test_codes_that_clients_know_keep_their_name(reason: Reason, code: str) -> None:
    """OpenAI's client libraries look for these."""
    assert json.loads(refuse(Refusal(404, "t", "m", reason)).body)["error"]["code"] == code


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.NO_READY_ENDPOINT])
def test_every_reason_has_a_code(reason: Reason) -> None:
    """Always a word, so that a client can tell refusals of one status apart."""
    code = json.loads(refuse(Refusal(503, "t", "m", reason)).body)["error"]["code"]
    assert isinstance(code, str)
    assert code


def test_retry_after_is_sent_where_waiting_helps() -> None:
    """In whole seconds, beside the content type; zero is a promise too."""
    refusal = Refusal(429, "rate_limit_error", "m", Reason.TOO_MANY_REQUESTS, retry_after_s=0)
    assert refuse(refusal).headers == (("content-type", "application/json"), ("retry-after", "0"))


def test_unicode_in_a_message_survives() -> None:
    """What the client wrote may be quoted back."""
    assert json.loads(refuse(Refusal(404, "t", "模型\n", Reason.UNKNOWN_MODEL)).body)["error"]["message"] == "模型\n"


def test_a_refused_grpc_call_gets_words_alone() -> None:
    """Envoy makes the gRPC status of the HTTP one, and the message of the body."""
    answer = refuse(Refusal(503, "server_error", "no endpoint", Reason.NO_READY_ENDPOINT, retry_after_s=1), grpc=True)
    assert (answer.status, answer.body, answer.headers) == (503, b"no endpoint", ())
