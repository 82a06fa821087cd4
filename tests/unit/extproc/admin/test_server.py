"""The admin API and the metrics page, over loopback sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from typer.testing import CliRunner

from extproc.admin.client import NoAnswer, ask
from extproc.admin.server import AdminServer
from extproc.cli import cli

ADDRESS = "10.0.0.1:8000"


class Operations:
    """A running system that answers what it is told to."""

    def __init__(self) -> None:
        self.is_ready = (True, "")
        self.asked: list[tuple[Any, ...]] = []
        self.in_loop: dict[str, bool] = {}

    def _note_thread(self, what: str) -> None:
        self.in_loop[what] = threading.current_thread() is threading.main_thread()

    def ready(self) -> tuple[bool, str]:
        """As set."""
        return self.is_ready

    def describe_fleet(self) -> list[dict[str, Any]]:
        """One endpoint."""
        self._note_thread("fleet")
        return [{"endpoint": ADDRESS, "state": "ready"}]

    def breakers(self) -> dict[str, Any]:
        """One breaker."""
        return {"models": {"p": {"position": "open"}}, "zones": {}}

    def decisions(self, limit: int, request_id: str | None) -> list[dict[str, Any]]:
        """One decision."""
        self._note_thread("decisions")
        self.asked.append(("decisions", limit, request_id))
        return [{"request_id": "r"}]

    def refusals(self, limit: int) -> list[dict[str, Any]]:
        """One refusal."""
        self._note_thread("refusals")
        self.asked.append(("refusals", limit))
        return [{"reason": "empty_body"}]

    def tenants(self) -> dict[str, Any]:
        """One tenant."""
        return {"acme": {"running": 2}}

    def queues(self) -> dict[str, Any]:
        """One queue."""
        return {"chat": {"held_bytes": 0}}

    def profiles(self) -> dict[str, Any]:
        """Operations."""
        return {"chat": {"prefill_tokens_per_s": 5.0}}

    async def explain(self, path: str, body: bytes, tenant: str | None) -> dict[str, Any]:
        """One explanation."""
        self._note_thread("explain")
        self.asked.append(("explain", path, body, tenant))
        return {"pool": "p"}

    def config(self) -> dict[str, Any]:
        """One generation."""
        return {"generation": 3, "config": {}}

    def drain(self, address: str, *, drain: bool) -> bool:
        """Only ADDRESS is there."""
        self.asked.append(("drain", address, drain))
        return address == ADDRESS

    def metrics_page(self) -> bytes:
        """A page."""
        self._note_thread("metrics")
        return b"pointsman_up 1\n"


def error(code: str, message: str, kind: str = "invalid_request_error") -> dict[str, str | None]:
    """What stands under `error`: the same four fields whatever went wrong."""
    return {"message": message, "type": kind, "param": None, "code": code}


def free_address() -> str:
    """A loopback address nobody listens on, on a port that no outgoing connection will take."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


