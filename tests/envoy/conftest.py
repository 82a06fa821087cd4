"""Fixtures over the harness: engines per module, systems per module, config or test."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SYSTEMS, Engine, System, free_ports, pool_of


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder where Unix sockets may be: an address has room for about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="pm-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def show_logs() -> Iterator[None]:
    """What systems that outlive a test have logged in it is shown if it fails."""
    before = {system.log: system.log.stat().st_size for system in SYSTEMS if system.log.exists()}
    yield
    for log, size in before.items():
        with contextlib.suppress(OSError), log.open() as lines:
            lines.seek(size)
            print(lines.read()[-8000:])


@pytest.fixture(scope="module")
def make_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Engine]]]:
    """Start engines that end with the module."""
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
def running() -> Iterator[dict[str, System]]:
    """The systems that a module's tests share, by config."""
    found: dict[str, System] = {}
    yield found
    for system in found.values():
        system.stop()


@pytest.fixture
def share_system(
    running: dict[str, System], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., System]]:
    """As `make_system`, for tests that change nothing in a system: those of a module with the same config share it.

    Each counts from zero, and leaves nothing in flight: that is looked at here.
    """
    used: dict[str, System] = {}

    def share(**config: Any) -> System:
        key = json.dumps(config, sort_keys=True)
        if key not in running:
            running[key] = System(tmp_path_factory.mktemp("shared"), copy.deepcopy(config))
            running[key].start()
        used[key] = running[key]
        used[key].count_from_now()
        return used[key]

    yield share
    for key, system in used.items():
        try:
            system.wait_settled()
        except AssertionError:
            running.pop(key).stop()  # the next test is to have a sound one
            raise


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
