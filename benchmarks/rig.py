"""A system over light engines, and what its processes cost, for the benches of streams and of soaking.

The engines are one process of ours on bare asyncio (light_engine.py). Rejected: `pointsman sim`, which models an
engine's steps and takes a core for a few hundred streams; and wire_rig.py's Envoy that answers by itself, which cannot
stream slowly. Not here: the four ways that are compared request by request (wire_rig.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import System, eventually

TRANSPORTS = ("lane", "grpcio")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Of one process: resident memory in KB and CPU time in seconds, both since its start."""

    rss_kb: int
    cpu_s: float


def cost(pid: int) -> Cost:
    """What a process holds and has used."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return Cost(rss, (int(fields[11]) + int(fields[12])) / _TICKS)


def pids(system: System) -> dict[str, int]:
    """The processes that requests go through."""
    return {"decision": system.child(" serve "), "envoy": system.child("envoy.yaml")}


def prepare() -> int:
    """Be ready to start others: with as many descriptors as allowed, which is returned, and ending them if we end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop before the end"))  # through every `finally`
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)):
        return True


class LightEngines:
    """Engines of `light_engine.py` in one process; it can be killed and started again."""

    def __init__(self, folder: Path, ports: list[int], every_s: float) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self._command = [
            sys.executable, "-m", "benchmarks.light_engine", ",".join(map(str, ports)), "--every-s", str(every_s),
        ]  # fmt: skip
        self._log = folder / f"engines-{ports[0]}.log"
        self.start()
        # all of them, or a port found free meanwhile may be one of these
        eventually(lambda: _listens(ports[-1]), "engines listen")

    def start(self) -> None:
        """Start, on the same ports."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)  # noqa: S603 - our own program

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def system_over(folder: Path, transport: str, engines: list[LightEngines], **config: object) -> Iterator[System]:
    """`pointsman up`, by one transport, every engine in use."""
    addresses = [address for one in engines for address in one.addresses]
    sockets = Path(tempfile.mkdtemp(prefix="lane-"))
    listen = {"lane": str(sockets / "s")} if transport == "lane" else {"lane": False}
    pool = {"name": "chat", "models": ["sim"], "endpoints": {"static": addresses}}
    home = folder / transport
    home.mkdir(exist_ok=True)
    system = System(home, {"pools": [pool], "listen": listen, **config})
    try:
        system.start()
        system.wait_pickable(*addresses)
        eventually(lambda: (system.total("pointsman_lane_connections") > 0) == (transport == "lane"), "the transport")
        yield system
    finally:
        if hasattr(system, "process"):
            system.stop()
        with contextlib.suppress(OSError):
            (sockets / "s").rmdir()
            sockets.rmdir()
