"""One watcher per endpoint: reads its metrics, asks for its models, tells the fleet.

In the decision loop for now; the parsing is a few tens of microseconds per page. Two loops per endpoint, so that a
slow model list does not make the load figures stale. Failures back off, and a probe that answers again wakes the
scrape at once: a restarted engine must not wait out somebody's back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import aiohttp
import structlog

from extproc.config.schema import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.grpc_health import check
from policies.lifecycle import Evidence
from vllm_adapters.health import (
    MODELS_PATH,
    TRIAL_HEADERS,
    TRIAL_PATH,
    Listing,
    NotAListing,
    parse_models,
    trial_of,
    trial_passed,
)
from vllm_adapters.metrics import NotMetrics, parse_metrics

log = structlog.get_logger(__name__)

_MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Far above any engine's page (vLLM's is about 59 KB): what is larger is not one."""
_LONGEST_SPREAD_S = 1.0
"""Endpoints found together begin within this: 256 pages at the same moment would hold up decisions."""


class WatchEvents(Protocol):
    """Who counts scrapes and probes."""

    def scraped(self, *, ok: bool) -> None:
        """A scrape was tried."""

    def probed(self, *, ok: bool) -> None:
        """A probe was tried."""

    def tried(self, *, ok: bool) -> None:
        """A trial was answered."""


class Watchers:
    """Keeps one watcher per endpoint of the fleet."""

    def __init__(self, fleet: Fleet, events: WatchEvents, config: Config) -> None:
        self._fleet = fleet
        self._events = events
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._watchers: dict[str, _Watcher] = {}
        fleet.on_suspicion = self.probe_now

    def configure(self, config: Config) -> None:
        """Use the new intervals; running watchers take them up at their next turn."""
        self._config = config
        for watcher in self._watchers.values():
            watcher.config = config

    def watch(self, addresses: Iterable[str]) -> None:
        """Watch exactly these addresses."""
        wanted = set(addresses)
        for address in set(self._watchers) - wanted:
            self._watchers.pop(address).cancel()
        new = wanted - set(self._watchers)
        spread_s = min(self._config.scrape.interval_ms / 1000, _LONGEST_SPREAD_S)
        for position, address in enumerate(new):
            watcher = _Watcher(address, self._fleet, self._events, self._config, self._client())
            watcher.start(spread_s * position / len(new))
            self._watchers[address] = watcher

    def probe_now(self, address: str) -> None:
        """Ask this one at once: a request has just shown that something is wrong with it."""
        watcher = self._watchers.get(address)
        if watcher is not None:
            watcher.probe_now()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=2))
        return self._session

    async def close(self) -> None:
        """Stop watching and close every connection."""
        tasks = [task for watcher in self._watchers.values() for task in watcher.tasks]
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


_TRIAL_PATIENCE_S = 1.0
"""Engines that shut down refuse within milliseconds; a token comes sooner unless others are before it."""


class _TrialFailed(ValueError):
    """It lists its model and does not generate."""


