"""What really happened at one simulated server: the truth that tests hold a router's account against."""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from vllm_adapters.stat_logger.wire import Finished

_MOST_ENDED = 10_000


class Record:
    """One request as it came, and what was sent for it. Headers in lower case, repeated ones joined by commas."""

    def __init__(self, path: str, headers: Iterable[tuple[str, str]]) -> None:
        self.path = path
        self.headers: dict[str, str] = {}
        for name, value in headers:
            name = name.lower()
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        self.body = b""
        self.sent_bytes = 0
        self._sent = hashlib.sha256()

    def sent(self, data: bytes) -> None:
        """Note bytes of the response's body."""
        self._sent.update(data)
        self.sent_bytes += len(data)

    def as_json(self) -> dict[str, Any]:
        """For `/sim/requests`."""
        return {
            "path": self.path,
            "headers": self.headers,
            "body_base64": base64.b64encode(self.body).decode(),
            "sent_sha256": self._sent.hexdigest(),
            "sent_bytes": self.sent_bytes,
        }


class Books:
    """Counts of one server. `in_flight`: generation requests being handled, from headers to the end of the answer.

    `served`: answered in full with 200. `aborted`: the client left first. `failed`: answered with an error, cut or
    reset. `held`: answers kept open by a fault. `finished`: by vLLM's finished_reason; `ended`: each of these, until
    somebody has taken them.
    """

    def __init__(self, record: int) -> None:
        self.started_at_s = time.time()
        self.in_flight = 0
        self.served = 0
        self.aborted = 0
        self.failed = 0
        self.held = 0
        self.finished: Counter[str] = Counter()
        self.ended: deque[Finished] = deque(maxlen=_MOST_ENDED)
        self.records: deque[Record] = deque(maxlen=record)

    def as_json(self) -> dict[str, Any]:
        """For `/sim/state`."""
        return {
            "started_at_s": self.started_at_s,
            "in_flight": self.in_flight,
            "served": self.served,
            "aborted": self.aborted,
            "failed": self.failed,
            "held": self.held,
        }
