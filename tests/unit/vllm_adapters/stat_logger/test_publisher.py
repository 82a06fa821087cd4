"""The plugin without vLLM: where it binds, when it sends, what it costs nobody, and how a shutdown is held."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from vllm_adapters.metrics import parse_metrics
from vllm_adapters.pushed import Pushed, parse_pushed
from vllm_adapters.stat_logger import loading, publisher, shutdown
from vllm_adapters.stat_logger.accumulator import Accumulator
from vllm_adapters.stat_logger.publisher import PORTS_TRIED, Publisher, bind
from vllm_adapters.stat_logger.settings import Settings
from vllm_adapters.stat_logger.wire import HEARTBEAT_S, Engine, Message

HANG_MS = 30_000


Open = Callable[[int], "zmq.Socket[bytes]"]
Subscribe = Callable[[int], Callable[[], Pushed]]


@pytest.fixture
def open_socket() -> Iterator[Open]:
    """Makes the test's own sockets, which are closed at its end."""
    context, made = zmq.Context(), []

    def make(kind: int) -> zmq.Socket[bytes]:
        made.append(context.socket(kind))
        return made[-1]

    yield make
    for socket in made:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def subscribe(open_socket: Open) -> Subscribe:
    """Connect to a port; gives a function that waits for the next message."""

    def connect(port: int) -> Callable[[], Pushed]:
        socket = open_socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.subscribe(b"")

        def receive() -> Pushed:
            assert socket.poll(HANG_MS)
            return parse_pushed(socket.recv())

        return receive

    return connect


def started(**fields: Any) -> Publisher:
    """A publisher of one engine, at any port."""
    settings = Settings(**{"address": "tcp://127.0.0.1:0", "messages_per_s": 100.0, "hold_s": 0.0} | fields)
    made = Publisher(settings, Accumulator("a1"))
    made.accumulator.add_engine(Engine(index=0))
    made.start()
    return made


# -- settings


def test_settings_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be set."""
    for name in [name for name in os.environ if name.startswith("POINTSMAN_STATS")]:
        monkeypatch.delenv(name)
    assert Settings.from_environment() == Settings("tcp://*:5559", 50, 0.5)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`off` publishes nothing."""
    monkeypatch.setenv("POINTSMAN_STATS", "tcp://10.0.0.1:7000")
    monkeypatch.setenv("POINTSMAN_STATS_HZ", "10")
    monkeypatch.setenv("POINTSMAN_STATS_HOLD_MS", "0")
    assert Settings.from_environment() == Settings("tcp://10.0.0.1:7000", 10, 0)
    monkeypatch.setenv("POINTSMAN_STATS", "off")
    assert Settings.from_environment().address is None


@pytest.mark.parametrize("value", ["0", "101", "-5", "nan", "inf", "many"])
def test_a_setting_that_makes_no_sense_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    """A server starts whatever its environment says."""
    monkeypatch.setenv("POINTSMAN_STATS_HZ", value)
    assert Settings.from_environment().messages_per_s == 50
    assert "POINTSMAN_STATS_HZ" in caplog.text


# -- the port


def test_engines_on_one_host_take_one_port_after_the_other(open_socket: Open) -> None:
    """And any port once those are taken."""
    first = open_socket(zmq.PUB)
    base = first.bind_to_random_port("tcp://127.0.0.1", min_port=40_000, max_port=60_000)
    second = bind(open_socket(zmq.PUB), f"tcp://127.0.0.1:{base}")
    assert base < second < base + PORTS_TRIED
    taken = {second} | {bind(open_socket(zmq.PUB), f"tcp://127.0.0.1:{base}") for _ in range(PORTS_TRIED)}
    assert len(taken) == PORTS_TRIED + 1
    assert any(port >= base + PORTS_TRIED or port < base for port in taken)


def test_an_address_that_cannot_be_bound_is_an_error_at_once(open_socket: Open) -> None:
    """Not one to be tried at other ports."""
    with pytest.raises(zmq.ZMQError):
        bind(open_socket(zmq.PUB), "tcp://192.0.2.1:5559")


def test_an_address_without_a_port_has_none(open_socket: Open) -> None:
    """A Unix socket, say."""
    assert bind(open_socket(zmq.PUB), "inproc://stats") == 0


def test_the_page_shows_the_port_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plugin registers is what a scrape finds."""
    registry = CollectorRegistry()
    real = publisher.Gauge
    monkeypatch.setattr(publisher, "Gauge", lambda *arguments: real(*arguments, registry=registry))
    monkeypatch.setattr(publisher, "_of_this_process", (0, None))
    monkeypatch.setenv("POINTSMAN_STATS", "tcp://127.0.0.1:0")
    made = publisher.running_publisher()
    assert made is not None
    page = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n" + generate_latest(registry)
    figures = parse_metrics(page)
    assert (figures.stats_port, figures.stats_run) == (made.port, made.accumulator.run)
    assert publisher.running_publisher() is made


def test_a_server_without_a_port_for_it_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so; nothing is raised."""
    monkeypatch.setattr(publisher, "_of_this_process", (0, None))
    monkeypatch.setenv("POINTSMAN_STATS", "tcp://192.0.2.1:5559")
    assert publisher.running_publisher() is None
    assert "no stats are pushed" in caplog.text


# -- messages


def test_a_change_is_sent_and_so_is_nothing(subscribe: Subscribe) -> None:
    """Every heartbeat, and at once when something happens; numbers without a gap."""
    made = started()
    receive = subscribe(made.port)
    first = receive()
    made.accumulator.step(0, SimpleNamespace(num_running_reqs=3, num_waiting_reqs=0, kv_cache_usage=0.0), None)
    second = receive()
    assert (second.seq, second.figures.running) == (first.seq + 1, 3)
    assert receive().seq == second.seq + 1


