"""The precise index against real vLLM: what it foretells is what the engine finds cached."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, System, eventually, free_ports
from real_engines import Vllm, _run, model, python_with_vllm

from vllm_adapters.tokens import CHAT_PATH, COMPLETION_PATH, LocalTokenizer, answered_tokens, questions

pytestmark = pytest.mark.timeout(1_800)  # a hang guard; the first run makes the environment: 3 GB

REQUESTS, SESSIONS = 500, 24
BLOCKS, BLOCK_TOKENS = 96, 32
"""An engine's cache: 3072 tokens, a fraction of what the conversations have together."""
LONGEST_WORDS = 500
WORDS = ["switch", "signal", "rail", "sleeper", "ballast", "point", "lever", "lamp", "block", "token", "bell", "yard"]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two with events, a small cache, and an adapter."""
    folder = tmp_path_factory.mktemp("vllm-events")
    _run(str(python_with_vllm()), str(HERE / "make_adapter.py"), str(folder / "l1"), str(model("tiny")))
    made = [_server(folder, *ports) for ports in zip(*[iter(free_ports(6))] * 3, strict=True)]
    try:
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.stop()


def _server(folder: Path, port: int, events: int, replay: int) -> Vllm:
    publish = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    options = ["--kv-events-config", json.dumps(publish), "--num-gpu-blocks-override", str(BLOCKS)]
    options += ["--max-model-len", "2048", "--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
    return Vllm(folder, port, "tiny", *options, "--lora-modules", f"l1={folder / 'l1'}")


def _pool(**precise: Any) -> dict[str, Any]:
    """Tokens by the model's own tokenizer; patient, for the engines have the same two cores."""
    settings = {"tokenizer": str(model("tiny")), "budget_ms": 1_000, **precise}
    return {"models": ["tiny", "l1"], "name": "tiny", "prefix_index": {"precise": settings}}


def _known(system: System) -> bool:
    blind = system.metrics().get('pointsman_precise_index_blind_endpoints{pool="tiny"}')
    return blind == 0


@dataclass
class Session:
    """One conversation. Each kind of request is one that caches apart from the others."""

    number: int
    rng: Random
    history: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> tuple[str, dict[str, Any]]:
        """The next request: the path and what is sent."""
        if sum(len(message["content"].split()) for message in self.history) > LONGEST_WORDS:
            self.history = []
        opening = 120 if not self.history else 20
        self.history.append({"role": "user", "content": " ".join(self.rng.choice(WORDS) for _ in range(opening))})
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        if self.number % 3 == 1:
            body["cache_salt"] = f"salt {self.number % 2}"
        elif self.number % 3 == 2:
            body["model"] = "l1"
        if self.number % 4 == 3:
            text = " ".join(message["content"] for message in self.history)
            return COMPLETION_PATH, body | {"prompt": f"session {self.number} {text}"}
        system = {"role": "system", "content": f"You are number {self.number % 6} of six. " + " ".join(WORDS * 4)}
        return CHAT_PATH, body | {"messages": [system, *self.history]}

    def answered(self, choice: dict[str, Any]) -> None:
        """The conversation goes on from there."""
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        self.history.append({"role": "assistant", "content": said})


@dataclass
class Tally:
    """Foretold against found."""

    right: int = 0
    lengths_right: int = 0
    partial: int = 0
    wrong: list[tuple[Any, ...]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)

    def take(self, path: str, body: dict[str, Any], usage: dict[str, Any], decision: dict[str, Any]) -> None:
        """One request."""
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        foretold = decision["matched_tokens"]
        self.right += foretold == cached
        self.lengths_right += decision["input_tokens"] == usage["prompt_tokens"]
        self.partial += 0 < cached < usage["prompt_tokens"]
        self.served[decision["endpoints"][0]] += 1
        if foretold != cached:
            self.wrong.append((path, body["model"], foretold, cached, usage["prompt_tokens"], decision["fallbacks"]))