class _Watcher:
    """The two loops of one endpoint."""

    def __init__(
        self, address: str, fleet: Fleet, events: WatchEvents, config: Config, client: aiohttp.ClientSession
    ) -> None:
        self.config = config
        self._base = f"http://{address}"
        self._address = address
        self._fleet = fleet
        self._events = events
        self._client = client
        self._scrape_now = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._answered = False
        self._failed_scrapes = 0
        self.tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self, delay_s: float) -> None:
        self.tasks = (
            asyncio.create_task(self._loop(delay_s, self._probe_turn), name=f"probe {self._address}"),
            asyncio.create_task(self._loop(delay_s, self._scrape_turn), name=f"scrape {self._address}"),
        )

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _loop(self, delay_s: float, turn: Callable[[], Awaitable[None]]) -> None:
        """Turns, each with the pause after it, until cancelled."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                await turn()
            except Exception:
                # A loop that ended would leave the endpoint in its last state for ever.
                log.exception("watching failed", endpoint=self._address)
                await asyncio.sleep(_LONGEST_SPREAD_S)

    # -- model list and trial

    def probe_now(self) -> None:
        """Do not wait for the next turn."""
        self._probe_now.set()

    async def _probe_turn(self) -> None:
        self._probe_now.clear()
        ok = await self._probe()
        self._events.probed(ok=ok)
        if ok and not self._answered:
            self._scrape_now.set()
        self._answered = ok
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._probe_now.wait(), self.config.probe.interval_ms / 1000)

    async def _probe(self) -> bool:
        assumed = self._fleet.assumed_by_grpc(self._address)
        return await (self._ask_model_list() if assumed is None else self._ask_grpc_health(assumed))

    async def _ask_grpc_health(self, assumed: Listing) -> bool:
        evidence = await check(self._address, self.config.probe.timeout_ms / 1000)
        if evidence is Evidence.PROBE_OK:
            self._fleet.listed_models(self._address, assumed)
            return True
        self._fleet.observe(self._address, evidence)
        return False

    async def _ask_model_list(self) -> bool:
        try:
            listing = parse_models(await self._get(MODELS_PATH, self.config.probe.timeout_ms))
            if self.config.probe.trial and self._fleet.wants_trial(self._address):
                await self._try(self._fleet.served_models(self._address, listing))
            self._fleet.listed_models(self._address, listing)
        except (aiohttp.ClientError, NotAListing, TimeoutError, OSError, ValueError) as error:
            log.debug("probe failed", endpoint=self._address, error=repr(error))
            self._fleet.observe(self._address, _evidence(error))
            return False
        except Exception:
            # A page that trips us counts against it, or the endpoint would keep its last state for ever.
            log.exception("probe failed", endpoint=self._address)
            self._fleet.observe(self._address, Evidence.PROBE_FAILED)
            return False
        return True

    async def _try(self, models: list[str]) -> None:
        """One generation of ours, half-open: what takes no traffic has to answer it first. Raises _TrialFailed.

        An engine at work that has taken our request and not refused it has passed: it waits behind others there.
        """
        if not models:
            return
        trial = asyncio.ensure_future(self._generate(models[0]))
        try:
            await asyncio.wait({trial}, timeout=_TRIAL_PATIENCE_S)
            if not trial.done() and self._fleet.at_work(self._address):
                self._events.tried(ok=True)
                return
            status = await trial
        finally:
            trial.cancel()
        self._events.tried(ok=trial_passed(status))
        if not trial_passed(status):
            raise _TrialFailed(f"a generation was answered {status}")

    async def _generate(self, model: str) -> int:
        """The status of the answer."""
        timeout = aiohttp.ClientTimeout(total=self.config.probe.trial_timeout_ms / 1000)
        url, body = self._base + TRIAL_PATH, trial_of(model)
        async with self._client.post(
            url, json=body, headers=TRIAL_HEADERS, timeout=timeout, allow_redirects=False
        ) as answer:
            return answer.status

    # -- metrics

    async def _scrape_turn(self) -> None:
        # Before the scrape, not after it: a wake-up that comes while it hangs is for the next one.
        self._scrape_now.clear()
        if self._fleet.assumed_by_grpc(self._address) is not None:
            await asyncio.sleep(self._pause_s(0))  # nothing to read there
            return
        ok = await self._scrape()
        self._events.scraped(ok=ok)
        self._failed_scrapes = 0 if ok else self._failed_scrapes + 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._scrape_now.wait(), self._pause_s(self._failed_scrapes))

    def _pause_s(self, failures: int) -> float:
        scrape = self.config.scrape
        backed_off_ms: int = scrape.interval_ms << min(failures, 10)
        return min(backed_off_ms, max(scrape.backoff_max_ms, scrape.interval_ms)) / 1000

    async def _scrape(self) -> bool:
        try:
            page = await self._get("/metrics", self.config.scrape.timeout_ms)
            self._fleet.scraped(self._address, parse_metrics(page))
        except (aiohttp.ClientError, NotMetrics, TimeoutError, OSError, ValueError) as error:
            log.debug("scrape failed", endpoint=self._address, error=repr(error))
            return False
        except Exception:  # as above
            log.exception("scrape failed", endpoint=self._address)
            return False
        return True

    async def _get(self, path: str, timeout_ms: int) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1000)
        async with self._client.get(self._base + path, timeout=timeout, allow_redirects=False) as response:
            response.raise_for_status()
            page = await response.content.read(_MAX_PAGE_BYTES + 1)
            while not response.content.at_eof() and len(page) <= _MAX_PAGE_BYTES:
                page += await response.content.read(_MAX_PAGE_BYTES + 1 - len(page))
            if len(page) > _MAX_PAGE_BYTES:
                raise ValueError(f"{path} is larger than {_MAX_PAGE_BYTES} bytes")
            return page


def _evidence(error: Exception) -> Evidence:
    """Only the endpoint's host can refuse; no descriptors left or no route are faults on our side of the wire."""
    refused = isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED
    return Evidence.PROBE_REFUSED if refused else Evidence.PROBE_FAILED
