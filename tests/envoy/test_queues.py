"""Requests that wait, through a real Envoy: turns by class, limits, clients that leave, restarts and reloads."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, Engine, HeldStream, System, chat, eventually, pool_of

CHAT = "/v1/chat/completions"
CLASSES = [
    {"name": "real-time", "weight": 7, "overflow": "batch"},
    {"name": "batch", "weight": 3},
]


@pytest.fixture(scope="module")
def only_engine(make_engines: Callable[..., list[Engine]]) -> Engine:
    """One engine that remembers its requests."""
    return make_engines(1, "--speed", "200", "--record", "1000")[0]


@pytest.fixture
def engine(only_engine: Engine) -> Engine:
    """The same, which counts its requests from now on."""
    only_engine.release()
    only_engine.forget_requests()
    return only_engine


@pytest.fixture
def make_queue(share_system: Callable[..., System], engine: Engine) -> Callable[..., System]:
    """A system, the same for all, in which the engine takes one request at a time and the rest wait as told."""

    def make(classes: list[dict[str, Any]] = CLASSES, **queue: Any) -> System:
        system = share_system(pools=[pool_of([engine])])
        system.wait_pickable(engine.address)
        system.config["pools"] = [pool_of([engine], queue={"classes": classes, "endpoint_requests": 1, **queue})]
        system.reload()
        system.count_from_now()
        return system

    return make


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=HANG_GUARD_S, limits=limits) as made:
        yield made


def waiting(system: System) -> Counter[str]:
    """How many wait, by class."""
    queues = httpx.get(f"{system.admin_url}/v1/queues", timeout=HANG_GUARD_S).json()["queues"]
    return Counter({name: one["waiting"] for name, one in queues["chat"]["classes"].items()})


def left(system: System, how: str, class_name: str = "") -> float:
    """How many have left the queue in this way."""
    return system.total("pointsman_queue_left_total", f'how="{how}"', f'class="{class_name}' if class_name else "")


def ask(client: httpx.AsyncClient, system: System, class_name: str, **fields: Any) -> asyncio.Task[httpx.Response]:
    """One request of a class, under way."""
    headers = {"x-pointsman-priority": class_name, "x-test-class": class_name}
    return asyncio.create_task(client.post(f"{system.url}{CHAT}", json=chat(**fields), headers=headers))


async def until_waiting(system: System, **counts: int) -> None:
    """So many of each class wait."""
    await asyncio.to_thread(eventually, lambda: waiting(system) == Counter(counts), f"{counts} wait")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object."""
    return dict(answer.json()["error"])


