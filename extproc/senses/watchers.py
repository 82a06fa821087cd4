"""One watcher per endpoint: reads its metrics, asks for its models, listens to its plugin, reports what it found.

Two loops per endpoint, so that a slow model list does not make the load figures stale. Failures back off, and a probe
that answers again wakes the scrape at once: a restarted engine must not wait out somebody's back-off. Nothing is
judged here; whether an endpoint needs a trial is the decision process's to say, since only it knows the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import thread_time

import aiohttp
import structlog

from extproc.senses.messages import Exported, FellSilent, Heard, Pace, Probed, Scraped, Target, Tried, Watch
from extproc.senses.push import Ears, Listener
from policies.lifecycle import Evidence
from vllm_adapters import dcgm
from vllm_adapters.health import MODELS_PATH, TRIAL_HEADERS, TRIAL_PATH, NotAListing, parse_models, trial_of
from vllm_adapters.metrics import EngineFigures, NotMetrics, parse_metrics

log = structlog.get_logger(__name__)

_MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Far above any engine's page (vLLM's is about 59 KB): what is larger is not one."""
_READINGS = 10
"""Between two pages of an engine is so much of the time that reading one took: megabytes of lines take a second, in
which nobody else's are read.
"""
_LONGEST_SPREAD_S = 1.0
"""Endpoints found together begin within this: 256 pages at the same moment would make all of them late."""
_STEPS, _TOGETHER = 4, 16
"""So many times in an interval endpoints are asked, each time a part of them: waking up, here and where the reports go,
costs more than a page does. It also keeps the interval from growing by the time that an answer takes. More times where
more than so many would be asked together, for whom the pages of all would be one long turn."""
_MOST_DOUBLINGS = 10

_CHECK_S = 5.0
"""How often the page of an engine that pushes its figures is read."""

Report = Callable[[Scraped | Exported | Probed | Tried | Heard | FellSilent], None]