def test_any_number_of_subscribers_hear_the_same(subscribe: Subscribe) -> None:
    """Each replica of a router everything."""
    made = started()
    one, other = subscribe(made.port), subscribe(made.port)
    latest = max(one().seq, other().seq)
    while one().seq < latest + 2:
        pass
    while other().seq < latest + 2:
        pass


def test_messages_are_no_more_often_than_agreed(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something changes, the thread pauses after each look."""
    pauses: list[float] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        real(0.001)

    monkeypatch.setattr(publisher, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    made = started(messages_per_s=20.0)
    subscribe(made.port)()
    assert 0.05 in pauses  # beside those of other tests' threads


@pytest.mark.parametrize("failure", [TypeError("not to be encoded"), RuntimeError("changed during iteration")])
def test_a_message_that_cannot_be_sent_is_trouble_and_no_end(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Whatever goes wrong: the next one says so."""
    made = started()
    receive = subscribe(made.port)
    receive()
    real, failures = publisher.encode, iter([failure])

    def fail_once(message: Message) -> bytes:
        for one in failures if message.run == unlucky else ():
            raise one
        return real(message)

    made.accumulator.run = unlucky = repr(failure)  # threads of other tests send as well
    monkeypatch.setattr(publisher, "encode", fail_once)
    while receive().troubles == 0:
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_finds_the_thread_at_rest(subscribe: Subscribe) -> None:
    """Engines are forked off the server: within a send it would leave them locks that nobody gives back."""
    made = started()
    receive = subscribe(made.port)
    before = receive().seq
    child = os.fork()
    if child == 0:
        os._exit(0 if made._sending.acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    while receive().seq < before + 2:
        pass


# -- the shutdown


class Server:
    """As vLLM's AsyncLLM, as far as it is wrapped."""

    def __init__(self) -> None:
        self.calls: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        """From here on it refuses."""
        self.calls.append(timeout)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    """A class of its own, as nothing has wrapped it yet."""
    monkeypatch.setattr(shutdown, "_announced", threading.Event())
    return type("Server", (Server,), {"shutdown": Server.shutdown})


def _held(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    holds: list[float] = []
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(sleep=holds.append))
    return holds


def _elsewhere(what: Callable[[], None]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


def test_a_shutdown_is_told_and_held_before_it_begins(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: vLLM calls it again while it ends, with what arguments it likes."""
    made = started(hold_s=0.25)
    order: list[object] = []
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(sleep=lambda s: order.append((s, made.accumulator.phase))))
    monkeypatch.setattr(server, "shutdown", lambda _self, timeout=None: order.append(timeout))
    shutdown.watch_shutdown(server, made)
    shutdown.watch_shutdown(server, made)
    one = server()
    _elsewhere(lambda: one.shutdown(timeout=20))
    _elsewhere(one.shutdown)
    assert order == [(0.25, "draining"), 20, None]


def test_the_thread_that_serves_is_never_held(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is also ended from there, when it fails to start."""
    made, holds = started(hold_s=0.25), _held(monkeypatch)
    shutdown.watch_shutdown(server, made)
    one = server()
    one.shutdown(3)
    assert (one.calls, holds, made.accumulator.phase) == ([3], [], "draining")


def test_a_drain_goes_out_at_once(server: type[Server], subscribe: Subscribe) -> None:
    """Not with the next heartbeat."""
    made = started()
    receive = subscribe(made.port)
    seq = receive().seq
    shutdown.watch_shutdown(server, made)
    _elsewhere(server().shutdown)
    told = receive()
    assert (told.phase, told.seq) == ("draining", seq + 1)


# -- loading


@pytest.mark.parametrize(
    ("arguments", "alone"),
    [
        (["vllm", "serve", "model"], True),
        (["vllm", "serve", "model", "--api-server-count", "2"], False),
        (["vllm", "serve", "model", "--data-parallel-size=2"], False),
        (["vllm", "serve", "model", "-dp", "2"], False),
        (["vllm", "serve", "--headless"], False),
        (["vllm", "bench", "throughput"], False),
        (["batch.py"], False),
    ],
)
def test_only_a_server_that_is_alone_says_that_it_loads(arguments: list[str], *, alone: bool) -> None:
    """A script that uses vLLM opens no port; nor does a process that only starts others."""
    assert loading.is_only_server(arguments) is alone


@pytest.mark.parametrize(
    ("arguments", "port"),
    [(["--port", "9001"], 9001), (["--port=9002"], 9002), (["--port"], 8000), ([], 8000), (["--port", "x"], 8000)],
)
def test_the_port_of_the_api_is_on_the_command_line(arguments: list[str], port: int) -> None:
    """Or the default."""
    assert loading.server_port(["vllm", "serve", *arguments]) == port


def test_a_server_says_from_the_start_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at which port it will answer."""
    made = started()
    monkeypatch.setattr(loading, "running_publisher", lambda: made)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", "--port", "9001"])
    loading.announce()
    assert made.accumulator.server_port == 9001


def test_trouble_while_loading_stops_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is."""

    def fail() -> None:
        raise RuntimeError("no thread left")

    monkeypatch.setattr(loading, "running_publisher", fail)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model"])
    with caplog.at_level(logging.WARNING):
        loading.announce()
    assert "no stats are pushed while loading" in caplog.text


def test_both_ends_agree_on_the_heartbeat() -> None:
    """It is written down on both sides."""
    from vllm_adapters import pushed

    assert pushed.HEARTBEAT_S == HEARTBEAT_S
