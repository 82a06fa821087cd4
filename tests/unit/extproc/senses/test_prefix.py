"""Matches answered in the senses: tokens of our own or of an engine's, and reasons where there are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers

from extproc.senses import prefix as module
from extproc.senses.messages import Index, Indexed, KvEvents, Match, Matched, PreciseOf, Scraped
from extproc.senses.prefix import Prefixes
from policies.placement.precise_index import Stored
from vllm_adapters.kv_events import token_bytes
from vllm_adapters.metrics import EngineFigures

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "a b"}]}).encode()


class Engine:
    """Answers what it is told to, and counts what it is asked. `renders`: as vLLM does where that is enabled.

    `refusals`: with what it answers to questions to render, one after the other; after that as it always does.
    """

    def __init__(self, *, renders: bool, status: int = 200, refusals: tuple[int, ...] = ()) -> None:
        self.asked: list[str] = []
        self._renders, self._status = renders, status
        self._refusals = list(refusals)

    def app(self) -> web.Application:
        """Its HTTP."""
        app = web.Application()
        app.router.add_post(CHAT + "/render", self._render)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _render(self, _: web.Request) -> web.Response:
        self.asked.append("render")
        if self._refusals:
            return web.Response(status=self._refusals.pop(0), headers={"location": "/tokenize"})
        return web.json_response({"token_ids": [1, 2, 3]}, status=200 if self._renders else 403)

    async def _tokenize(self, _: web.Request) -> web.Response:
        self.asked.append("tokenize")
        return web.json_response({"tokens": [1, 2, 3]}, status=self._status)


class Rig:
    """Indexes of one pool over one endpoint."""

    def __init__(self, endpoint: str, tokenizer: Path | None) -> None:
        self.endpoint = endpoint
        self.said: asyncio.Queue[Matched | Indexed] = asyncio.Queue()
        self.prefixes = Prefixes(self.said.put_nowait)
        folder = None if tokenizer is None else str(tokenizer)
        tiers = {"gpu": 1.0, "cpu": 0.8, "disk": 0.5}
        self.spec = PreciseOf("p", [endpoint], KvEvents(), folder, 10, tiers, 100, 5_000)
        self.prefixes.order(Index([self.spec]))
        self.pool = self.prefixes._pools["p"]

    async def ask(self, body: bytes = BODY, path: str = CHAT, pool: str = "p") -> Matched:
        """One question and its answer."""
        self.prefixes.match(Match(7, pool, path, body))
        answer = await asyncio.wait_for(self.said.get(), 30)
        assert isinstance(answer, Matched)
        assert answer.number == 7
        return answer


@asynccontextmanager
async def _rig(engine: Engine, tokenizer: Path | None = None) -> AsyncIterator[Rig]:
    async with TestServer(engine.app()) as server:
        rig = Rig(f"{server.host}:{server.port}", tokenizer)
        yield rig
        await rig.prefixes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of two words."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))  # noqa: S106 - no secret
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ messages[0].content }} ?"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


def _holds(rig: Rig, *tokens: int) -> None:
    rig.pool.index.keep_ranks(rig.endpoint, [0])
    rig.pool.index.forget(rig.endpoint, 0, empty=True)
    rig.pool.index.apply(rig.endpoint, 0, [Stored(list(tokens), None, token_bytes(tokens), 1)])


async def test_a_prompt_is_matched_in_tokens_of_our_own(folder: Path) -> None:
    """No engine is asked; the last token is computed in any case."""
    engine = Engine(renders=True)
    async with _rig(engine, folder) as rig:
        assert rig.pool._loading is not None
        await rig.pool._loading
        _holds(rig, 1, 2, 0)
        assert await rig.ask() == Matched(7, 3, {rig.endpoint: 2})
        assert engine.asked == []


async def test_an_engine_that_renders_is_asked_to() -> None:
    """Which is exact, and one question."""
    engine = Engine(renders=True)
    async with _rig(engine) as rig:
        _holds(rig, 1)
        assert await rig.ask() == Matched(7, 3, {rig.endpoint: 1})
        assert engine.asked == ["render"]


async def test_an_engine_that_does_not_render_is_asked_to_tokenize() -> None:
    """And not to render again."""
    engine = Engine(renders=False)
    async with _rig(engine) as rig:
        assert (await rig.ask()).input_tokens == 3
        assert (await rig.ask()).input_tokens == 3
        assert engine.asked == ["render", "tokenize", "tokenize"]


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
async def test_one_refusal_does_not_end_rendering(status: int) -> None:
    """One client's broken body, or an engine that is not well for a moment, says nothing of the next request."""
    engine = Engine(renders=True, refusals=(status, status))
    async with _rig(engine) as rig:
        assert (await rig.ask()).why in {"unreadable", "not_ready"}
        engine._refusals.clear()
        assert (await rig.ask()).input_tokens == 3
        assert engine.asked == ["render", "render"]


