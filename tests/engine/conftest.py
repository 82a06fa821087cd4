"""Fixtures over real vLLM: servers for the session, started again by whoever stops them; systems per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import System, free_ports
from real_engines import START_GUARD_S, Vllm

DRAIN_S = 120
"""How long a server told to stop finishes what it has begun."""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two servers of the mid-sized model, in which a cached prefix shows."""
    folder = tmp_path_factory.mktemp("vllm")
    options = ("--shutdown-timeout", str(DRAIN_S), "--kv-cache-memory-bytes", "512M")
    made = [Vllm(folder, port, "mid", *options) for port in free_ports(2)]
    try:
        for server in made:
            server.wait_ready()
        yield made
    finally:
        for server in made:
            server.stop()


@pytest.fixture
def two_servers(servers: list[Vllm]) -> list[Vllm]:
    """Both of them up, whatever the test before did to them."""
    for server in servers:
        if server.leaving or server.process.poll() is not None:
            # one that drains lists its model to the end, and takes no request
            server.kill()
            server.start()
    for server in servers:
        server.wait_ready()
    return servers


@pytest.fixture
def make_real_system(tmp_path: Path) -> Iterator[Callable[..., System]]:
    """Start systems over real servers; they end with the test, and their logs are shown if it fails."""
    made: list[System] = []

    def make(servers: list[Vllm], *, pool: dict[str, Any] | None = None, **config: Any) -> System:
        folder = tmp_path / f"system-{len(made)}"
        folder.mkdir()
        entry = {"name": "mid", "models": ["mid"], "endpoints": {"static": [s.address for s in servers]}}
        system = System(folder, {"pools": [entry | (pool or {})], **config})
        made.append(system)
        system.start()
        # the first generation after a start takes long on a busy machine, and it is our trial
        system.wait_pickable(*(server.address for server in servers), within_s=START_GUARD_S)
        return system

    yield make
    for system in made:
        if system.process.poll() is None:
            system.stop()
        print(system.log.read_text()[-8000:])
