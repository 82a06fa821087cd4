"""Sends an accumulator's messages on a ZMQ PUB socket, from a thread of its own. One per process.

The socket never blocks: what a slow subscriber does not take is dropped for it alone, and the gap in `seq` says so.

The thread looks for news as often as it may send, and nobody wakes it. Rejected: waking it for each step. The woken
thread takes the CPU, or waits for the interpreter, at the moment when tokens are to go out: on a busy machine the
serving thread was held up for milliseconds.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time

import zmq
from prometheus_client import REGISTRY, Gauge

from .accumulator import Accumulator
from .settings import Settings, log
from .wire import DRAINING, HEARTBEAT_S, PORT_GAUGE, encode

PORTS_TRIED = 16
"""Engines that share a host take one after the other."""
_MOST_UNSENT = 100
"""Messages kept for a subscriber that does not take them: two seconds' worth."""


class Publisher:
    """One server's messages: as often as agreed while something changes, and a heartbeat when nothing does."""

    def __init__(self, settings: Settings, accumulator: Accumulator) -> None:
        self.settings = settings
        self.accumulator = accumulator
        self.port = 0
        self._sending = threading.Lock()
        self._told = False

    def start(self) -> None:
        """Bind, and publish from now on. Raises zmq.ZMQError."""
        socket = zmq.Context().socket(zmq.PUB)  # not the shared context, which is vLLM's to end
        for option, value in ((zmq.SNDHWM, _MOST_UNSENT), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            socket.setsockopt(option, value)
        assert self.settings.address is not None  # noqa: S101 - who calls has looked
        try:
            self.port = bind(socket, self.settings.address)
        except zmq.ZMQError:
            socket.context.destroy(linger=0)
            raise
        # A fork while this thread is within ZMQ would leave the child with locks that nobody ever gives back.
        os.register_at_fork(
            before=self._sending.acquire,
            after_in_parent=self._sending.release,
            after_in_child=self._sending.release,
        )
        threading.Thread(target=self._run, args=(socket,), name="pointsman-stats", daemon=True).start()

    def draining(self) -> None:
        """The server is told to stop: say so from now on."""
        self.accumulator.set_phase(DRAINING)

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        gap_s = 1 / self.settings.messages_per_s
        sent_at_s = -HEARTBEAT_S
        while True:
            now_s = time.monotonic()
            if self.accumulator.has_news or now_s - sent_at_s >= HEARTBEAT_S:
                sent_at_s = now_s
                with self._sending:
                    self._send(socket)
            time.sleep(gap_s)

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        try:
            socket.send(encode(self.accumulator.take()), zmq.DONTWAIT)
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread would be gone for good
            self.accumulator.trouble()
            log.log(logging.DEBUG if self._told else logging.WARNING, "no stats sent: %r", error)
            self._told = True


def bind(socket: zmq.Socket[bytes], address: str) -> int:
    """Bind to `address`; where its port is taken, to one of the next, else to any. The port, 0 if there is none."""
    base, _, port = address.rpartition(":")
    if not address.startswith("tcp://") or not port.isdigit():
        socket.bind(address)
        return 0
    first = int(port)
    for number in range(first, first + PORTS_TRIED) if first else ():
        try:
            socket.bind(f"{base}:{number}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return number
    return socket.bind_to_random_port(base)


_of_this_process: tuple[int, Publisher | None] = (0, None)
_starting = threading.Lock()


def running_publisher() -> Publisher | None:
    """This process's publisher, started by whoever asks first. None if there is none to be had: the log says why."""
    global _of_this_process  # noqa: PLW0603 - vLLM makes loggers, and nobody to hand them a common owner
    with _starting:
        if _of_this_process[0] != os.getpid():
            _of_this_process = os.getpid(), _started()
        return _of_this_process[1]


def _started() -> Publisher | None:
    settings = Settings.from_environment()
    if settings.address is None:
        return None
    accumulator = Accumulator(secrets.token_hex(8))
    accumulator.started_at_s = REGISTRY.get_sample_value("process_start_time_seconds")
    publisher = Publisher(settings, accumulator)
    try:
        publisher.start()
    except zmq.ZMQError as error:
        log.warning("no stats are pushed: %s: %s", settings.address, error)
        return None
    _show_port(publisher)
    log.info("stats are pushed on port %d, run %s", publisher.port, accumulator.run)
    return publisher


def _show_port(publisher: Publisher) -> None:
    """On the server's metrics page: whoever reads it finds the socket."""
    gauge = Gauge(PORT_GAUGE, "Port of the socket on which this server pushes its stats", ["run"])
    gauge.labels(publisher.accumulator.run).set(publisher.port)