class House:
    """The server and a client of it."""

    def __init__(self, client: aiohttp.ClientSession, admin: str, metrics: str) -> None:
        self.operations = Operations()
        self.admin, self.metrics = admin, metrics
        self.server = AdminServer(self.operations, admin=admin, metrics=metrics)
        self._client = client

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON document of an admin route."""
        url = f"http://{self.admin}{path}"
        async with self._client.request(method, url, data=body, headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def page(self, path: str) -> tuple[int, bytes, str]:
        """Status, body and content type from the metrics port."""
        async with self._client.get(f"http://{self.metrics}{path}") as response:
            return response.status, await response.read(), response.headers["content-type"]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Listening on two free ports."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
        house = House(client, free_address(), free_address())
        await house.server.start()
        yield house
        await house.server.stop()


async def test_it_lives(house: House) -> None:
    """Whatever the fleet does."""
    house.operations.is_ready = (False, "stopping")
    assert await house.ask("GET", "/livez") == (200, {"live": True})


async def test_it_says_whether_it_is_ready_and_why_not(house: House) -> None:
    """In the status, for probes, and in words."""
    assert await house.ask("GET", "/readyz") == (200, {"ready": True, "reason": ""})
    house.operations.is_ready = (False, "stopping")
    assert await house.ask("GET", "/readyz") == (503, {"ready": False, "reason": "stopping"})


async def test_the_fleet_is_told(house: House) -> None:
    """Every endpoint."""
    assert await house.ask("GET", "/v1/fleet") == (
        200,
        {
            "endpoints": [{"endpoint": ADDRESS, "state": "ready"}],
            "breakers": {"models": {"p": {"position": "open"}}, "zones": {}},
        },
    )


async def test_the_config_in_force_is_told(house: House) -> None:
    """With its generation."""
    assert await house.ask("GET", "/v1/config") == (200, {"generation": 3, "config": {}})


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (20, None)),
        ("?limit=5", (5, None)),
        ("?limit=0", (0, None)),
        ("?limit=1000000", (1_000, None)),
        ("?request_id=abc", (20, "abc")),
    ],
)
async def test_decisions_are_told_up_to_a_bound(house: House, query: str, asked: tuple[int, str | None]) -> None:
    """The newest 20 unless told otherwise, or one by its id."""
    assert await house.ask("GET", "/v1/decisions" + query) == (200, {"decisions": [{"request_id": "r"}]})
    assert house.operations.asked == [("decisions", *asked)]


async def test_refusals_are_told_up_to_a_bound(house: House) -> None:
    """As decisions are."""
    assert await house.ask("GET", "/v1/refusals?limit=5") == (200, {"refusals": [{"reason": "empty_body"}]})
    await house.ask("GET", "/v1/refusals?limit=5000")
    assert house.operations.asked == [("refusals", 5), ("refusals", 1_000)]


@pytest.mark.parametrize("route", ["decisions", "refusals"])
@pytest.mark.parametrize("limit", ["-1", "x", "", "1.5", "9" * 5_000])
async def test_a_limit_that_is_no_number_is_refused(house: House, route: str, limit: str) -> None:
    """In words, and nothing is read."""
    status, answer = await house.ask("GET", f"/v1/{route}?limit={limit}")
    assert (status, answer) == (400, {"error": error("invalid_request", "limit must be a whole number")})
    assert house.operations.asked == []


async def test_a_body_is_explained(house: House) -> None:
    """As chat unless told otherwise; the bytes as they are."""
    assert await house.ask("POST", "/v1/explain", b'{"model":"m"}') == (200, {"pool": "p"})
    await house.ask("POST", "/v1/explain?path=/v1/completions&tenant=acme", b"")
    assert house.operations.asked == [
        ("explain", "/v1/chat/completions", b'{"model":"m"}', None),
        ("explain", "/v1/completions", b"", "acme"),
    ]


@pytest.mark.parametrize(("verb", "drain"), [("drain", True), ("undrain", False)])
async def test_an_endpoint_is_drained_and_taken_back(house: House, verb: str, *, drain: bool) -> None:
    """Named by address, colon and all."""
    assert await house.ask("POST", f"/v1/endpoints/{ADDRESS}:{verb}") == (200, {"endpoint": ADDRESS, "done": verb})
    assert house.operations.asked == [("drain", ADDRESS, drain)]


async def test_an_ipv6_endpoint_can_be_named(house: House) -> None:
    """In brackets."""
    await house.ask("POST", "/v1/endpoints/[::1]:8000:drain")
    assert house.operations.asked == [("drain", "[::1]:8000", True)]


async def test_draining_a_stranger_is_not_found(house: House) -> None:
    """404 that names it."""
    status, answer = await house.ask("POST", "/v1/endpoints/10.9.9.9:1:drain")
    assert (status, answer) == (404, {"error": error("unknown_endpoint", "no endpoint 10.9.9.9:1")})


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("GET", "/nope", 404, ("unknown_path", "Not Found")),
        ("GET", "/metrics", 404, ("unknown_path", "Not Found")),
        ("POST", f"/v1/endpoints/{ADDRESS}:reboot", 404, ("unknown_path", "Not Found")),
        ("POST", f"/v1/endpoints/{ADDRESS}", 404, ("unknown_path", "Not Found")),
    ],
)
async def test_what_there_is_not_is_an_error_in_json(
    house: House, method: str, path: str, status: int, expected: tuple[str, str]
) -> None:
    """As everywhere else, and nothing is done."""
    assert await house.ask(method, path) == (status, {"error": error(*expected)})
    assert house.operations.asked == []


def routes() -> list[tuple[str, str]]:
    """Method and path of all that the admin API answers."""
    app = AdminServer(Operations(), admin="", metrics="")._admin_app()
    found = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None]
    return [(method, path.format(endpoint=ADDRESS, verb="drain")) for method, path in found if method != "HEAD"]


@pytest.mark.parametrize(("method", "path"), routes())
async def test_every_route_has_errors_of_one_shape(
    house: House, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """By the wrong method, from another origin's page, and where we fail: what fails is told in no answer."""
    wrong = "POST" if method == "GET" else "GET"
    assert await house.ask(wrong, path) == (405, {"error": error("method_not_allowed", "Method Not Allowed")})
    foreign = await house.ask(method, path, headers={"origin": "http://evil.example"})
    assert foreign == (403, {"error": error("other_origin", "requests of other origins are not answered")})
    assert house.operations.asked == []

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret detail")

    for operation in ("ready", "describe_fleet", "decisions", "refusals", "explain", "queues", "tenants", "profiles",
                      "config", "drain"):  # fmt: skip
        monkeypatch.setattr(house.operations, operation, broken)
    if path != "/livez":
        failed = await house.ask(method, path)
        assert failed == (500, {"error": error("internal_error", "internal error", "server_error")})