class Watchers:
    """Keeps one watcher per endpoint, as told by the newest Watch."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._session: aiohttp.ClientSession | None = None
        self._ears = Ears()
        self._watchers: dict[str, Watcher] = {}

    def watch(self, wanted: Watch) -> None:
        """Watch exactly these endpoints; running watchers take a new pace up at their next turn."""
        targets = {target.address: target for target in wanted.targets}
        for address, watcher in list(self._watchers.items()):
            if targets.get(address) != watcher.target:
                self._watchers.pop(address).cancel()
            watcher.pace = wanted.pace
        steps = max(_STEPS, len(targets) // _TOGETHER)
        new = [target for address, target in targets.items() if address not in self._watchers]
        spread_s = min(wanted.pace.scrape_interval_ms / 1000, _LONGEST_SPREAD_S)
        for position, target in enumerate(new):
            watcher = Watcher(target, wanted.pace, self._client(), self._ears, self._report)
            self._watchers[target.address] = watcher
            watcher.start(spread_s * position / len(new))
        for watcher in self._watchers.values():
            watcher.steps = steps

    def probe_now(self, address: str) -> None:
        """Ask this one at once."""
        if address in self._watchers:
            self._watchers[address].probe_now()

    def try_generation(self, address: str, model: str) -> None:
        """Ask this one for a generation; what comes of it is reported."""
        if address in self._watchers:
            self._watchers[address].try_generation(model)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=3))
        return self._session

    async def close(self) -> None:
        """Stop watching and close every connection."""
        tasks = [task for watcher in self._watchers.values() for task in watcher.tasks]
        for watcher in self._watchers.values():
            watcher.cancel()
        self._watchers.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ears.close()
        if self._session is not None:
            await self._session.close()


class Watcher:
    """The two loops of one endpoint, and its trial where there is one."""

    def __init__(self, target: Target, pace: Pace, client: aiohttp.ClientSession, ears: Ears, report: Report) -> None:
        self.target = target
        self.pace = pace
        self.steps = _STEPS
        self._address = target.address
        self._base = f"http://{target.address}"
        self._metrics_url = f"http://{target.metrics}" if target.metrics else self._base + "/metrics"
        self._client = client
        self._report = report
        self._scrape_now = asyncio.Event()
        self._listener = Listener(target.address, ears, report, self._scrape_now.set, lambda: self.pace.requests)
        self._probe_now = asyncio.Event()
        self._answered = False
        self._failed_scrapes = 0
        self._reading_s = 0.0
        self._trial: asyncio.Task[None] | None = None
        self._loops: tuple[asyncio.Task[None], ...] = ()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs for this endpoint."""
        return [*self._loops, *(task for task in (self._trial, self._listener.task) if task is not None)]

    def start(self, delay_s: float) -> None:
        """Begin, after a while."""
        loops = [self._loop(delay_s, self._probe_turn)]
        if not self.target.grpc:
            loops.append(self._loop(delay_s, self._scrape_turn))
        if self.target.exporter:
            loops.append(self._loop(delay_s, self._exporter_turn))
        self._loops = tuple(asyncio.create_task(loop, name=f"watch {self._address}") for loop in loops)

    def cancel(self) -> None:
        """Ask no more. Who counts on the pushes or waits for the trial is told that nothing comes of them."""
        for task in self.tasks:
            task.cancel()
        if self._listener.live:
            self._listener.live = False
            self._report(FellSilent(self._address))
        if self._trial is not None and not self._trial.done():
            self._report(Tried(self._address, None))

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
        probed = await self._probe()
        ok = probed.evidence is Evidence.PROBE_OK
        if ok and not self._answered:
            self._scrape_now.set()
        self._answered = ok
        self._report(probed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pace.probe_interval_ms / 1000):
                await self._probe_now.wait()

    async def _probe(self) -> Probed:
        if self.target.grpc:
            from extproc.senses.grpc_health import check  # grpc takes long to import, and few fleets speak it

            return Probed(self._address, await check(self._address, self.pace.probe_timeout_ms / 1000))
        try:
            listing = parse_models(await self._get(self._base + MODELS_PATH, self.pace.probe_timeout_ms))
        except (aiohttp.ClientError, NotAListing, TimeoutError, OSError, ValueError) as error:
            log.debug("probe failed", endpoint=self._address, error=repr(error))
            return Probed(self._address, _evidence(error))
        except Exception:
            # A page that trips us counts against it, or the endpoint would keep its last state for ever.
            log.exception("probe failed", endpoint=self._address)
            return Probed(self._address, Evidence.PROBE_FAILED)
        return Probed(self._address, Evidence.PROBE_OK, listing)

    def try_generation(self, model: str) -> None:
        """Ask for one token; one trial at a time."""
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._try(model), name=f"try {self._address}")

    async def _try(self, model: str) -> None:
        status: int | None = None
        try:
            status = await self._generate(model)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("trial failed", endpoint=self._address, error=repr(error))
        self._report(Tried(self._address, status))

    async def _generate(self, model: str) -> int:
        """The status of the answer."""
        timeout = aiohttp.ClientTimeout(total=self.pace.trial_timeout_ms / 1000)
        url, body = self._base + TRIAL_PATH, trial_of(model)
        async with self._client.post(
            url, json=body, headers=TRIAL_HEADERS, timeout=timeout, allow_redirects=False
        ) as answer:
            return answer.status

    # -- metrics

    async def _scrape_turn(self) -> None:
        # Before the scrape, not after it: a wake-up that comes while it hangs is for the next one.
        self._scrape_now.clear()
        figures = await self._scrape()
        if figures is not None:
            self._listener.told(figures if self.pace.pushes else replace(figures, stats_port=None))
        # A page is a moment old, and pushes may overtake it: of what counts up, the two must not alternate.
        self._report(Scraped(self._address, figures, spare=self._listener.live))
        self._failed_scrapes = 0 if figures is not None else self._failed_scrapes + 1
        with contextlib.suppress(TimeoutError):
            ends_s = asyncio.get_running_loop().time() + self._pause_s(self._failed_scrapes)
            async with asyncio.timeout_at(in_step(ends_s, self.pace.scrape_interval_ms / 1000, self.steps)):
                await self._scrape_now.wait()

    def _pause_s(self, failures: int) -> float:
        """Long enough for others to have their turn, too, where a page takes long to read."""
        pace, least_s = self.pace, _READINGS * self._reading_s
        if self._listener.live:
            return max(_CHECK_S, least_s, pace.scrape_interval_ms / 1000)
        backed_off_ms: int = pace.scrape_interval_ms << min(failures, _MOST_DOUBLINGS)
        return max(least_s, min(backed_off_ms, max(pace.scrape_backoff_max_ms, pace.scrape_interval_ms)) / 1000)

    async def _scrape(self) -> EngineFigures | None:
        try:
            page = await self._get(self._metrics_url, self.pace.scrape_timeout_ms)
            began_s = thread_time()
            try:
                return parse_metrics(page)
            finally:
                self._reading_s = thread_time() - began_s
        except (aiohttp.ClientError, NotMetrics, TimeoutError, OSError, ValueError) as error:
            log.debug("scrape failed", endpoint=self._address, error=repr(error))
        except Exception:  # as above
            log.exception("scrape failed", endpoint=self._address)
        return None

    async def _exporter_turn(self) -> None:
        self._report(Exported(self._address, await self._gpus()))
        await asyncio.sleep(self.target.exporter_ms / 1000)

    async def _gpus(self) -> dcgm.GpuLoad | None:
        try:
            page = await self._get(f"http://{self.target.exporter}{dcgm.PATH}", self.pace.scrape_timeout_ms)
            return dcgm.parse_gpus(page, self.target.gpus)
        except (aiohttp.ClientError, dcgm.NoGpu, TimeoutError, OSError, ValueError) as error:
            log.debug("GPUs not told", endpoint=self._address, error=repr(error))
            return None

    async def _get(self, url: str, timeout_ms: int) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1000)
        async with self._client.get(url, timeout=timeout, allow_redirects=False) as response:
            response.raise_for_status()
            page = await response.content.read(_MAX_PAGE_BYTES + 1)
            while not response.content.at_eof() and len(page) <= _MAX_PAGE_BYTES:
                page += await response.content.read(_MAX_PAGE_BYTES + 1 - len(page))
            if len(page) > _MAX_PAGE_BYTES:
                raise ValueError(f"{url} is larger than {_MAX_PAGE_BYTES} bytes")
            return page


def in_step(ends_s: float, interval_s: float, steps: int = _STEPS) -> float:
    """When a pause ends that should end about then, with others': within half of one of so many steps per interval."""
    step_s = interval_s / steps
    return round(ends_s / step_s) * step_s


def _evidence(error: Exception) -> Evidence:
    """Only the endpoint's host can refuse; no descriptors left or no route are faults on our side of the wire."""
    refused = isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED
    return Evidence.PROBE_REFUSED if refused else Evidence.PROBE_FAILED
