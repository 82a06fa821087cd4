"""A whole system for tests: simulated engines, a real Envoy and us, as the processes a user would start."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import httpx
import yaml

HANG_GUARD_S = 60.0
"""How long anything may take before a test gives up: a guard against hanging, not a yardstick."""


_LOCAL = httpx.Client(
    timeout=HANG_GUARD_S,
    limits=httpx.Limits(max_keepalive_connections=0),  # who is asked again may have been started anew
    verify=False,  # noqa: S501 - plain HTTP on loopback
)
"""For looking in. A client for each look would read the system's certificates, 50 ms of CPU, at every poll."""

FIRST_PORT, PORTS = 20_000, 12_000
"""All are below the range from which outgoing connections take theirs."""
_given: deque[int] = deque(maxlen=500)


def _own_ports() -> range:
    """Those of this process of pytest-xdist's: what one has found free another does not take before it is used."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = PORTS // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(FIRST_PORT + worker * share, FIRST_PORT + (worker + 1) * share)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, and that were not given out lately."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_own_ports())
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                found.append(port)
                _given.append(port)
    return found


def unmeasured() -> dict[str, str]:
    """Our environment without what makes coverage measure a process.

    Systems and engines under test run as fast as a user's: the lines they execute are those of the unit tests, and
    measuring them would cost a third of the time of all tests.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS_")}


