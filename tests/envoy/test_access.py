"""Who may call, through a real Envoy: API keys, tokens, a trusted hop; and that no credential goes further than us."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

from extproc.access.keys import digest_of

ACME, OTHER = "pm-acme-0123456789abcdef", "pm-other-0123456789abcdef"
ISSUER, AUDIENCE = "https://issuer.example", "pointsman"
CHAT = "/v1/chat/completions"


def entry(key: str, tenant: str) -> dict[str, str]:
    """A key's line."""
    return {"name": f"{tenant}-1", "tenant": tenant, "sha256": digest_of(key)}


def bearer(key: str) -> dict[str, str]:
    """The header that OpenAI's clients send."""
    return {"authorization": f"Bearer {key}"}


@dataclass
class Issuer:
    """Signs tokens, and publishes the key to check them by."""

    key: rsa.RSAPrivateKey

    def key_set(self) -> dict[str, Any]:
        """Its public key, as a JWKS."""
        numbers = self.key.public_key().public_numbers()
        n, e = (_base64(number.to_bytes((number.bit_length() + 7) // 8, "big")) for number in (numbers.n, numbers.e))
        return {"keys": [{"kty": "RSA", "kid": "1", "alg": "RS256", "use": "sig", "n": n, "e": e}]}

    def token(self, **claims: Any) -> str:
        """A token that is good, but for what `claims` say otherwise; None leaves a claim out."""
        good = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 600, "org": {"id": "acme"}}
        wanted = {name: value for name, value in (good | claims).items() if value is not None}
        head = _base64(json.dumps({"alg": "RS256", "kid": "1", "typ": "JWT"}).encode())
        signed = f"{head}.{_base64(json.dumps(wanted).encode())}"
        return f"{signed}.{_base64(self.key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """One whose key the systems below know."""
    return Issuer(rsa.generate_private_key(65_537, 2048))


@dataclass(frozen=True)
class House:
    """A guarded system over one engine that remembers what reached it."""

    system: System
    engine: Engine
    folder: Path

    def ask(self, headers: Mapping[str, str], path: str = CHAT, **fields: Any) -> httpx.Response:
        """A chat with these headers."""
        return httpx.post(self.system.url + path, json=chat(**fields), headers=dict(headers), timeout=HANG_GUARD_S)

    def get(self, headers: Mapping[str, str], path: str = "/v1/models") -> httpx.Response:
        """A GET with these headers."""
        return httpx.get(self.system.url + path, headers=dict(headers), timeout=HANG_GUARD_S)

    def tenant(self, answer: httpx.Response) -> str | None:
        """Whose request the decision log says it was."""
        tenant: str | None = self.system.decision(answer.headers["x-pointsman-request-id"])["tenant"]
        return tenant

    def reached(self, answer: httpx.Response) -> dict[str, str]:
        """The headers with which a request reached its engine."""
        wanted = answer.headers["x-pointsman-request-id"]
        [headers] = [
            request["headers"]
            for request in self.engine.requests()
            if request["headers"].get("x-pointsman-request-id") == wanted
        ]
        return dict(headers)

    def refusals(self, reason: str) -> float:
        """So many were refused for it."""
        return self.system.total("pointsman_refusals_total", f'reason="{reason}"', 'status="401"')


def house(folder: Path, engine: Engine, headers: Mapping[str, str], **access: Any) -> Iterator[House]:
    """A system guarded by `access`; `headers` let the harness in."""
    routing = {"paths": [{"prefix": "/custom", "pool": "chat"}]}
    config = {"pools": [pool_of([engine])], "routing": routing, "access": access, "headers": dict(headers)}
    system = System(folder, config)
    system.start()
    system.wait_pickable(engine.address)
    yield House(system, engine, folder)
    system.stop()
    print(system.log.read_text()[-8000:])


@pytest.fixture(scope="module")
def engine(make_engines: Callable[..., list[Engine]]) -> Engine:
    """Shared by this module's systems."""
    return make_engines(1, "--speed", "100", "--record", "100")[0]


@pytest.fixture(scope="module")
def keys(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """API keys: one in the config, others in a file."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.yaml").write_text("[]")
    yield from house(folder, engine, bearer(ACME), api_keys=[entry(ACME, "acme")], api_keys_file="keys.yaml")


@pytest.fixture(scope="module")
def tokens(engine: Engine, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Tokens alone."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "jwks.json").write_text(json.dumps(issuer.key_set()))
    jwt = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks_file": "jwks.json", "tenant_claim": "org.id"}
    yield from house(folder, engine, bearer(issuer.token()), jwt=jwt)


@pytest.fixture(scope="module")
def either(engine: Engine, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Keys, tokens from a fetched key set, or the word of a hop before us; credentials go on to engines."""
    import http.server
    import threading

    published = json.dumps(issuer.key_set()).encode()

    class KeySet(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(published)))
            self.end_headers()
            self.wfile.write(published)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), KeySet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    jwt = {
        "issuer": ISSUER, "audiences": [AUDIENCE], "tenant_claim": "org.id",
        "jwks_uri": f"http://127.0.0.1:{server.server_port}/keys",
    }  # fmt: skip
    yield from house(
        tmp_path_factory.mktemp("either"), engine, bearer(ACME), api_keys=[entry(ACME, "acme")], jwt=jwt,
        tenant_header="x-pointsman-tenant", forward_credentials=True,
    )  # fmt: skip
    server.shutdown()
    server.server_close()


# -- API keys


def test_an_openai_client_with_a_key_is_served(keys: House) -> None:
    """As the key's tenant."""
    client = openai.OpenAI(base_url=f"{keys.system.url}/v1", api_key=ACME, max_retries=0)
    raw = client.chat.completions.with_raw_response.create(
        model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )
    assert raw.parse().choices[0].message.content
    assert keys.system.decision(raw.headers["x-pointsman-request-id"])["tenant"] == "acme"
    assert {model.id for model in client.models.list()} == {"sim", "gpt-4o"}


def test_an_openai_client_with_a_wrong_key_is_told(keys: House) -> None:
    """With the error that its library knows, and it is counted."""
    before = keys.refusals("wrong_credentials")
    client = openai.OpenAI(base_url=f"{keys.system.url}/v1", api_key="pm-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as told:
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])
    assert told.value.code == "invalid_api_key"
    assert told.value.response.headers["www-authenticate"] == 'Bearer realm="pointsman"'
    assert keys.refusals("wrong_credentials") == before + 1