def _send(
    client: httpx.Client, system: System, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(answer, decision)."""
    answer = client.post(system.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json(), system.decision(answer.headers["x-pointsman-request-id"])


def _evictions(servers: list[Vllm]) -> float:
    """Blocks that had to go at least: those that prompts filled, less those that fit."""
    computed = [
        server.metric("vllm:prompt_tokens_total") - server.metric("vllm:prefix_cache_hits_total") for server in servers
    ]
    return sum(computed) / BLOCK_TOKENS - len(servers) * BLOCKS


def _senses(system: System) -> int:
    """Their process id, by the log: they are the decision process's child."""
    started = [json.loads(line) for line in system.log.read_text().splitlines() if '"child": "senses"' in line]
    return int(started[-1]["pid"])


def test_what_is_foretold_is_what_the_engines_find(
    servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """500 requests, plain, salted and with an adapter, as chats and completions, with evictions: 99 % exactly right."""
    system = make_real_system(servers, pool=_pool())
    eventually(lambda: _known(system), "the index knows both engines")
    rng, tally = Random(20), Tally()
    sessions = [Session(number, Random(number)) for number in range(SESSIONS)]
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        for _ in range(REQUESTS):
            session = rng.choice(sessions)
            path, body = session.body()
            answer, decision = _send(client, system, path, body)
            tally.take(path, body, answer["usage"], decision)
            session.answered(answer["choices"][0])
    evicted = _evictions(servers)
    print(
        f"foretold exactly {tally.right} of {REQUESTS}, lengths {tally.lengths_right}, partial hits {tally.partial}, "
        f"evicted at least {evicted:.0f} blocks, {dict(tally.served)}; wrong: {tally.wrong[:12]}"
    )
    print({name: value for name, value in system.metrics().items() if "kv_events" in name or "fallbacks" in name})
    assert evicted > 0
    assert tally.partial >= 0.3 * REQUESTS
    assert len(tally.served) == len(servers)
    assert tally.lengths_right == REQUESTS
    assert tally.right >= 0.99 * REQUESTS


CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "which way"}]},
    {"messages": [{"role": "user", "content": "which way"}], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "which way"}], "add_special_tokens": True},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "which"}, {"type": "text", "text": "way é"}]}]},
    {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a  b\n\nc 😀 <|im_end|> d"}]},
    {"messages": [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "which way"}]},
    {
        "messages": [{"role": "user", "content": "which"}, {"role": "assistant", "content": "the way "}],
        "continue_final_message": True, "add_generation_prompt": False,
    },
    {
        "messages": [
            {"role": "user", "content": "which"},
            {
                "role": "assistant", "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "so"}]},
        ]
    },
]  # fmt: skip
TEXTS: list[dict[str, Any]] = [
    {"prompt": "which way"},
    {"prompt": ["a b", "c"]},
    {"prompt": "", "add_special_tokens": False},
]


@pytest.mark.parametrize(
    ("path", "body"), [*[(CHAT_PATH, chat) for chat in CHATS], *[(COMPLETION_PATH, text) for text in TEXTS]]
)
def test_our_tokens_are_the_engines(servers: list[Vllm], path: str, body: dict[str, Any]) -> None:
    """Whatever a request looks like, our tokenizer and the engine's make the same of it."""
    asked = json.dumps({"model": "tiny", **body}).encode()
    *_, (place, question) = questions(path, asked)
    answer = servers[0].post(place, json.loads(question))
    assert answer.status_code == 200, answer.text
    assert LocalTokenizer(model("tiny")).tokens_of(path, asked) == answered_tokens(answer.content)


def test_the_engines_own_tokenizer_serves_as_well(servers: list[Vllm], make_real_system: Callable[..., System]) -> None:
    """Without a folder; the second of two equal chats is foretold as found."""
    system = make_real_system(servers, pool=_pool(tokenizer="engine"))
    eventually(lambda: _known(system), "the index knows both engines")
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "by the engine " * 60}]}
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        _send(client, system, CHAT_PATH, body)
        answer, decision = _send(client, system, CHAT_PATH, body)
    assert decision["prefix_index"] == "precise"
    assert decision["matched_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_tokenizer_that_is_too_slow_is_not_waited_for(
    servers: list[Vllm], make_real_system: Callable[..., System]
) -> None:
    """The approximate index answers, and it is said why."""
    system = make_real_system(servers, pool=_pool(tokenizer="engine", budget_ms=0.01))
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "too slow"}]}
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        _, decision = _send(client, system, CHAT_PATH, body)
    assert (decision["prefix_index"], decision["fallbacks"]) == ("approximate", ["prefix_late"])
    assert system.total("pointsman_fallbacks_total", 'reason="prefix_late"') == 1


def test_senses_that_are_killed_cost_no_request(servers: list[Vllm], make_real_system: Callable[..., System]) -> None:
    """Until others have taken over our own books answer; they hear everything again, and are as exact as before."""
    system = make_real_system(servers, pool=_pool())
    eventually(lambda: _known(system), "the index knows both engines")
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "killed senses " * 60}]}
    with httpx.Client(timeout=HANG_GUARD_S) as client:
        _send(client, system, CHAT_PATH, body)
        os.kill(_senses(system), signal.SIGKILL)

        def fell_back() -> bool:
            return "prefix_senses_down" in _send(client, system, CHAT_PATH, body)[1]["fallbacks"]

        eventually(fell_back, "a decision without senses", pause_s=0)
        eventually(lambda: _send(client, system, CHAT_PATH, body)[1]["fallbacks"] == [], "precise again", pause_s=0.2)
        answer, decision = _send(client, system, CHAT_PATH, body)
    assert decision["matched_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert system.total("pointsman_fallbacks_total", 'reason="prefix_senses_down"') > 0