def eventually(check: Callable[[], Any], what: str, pause_s: float = 0.02, within_s: float = HANG_GUARD_S) -> Any:
    """The first true result of `check`, asked again and again; fails the test with `what` at the hang guard."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, OSError):
            if result := check():
                return result
        time.sleep(pause_s)
    raise AssertionError(f"did not happen within {within_s} s: {what}")


class Engine:
    """One simulated engine in its own process, so that it can be killed."""

    def __init__(self, log: Path, port: int, *options: str) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.options = options
        self._log = log
        self.start()

    def start(self) -> None:
        """Start (again) on the same port."""
        self._forgotten = 0
        command = [sys.executable, "-m", "extproc.cli", "sim", "--listen", self.address, *self.options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=unmeasured())

    def wait_ready(self) -> None:
        """Until it answers."""
        eventually(lambda: self.get("/health").status_code == 200, f"engine {self.address} answers")

    def get(self, path: str) -> httpx.Response:
        """Ask it directly."""
        return _LOCAL.get(f"http://{self.address}{path}")

    def state(self) -> dict[str, Any]:
        """What it knows to be true of itself."""
        document: dict[str, Any] = self.get("/sim/state").json()
        return document

    def requests(self) -> list[dict[str, Any]]:
        """The requests it remembers, oldest first; the trials of ours are not among them."""
        return self._remembered()[self._forgotten :]

    def forget_requests(self) -> None:
        """Those so far are not among `requests` any more; `--record` must be enough for all there will be."""
        self._forgotten = len(self._remembered())

    def _remembered(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/sim/requests").json()
        return [request for request in found if "x-pointsman-probe" not in request["headers"]]

    def faults(self, **faults: Any) -> None:
        """Misbehave from now on; no arguments: behave again."""
        _LOCAL.post(f"http://{self.address}/sim/faults", json=faults).raise_for_status()

    def release(self) -> None:
        """End every held answer."""
        _LOCAL.post(f"http://{self.address}/sim/release").raise_for_status()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.kill()


SYSTEMS: WeakSet[System] = WeakSet()
"""All there are, so that their logs can be shown."""


class System:
    """`pointsman up` on free ports, over the given config parts."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        http, grpc, health, metrics, admin = free_ports(5)
        self.verify = config.pop("verify", None)
        self.headers: dict[str, str] = config.pop("headers", {})
        self.url = f"{'https' if self.verify else 'http'}://127.0.0.1:{http}"
        self.admin_url = f"http://127.0.0.1:{admin}"
        self.health_address = f"127.0.0.1:{health}"
        self._metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self._folder = folder
        self.log = folder / "pointsman.log"
        self.config: dict[str, Any] = {
            "listen": {
                "http": f"127.0.0.1:{http}",
                "grpc": f"127.0.0.1:{grpc}",
                "health": self.health_address,
                **config.pop("listen", {}),
            },
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "wire": {"response_headers": ["request_id", "endpoint", "model"], **config.pop("wire", {})},
            "observe": {"metrics": f"127.0.0.1:{metrics}", **config.pop("observe", {})},
            **config,
        }
        self.config_path = folder / "pointsman.yaml"
        self._counted_from: dict[str, float] = {}
        self.write_config()
        SYSTEMS.add(self)

    def write_config(self) -> None:
        """Put the config in place the way an operator's tool does: written aside, then renamed."""
        aside = self.config_path.with_suffix(".new")
        aside.write_text(yaml.safe_dump(self.config))
        aside.rename(self.config_path)

    def reload(self) -> None:
        """Put the config as it is now in force, if it is another one."""
        if yaml.safe_load(self.config_path.read_text()) == self.config:
            return
        before = self._generation()
        self.write_config()
        eventually(lambda: self._generation() > before, "the new config is in force")

    def _generation(self) -> float:
        return self.total("pointsman_config_generation")

    def start(self) -> None:
        """Start, and wait until requests are served by every endpoint that answers."""
        command = [sys.executable, "-m", "extproc.cli", "up", str(self.config_path), "--concurrency", "1"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=unmeasured())
        eventually(self._serves, "the system serves")

    def _serves(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"pointsman up ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        url = f"{self.url}/v1/models"
        if url.startswith("http:"):
            return _LOCAL.get(url, headers=self.headers, timeout=5).status_code == 200
        return httpx.get(url, headers=self.headers, timeout=5, verify=self._trust()).status_code == 200

    def _trust(self) -> ssl.SSLContext | bool:
        """Whose certificates the client believes: `verify` as a CA file, or a context that may hold one of its own."""
        return ssl.create_default_context(cafile=self.verify) if isinstance(self.verify, str) else self.verify or True

    def stop(self) -> int:
        """SIGTERM to the tree; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_GUARD_S)

    # -- looking in

    def fleet(self) -> dict[str, dict[str, Any]]:
        """Every endpoint by address."""
        endpoints = _LOCAL.get(f"{self.admin_url}/v1/fleet").json()["endpoints"]
        return {endpoint["endpoint"]: endpoint for endpoint in endpoints}

    def in_flight(self) -> dict[str, int]:
        """Our count per endpoint."""
        return {address: endpoint["in_flight"] for address, endpoint in self.fleet().items()}

    def wait_pickable(self, *addresses: str, within_s: float = HANG_GUARD_S) -> None:
        """Until every one of `addresses` may be picked."""
        eventually(
            lambda: all(
                self.fleet().get(address, {}).get("state") == "ready" and self.fleet()[address]["routable"]
                for address in addresses
            ),
            f"{addresses} may be picked",
            within_s=within_s,
        )

    def decision(self, request_id: str) -> dict[str, Any]:
        """The decision log's record of one request, once its outcome is known."""

        def finished() -> dict[str, Any] | None:
            answer = _LOCAL.get(f"{self.admin_url}/v1/decisions", params={"request_id": request_id})
            found: list[dict[str, Any]] = answer.json()["decisions"]
            return found[0] if found and found[0]["outcome"] else None

        record: dict[str, Any] = eventually(finished, f"request {request_id} is settled")
        return record

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as on the page."""
        page = _LOCAL.get(self._metrics_url).text
        lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def count_from_now(self) -> None:
        """Whatever was counted before is not in `total` any more: another test shares this system."""
        counts = self.metrics().items()
        self._counted_from = {name: value for name, value in counts if name.partition("{")[0].endswith("_total")}

    def total(self, name: str, *having: str) -> float:
        """The sum of all samples of `name` whose labels contain every one of `having`."""
        return sum(
            value - self._counted_from.get(sample, 0)
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(label in sample for label in having)
        )

    def wait_settled(self) -> None:
        """Until nothing is in flight, and every request was told of."""
        eventually(lambda: not sum(self.in_flight().values()), "nothing is in flight")
        gauges = ("pointsman_requests_unsettled", "pointsman_ext_proc_streams_open")
        eventually(lambda: not any(map(self.total, gauges)), "all are settled")

    def child(self, what: str) -> int:
        """Process id of one of the launcher's children, by a word of its command line."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if int(fields[1]) == self.process.pid and what in command:
                    return int(entry.name)
        raise AssertionError(f"no child {what!r}")

    def kill_decision_process(self) -> None:
        """SIGKILL to the process that decides; the launcher starts it again."""
        os.kill(self.child(" serve "), signal.SIGKILL)


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat completion's body."""
    return {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


class HeldStream:
    """A streamed answer that stays open after its first tokens, until its engine is told to release."""

    def __init__(self, client: httpx.Client, system: System, **fields: Any) -> None:
        body = chat(stream=True, **{"max_tokens": 3, **fields})
        request = client.build_request("POST", f"{system.url}/v1/chat/completions", json=body, headers=held(2))
        self.answer = client.send(request, stream=True)
        assert self.answer.status_code == 200
        # Set by our own Envoy; a foreign gateway shows neither.
        self.endpoint: str = self.answer.headers.get("x-pointsman-endpoint", "")
        self.request_id: str = self.answer.headers.get("x-pointsman-request-id", "")
        self._chunks = self.answer.iter_raw()
        self._first = next(self._chunks)

    def rest(self) -> bytes:
        """All of the answer. Raises httpx.RemoteProtocolError if it is cut."""
        return self._first + b"".join(self._chunks)


def held(tokens: int = 1) -> dict[str, str]:
    """The header that keeps an answer open after so many tokens, until released."""
    return {"x-sim-fault": json.dumps({"hold": tokens})}


def pool_of(engines: list[Engine], **fields: Any) -> dict[str, Any]:
    """A pool over these engines."""
    return {
        "name": "chat", "models": ["sim"], "aliases": {"gpt-4o": "sim"},
        "endpoints": {"static": [engine.address for engine in engines]}, **fields,
    }  # fmt: skip
