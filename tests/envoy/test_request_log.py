"""The request log through a real Envoy: a line for every request, however it ended; prompts redacted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

from extproc.access.keys import digest_of

KEY = "pm-acme-0123456789abcdef"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
ACCESS = {"api_keys": [{"name": "laptop", "tenant": "acme", "sha256": digest_of(KEY)}]}
CHAT = "/v1/chat/completions"


class House:
    """A guarded system over two engines, and the lines of its request log."""

    def __init__(self, system: System, engines: list[Engine]) -> None:
        self.system = system
        self.engines = engines
        self.file = system.config_path.with_name("requests.jsonl")

    def ready(self) -> None:
        """Until both engines are served from."""
        self.system.wait_pickable(*(engine.address for engine in self.engines))

    def ask(self, **fields: Any) -> httpx.Response:
        """A chat of the tenant's."""
        return httpx.post(f"{self.system.url}{CHAT}", json=chat(**fields), headers=AUTHORIZED, timeout=HANG_GUARD_S)

    def lines(self, request_id: str) -> list[dict[str, Any]]:
        """The lines so far of one request."""
        file = self.file if self.file.exists() else self.system.log
        lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        found = [json.loads(line) for line in lines if line.startswith('{"time"')]
        return [line for line in found if line["request_id"] == request_id]

    def line(self, request_id: str) -> dict[str, Any]:
        """The one line of a request, once it is there."""
        found: list[dict[str, Any]] = eventually(lambda: self.lines(request_id), "the request's line is there")
        assert len(found) == 1
        return found[0]

    def of(self, answer: httpx.Response) -> dict[str, Any]:
        """The line of the request that got this answer."""
        return self.line(answer.headers["x-pointsman-request-id"])


@pytest.fixture(scope="module")
def house(make_engines: Callable[..., list[Engine]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One that logs to a file, shared by the tests; engines that a test kills it starts again."""
    engines = make_engines(2, "--speed", "100")
    observe = {"request_log": {"file": "requests.jsonl"}}
    config = {"pools": [pool_of(engines)], "observe": observe, "access": ACCESS, "headers": AUTHORIZED}
    system = System(tmp_path_factory.mktemp("house"), config)
    system.start()
    house = House(system, engines)
    house.ready()
    yield house
    system.stop()
    print(system.log.read_text()[-8000:])


def test_a_served_request_has_a_line(house: House) -> None:
    """Whose it was, what was asked and served, where, how it went; no prompt."""
    answer = house.ask(content="a secret prompt", model="gpt-4o")
    line = house.of(answer)
    assert {
        "tenant": "acme", "key": "laptop", "path": CHAT, "kind": "chat", "stream": False, "asked_model": "gpt-4o",
        "model": "sim", "pool": "chat", "attempts": 1, "status": 200, "outcome": "ok", "reason": None, "flags": [],
        "completion_tokens": 4, "response_bytes": len(answer.content),
    }.items() <= line.items()  # fmt: skip
    assert line["endpoint"] == line["first_endpoint"] == answer.headers["x-pointsman-endpoint"]
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["request_bytes"] > 0
    assert line["prompt_tokens"] > 0
    assert "a secret prompt" not in house.file.read_text()


def test_a_refused_request_has_a_line(house: House) -> None:
    """With the reason, and whose it was as far as that is known; neither keys nor queries."""
    assert {
        "tenant": "acme", "key": "laptop", "path": CHAT, "status": 404, "outcome": "refused", "reason": "unknown_model",
    }.items() <= house.of(house.ask(model="nope")).items()  # fmt: skip
    stranger = httpx.post(f"{house.system.url}{CHAT}?key={KEY}", json=chat(), timeout=HANG_GUARD_S)
    assert {
        "tenant": None, "key": None, "path": CHAT, "status": 401, "outcome": "refused", "reason": "no_credentials",
    }.items() <= house.of(stranger).items()  # fmt: skip
    assert KEY not in house.file.read_text()


def test_a_list_of_models_has_a_line(house: House) -> None:
    """No engine had a part in it."""
    models = httpx.get(f"{house.system.url}/v1/models", headers=AUTHORIZED, timeout=HANG_GUARD_S)
    assert {"tenant": "acme", "status": 200, "outcome": "answered"}.items() <= house.of(models).items()


def test_a_failover_names_both_endpoints(house: House) -> None:
    """The one chosen and the one that served."""
    house.engines[0].faults(reset_before_headers=True)
    answers = [house.ask() for _ in range(8)]
    house.engines[0].faults()
    assert {answer.status_code for answer in answers} == {200}
    lines = [house.of(answer) for answer in answers]
    moved = [line for line in lines if line["first_endpoint"] == house.engines[0].address]
    assert moved
    assert all(line["endpoint"] == house.engines[1].address and line["attempts"] == 2 for line in moved)


def test_a_killed_engines_request_has_a_line(house: House) -> None:
    """With Envoy's flags and what had been sent."""
    house.ready()
    with httpx.Client(headers=AUTHORIZED, timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, house.system)
        engine = next(engine for engine in house.engines if engine.address == stream.endpoint)
        engine.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            stream.rest()
    engine.start()
    line = house.line(stream.request_id)
    assert (line["outcome"], line["endpoint"], line["stream"]) == ("endpoint_failed", stream.endpoint, True)
    assert line["flags"]
    assert line["response_bytes"] > 0


def test_a_request_that_outlives_our_process_has_a_line(house: House) -> None:
    """From Envoy's entry alone: whose it was died with the process that knew."""
    house.ready()
    with httpx.Client(headers=AUTHORIZED, timeout=HANG_GUARD_S) as client:
        stream = HeldStream(client, house.system)
        house.system.kill_decision_process()
        eventually(lambda: house.ask().status_code == 200, "requests are served again")
        for engine in house.engines:
            engine.release()
        assert b"[DONE]" in stream.rest()
    line = house.line(stream.request_id)
    assert (line["outcome"], line["status"], line["endpoint"]) == ("ok", 200, stream.endpoint)
    assert (line["tenant"], line["model"], line["path"]) == (None, None, CHAT)


def test_no_line_was_lost(house: House) -> None:
    """By all of the above."""
    assert house.system.total("pointsman_request_log_lost_total") == 0


def test_prompts_are_logged_redacted_where_asked_for(
    make_system: Callable[..., System], make_engines: Callable[..., list[Engine]]
) -> None:
    """To standard output, for want of a file. Built-in patterns and the operator's own; what is cut off stays out."""
    engines = make_engines(1, "--speed", "100")
    wanted = {"prompts": True, "prompt_bytes": 400, "redact_patterns": {"badge": r"E\d{6}"}}
    house = House(make_system(pools=[pool_of(engines)], observe={"request_log": wanted}), engines)
    house.ready()
    content = "I am bob@acme.org, badge E123456,\ncard 4111 1111 1111 1111, key sk-proj-0123456789abcdef. Why? "
    shown = house.of(house.ask(content=content + "x" * 1000))["prompt"]
    assert "I am [email], badge [badge],\ncard [credit_card], key [api_key]. Why? xxx" in shown
    assert len(shown) < 500
    assert house.of(house.ask(content="short"))["prompt"] == '[{"role":"user","content":"short"}]'
