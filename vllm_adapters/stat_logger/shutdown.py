"""Sees that a server is told to stop, and has it wait until whoever sends it requests has heard of it.

On SIGTERM vLLM 0.32's API server calls `AsyncLLM.shutdown` in a thread. From that moment it refuses new requests with
500, while `/health` and `/v1/models` stay 200 and, with `--shutdown-timeout`, what it has begun goes on. Until that
call it serves as ever. So the call is wrapped: say that we drain, hold for a moment, go on. Rejected: a signal handler
of our own. vLLM sets its own later and nothing tells when; and it would see the signal, but not hold what follows.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from .publisher import Publisher
from .settings import log


def watch_shutdown(server: type[Any], publisher: Publisher) -> None:
    """Wrap `server.shutdown`, once."""
    shutdown = server.shutdown
    if hasattr(shutdown, "pointsman"):
        return

    @functools.wraps(shutdown)
    def announced(self: Any, *arguments: Any, **named: Any) -> Any:
        announce(publisher)
        return shutdown(self, *arguments, **named)

    announced.pointsman = True  # type: ignore[attr-defined]
    server.shutdown = announced


_announced = threading.Event()


def announce(publisher: Publisher) -> None:
    """Say it. The first time, and if no request waits for this thread, hold until it was heard."""
    first = not _announced.is_set()
    _announced.set()
    publisher.draining()
    if first and threading.current_thread() is not threading.main_thread():
        log.info("told to stop: waiting %g s for routers to hear it", publisher.settings.hold_s)
        time.sleep(publisher.settings.hold_s)