def test_without_a_key_nothing_is_reached(keys: House) -> None:
    """Not the model list, no path rule, no stored answer; and a path that there is not is none the less a 401."""
    before = len(keys.engine.requests())
    for path in ("/v1/models", "/v1/responses/resp_1", "/custom/x", "/nowhere", "/metrics"):
        answer = keys.get({}, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "no_credentials"), path
    for path in (CHAT, "/v1/completions", "/v1/responses", "/custom/x"):
        assert keys.ask({}, path).status_code == 401
    assert len(keys.engine.requests()) == before


def test_a_large_body_is_refused_before_it_is_sent(keys: House) -> None:
    """The answer comes while most of the body is still to come."""

    def slowly() -> Iterator[bytes]:
        yield b"{" + b" " * 1000
        eventually(lambda: keys.refusals("no_credentials") > before, "the refusal is out")
        yield b"}"

    before = keys.refusals("no_credentials")
    answer = httpx.post(keys.system.url + CHAT, content=slowly(), timeout=HANG_GUARD_S)
    assert answer.status_code == 401


def test_anthropics_clients_send_their_own_header(keys: House) -> None:
    """And are told in their own form."""
    body = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    url = f"{keys.system.url}/v1/messages"
    answer = httpx.post(url, json=body, headers={"x-api-key": ACME}, timeout=HANG_GUARD_S)
    assert answer.status_code == 200
    assert keys.tenant(answer) == "acme"
    answer = httpx.post(url, json=body, headers={"x-api-key": "pm-wrong"}, timeout=HANG_GUARD_S)
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("headers", [bearer(ACME), {"x-api-key": ACME}, bearer(ACME) | {"x-api-key": "pm-wrong"}])
def test_a_key_reaches_no_engine(keys: House, headers: dict[str, str]) -> None:
    """Whichever header it came in."""
    answer = keys.ask(headers)
    assert answer.status_code == 200
    assert not {"authorization", "x-api-key"} & {name.lower() for name in keys.reached(answer)}


