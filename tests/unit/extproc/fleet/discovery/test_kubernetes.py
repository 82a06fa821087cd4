"""Discovery by Kubernetes, against a stand-in for the API server: what is mirrored, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_server import (
    PODS,
    POOLS,
    SLICES,
    Kubernetes,
    endpoint,
    endpoint_slice,
    event,
    inference_pool,
    pod,
)
from pydantic import ValidationError

from extproc.config.loading import load
from extproc.config.sections.endpoint_sources import Endpoints
from extproc.config.sections.endpoint_sources import Kubernetes as Source
from extproc.fleet.discovery import kubernetes_api
from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.kubernetes import follow_kubernetes
from extproc.fleet.discovery.kubernetes_api import Access, Unread, access_to
from extproc.fleet.discovery.sink import Sink

HANG_S = 60
BY_LABEL = {"pods": {"selector": "app=vllm", "port": 8000}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(kubernetes_api, "_FIRST_PAUSE_S", 0.01)


class House:
    """A follower and what it told."""

    def __init__(self, cluster: Kubernetes) -> None:
        self.cluster = cluster
        self.lists: list[dict[str, bool]] = []  # address -> terminating
        self.failures: list[str] = []
        self.skipped = 0
        self.stale = False

    @asynccontextmanager
    async def following(self, **fields: Any) -> AsyncIterator[None]:
        """Follow for as long as the block lasts."""
        given = {"api_server": self.cluster.url, "namespace": "llm", "retry_max_s": 0.05, **(fields or BY_LABEL)}
        source = Source.model_validate(given)
        task = asyncio.create_task(follow_kubernetes(source, Sink("p", self._report, self)))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def lists_are(self, *addresses: str, terminating: tuple[str, ...] = ()) -> None:
        """Wait until the newest list is this one."""
        wanted = dict.fromkeys(addresses, False) | dict.fromkeys(terminating, True)
        await self.until(lambda: bool(self.lists) and self.lists[-1] == wanted)

    async def until(self, check: Callable[[], bool]) -> None:
        """Wait until it is so."""

        async def wait() -> None:
            while not check():  # noqa: ASYNC110 - the stand-in and the follower set no events
                await asyncio.sleep(0.005)

        await asyncio.wait_for(wait(), HANG_S)

    def _report(self, _pool: str, endpoints: list[Discovered]) -> None:
        self.lists.append({one.address: one.terminating for one in endpoints})

    def discovered(self, pool: str, *, ok: bool) -> None:
        """DiscoveryEvents."""

    def discovery_failed(self, pool: str, reason: str) -> None:  # noqa: ARG002
        """DiscoveryEvents."""
        self.failures.append(reason)

    def discovery_state(self, pool: str, *, endpoints: int, skipped: int, stale: bool) -> None:  # noqa: ARG002
        """DiscoveryEvents."""
        self.skipped = skipped
        self.stale = stale


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """An API server that listens while the test lasts, with one pod."""
    cluster = Kubernetes()
    cluster.put(PODS, pod("a", "10.0.0.1"))
    cluster.put(PODS, pod("other", "10.0.9.9", labels={"app": "redis"}))
    runner = await cluster.start()
    yield House(cluster)
    cluster.end_watches()
    await runner.cleanup()


A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


# -- the three sources


async def test_pods_come_drain_and_go(house: House) -> None:
    """By label, as they change; a deleted one is terminating until it is gone."""
    async with house.following():
        await house.lists_are(A)
        house.cluster.put(PODS, pod("b", "10.0.0.2", ready=False))
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)
        house.cluster.put(PODS, pod("a", "10.0.0.1", terminating=True))
        await house.lists_are(B, terminating=(A,))
        house.cluster.delete(PODS, "a")
        await house.lists_are(B)
    assert house.failures == []


async def test_slices_of_a_service_are_followed(house: House) -> None:
    """Several of them, and one that goes."""
    house.cluster.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.1", "a")))
    async with house.following(endpoint_slices={"service": "vllm"}):
        await house.lists_are(A)
        house.cluster.put(SLICES, endpoint_slice("s2", endpoint("10.0.0.2", "b"), endpoint("10.0.0.1", "a")))
        await house.lists_are(A, B)
        house.cluster.put(SLICES, endpoint_slice("s1", endpoint("10.0.0.3", "c", ready=False, terminating=True)))
        await house.lists_are(A, B, terminating=(C,))
        house.cluster.delete(SLICES, "s2")
        await house.lists_are(terminating=(C,))


async def test_an_inference_pool_is_followed_with_its_pods(house: House) -> None:
    """Its ports and labels may change, and the pods they lead to."""
    house.cluster.put(POOLS, inference_pool("other", 1, app="redis"))
    house.cluster.put(POOLS, inference_pool("qwen", 8000, 8001, app="vllm"))
    async with house.following(inference_pool={"name": "qwen"}):
        await house.lists_are(A, "10.0.0.1:8001")
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, "10.0.0.1:8001", B, "10.0.0.2:8001")
        house.cluster.put(POOLS, inference_pool("qwen", 9000, app="redis"))
        await house.lists_are("10.0.9.9:9000")
        house.cluster.put(PODS, pod("c", "10.0.0.3"))  # of the labels it had
        house.cluster.put(PODS, pod("d", "10.0.9.8", labels={"app": "redis"}))
        await house.lists_are("10.0.9.8:9000", "10.0.9.9:9000")
    assert house.failures == []


async def test_a_pool_that_is_gone_leaves_its_pods(house: House) -> None:
    """They run on and are followed; the list is stale until the pool is back."""
    house.cluster.put(POOLS, inference_pool("qwen", 8000, app="vllm"))
    async with house.following(inference_pool={"name": "qwen"}):
        await house.lists_are(A)
        house.cluster.delete(POOLS, "qwen")
        await house.until(lambda: house.failures == ["not_found"])
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)
        assert house.stale
        house.cluster.put(POOLS, inference_pool("qwen", 8000, app="vllm"))
        await house.until(lambda: not house.stale)


async def test_a_pool_that_is_not_there_yet_is_waited_for(house: House) -> None:
    """Nothing is reported, so that nothing counts as found."""
    async with house.following(inference_pool={"name": "qwen"}):
        await house.until(lambda: house.failures == ["not_found"])
        assert house.lists == []
        house.cluster.put(POOLS, inference_pool("qwen", 8000, app="vllm"))
        await house.lists_are(A)


async def test_an_empty_list_is_a_list(house: House) -> None:
    """Scaled to zero."""
    house.cluster.delete(PODS, "a")
    async with house.following():
        await house.lists_are()


async def test_what_cannot_be_an_endpoint_is_counted(house: House) -> None:
    """A ready pod without the port."""
    async with house.following(pods={"selector": "app=vllm", "port": "http"}):
        await house.lists_are()
        assert house.skipped == 1


# -- the protocol


async def test_a_long_list_is_read_in_pages(house: House) -> None:
    """And told once, when it is whole."""
    for number in range(1, 251):
        house.cluster.put(PODS, pod(f"p{number}", f"10.1.0.{number}"))
    async with house.following():
        await house.until(lambda: bool(house.lists))
    assert len(house.lists) == 1
    assert len(house.lists[0]) == 251
    assert [query.get("limit") for query in house.cluster.asked[:3]] == ["100", "100", "100"]


async def test_a_watch_that_ends_is_taken_up_where_it_was(house: House) -> None:
    """From the newest version seen, bookmarks included, and without listing again."""
    async with house.following():
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)
        house.cluster.forget()
        house.cluster.bookmark(PODS)
        house.cluster.end_watches()
        await house.until(lambda: len(house.cluster.asked) == 3)
        house.cluster.put(PODS, pod("c", "10.0.0.3"))
        await house.lists_are(A, B, C)
    assert ["watch" in query for query in house.cluster.asked] == [False, True, True]
    assert house.cluster.asked[-1]["allowWatchBookmarks"] == "true"
    assert house.failures == []


async def test_a_watch_lasts_as_long_as_asked(house: House) -> None:
    """The server ends it; that is no failure."""
    async with house.following(**BY_LABEL, watch_s=1):
        await house.until(lambda: len(house.cluster.asked) >= 3)
    assert house.cluster.asked[1]["timeoutSeconds"] == "1"
    assert house.failures == []
    assert house.lists == [{A: False}]


@pytest.mark.parametrize("in_stream", [False, True], ids=["as a status", "as an event"])
async def test_a_version_that_is_gone_means_to_list_again(house: House, in_stream: bool) -> None:  # noqa: FBT001
    """What happened in between is seen by the list, removals included."""
    house.cluster.put(PODS, pod("b", "10.0.0.2"))
    async with house.following():
        await house.lists_are(A, B)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.gone_in_stream = in_stream
        house.cluster.send(PODS, b'{"type"')  # cuts it, so that what follows is missed
        await house.until(lambda: house.cluster.watches == 0)
        house.cluster.objects[PODS].pop("a")
        house.cluster.forget()
        await house.lists_are(B)
        await house.until(lambda: not house.stale)
    assert "expired" in house.failures


async def test_a_watch_cut_within_an_event_is_taken_up_where_it_was(house: House) -> None:
    """The half event is dropped and comes again."""
    async with house.following():
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.send(PODS, event("ADDED", pod("x", "10.0.0.9"))[:-20])
        await house.until(lambda: house.cluster.watches == 0)
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)
        assert not house.stale
    assert set(house.failures) == {"disconnected"}
    assert sum("watch" not in query for query in house.cluster.asked) == 1


@pytest.mark.parametrize(
    "nonsense",
    [b"{no json}\n", b"[]\n", event("ADDED", {"metadata": 7}), event("SURPRISE", pod("x", "10.0.0.9"))],
    ids=["no json", "another shape", "another object", "another event"],
)
async def test_an_event_that_makes_no_sense_means_to_list_again(house: House, nonsense: bytes) -> None:
    """It may have said something that we now do not know."""
    async with house.following():
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.send(PODS, nonsense)
        await house.until(lambda: house.failures == ["malformed"] and not house.stale)
    assert sum("watch" not in query for query in house.cluster.asked) == 2
    assert house.lists == [{A: False}]


async def test_one_event_may_come_in_many_pieces_and_many_in_one(house: House) -> None:
    """Lines count, not packets."""
    async with house.following():
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        lines = b"".join(
            event("ADDED", {**one, "metadata": {**one["metadata"], "resourceVersion": "9"}})
            for one in (pod("b", "10.0.0.2"), pod("c", "10.0.0.3"))
        )
        house.cluster.send(PODS, lines + b"\n")
        await house.lists_are(A, B, C)
    assert house.failures == []


# -- failures


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "unauthorized"), (403, "forbidden"), (404, "not_found"), (429, "http_status"), (500, "http_status")],
)
async def test_a_refusal_is_told_with_its_reason_and_tried_again(house: House, status: int, reason: str) -> None:
    """Until it is over."""
    house.cluster.status = status
    async with house.following():
        await house.until(lambda: len(house.failures) >= 3)
        assert set(house.failures) == {reason}
        assert house.stale
        assert house.lists == []
        house.cluster.status = None
        await house.lists_are(A)
        assert not house.stale


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"[]", b'{"items": []}', b'{"metadata": {"resourceVersion": "1"}, "items": [7]}'],
    ids=["no json", "another shape", "no version", "another object"],
)
async def test_a_list_that_makes_no_sense_keeps_the_last_good_one(house: House, answer: bytes) -> None:
    """As any failure."""
    async with house.following():
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.raw_list = answer
        house.cluster.send(PODS, b"nonsense\n")
        await house.until(lambda: len(house.failures) >= 3)
        assert set(house.failures) == {"malformed"}
        assert house.lists == [{A: False}]


async def test_more_objects_than_the_bound_keep_the_last_good_list(house: House) -> None:
    """Neither all nor some of them: which would be left out could not be said."""
    async with house.following(**BY_LABEL, max_objects=2):
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)
        house.cluster.put(PODS, pod("c", "10.0.0.3"))
        await house.until(lambda: len(house.failures) >= 2)
        assert set(house.failures) == {"too_many"}
        assert house.lists[-1] == {A: False, B: False}


async def test_an_answer_without_end_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours grows with what a server sends."""
    monkeypatch.setattr(kubernetes_api, "_LARGEST_ANSWER_BYTES", 10_000)
    house.cluster.raw_list = b" " * 20_000
    async with house.following():
        await house.until(lambda: house.failures[:1] == ["malformed"])
        house.cluster.raw_list = None
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.failures.clear()
        house.cluster.send(PODS, b" " * 20_000)
        await house.until(lambda: bool(house.failures))
        assert set(house.failures) <= {"malformed", "disconnected"}


