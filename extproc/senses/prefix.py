"""Answers how much of a prompt each endpoint holds, for pools with a precise index.

Per pool: the index, the feed that keeps it, and where tokens come from. Tokenizing by ourselves runs in two threads,
since a long prompt takes milliseconds and figures must go on meanwhile. What is asked of an engine goes to one that the
pool has, in turn; one that does not answer is passed over once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import aiohttp
import structlog
from msgspec.structs import replace

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
_LARGEST_ANSWER_BYTES = 64 * 1024 * 1024
_HTTP_OK = 200


class _Pool:
    """One pool: what is known of its engines' blocks, and how its prompts become tokens."""

    def __init__(self, spec: PreciseOf, client: aiohttp.ClientSession, threads: ThreadPoolExecutor) -> None:
        tiers = {Tier[name.upper()]: worth for name, worth in spec.tiers.items()}
        self.spec = spec
        self.index = PreciseIndex(spec.max_blocks, tiers)
        self.feed = KvFeed(spec.events, self.index, client)
        self._client = client
        self._threads = threads
        self._turn = count()
        self._renders = True
        self._tokenizer: LocalTokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._told: Counter[str] = Counter()
        if spec.tokenizer is not None:
            self._loading = asyncio.create_task(self._load(Path(spec.tokenizer)), name="load tokenizer")
        self.watch(spec)

    def watch(self, spec: PreciseOf) -> None:
        """Its endpoints have changed."""
        self.spec = spec
        self.feed.watch(spec.endpoints)

    async def _load(self, folder: Path) -> None:
        """Import and read it in a thread: both take a second or so."""
        cached = self.spec.cached_texts
        try:
            make = lambda: LocalTokenizer(folder, cached_texts=cached)  # noqa: E731 - shorter than a partial
            self._tokenizer = await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except (NotInstalled, NoTokenizer, OSError) as error:
            log.error("no tokenizer", pool=self.spec.pool, error=str(error))  # noqa: TRY400 - says it all

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
            run = asyncio.get_running_loop().run_in_executor
            return await run(self._threads, self._tokenizer.tokens_of, asked.path, asked.body)
        if self.spec.tokenizer is not None:
            raise Untokenizable(NoTokens.NOT_READY)
        return ready_tokens(asked.path, asked.body) or await self._ask(asked)

    async def _ask(self, asked: Match) -> bytes:
        for path, body in questions(asked.path, asked.body):
            if path.endswith(RENDER_SUFFIX) and not self._renders:
                continue
            answer = await self._answer(path, body)
            if answer is not None:
                return answered_tokens(answer)
            if path.endswith(RENDER_SUFFIX):
                self._renders = False  # it is off unless asked for, so one that refuses will go on refusing
        raise Untokenizable(NoTokens.NOT_READY, "no engine answers")

    async def _answer(self, path: str, body: bytes) -> bytes | None:
        """What an engine answers; None for a refusal."""
        endpoints = self.spec.endpoints
        if not endpoints:
            return None
        url = f"http://{endpoints[next(self._turn) % len(endpoints)]}{path}"
        timeout = aiohttp.ClientTimeout(total=self.spec.patience_ms / 1000)
        headers = {"content-type": "application/json"}
        try:
            async with self._client.post(url, data=body, headers=headers, timeout=timeout) as answer:
                page = await answer.content.read(_LARGEST_ANSWER_BYTES) if answer.status == _HTTP_OK else b""
                while page and not answer.content.at_eof() and len(page) < _LARGEST_ANSWER_BYTES:
                    page += await answer.content.read(_LARGEST_ANSWER_BYTES - len(page))
                return page or None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Untokenizable(NoTokens.NOT_READY, repr(error)) from error

    def figures(self) -> Indexed:
        """How the index is, and what happened since this was last asked."""
        tally = self.index.tally
        now = self.feed.counts + Counter(orphans=tally.orphans, odd=tally.odd, evicted=tally.evicted)
        since = dict(now - self._told)
        self._told = now
        blind = sum(not self.index.is_known(endpoint) for endpoint in self.spec.endpoints)
        return Indexed(self.spec.pool, len(self.index), blind, since)

    async def close(self) -> None:
        """Listen no more."""
        if self._loading is not None:
            self._loading.cancel()
        await self.feed.close()


class Prefixes:
    """The precise indexes of all pools that have one. `report` sends answers and figures."""

    def __init__(self, report: Callable[[Matched | Indexed], None]) -> None:
        self._report = report
        self._pools: dict[str, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at_s: dict[str, float] = {}
        self._client: aiohttp.ClientSession | None = None
        self._threads: ThreadPoolExecutor | None = None

    def order(self, wanted: Index) -> None:
        """Keep an index for exactly these pools. One that changes in more than its endpoints begins anew."""
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
        if self._client is None or self._threads is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=8))
            self._threads = ThreadPoolExecutor(_THREADS, "tokenize")
        return _Pool(spec, self._client, self._threads)

    def match(self, asked: Match) -> None:
        """Answer; who asks sees to it that not too many wait."""
        self._run(self._match(asked))

    async def _match(self, asked: Match) -> None:
        pool = self._pools.get(asked.pool)
        try:
            answer = Matched(asked.number, why=NoTokens.NOT_READY) if pool is None else await pool.matched(asked)
        except Exception:
            log.exception("match failed", pool=asked.pool)
            answer = Matched(asked.number, why=NoTokens.UNREADABLE)
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
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _same(one: PreciseOf, other: PreciseOf) -> bool:
    return replace(one, endpoints=[]) == replace(other, endpoints=[])
