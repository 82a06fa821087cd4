"""What the senses are told to watch, and what they find where they are told to look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.sections.watching import Dcgm
from extproc.fleet.discovery.endpoints import as_discovered
from extproc.fleet.fleet import Fleet
from extproc.observe.metrics import Metrics
from extproc.senses.inbox import Inbox
from extproc.senses.messages import Exported, FromSenses, Pace, Scraped, Target, Watch
from extproc.senses.targets import targets_of
from extproc.senses.watchers import Watchers
from policies.fleet_state import FleetState
from vllm_adapters.dcgm import GpuLoad

A, B = "10.0.0.1:8000", "[fd00::2]:8000"
GPUS = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 90\nDCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b"} 10\n'
PACE = Pace(20, 1_000, 20, 1_000, 1_000, 1_000)
HANG_S = 20
Serve = Callable[[dict[str, str]], Awaitable[str]]


def _fleet(*pools: str) -> Fleet:
    fleet = Fleet(FleetState(), Metrics(), lambda: 0.0)
    config = parse("scrape: {dcgm: {}}\npools: [" + ", ".join(pools) + "]")
    fleet.configure(Generation(1, config))
    for pool in config.pools:
        fleet.set_endpoints(pool.name, as_discovered(pool.endpoints.static or ()).values())
    return fleet


def test_endpoints_are_asked_on_their_own_port_unless_told_otherwise() -> None:
    """An IPv6 address keeps its brackets."""
    plain = _fleet(f"{{name: p, models: [m], endpoints: {{static: ['{A}', '{B}']}}}}")
    assert [target.metrics for target in targets_of(plain, None)] == [f"{A}/metrics", f"{B}/metrics"]
    elsewhere = "metrics_port: 8002, metrics_path: /prometheus/metrics"
    other = _fleet(f"{{name: p, models: [m], {elsewhere}, endpoints: {{static: ['{B}']}}}}")
    assert targets_of(other, None) == [Target(B, metrics="[fd00::2]:8002/prometheus/metrics")]


def test_an_endpoint_of_two_pools_has_the_metrics_of_the_one_that_says_where() -> None:
    """It is one process, whatever the order of the pools."""
    one, two = (f"{{name: {name}, models: [{name}], endpoints: {{static: ['{A}']}}" for name in "pq")
    fleet = _fleet(one + "}", two + ", metrics_port: 9000}")
    assert [target.metrics for target in targets_of(fleet, None)] == ["10.0.0.1:9000/metrics"]


def test_exporters_are_asked_on_the_endpoints_hosts_if_at_all() -> None:
    """For the GPUs that are the endpoint's own."""
    fleet = _fleet(f"{{name: p, models: [m], endpoints: {{static: [{{address: '{A}', gpus: ['2', GPU-a]}}, '{B}']}}}}")
    first, second = targets_of(fleet, Dcgm(port=9401, interval_ms=5_000))
    assert (first.exporter, first.exporter_ms, first.gpus) == ("10.0.0.1:9401", 5_000, ("2", "GPU-a"))
    assert (second.exporter, second.gpus) == ("[fd00::2]:9401", ())
    assert [target.exporter for target in targets_of(fleet, None)] == ["", ""]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve these pages by path; returns the address."""
    runners: list[web.AppRunner] = []

    async def serve(pages: dict[str, str]) -> str:
        async def page(request: web.Request) -> web.Response:
            return web.Response(text=pages[request.path]) if request.path in pages else web.Response(status=404)

        app = web.Application()
        app.router.add_get("/{rest:.*}", page)
        runners.append(web.AppRunner(app, access_log=None))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"127.0.0.1:{runners[-1].addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def _first(target: Target, kind: type[FromSenses]) -> FromSenses:
    """The first report of a kind about a target."""
    found: asyncio.Future[FromSenses] = asyncio.get_running_loop().create_future()

    def take(message: FromSenses) -> None:
        if isinstance(message, kind) and not found.done():
            found.set_result(message)

    watchers = Watchers(take)
    watchers.watch(Watch([target], PACE))
    try:
        return await asyncio.wait_for(found, HANG_S)
    finally:
        await watchers.close()


async def test_metrics_are_read_where_they_are(serve: Serve) -> None:
    """On another port and path than the API's."""
    address = await serve({"/prometheus/metrics": "trtllm_num_requests_running 3\ntrtllm_num_requests_waiting 1\n"})
    report = await _first(Target("127.0.0.1:9", metrics=f"{address}/prometheus/metrics"), Scraped)
    assert isinstance(report, Scraped)
    assert report.figures is not None
    assert (report.figures.dialect, report.figures.running) == ("trtllm-serve", 3.0)


@pytest.mark.parametrize(
    ("pages", "gpus", "load"),
    [
        ({"/metrics": GPUS}, ("1",), GpuLoad(1, 0.1)),
        ({"/metrics": GPUS}, (), GpuLoad(2, 0.5)),
        ({"/metrics": GPUS}, ("7",), None),
        ({"/metrics": "<html>"}, (), None),
        ({}, (), None),
    ],
)
async def test_a_host_tells_of_an_endpoints_gpus(
    serve: Serve, pages: dict[str, str], gpus: tuple[str, ...], load: GpuLoad | None
) -> None:
    """Or of none, which is reported as well."""
    exporter = await serve(pages)
    assert await _first(Target("127.0.0.1:9", exporter=exporter, gpus=gpus), Exported) == Exported("127.0.0.1:9", load)


def test_what_a_host_tells_is_shown_until_it_tells_no_more() -> None:
    """As null and without a series then: nobody must take silence for idleness."""
    fleet = _fleet(f"{{name: p, models: [m], endpoints: {{static: ['{A}']}}}}")
    metrics = Metrics()
    metrics.observe_state(fleet.state, dict, lambda: 0.0)
    shown = []
    for told in (None, GpuLoad(1, 0.5, 0.25), GpuLoad(1, 0.75), None):
        fleet.exported(A, told)
        described = fleet.describe()[0]
        assert (described["gpu_used"], described["gpu_memory_used"]) == _series(metrics)
        shown.append(_series(metrics))
    assert shown == [(None, None), (0.5, 0.25), (0.75, None), (None, None)]


@pytest.mark.parametrize("ending", ["reload", "senses down"])
def test_gpus_that_nobody_asks_for_any_more_are_not_shown(ending: str) -> None:
    """Their last figure would be taken for how they are; a report under way does not bring it back."""
    pool = f"{{name: p, models: [m], endpoints: {{static: ['{A}']}}}}"
    fleet = _fleet(pool)
    metrics = Metrics()
    metrics.observe_state(fleet.state, dict, lambda: 0.0)
    fleet.exported(A, GpuLoad(1, 0.5, 0.25))
    assert _series(metrics) == (0.5, 0.25)
    if ending == "reload":
        fleet.configure(Generation(2, parse(f"pools: [{pool}]")))
        fleet.exported(A, GpuLoad(1, 0.5, 0.25))
    else:
        Inbox(fleet, metrics, lambda: 0.0).forget_all()
    assert _series(metrics) == (None, None)


def _series(metrics: Metrics) -> tuple[float | None, float | None]:
    name = "pointsman_endpoint_gpu_{}_ratio"
    sample = metrics.registry.get_sample_value
    return sample(name.format("used"), {"endpoint": A}), sample(name.format("memory_used"), {"endpoint": A})