async def test_a_websocket_needs_a_key_too(keys: House) -> None:
    """Before the upgrade; with it the socket opens."""
    async with aiohttp.ClientSession(keys.system.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as told:
            await session.ws_connect("/v1/realtime?model=sim")
        assert told.value.status == 401
        async with session.ws_connect(
            "/v1/realtime?model=sim", headers=bearer(ACME), timeout=aiohttp.ClientWSTimeout(ws_close=5)
        ) as socket:
            await socket.send_str("one")
            assert await socket.receive_str(timeout=HANG_GUARD_S) == "one"


def test_a_tenant_cannot_be_claimed(keys: House) -> None:
    """By a header of the client's own."""
    answer = keys.ask(bearer(ACME) | {"x-pointsman-tenant": "other"})
    assert keys.tenant(answer) == "acme"
    assert keys.ask({"x-pointsman-tenant": "acme"}).status_code == 401


def test_keys_come_and_go_with_their_file(keys: House) -> None:
    """Without a restart; what cannot be understood leaves the last good list."""
    file = keys.folder / "keys.yaml"
    assert keys.get(bearer(OTHER)).status_code == 401
    file.write_text(json.dumps({"api_keys": [entry(OTHER, "other")]}))
    eventually(lambda: keys.get(bearer(OTHER)).status_code == 200, "the new key lets in")
    file.write_text("- {name: half")
    eventually(lambda: keys.system.total("pointsman_api_key_file_reads_total", "failed"), "the slip was seen")
    assert keys.get(bearer(OTHER)).status_code == 200
    file.write_text("[]")
    eventually(lambda: keys.get(bearer(OTHER)).status_code == 401, "the key is gone")
    assert keys.get(bearer(ACME)).status_code == 200


def test_keys_of_the_config_change_with_it(keys: House) -> None:
    """A reload is enough, as long as there have been keys from the start."""
    keys.system.config["access"]["api_keys"].append(entry("pm-third", "third"))
    keys.system.write_config()
    eventually(lambda: keys.get(bearer("pm-third")).status_code == 200, "the new key lets in")
    answer = keys.ask(bearer("pm-third"))
    assert keys.tenant(answer) == "third"


def test_answers_of_another_tenant_are_not_there(keys: House) -> None:
    """Neither to read, nor to cancel, nor to go on from, nor to replace."""
    (keys.folder / "keys.yaml").write_text(json.dumps([entry(OTHER, "other")]))
    eventually(lambda: keys.get(bearer(OTHER)).status_code == 200, "the other tenant has a key")
    url = f"{keys.system.url}/v1/responses"
    body = {"model": "sim", "input": "hi", "max_output_tokens": 4}
    made = httpx.post(url, json=body, headers=bearer(ACME), timeout=HANG_GUARD_S).json()["id"]
    assert keys.get(bearer(ACME), f"/v1/responses/{made}").status_code == 200
    theirs = keys.get(bearer(OTHER), f"/v1/responses/{made}")
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "unknown_response")
    cancel = httpx.post(f"{url}/{made}/cancel", headers=bearer(OTHER), timeout=HANG_GUARD_S)
    assert cancel.status_code == 404
    for field, status in (("previous_response_id", 404), ("request_id", 400)):
        answer = httpx.post(url, json=body | {field: made}, headers=bearer(OTHER), timeout=HANG_GUARD_S)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


def test_no_key_is_told_of_anywhere(keys: House) -> None:
    """Not in our log, the decision log, the metrics or the admin API's view of the config."""
    keys.ask(bearer(ACME))
    keys.ask(bearer("pm-wrong-but-secret"))
    told = [
        keys.system.log.read_text(),
        str(keys.system.metrics()),
        *(httpx.get(f"{keys.system.admin_url}/v1/{what}").text for what in ("decisions", "refusals", "config")),
    ]
    assert all(key not in text for text in told for key in (ACME, OTHER, "pm-wrong-but-secret"))


def test_access_cannot_be_opened_by_a_reload(make_system: Callable[..., System], engine: Engine) -> None:
    """Envoy was started without the credentials' way to us, or with it: the change waits, and the log says so."""
    guarded = make_system(pools=[pool_of([engine])], access={"api_keys": [entry(ACME, "acme")]}, headers=bearer(ACME))
    guarded.config.pop("access")
    guarded.config["retries"] = {"attempts": 2}
    guarded.write_config()
    eventually(lambda: guarded.total("pointsman_config_generation") == 2, "the rest of the change is in force")
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
    assert "in effect at the next start only" in guarded.log.read_text()


# -- tokens


def test_a_good_token_is_served_as_its_claims_tenant(tokens: House, issuer: Issuer) -> None:
    """And goes no further."""
    answer = tokens.ask(bearer(issuer.token()))
    assert answer.status_code == 200
    assert tokens.tenant(answer) == "acme"
    assert "authorization" not in {name.lower() for name in tokens.reached(answer)}