async def test_a_prompt_goes_nowhere_that_an_engine_sends_it_to() -> None:
    """A redirect is no answer: it could lead to anybody."""
    engine = Engine(renders=True, refusals=(307,))
    async with _rig(engine) as rig:
        assert (await rig.ask()).why == "not_ready"
        assert engine.asked == ["render"]


async def test_an_engine_that_does_not_render_speaks_for_itself_and_for_a_while() -> None:
    """Another one of the pool renders; and the one that did not is asked again after a minute. Both are counted."""
    without, engine = Engine(renders=False), Engine(renders=True)
    async with _rig(without) as rig, TestServer(engine.app()) as second:
        rig.pool.watch(replace(rig.spec, endpoints=[rig.endpoint, f"{second.host}:{second.port}"]))
        for _ in range(4):
            await rig.ask()
        assert without.asked == ["render", "tokenize", "tokenize"]
        assert engine.asked == ["render", "render"]
        assert rig.pool.figures().counts["no_render"] == 1
        rig.pool._no_render_until_s[rig.endpoint] -= module._NO_RENDER_S
        await rig.ask()
        assert without.asked[3:] == ["render", "tokenize"]


async def test_the_next_engine_is_asked_where_one_fails() -> None:
    """One that cannot be reached, and one that answers 503; counted."""
    failing, engine = Engine(renders=True, refusals=(503,)), Engine(renders=True)
    async with _rig(failing) as rig, TestServer(engine.app()) as second:
        good = f"{second.host}:{second.port}"
        rig.pool.watch(replace(rig.spec, endpoints=[rig.endpoint, good]))
        assert (await rig.ask()).input_tokens == 3
        rig.pool.watch(replace(rig.spec, endpoints=[good, "127.0.0.1:9"]))
        assert (await rig.ask()).input_tokens == 3
        assert rig.pool.figures().counts["unanswered"] == 2
        assert failing.asked == ["render"]


@pytest.mark.parametrize(
    ("body", "path", "pool", "why"),
    [
        (b'{"input": "a"}', "/v1/responses", "p", "other_api"),
        (b"{", CHAT, "p", "unreadable"),
        (BODY, CHAT, "another", "not_ready"),
        (BODY, CHAT, "p", "not_ready"),
    ],
)
async def test_what_cannot_be_matched_is_answered_with_a_reason(body: bytes, path: str, pool: str, why: str) -> None:
    """An API we cannot follow, a broken body, a pool without an index, an engine that refuses."""
    async with _rig(Engine(renders=False, status=500)) as rig:
        assert (await rig.ask(body, path, pool)).why == why


async def test_a_folder_without_a_tokenizer_is_answered_with_a_reason(tmp_path: Path) -> None:
    """It is logged, and the pool goes on without."""
    async with _rig(Engine(renders=True), tmp_path) as rig:
        assert rig.pool._loading is not None
        await rig.pool._loading
        assert (await rig.ask()).why == "not_ready"


