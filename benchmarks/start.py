"""From starting `serve` to being ready, a few times.

    make bench-start [ARGS='--times 5']

With one pool of two static endpoints, until `/readyz` says 200; and the CPU time used by then, which a busy machine
blurs less. Byte code is written on the first run, which is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import typer
import yaml
from harness import eventually, free_ports

from benchmarks.rig import cost, prepare


def _start(folder: Path) -> tuple[float, float]:
    """Seconds until ready, and of CPU."""
    grpc, health, metrics, admin = (f"127.0.0.1:{port}" for port in free_ports(4))
    config = folder / "pointsman.yaml"
    pool = {"name": "chat", "models": ["sim"], "endpoints": {"static": ["127.0.0.1:1", "127.0.0.1:2"]}}
    listen = {"grpc": grpc, "health": health}
    sections = {"listen": listen, "observe": {"metrics": metrics}, "admin": {"listen": admin}, "pools": [pool]}
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "extproc.cli", "serve", str(config)]
    began = time.perf_counter()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603 - our own program
    try:
        eventually(lambda: _ready(admin), "it is ready")
        return time.perf_counter() - began, cost(process.pid).cpu_s
    finally:
        process.terminate()
        process.wait(20)


def _ready(admin: str) -> bool:
    """Asked with the least of clients: others take a core from what is measured."""
    client = HTTPConnection(admin, timeout=5)
    client.request("GET", "/readyz")
    return client.getresponse().status == HTTPStatus.OK


def main(times: int = 7) -> None:
    """Start it, print each and the medians."""
    prepare()
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{name}/bytecode")
        _start(Path(name))
        found = [_start(Path(name)) for _ in range(times)]
    for ready_s, cpu_s in found:
        typer.echo(f"`serve` ready after {ready_s:.2f} s, {cpu_s:.2f} s of CPU")
    ready, cpu = (statistics.median(column) for column in zip(*found, strict=True))
    typer.echo(f"median {ready:.2f} s, {cpu:.2f} s of CPU; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)
