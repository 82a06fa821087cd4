"""The table of APIs, and how a path finds its row."""

from __future__ import annotations

import pytest

from extproc.request.apis import (
    APIS,
    BY_PATH,
    ModelIn,
    by_path,
    canonical,
    guess,
    is_engine_admin,
    is_grpc,
    model_id,
    response_id,
    without_path,
)
from policies.types import Kind


def test_no_path_stands_in_two_rows() -> None:
    """Or the later row would be dead."""
    assert len(BY_PATH) == sum(len(api.paths) for api in APIS)


def test_every_row_says_what_is_true_of_it() -> None:
    """Only bodies in JSON have fields; what is required is part of the prompt."""
    for api in APIS:
        assert api.model_in is ModelIn.JSON or not (api.prompt or api.required)
        assert set(api.required) <= set(api.prompt)
        assert api.methods


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", Kind.CHAT),
        ("/v1/messages", Kind.MESSAGE),
        ("/v2/rerank", Kind.RERANK),
        ("/v1/responses", Kind.RESPONSE),
        ("/v1/responses/resp_1", Kind.RESPONSE),
        ("/v1/responses/resp_1/cancel", Kind.RESPONSE),
        ("/v1/models", Kind.OTHER),
        ("/v1/models/owner/name", Kind.OTHER),
    ],
)
def test_a_path_finds_its_row(path: str, kind: Kind) -> None:
    """Ids in paths are any."""
    api = by_path(path)
    assert api is not None
    assert api.kind is kind


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/responses/", "/v1/responses/a/b", "/v1/responses/a/cancel/b", "/x"]
)
def test_other_paths_find_none(path: str) -> None:
    """Nor do those below or above a row's."""
    assert by_path(path) is None


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/models", ""),
        ("/v1/models/", ""),
        ("/v1/models/m", "m"),
        ("/v1/models/owner/name", "owner/name"),
        ("/v1/models/owner%2Fname", "owner/name"),
        ("/v2/models/m", ""),
    ],
)
def test_a_model_in_a_path_is_decoded(path: str, model: str) -> None:
    """Slashes are part of its name, however they are written."""
    assert model_id(path) == model


def test_the_id_in_a_path_is_decoded() -> None:
    """As the engine decodes it."""
    assert response_id("/v1/responses/resp_%61/cancel") == "resp_a"
    assert response_id("/v1/responses") == ""


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/a/b", "/a/b"),
        ("//a///b/", "/a/b"),
        ("/a/../b", "/b"),
        ("/%73leep", "/sleep"),
        ("/a%2f..%2fb", "/b"),
        ("", "/"),
    ],
)
def test_a_path_is_judged_as_the_engine_reads_it(path: str, meant: str) -> None:
    """Escapes, dots and doubled slashes are no disguise."""
    assert canonical(path) == meant


@pytest.mark.parametrize(
    ("path", "admin"),
    [
        ("/sleep", True),
        ("/docs/oauth2-redirect", True),
        ("/v1/load_lora_adapter", True),
        ("/metrics/", True),
        ("/sleepy", False),
        ("/custom/sleep", False),
        ("/", False),
    ],
)
def test_an_engines_own_paths_are_known(path: str, admin: bool) -> None:  # noqa: FBT001
    """With what stands below them."""
    assert is_engine_admin(canonical(path)) is admin


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"model":"m","messages":[]}', Kind.CHAT),
        (b'{"prompt":"x","model":"m"}', Kind.COMPLETION),
        (b'{"input":"x"}', Kind.RESPONSE),
        (b'{"query":"x"}', Kind.RERANK),
        (b'{"text_1":"x"}', Kind.RERANK),
        (b'{"x":1}', Kind.CHAT),
        (b"\xff", Kind.CHAT),
        (b'{"x":' * 100_000, Kind.CHAT),
    ],
)
def test_without_a_path_the_keys_tell(body: bytes, kind: Kind) -> None:
    """What tells nothing is taken for a chat, whose parser says what is wrong."""
    assert guess({}, body).kind is kind


def test_without_a_path_a_form_is_audio() -> None:
    """No other API takes one."""
    assert guess({"content-type": "Multipart/Form-Data; boundary=x"}, b"{").kind is Kind.AUDIO


def test_connect_is_not_without_a_path() -> None:
    """It never has one; a gateway that hides the path hides the method too."""
    assert without_path({"content-type": "x"})
    assert not without_path({":method": "CONNECT"})


@pytest.mark.parametrize(
    ("content_type", "grpc"),
    [
        ("application/grpc", True),
        ("application/grpc+proto", True),
        ("application/grpc-web", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_grpc_calls_are_known_by_their_content_type(content_type: str, *, grpc: bool) -> None:
    """As Envoy knows them; grpc-web is another protocol."""
    assert is_grpc({"content-type": content_type}) is grpc