async def test_a_slow_answer_is_given_up_and_holds_nobody_up(house: House) -> None:
    """The loop goes on meanwhile; the next try may be quicker."""
    house.cluster.hold_lists = asyncio.Event()
    async with house.following(**BY_LABEL, timeout_s=0.1):
        await house.until(lambda: house.failures[:1] == ["timeout"])
        house.cluster.hold_lists.set()
        await house.lists_are(A)


async def test_a_server_that_is_not_there_is_tried_again(house: House) -> None:
    """Nothing listens at first."""
    url, house.cluster.url = house.cluster.url, "http://127.0.0.1:1"
    async with house.following():
        await house.until(lambda: house.failures[:2] == ["unreachable", "unreachable"])
    house.cluster.url = url
    async with house.following():
        await house.lists_are(A)


async def test_a_watch_that_is_refused_backs_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good list before it does not begin the pauses anew: it would be listed again and again."""
    watch, pauses = house.cluster._watch, []
    pause = kubernetes_api.Mirror._pause_s

    async def refuse(request: Any, query: dict[str, str]) -> Any:
        if "resourceVersion" in query and len(pauses) < 4:
            house.cluster.oldest = house.cluster.version + 1
            answer = await watch(request, query)
            house.cluster.oldest = 1
            return answer
        return await watch(request, query)

    def noted(mirror: Any) -> float:
        pauses.append(mirror._failures)
        return pause(mirror)

    monkeypatch.setattr(house.cluster, "_watch", refuse)
    monkeypatch.setattr(kubernetes_api.Mirror, "_pause_s", noted)
    async with house.following():
        await house.until(lambda: len(pauses) >= 4)
        assert pauses[:4] == [1, 2, 3, 4]
        await house.until(lambda: house.cluster.watches == 1)


async def test_a_fault_nobody_thought_of_does_not_end_the_following(house: House) -> None:
    """It is logged and counted, and everything is listed again."""
    report, faults = house._report, [ZeroDivisionError()]

    def broken(pool: str, endpoints: list[Discovered]) -> None:
        if faults:
            raise faults.pop()
        report(pool, endpoints)

    house._report = broken  # type: ignore[method-assign]
    async with house.following():
        await house.until(lambda: house.failures == ["fault"])
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        await house.lists_are(A, B)


# -- who we are


async def test_a_token_that_rotates_is_read_anew(house: House, tmp_path: Path) -> None:
    """The old one is refused in the middle of everything; the new one is in the file by then or later."""
    token = tmp_path / "token"
    token.write_text("old\n")
    house.cluster.token = "old"
    async with house.following(**BY_LABEL, token_file=token):
        await house.lists_are(A)
        await house.until(lambda: house.cluster.watches == 1)
        house.cluster.token = "new"
        house.cluster.put(PODS, pod("b", "10.0.0.2"))
        house.cluster.end_watches()
        await house.until(lambda: "unauthorized" in house.failures)
        token.write_text("new\n")
        await house.until(lambda: not house.stale)
        await house.lists_are(A, B)


async def test_a_token_that_cannot_be_read_is_a_failure_as_any(house: House, tmp_path: Path) -> None:
    """It is not mounted yet, say; nothing is asked without it."""
    async with house.following(**BY_LABEL, token_file=tmp_path / "token"):
        await house.until(lambda: len(house.failures) >= 2)
        assert set(house.failures) == {"credentials"}
        assert house.cluster.asked == []
        (tmp_path / "token").write_text("any")
        await house.lists_are(A)


def test_in_a_cluster_everything_is_at_hand(tmp_path: Path) -> None:
    """Address from the environment; namespace, CA and token as they are mounted."""
    (tmp_path / "namespace").write_text("llm\n")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = access_to(Source.model_validate(BY_LABEL), environ, tmp_path)
    assert access == Access("https://[fd00::1]:6443", "llm", tmp_path / "ca.crt", tmp_path / "token")
    given = Source.model_validate({**BY_LABEL, "namespace": "mine", "ca_file": "/ca", "token_file": "/token"})
    access = access_to(given, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    assert access == Access("https://10.0.0.1:443", "mine", Path("/ca"), Path("/token"))


def test_elsewhere_the_config_says_it() -> None:
    """No token is sent to whoever it names, unless told which."""
    source = Source.model_validate({**BY_LABEL, "api_server": "http://127.0.0.1:8001/"})
    assert access_to(source, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == Access(
        "http://127.0.0.1:8001", "default", None, None
    )
    with pytest.raises(Unread, match="give api_server"):
        access_to(Source.model_validate(BY_LABEL), {})


# -- configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of"),
        ({**BY_LABEL, "endpoint_slices": {"service": "vllm"}}, "exactly one of"),
        ({"pods": {"selector": "", "port": 1}}, "at least 1 character"),
        ({"pods": {"selector": "a=b", "port": 0}}, "a port is"),
        ({"pods": {"selector": "a=b", "port": "8000"}}, "name of a port"),
        ({"endpoint_slices": {"service": "../secrets"}}, "pattern"),
        ({**BY_LABEL, "namespace": "a/b"}, "pattern"),
        ({**BY_LABEL, "api_server": "file:///etc/passwd"}, "pattern"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    """When the file is read."""
    with pytest.raises(ValidationError, match=message):
        Endpoints.model_validate({"kubernetes": fields})


def test_files_are_relative_to_the_config(tmp_path: Path) -> None:
    """As all files are."""
    source = {"kubernetes": {**BY_LABEL, "ca_file": "ca.crt", "token_file": "token"}}
    file = tmp_path / "pointsman.yaml"
    file.write_text(json.dumps({"pools": [{"name": "p", "models": ["m"], "endpoints": source}]}))
    found = load(file).pools[0].endpoints.kubernetes
    assert found is not None
    assert (found.ca_file, found.token_file) == (tmp_path / "ca.crt", tmp_path / "token")