@pytest.mark.parametrize(
    ("claims", "status", "why"),
    [
        ({"exp": 1_000_000_000}, 401, "Jwt_is_expired"),
        ({"exp": None}, 401, "Jwt_verification_fails"),
        ({"aud": "somebody-else"}, 403, "Audiences_in_Jwt_are_not_allowed"),
        ({"iss": "https://elsewhere.example"}, 401, "Jwt_issuer_is_not_configured"),
    ],
    ids=["expired", "never expires", "another audience", "another issuer"],
)
def test_a_bad_token_is_refused_by_envoy_in_openais_form(
    tokens: House, issuer: Issuer, claims: dict[str, Any], status: int, why: str
) -> None:
    """Before us: it costs the decision process nothing."""
    streams = tokens.system.total("pointsman_ext_proc_streams_opened_total")
    answer = tokens.ask(bearer(issuer.token(**claims)))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        status,
        "invalid_request_error",
        "invalid_api_key",
    )
    assert why in error["message"]
    assert tokens.system.total("pointsman_ext_proc_streams_opened_total") == streams


def test_a_token_of_anothers_making_is_refused(tokens: House) -> None:
    """All claims right, but signed with another key."""
    forger = Issuer(rsa.generate_private_key(65_537, 2048))
    assert tokens.ask(bearer(forger.token())).status_code == 401
    assert tokens.ask({}).status_code == 401


def test_a_token_without_the_tenants_claim_is_refused(tokens: House, issuer: Issuer) -> None:
    """By us, in words; a header of the client's does not stand in for it."""
    answer = tokens.ask(bearer(issuer.token(org=None)) | {"x-pointsman-tenant": "acme"})
    assert answer.status_code == 401
    assert "org.id" in answer.json()["error"]["message"]


def test_without_a_token_it_is_said_that_there_is_none(tokens: House) -> None:
    """By Envoy, with the code that we would give where a key would do as well."""
    for headers in ({}, {"authorization": "Basic eDp5"}):
        answer = tokens.ask(headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "no_credentials")
    garbled = tokens.ask(bearer("no-token"))
    assert (garbled.status_code, garbled.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_token_in_the_query_is_none(tokens: House, issuer: Issuer) -> None:
    """Envoy would take it by default; queries stand in logs."""
    assert tokens.ask({}, f"{CHAT}?access_token={issuer.token()}").status_code == 401


async def test_a_websocket_takes_a_token(tokens: House, issuer: Issuer) -> None:
    """The upgrade has filters of its own."""
    async with aiohttp.ClientSession(tokens.system.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as told:
            await session.ws_connect("/v1/realtime?model=sim", headers=bearer(issuer.token(exp=1_000_000_000)))
        assert told.value.status == 401
        async with session.ws_connect("/v1/realtime?model=sim", headers=bearer(issuer.token())) as socket:
            await socket.send_str("one")
            assert await socket.receive_str(timeout=HANG_GUARD_S) == "one"


# -- either


def test_any_one_of_the_sources_suffices(either: House, issuer: Issuer) -> None:
    """A key is no token, and yet lets in; a token counts more than what else a request brings."""
    assert either.tenant(either.ask(bearer(ACME))) == "acme"
    token = bearer(issuer.token(org={"id": "by-token"}))
    assert either.tenant(either.ask(token)) == "by-token"
    assert either.tenant(either.ask({"x-pointsman-tenant": "by-hop"})) == "by-hop"
    assert either.tenant(either.ask(token | {"x-pointsman-tenant": "by-hop", "x-api-key": ACME})) == "by-token"


def test_with_none_that_is_good_the_answer_is_ours(either: House, issuer: Issuer) -> None:
    """An expired token or nothing at all: Envoy passes it on, and we refuse it."""
    expired = either.ask(bearer(issuer.token(exp=1_000_000_000)))
    assert (expired.status_code, expired.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (either.ask({}).status_code, either.ask({}).json()["error"]["code"]) == (401, "no_credentials")


def test_credentials_go_on_where_asked_for(either: House, issuer: Issuer) -> None:
    """Engines may have keys of their own."""
    assert either.reached(either.ask(bearer(ACME)))["authorization"] == f"Bearer {ACME}"
    token = issuer.token()
    assert either.reached(either.ask(bearer(token)))["authorization"] == f"Bearer {token}"
