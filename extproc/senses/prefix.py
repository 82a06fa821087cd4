"""Answers how much of a prompt each endpoint holds, for pools with a precise index.

Per pool: the index, the feed that keeps it, and where tokens come from. Tokenizing by ourselves runs in two threads,
since a long prompt takes milliseconds and figures must go on meanwhile. A template may never end, and nobody can end a
thread: its question is answered after a while, and the pool has other threads once its configuration has changed.

What is asked of an engine goes to one that the pool has, in turn; where that one cannot be reached or fails, the next
one is asked, once. One that does not answer in time is not followed by another, since that answer would come too late.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from traceback import extract_tb

import aiohttp
import structlog

from extproc.senses.kv_feed import KvFeed
from extproc.senses.messages import Index, Indexed, Match, Matched, PreciseOf, Scraped
from policies.placement.precise_index import TOKEN_BYTES, PreciseIndex, Tier
from vllm_adapters.tokens import (
    RENDER_SUFFIX,
    LocalTokenizer,
    NotInstalled,
    NoTokenizer,
    NoTokens,
    Untokenizable,
    answered_tokens,
    questions,
    ready_tokens,
)

log = structlog.get_logger(__name__)

_THREADS = 2
"""Per pool."""
_LONGEST_S = 30.0
"""A megabyte takes a second or two; what takes so long does not end."""
_END_S = 1.0
"""How long the end waits for what is under way."""
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
_HTTP_OK = 200
_NOT_OFFERED = frozenset({403, 404, 405})
"""What an engine answers that does not render: vLLM 403 unless it is started with --enable-scale-out, others 404."""
_NOT_UNDERSTOOD = frozenset({400, 422})
"""What it answers to a request that is not well formed, which any other engine of the pool would answer too."""
_NO_RENDER_S = 60.0
_MOST_ASKED = 2


class _Silent(Exception):
    """An engine did not say what was asked; another may."""


class _Pool:
    """One pool: what is known of its engines' blocks, and how its prompts become tokens."""

    def __init__(self, spec: PreciseOf, client: aiohttp.ClientSession) -> None:
        tiers = {Tier[name.upper()]: worth for name, worth in spec.tiers.items()}
        self.spec = spec
        self.index = PreciseIndex(spec.max_blocks, tiers)
        self.feed = KvFeed(spec.events, self.index, client)
        self._client = client
        self._threads = ThreadPoolExecutor(_THREADS, "tokenize")  # its own, for they may come to hang in a template
        self._turn = count()
        self._no_render_until_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._tokenizer: LocalTokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._told: Counter[str] = Counter()
        if spec.tokenizer is not None:
            self._loading = asyncio.create_task(self._load(Path(spec.tokenizer)), name="load tokenizer")
        self.watch(spec)

    def watch(self, spec: PreciseOf) -> None:
        """Its endpoints have changed, or what it takes to tokenize."""
        before, self.spec = self.spec, spec
        if self._tokenizer is not None and spec.cached_bytes != before.cached_bytes:
            self._tokenizer.remember(spec.cached_bytes)
        self._no_render_until_s = {at: s for at, s in self._no_render_until_s.items() if at in set(spec.endpoints)}
        self.feed.watch(spec.endpoints)

    async def _load(self, folder: Path) -> None:
        """Import and read it in a thread: both take a second or so."""
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._threads, LocalTokenizer, folder)
        except (NotInstalled, NoTokenizer, OSError) as error:
            log.error("no tokenizer", pool=self.spec.pool, error=str(error))  # noqa: TRY400 - says it all
        except Exception:
            log.exception("no tokenizer", pool=self.spec.pool)  # or nobody would hear of it
        else:
            made.remember(self.spec.cached_bytes)
            self._tokenizer = made

    async def matched(self, asked: Match) -> Matched:
        """The answer, whatever it is."""
        try:
            tokens = await self._tokens(asked)
        except Untokenizable as error:
            log.debug("not tokenized", pool=self.spec.pool, error=str(error)[:200])
            return Matched(asked.number, why=error.reason)
        found = self.index.match(tokens, asked.adapter, asked.salt, self.spec.endpoints)
        return Matched(asked.number, len(tokens) // TOKEN_BYTES, found.tokens, list(found.blind))

    async def _tokens(self, asked: Match) -> bytes:
        if self._tokenizer is not None:
            return await self._own_tokens(self._tokenizer, asked)
        if self.spec.tokenizer is not None:
            raise Untokenizable(NoTokens.NOT_READY)
        return ready_tokens(asked.path, asked.body) or await self._ask(asked)

    async def _own_tokens(self, tokenizer: LocalTokenizer, asked: Match) -> bytes:
        run = asyncio.get_running_loop().run_in_executor
        try:
            async with asyncio.timeout(_LONGEST_S):
                return await run(self._threads, tokenizer.tokens_of, asked.path, asked.body)
        except TimeoutError as error:
            self._counts["hung"] += 1
            raise Untokenizable(NoTokens.NOT_READY, "tokenizing does not end") from error

    async def _ask(self, asked: Match) -> bytes:
        """Ask one engine, and if that one is not there or not well, the next one, once."""
        for endpoint in self._next_endpoints():
            try:
                return await self._ask_one(endpoint, asked)
            except _Silent as error:
                self._counts["unanswered"] += 1
                log.debug("engine does not tokenize", endpoint=endpoint, error=str(error))
        raise Untokenizable(NoTokens.NOT_READY, "no engine answers")

    def _next_endpoints(self) -> list[str]:
        endpoints, turn = self.spec.endpoints, next(self._turn)
        return [endpoints[(turn + further) % len(endpoints)] for further in range(min(_MOST_ASKED, len(endpoints)))]

    async def _ask_one(self, endpoint: str, asked: Match) -> bytes:
        for path, body in questions(asked.path, asked.body):
            renders = path.endswith(RENDER_SUFFIX)
            if renders and self._asks_in_vain(endpoint):
                continue
            status, page = await self._answer(endpoint, path, body)
            if status == _HTTP_OK:
                return answered_tokens(page)
            if renders and status in _NOT_OFFERED:
                self._counts["no_render"] += 1
                self._no_render_until_s[endpoint] = asyncio.get_running_loop().time() + _NO_RENDER_S
                continue
            if status in _NOT_UNDERSTOOD:
                raise Untokenizable(NoTokens.UNREADABLE, f"the engine answers {status}")
            raise _Silent(str(status))
        raise _Silent("it offers neither question")

    def _asks_in_vain(self, endpoint: str) -> bool:
        """It has said a while ago that it does not render. It may have been started anew since, with other settings."""
        return self._no_render_until_s.get(endpoint, 0.0) > asyncio.get_running_loop().time()

    async def _answer(self, endpoint: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The status that an engine answers, and if it is 200 what it says. Raises _Silent and Untokenizable."""
        timeout = aiohttp.ClientTimeout(total=self.spec.patience_ms / 1000)
        headers, url = {"content-type": "application/json"}, f"http://{endpoint}{path}"
        try:
            async with self._client.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != _HTTP_OK:
                    return answer.status, b""
                page = await answer.content.read(_LARGEST_ANSWER_BYTES)
                while not answer.content.at_eof() and len(page) < _LARGEST_ANSWER_BYTES:
                    page += await answer.content.read(_LARGEST_ANSWER_BYTES - len(page))
                return _HTTP_OK, page
        except TimeoutError as error:  # another engine's answer would be too late as well
            self._counts["unanswered"] += 1
            raise Untokenizable(NoTokens.NOT_READY, "no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Silent(repr(error)[:200]) from error

    def figures(self) -> Indexed:
        """How the index is, and what happened since this was last asked."""
        tally = self.index.tally
        now = self.feed.counts + self._counts + Counter(orphans=tally.orphans, odd=tally.odd, evicted=tally.evicted)
        since = dict(now - self._told)
        self._told = now
        blind = sum(not self.index.is_known(endpoint) for endpoint in self.spec.endpoints)
        return Indexed(self.spec.pool, len(self.index), blind, since)

    async def close(self) -> None:
        """Listen no more."""
        if self._loading is not None:
            self._loading.cancel()
        self._threads.shutdown(wait=False)  # what waits for its turn is answered yet
        await self.feed.close()


class Prefixes:
    """The precise indexes of all pools that have one. `report` sends answers and figures."""

    def __init__(self, report: Callable[[Matched | Indexed], None]) -> None:
        self._report = report
        self._pools: dict[str, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at_s: dict[str, float] = {}
        self._client: aiohttp.ClientSession | None = None

    def order(self, wanted: Index) -> None:
        """Keep an index for exactly these pools. One that changes in what makes the index begins anew."""
        specs = {spec.pool: spec for spec in wanted.pools}
        for name, pool in list(self._pools.items()):
            spec = specs.get(name)
            if spec is not None and _same(spec, pool.spec):
                pool.watch(spec)
            else:
                self._run(self._pools.pop(name).close())
        for name in specs.keys() - self._pools.keys():
            self._pools[name] = self._made(specs[name])

    def _made(self, spec: PreciseOf) -> _Pool:
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=8))
        return _Pool(spec, self._client)

    def match(self, asked: Match) -> None:
        """Answer; who asks sees to it that not too many wait."""
        self._run(self._match(asked))

    async def _match(self, asked: Match) -> None:
        pool = self._pools.get(asked.pool)
        try:
            answer = Matched(asked.number, why=NoTokens.NOT_READY) if pool is None else await pool.matched(asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked waits for an answer
            # a client may do this as often as it likes: one line, and nothing that it wrote, as texts of errors have
            at = extract_tb(error.__traceback__)[-1]
            log.error("match failed", pool=asked.pool, kind=type(error).__name__, at=f"{at.name}:{at.lineno}")  # noqa: TRY400
            answer = Matched(asked.number, why=NoTokens.FAILED)
        self._report(answer)

    def scraped(self, message: Scraped) -> None:
        """An engine's metrics may tell that it restarted."""
        started = None if message.figures is None else message.figures.started_at_s
        if started is None or not self._pools:
            return
        before = self._started_at_s.get(message.address)
        self._started_at_s[message.address] = started
        if before is not None and started > before:
            for pool in self._pools.values():
                pool.feed.restarted(message.address, started)

    def tell(self) -> None:
        """Report how every index is."""
        watched = {endpoint for pool in self._pools.values() for endpoint in pool.spec.endpoints}
        self._started_at_s = {address: at for address, at in self._started_at_s.items() if address in watched}
        for pool in self._pools.values():
            self._report(pool.figures())

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End everything."""
        self.order(Index([]))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)
        if self._client is not None:
            await self._client.close()


def _same(one: PreciseOf, other: PreciseOf) -> bool:
    """Whether an index for the one is one for the other too."""
    return all(getattr(one, name) == getattr(other, name) for name in ("events", "tiers", "max_blocks", "tokenizer"))
