"""Fixtures over the harness: engines per session or module, systems per module or test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, System, free_ports, pool_of


@pytest.fixture(scope="session")
def make_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Engine]]]:
    """Start engines that end with the session."""
    made: list[Engine] = []

    def make(count: int, *options: str) -> list[Engine]:
        folder = tmp_path_factory.mktemp("engines")
        engines = [Engine(folder / f"{port}.log", port, *options) for port in free_ports(count)]
        made.extend(engines)
        for engine in engines:
            engine.wait_ready()
        return engines

    yield make
    for engine in made:
        engine.kill()  # one that still holds answers would take ten seconds to end in good order


@pytest.fixture
def make_system(tmp_path: Path) -> Iterator[Callable[..., System]]:
    """Start systems that end with the test; its log is shown if the test fails."""
    made: list[System] = []

    def make(**config: Any) -> System:
        folder = tmp_path / f"system-{len(made)}"
        folder.mkdir()
        system = System(folder, config)
        made.append(system)
        system.start()
        return system

    yield make
    for system in made:
        if system.process.poll() is None:
            system.stop()
        print(system.log.read_text()[-8000:])


@pytest.fixture(scope="module")
def engines(make_engines: Callable[..., list[Engine]]) -> list[Engine]:
    """Two engines shared by a module's tests, with room for a 2 MB prompt, which remember their last requests."""
    room = ("--kv-capacity-tokens", "1000000", "--max-model-len", "900000")
    return make_engines(2, "--speed", "100", "--record", "50", *room)


@pytest.fixture(scope="module")
def system(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system over `engines`, shared by a module's tests."""
    system = System(tmp_path_factory.mktemp("system"), {"pools": [pool_of(engines)]})
    system.start()
    system.wait_pickable(*(engine.address for engine in engines))
    yield system
    system.stop()