async def test_a_template_that_does_not_end_keeps_no_question_and_no_other_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions are answered after a while; with the template mended and the config read again, it tokenizes."""

    class Stuck:
        ended = Event()

        def tokens_of(self, _path: str, _body: bytes) -> bytes:
            self.ended.wait()
            return b""

    async with _rig(Engine(renders=True), folder) as rig:
        assert rig.pool._loading is not None
        await rig.pool._loading
        with monkeypatch.context() as patch:
            patch.setattr(module, "_LONGEST_S", 0.01)
            patch.setattr(rig.pool, "_tokenizer", Stuck())
            assert [(await rig.ask()).why for _ in range(3)] == ["not_ready"] * 3
        assert rig.pool.figures().counts["hung"] == 3
        rig.prefixes.order(Index([replace(rig.spec, max_blocks=99)]))
        mended = rig.prefixes._pools["p"]
        assert mended._loading is not None
        await mended._loading
        assert (await rig.ask()).input_tokens == 3
        Stuck.ended.set()


async def test_how_an_index_is_gets_reported() -> None:
    """Blocks, endpoints it is blind for, and what happened since the last time."""
    async with _rig(Engine(renders=True)) as rig:
        _holds(rig, 1, 2)
        rig.pool.index.apply(rig.endpoint, 0, [Stored([9], 8, token_bytes([9]), 1)])
        rig.prefixes.tell()
        rig.prefixes.tell()
        assert await rig.said.get() == Indexed("p", 2, 1, {"orphans": 1})
        assert await rig.said.get() == Indexed("p", 2, 1, {})


async def test_a_restart_in_the_metrics_empties_the_index() -> None:
    """When the process behind an address is another than before."""
    async with _rig(Engine(renders=True)) as rig:
        figures: list[Any] = [EngineFigures(started_at_s=at_s) for at_s in (100.0, 100.0, 200.0)]
        _holds(rig, 1, 2)
        for before in figures[:2]:
            rig.prefixes.scraped(Scraped(rig.endpoint, before))
        assert len(rig.pool.index) == 2
        rig.prefixes.scraped(Scraped(rig.endpoint, figures[2]))
        assert len(rig.pool.index) == 0


@pytest.mark.parametrize(
    "changed",
    [{"endpoints": ["127.0.0.1:9"]}, {"patience_ms": 7}, {"cached_bytes": 5}],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_does_not_make_the_index_changes_without_losing_it(changed: dict[str, Any], folder: Path) -> None:
    """And counts from then on."""
    async with _rig(Engine(renders=True), folder) as rig:
        assert rig.pool._loading is not None
        await rig.pool._loading
        assert rig.pool._tokenizer is not None
        changed["endpoints"] = [*rig.spec.endpoints, *changed.get("endpoints", [])]
        _holds(rig, 1)
        rig.prefixes.order(Index([replace(rig.spec, **changed)]))
        assert rig.prefixes._pools["p"] is rig.pool
        assert len(rig.pool.index) == 1
        assert rig.pool.spec == replace(rig.spec, **changed)
        assert rig.pool._tokenizer._cache.maxsize == rig.pool.spec.cached_bytes


@pytest.mark.parametrize(
    "changed", [{"max_blocks": 5}, {"tiers": {"gpu": 0.9}}, {"events": KvEvents(port=1)}, {"tokenizer": "/nowhere"}]
)
async def test_what_makes_the_index_begins_it_anew(changed: dict[str, Any]) -> None:
    """A pool that goes takes its index along."""
    async with _rig(Engine(renders=True)) as rig:
        rig.prefixes.order(Index([replace(rig.spec, **changed)]))
        assert rig.prefixes._pools["p"] is not rig.pool
        rig.prefixes.order(Index([]))
        assert (await rig.ask()).why == "not_ready"


async def test_a_template_that_is_no_text_is_logged(folder: Path) -> None:
    """As is anything else that a folder may have in store; the pool goes on without."""
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with capture_logs() as logs:
        async with _rig(Engine(renders=True), folder) as rig:
            assert rig.pool._loading is not None
            await rig.pool._loading
            assert (await rig.ask()).why == "not_ready"
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["no tokenizer"]


async def test_a_fault_of_ours_is_one_line_without_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a client wrote to bring it about, and however often."""

    def fail(_path: str, body: bytes) -> None:
        raise KeyError(body.decode())

    monkeypatch.setattr(module, "ready_tokens", fail)
    async with _rig(Engine(renders=True)) as rig:
        with capture_logs() as logs:
            assert (await rig.ask(b"secret")).why == "failed"
    (line,) = [entry for entry in logs if entry["event"] == "match failed"]
    assert "exc_info" not in line
    assert "secret" not in str(line)
    assert (line["kind"], line["at"].partition(":")[0]) == ("KeyError", "fail")