@pytest.mark.parametrize("path", ["/nope", "/v1/models", "/v1/audio/translations", ""])
async def test_a_path_that_cannot_be_explained_is_told_from_those_that_can(house: House, path: str) -> None:
    """Naming them."""
    status, answer = await house.ask("POST", f"/v1/explain?path={path}", b"{}")
    told = answer["error"]
    assert (status, told["code"], told["param"], told["type"]) == (
        400,
        "invalid_request",
        "path",
        "invalid_request_error",
    )
    assert told["message"].startswith(f"not a path with a JSON body: {path}; there are: /v1/chat/completions, ")
    assert house.operations.asked == []


async def test_a_body_that_is_not_what_its_headers_say_is_refused(house: House) -> None:
    """In words; it is the caller's fault and not ours."""
    status, answer = await house.ask("POST", "/v1/explain", b"{}", headers={"content-encoding": "gzip"})
    told = error("invalid_request", "the body cannot be read: it is not what its headers say")
    assert (status, answer) == (400, {"error": told})
    assert house.operations.asked == []


async def test_a_fault_of_ours_is_json_too(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 500 without its working, and the server lives on."""

    def broken() -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(house.operations, "describe_fleet", broken)
    assert (await house.ask("GET", "/v1/fleet"))[0] == 500
    assert (await house.ask("GET", "/livez"))[0] == 200


async def test_metrics_have_their_own_port_and_nothing_else_there(house: House) -> None:
    """In Prometheus' own content type; the admin API is not reachable through it."""
    status, page, content_type = await house.page("/metrics")
    assert (status, page) == (200, b"pointsman_up 1\n")
    assert content_type.startswith("text/plain; version=")
    assert (await house.page("/v1/fleet"))[0] == 404
    assert (await house.page("/livez"))[0] == 404


async def test_what_takes_long_is_done_beside_the_decision_loop(house: House) -> None:
    """Reading what never changes; but what changes with every decision is read in the loop."""
    for path in ("fleet", "decisions", "refusals"):
        await house.ask("GET", f"/v1/{path}")
    await house.ask("POST", "/v1/explain", b"{}")
    await house.page("/metrics")
    assert house.operations.in_loop == {
        "fleet": True,
        "decisions": False,
        "refusals": False,
        "explain": True,
        "metrics": False,
    }


async def test_json_is_made_beside_the_decision_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer about a large fleet is megabytes."""
    in_loop: list[bool] = []
    encode = msgspec.json.encode

    def noting(document: object) -> bytes:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return encode(document)

    monkeypatch.setattr(msgspec.json, "encode", noting)
    for path in ("fleet", "decisions", "refusals", "config"):
        await house.ask("GET", f"/v1/{path}")
    await house.ask("POST", "/v1/explain", b"{}")
    assert in_loop == [False] * 5


async def test_a_taken_port_is_an_error_at_the_start(house: House) -> None:
    """Not a server that nobody reaches."""
    second = AdminServer(house.operations, admin=free_address(), metrics=house.metrics)
    expected = f"observe.metrics: cannot listen on {house.metrics}: the address is already in use; does another Point"
    with pytest.raises(OSError, match=expected):
        await second.start()
    await second.stop()


async def test_after_stopping_nobody_listens(house: House) -> None:
    """On either port; stopping again is harmless."""
    await house.server.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await house.ask("GET", "/livez")
    with pytest.raises(aiohttp.ClientConnectorError):
        await house.page("/metrics")


async def test_a_page_of_another_origin_is_refused(house: House) -> None:
    """A browser on the operator's machine reaches loopback; pages that are not ours must not drain anything."""
    url = f"http://{house.admin}"
    async with aiohttp.ClientSession() as browser:
        drain = f"{url}/v1/endpoints/10.0.0.1:80:drain"
        async with browser.post(drain, headers={"origin": "http://evil.example"}) as response:
            assert (response.status, response.content_type) == (403, "application/json")
        async with browser.get(f"{url}/livez", headers={"origin": url}) as response:
            assert response.status == 200


async def test_what_was_learned_can_be_carried_over(house: House) -> None:
    """`pointsman profiles` prints it as a config has it."""
    assert await house.ask("GET", "/v1/tenants") == (200, {"tenants": {"acme": {"running": 2}}})
    assert await house.ask("GET", "/v1/profiles") == (200, {"profiles": {"chat": {"prefill_tokens_per_s": 5.0}}})
    printed = await asyncio.to_thread(CliRunner().invoke, cli, ["profiles", "--admin", house.admin])
    assert yaml.safe_load(printed.output) == {"pools": [{"name": "chat", "hardware": {"prefill_tokens_per_s": 5.0}}]}


def test_profiles_of_nobody_are_no_traceback() -> None:
    """Nothing listens there, and what to look at is said in a line."""
    printed = CliRunner().invoke(cli, ["profiles", "--admin", "127.0.0.1:1"])
    assert printed.exit_code == 2
    told = "no answer from 127.0.0.1:1: Connection refused; does Pointsman run, with this `admin.listen`?"
    assert printed.stderr.splitlines() == [told]


@pytest.mark.parametrize("admin", ["nobody", "127.0.0.1:x", "a:b", "0.0.0.0:9700", ""])
def test_what_is_no_address_of_an_admin_api_is_told_as_that(admin: str) -> None:
    """Before anything is asked."""
    printed = CliRunner().invoke(cli, ["profiles", "--admin", admin])
    assert printed.exit_code == 2
    [line] = printed.stderr.splitlines()
    assert line.startswith("--admin: ")
    assert f"{admin!r} is not " in line or "0.0.0.0:9700 is an address to listen on" in line


async def test_a_fault_of_the_admin_api_is_told_as_that(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as another server's answer: to look for the right address would help nobody."""

    def broken() -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(house.operations, "profiles", broken)
    printed = await asyncio.to_thread(CliRunner().invoke, cli, ["profiles", "--admin", house.admin])
    assert (printed.exit_code, printed.stderr) == (2, f"{house.admin} answers 500: internal error\n")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {"message": 5}}', b"\xff"])
async def test_a_fault_in_words_that_are_not_ours_is_another_servers(body: bytes) -> None:
    """Whatever stands in it."""

    async def fail(_request: web.BaseRequest) -> web.Response:
        return web.Response(status=502, body=body)

    async with RawTestServer(fail) as server:
        with pytest.raises(NoAnswer, match="is no admin API of Pointsman"):
            await asyncio.to_thread(ask, f"127.0.0.1:{server.port}", "/v1/profiles", "profiles")


async def test_another_server_is_no_admin_api(house: House) -> None:
    """Whether it knows the path or not."""
    metrics = await asyncio.to_thread(CliRunner().invoke, cli, ["profiles", "--admin", house.metrics])
    assert metrics.exit_code == 2
    assert (
        metrics.stderr == f"what answers at {house.metrics} is no admin API of Pointsman; is that its `admin.listen`?\n"
    )
    with pytest.raises(NoAnswer, match="is no admin API of Pointsman"):
        await asyncio.to_thread(ask, house.admin, "/v1/tenants", "profiles")