async def test_classes_take_turns_by_weight(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """70 urgent and 70 others wait for one place: while both do, they go 7 to 3; all are answered."""
    system = make_queue()
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        asked = [ask(client, system, name) for _ in range(70) for name in ("real-time", "batch")]
        await until_waiting(system, **{"real-time": 70, "batch": 70})
        engine.release()
        first.rest()
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    order = [request["headers"]["x-test-class"] for request in engine.requests()[1:]]
    assert len(order) == 140
    both_wait = order[:90]
    assert both_wait.count("real-time") / 90 == pytest.approx(0.7, abs=0.05)
    for begin in range(0, 80, 10):
        assert both_wait[begin : begin + 20].count("batch") >= 4  # its share at every moment, not just on the whole
    assert left(system, "bound") == 140
    assert system.in_flight() == {engine.address: 0}


async def test_who_leaves_the_queue_is_never_seen_by_an_engine(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """Clients that hang up while they wait lose their places at once, and nothing of them is left."""
    system = make_queue()
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        stays = ask(client, system, "real-time", content="stays")
        leave = [ask(client, system, "real-time", content=f"leaves {number}") for number in range(10)]
        await until_waiting(system, **{"real-time": 11, "batch": 0})
        for one in leave:
            one.cancel()
        await until_waiting(system, **{"real-time": 1, "batch": 0})
        engine.release()
        first.rest()
        assert (await stays).status_code == 200
    assert len(engine.requests()) == 2
    assert left(system, "client_gone") == 10
    assert system.total("pointsman_ext_proc_streams_open") == 0
    assert system.total("pointsman_queue_bytes") == 0


async def test_who_waits_too_long_is_told_so(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """503 in JSON with a Retry-After after `max_wait_s`; the place is free again."""
    system = make_queue([{"name": "only", "max_wait_s": 0.3}])
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        answer = await ask(client, system, "only")
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "queue_timeout"
        assert int(answer.headers["retry-after"]) >= 1
        engine.release()
        first.rest()
    assert (await ask(client, system, "only")).status_code == 200
    assert len(engine.requests()) == 2


async def test_a_full_queue_overflows_and_then_refuses(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """What finds no place among the urgent waits with the others; what finds none there gets 429 with Retry-After."""
    system = make_queue([{"name": "real-time", "places": 2, "overflow": "batch"}, {"name": "batch", "places": 3}])
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        asked = [ask(client, system, "real-time") for _ in range(5)]
        await until_waiting(system, **{"real-time": 2, "batch": 3})
        refused = await ask(client, system, "real-time")
        engine.release()
        first.rest()
    assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert left(system, "overflowed", "real-time") == 3
    assert left(system, "full") == 1


async def test_bodies_that_wait_are_bounded(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """A body that would hold more than `max_bytes` is refused, a small one waits."""
    system = make_queue([{"name": "only"}], max_bytes=20_000)
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        large = await ask(client, system, "only", content="x" * 30_000)
        small = ask(client, system, "only")
        await until_waiting(system, only=1)
        engine.release()
        first.rest()
    assert (large.status_code, error_of(large)["code"]) == (429, "queue_full")
    assert (await small).status_code == 200


async def test_an_unknown_class_is_an_error(make_queue: Callable[..., System], client: httpx.AsyncClient) -> None:
    """400 that names the classes there are."""
    answer = await ask(client, make_queue(), "realtime")
    assert answer.status_code == 400
    assert "real-time, batch" in error_of(answer)["message"]


async def test_a_reload_keeps_those_that_wait(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """Who waits goes on waiting where the queue changes, and goes at once where there is none any more."""
    system = make_queue()
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        asked = [ask(client, system, name) for name in ("real-time", "batch")]
        await until_waiting(system, **{"real-time": 1, "batch": 1})
        system.config["pools"][0]["queue"]["classes"] = [{"name": "real-time"}]
        system.write_config()
        await until_waiting(system, **{"real-time": 2})
        del system.config["pools"][0]["queue"]
        system.write_config()
        answers = await asyncio.gather(*asked)  # though the place is still taken
        engine.release()
        first.rest()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert left(system, "reconfigured") == 2


async def test_a_crash_while_some_wait_is_answered(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """503 in JSON to those that waited; the running answer is whole, and all is well afterwards."""
    system = make_queue()
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        asked = [ask(client, system, "real-time") for _ in range(3)]
        await until_waiting(system, **{"real-time": 3, "batch": 0})
        system.kill_decision_process()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "router_unavailable"
        engine.release()
        assert first.rest().endswith(b"data: [DONE]\n\n")
    system.wait_pickable(engine.address)
    assert (await ask(client, system, "real-time")).status_code == 200


async def test_who_waits_for_an_engine_that_dies_goes_to_another(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """Both engines are full, one is killed: those that waited are answered by the other."""
    pair = make_engines(2, "--speed", "200", "--record", "100")
    queue = {"classes": [{"name": "only", "max_wait_s": 60}], "endpoint_requests": 1}
    system = make_system(pools=[pool_of(pair, queue=queue)])
    system.wait_pickable(*(engine.address for engine in pair))
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        streams = [HeldStream(holder, system) for _ in pair]
        asked = [ask(client, system, "only") for _ in range(6)]
        await until_waiting(system, only=6)
        dead, alive = pair
        dead.kill()
        alive.release()
        next(stream for stream in streams if stream.endpoint == alive.address).rest()
        answers = await asyncio.gather(*asked)
    assert {(answer.status_code, answer.headers["x-pointsman-endpoint"]) for answer in answers} == {
        (200, alive.address)
    }


async def test_an_engine_hears_how_urgent_a_request_is(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """X-Vllm-Priority by class, whatever the client says itself; without a figure what it says, if it is not sooner."""
    system = make_queue(
        [{"name": "urgent", "engine_priority": 0}, {"name": "late", "engine_priority": 10}, {"name": "own"}]
    )
    for name, said in (("urgent", "-5"), ("late", "-5"), ("own", "-5"), ("own", "20000")):
        headers = {"x-pointsman-priority": name, "x-vllm-priority": said}
        answer = await client.post(f"{system.url}{CHAT}", json=chat(), headers=headers)
        assert answer.status_code == 200
    heard = [request["headers"].get("x-vllm-priority") for request in engine.requests()]
    assert heard == ["0", "10", "0", "20000"]


async def test_a_class_has_no_more_of_an_engine_than_it_may(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """Two of the batch class at once; an urgent request passes those that wait for a third place."""
    system = make_queue([{"name": "real-time"}, {"name": "batch", "endpoint_requests": 2}], endpoint_requests=4)
    with httpx.Client(timeout=HANG_GUARD_S, headers={"x-pointsman-priority": "batch"}) as holder:
        streams = [HeldStream(holder, system) for _ in range(2)]
        third = ask(client, system, "batch")
        await until_waiting(system, **{"real-time": 0, "batch": 1})
        assert (await ask(client, system, "real-time")).status_code == 200
        assert waiting(system)["batch"] == 1
        engine.release()
        for stream in streams:
            stream.rest()
        assert (await third).status_code == 200


async def test_a_decision_tells_how_long_it_waited(
    engine: Engine, make_queue: Callable[..., System], client: httpx.AsyncClient
) -> None:
    """With its class, in the decision log."""
    system = make_queue()
    with httpx.Client(timeout=HANG_GUARD_S) as holder:
        first = HeldStream(holder, system)
        waits = ask(client, system, "batch")
        await until_waiting(system, **{"real-time": 0, "batch": 1})
        engine.release()
        first.rest()
        answer = await waits
    record = await asyncio.to_thread(system.decision, answer.headers["x-pointsman-request-id"])
    assert record["class"] == "batch"
    assert record["waited_s"] > 0
    assert system.decision(first.request_id)["waited_s"] == 0
    assert json.dumps(record)
