"""`pointsman up`: Envoy and the decision process as one tree.

The launcher sets limits and allocator variables, starts the children, starts a fallen one again, and stops them in
order: Envoy drains first, then the decision process goes. It handles no traffic. A child whose first start fails
(a taken port) ends the whole; one that falls later is started again after a growing pause.

What it shares with the children is in a run folder: Envoy's configuration and admin socket, and the last good config,
so that neither a file broken since nor one with other addresses keeps a fallen decision process from coming back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from extproc.config.schema import Config
from extproc.config.sections.listen import fits_a_socket
from extproc.extras import how_to_install

log = structlog.get_logger(__name__)

ALLOCATOR = {
    # Large bodies are malloc'ed and freed per request; by default glibc maps and unmaps each one, and the page faults
    # cost 30 % of the CPU at 512 KB bodies and 50 % at 4 MB. The price is memory that stays at its peak.
    "MALLOC_MMAP_THRESHOLD_": str(128 * 1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 1024 * 1024),
    "MALLOC_TOP_PAD_": str(16 * 1024 * 1024),
}
_SETTLED_S = 5.0
"""A child that ran this long had started properly; its next fall is not a failed start."""
_LANE = "lane"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_DOUBLINGS = 0.1, 5.0, 10
_KILL_AFTER_S = 10.0
_NOT_STARTED = 126
"""Exit code of what could not be executed, as shells have it."""
_LOOK_EVERY_S = 0.1
"""How often another process is asked for its state; it tells us of no change."""
_WANTED_FILES = 65_536
"""Envoy holds two descriptors per HTTP/1 stream."""


class NoEnvoy(Exception):
    """There is no Envoy binary to start."""


class ChildFailed(Exception):
    """A child did not come up."""


def find_envoy() -> str:
    """Path of the Envoy to start: beside our Python, where the wheel puts its own, else on PATH. Raises NoEnvoy."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.is_file() else shutil.which("envoy")
    if found:
        return found
    raise NoEnvoy(
        f"no envoy found; the extra [embedded] brings one ({how_to_install('embedded')}), or put yours on PATH"
    )


def raise_file_limit(*, warn: bool = True) -> int:
    """Raise the limits on open files as far as we may; returns it, and says what to do where it is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _WANTED_FILES:
        with contextlib.suppress(ValueError, OSError):  # the hard limit is root's to raise, and not always his
            resource.setrlimit(resource.RLIMIT_NOFILE, (_WANTED_FILES, _WANTED_FILES))
            return _WANTED_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if warn and hard < _WANTED_FILES:
        what_to_do = "raise the hard limit: LimitNOFILE= in systemd, --ulimit nofile= in Docker, ulimit -Hn in a shell"
        log.warning("few file descriptors", limit=hard, streams=hard // 2, wanted=_WANTED_FILES, what_to_do=what_to_do)
    return hard


class RunFolder:
    """A folder of one launcher's. A lock on it tells the next one whether we still live, should we not get to clean up.

    The lock and not the process id alone: in a container every launcher has the same one.
    """

    def __init__(self) -> None:
        parent, usual = _parent(), tempfile.gettempdir()
        if parent != Path(usual):
            log.info("too deep for sockets", folder=usual, instead=str(parent))
        self.path = Path(tempfile.mkdtemp(prefix=f"pointsman-{os.getpid()}-", dir=parent))
        self._lock = _lock(self.path)

    def remove(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _parent() -> Path:
    """The system's folder for temporary files; /tmp where that is so deep that no socket below it has an address."""
    usual = Path(tempfile.gettempdir())
    fits = fits_a_socket(usual / "pointsman-4194304-12345678" / _LANE)
    return usual if fits else Path("/tmp")  # noqa: S108 - what is made there is private


def _lock(folder: Path) -> int | None:
    """Lock `folder` until the descriptor returned is closed, by us or by our end; None if another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def write_last_good(file: Path, config: Config) -> None:
    """Put `config` in place whole or not at all, to be loaded like a file of the operator's. Raises OSError."""
    # Not the operator's text: file names in it count from its own folder, and here they are absolute already.
    # Not pydantic's JSON, which has no infinity.
    document = config.model_dump(mode="json")
    if not config.access.guarded:
        del document["access"]  # a section that names nobody is a fault; where there was none there must be none
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps(document), encoding="utf-8")
    aside.replace(file)


def remove_stale_folders() -> None:
    """Remove the run folders of launchers of this user that were killed."""
    for folder in _parent().glob("pointsman-*-*"):
        with contextlib.suppress(OSError):  # another launcher may be at it too
            _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    named = re.fullmatch(r"pointsman-(\d{1,9})-\w+", folder.name)
    if named is None or folder.lstat().st_uid != os.getuid() or _lives(int(named[1])):
        return
    lock = _lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        log.info("removed what a killed launcher left", folder=str(folder))


def _lives(pid: int) -> bool:
    """Whether another process than ours has this id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # not permitted: it is there, and somebody else's
        return not isinstance(error, ProcessLookupError)
    return True


def _with_lane(config: Config, folder: Path) -> Config:
    return config.model_copy(update={"listen": config.listen.model_copy(update={"lane": folder})})


@dataclass(slots=True)
class _Child:
    """One process to keep running. Once stopped it is not started again."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    falls: int = 0
    stopped: bool = False
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> int | None:
        """Start it and wait for its end; returns the exit code, None if it was stopped before."""
        async with self._starting:
            if self.stopped:
                return None
            try:
                process = self.process = await self._start()
            except OSError as error:  # no memory or process left: a fall like others, not the end of the whole
                log.error("cannot start", child=self.name, error=str(error))  # noqa: TRY400 - it is told whole
                return _NOT_STARTED
        log.info("started", child=self.name, pid=process.pid)
        return await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.command,
            env={**os.environ, **self.environment},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone, which stops them in order
            preexec_fn=die_with_parent(),
        )

    async def stop(self) -> None:
        """End it; a start that is under way is waited for, or its process would be nobody's."""
        self.stopped = True
        async with self._starting:
            process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            log.warning("did not stop in time, killing", child=self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def die_with_parent() -> Callable[[], None] | None:
    """Linux: have the kernel stop the child if the launcher is killed. Elsewhere nothing can be done."""
    if sys.platform != "linux":
        return None
    set_option = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG

    def arm() -> None:
        set_option(set_parent_death_signal, signal.SIGTERM)

    return arm


class Launcher:
    """Runs `serve` and Envoy for one config file until told to stop."""

    def __init__(self, config: Config, config_path: Path, *, concurrency: int | None = None) -> None:
        """Raise NoEnvoy."""
        self._config = config
        envoy_binary = find_envoy()
        remove_stale_folders()
        self._folder = RunFolder()
        self._run = self._folder.path
        self._admin_socket = self._run / "envoy-admin.sock"
        last_good = self._run / "last-good.json"
        write_last_good(last_good, config)
        # -P: else a file in the operator's folder that is named like a module of ours would be imported in its place
        serve = [sys.executable, "-P", "-m", "extproc.cli", "serve", str(config_path), "--last-good", str(last_good)]
        self._lane = self._run / _LANE if config.listen.lane is None else None
        serve += [] if self._lane is None else ["--lane", str(self._lane)]
        workers = ["--concurrency", str(concurrency)] if concurrency else []
        # `misc` warns of every message its authors have not declared stable; that choice is ours and made.
        quiet = ["--disable-hot-restart", "-l", "warning", "--component-log-level", "misc:error"]
        envoy = [envoy_binary, "-c", str(self._run / "envoy.yaml"), *quiet, *workers]
        self._serve = _Child("decision process", serve, ALLOCATOR)
        self._envoy = _Child("envoy", envoy)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start everything, keep it running, stop it in order. Raises ChildFailed."""
        raise_file_limit()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        keepers = [asyncio.create_task(self._keep(self._serve)), asyncio.create_task(self._keep_envoy())]
        others = [asyncio.create_task(self._announce()), asyncio.create_task(self._stopping.wait())]
        try:
            done, _ = await asyncio.wait([*keepers, others[-1]], return_when=asyncio.FIRST_COMPLETED)
            for task in done.intersection(keepers):
                task.result()
        finally:
            await self._stop(keepers, others)

    async def _keep_envoy(self) -> None:
        """Write Envoy's configuration, in a thread, so that the decision process need not wait for it to start."""
        await asyncio.to_thread(self._write_envoy_config)
        await self._keep(self._envoy)

    def _write_envoy_config(self) -> None:
        from extproc.control.envoy_config import bootstrap, to_yaml

        config = self._config if self._lane is None else _with_lane(self._config, self._lane)
        text = to_yaml(bootstrap(config, admin_socket=str(self._admin_socket)))
        (self._run / "envoy.yaml").write_text(text, encoding="utf-8")

    async def _keep(self, child: _Child) -> None:
        """Start the child, and again whenever it falls."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = await child.run()
            if code is None or self._stopping.is_set():
                return
            lived = loop.time() - began
            if not child.falls and lived < _SETTLED_S and code > 0:
                raise ChildFailed(f"{child.name} did not start (exit code {code}); its log says why")
            child.falls = 1 if lived > _SETTLED_S else child.falls + 1
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(child.falls - 1, _MOST_DOUBLINGS))
            log.error("child fell, starting it again", child=child.name, code=code, pause_s=pause)
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not beyond the beginning of the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _announce(self) -> None:
        """Say so when clients can connect: our own Envoy is live once it knows its clusters, be they empty.

        Asking the port instead would not do: another process may hold it.
        """
        connector = aiohttp.UnixConnector(path=str(self._admin_socket))
        timeout = aiohttp.ClientTimeout(total=_KILL_AFTER_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as admin:
            while not await _answers(admin, "http://envoy/ready"):  # noqa: ASYNC110 - another process's state: no event
                await asyncio.sleep(_LOOK_EVERY_S)
        listen = self._config.listen
        log.info("listening", url=f"{'https' if listen.http_tls else 'http'}://{listen.http}/v1")

    async def _stop(self, keepers: list[asyncio.Task[None]], others: list[asyncio.Task[Any]]) -> None:
        self._stopping.set()
        log.info("stopping: running answers may finish", at_most_s=_KILL_AFTER_S)
        await self._drain_envoy()
        await self._envoy.stop()
        await self._serve.stop()
        for task in others:
            task.cancel()
        # The keepers end by themselves, and what they do in the run folder with them.
        await asyncio.gather(*keepers, *others, return_exceptions=True)
        self._folder.remove()
        log.info("all stopped")

    async def _drain_envoy(self) -> None:
        """Refuse new connections, then give running requests a while to end."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            connector = aiohttp.UnixConnector(path=str(self._admin_socket))
            async with asyncio.timeout(_KILL_AFTER_S), aiohttp.ClientSession(connector=connector) as admin:
                # First the sockets, then the rest: a client whose connection is closed must not open another.
                await _tell(admin, "drain_listeners")
                # Open connections would go on bringing requests. From here on each answer closes its own.
                await _tell(admin, "healthcheck/fail")
                await _until_quiet(admin)


async def _answers(client: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with client.get(url) as response:
            return response.status == HTTPStatus.OK
    return False


async def _tell(admin: aiohttp.ClientSession, what: str) -> None:
    async with admin.post(f"http://envoy/{what}"):
        pass


async def _until_quiet(admin: aiohttp.ClientSession) -> None:
    """Until no request runs and none has come since the last look."""
    before = None
    while True:
        active, total = [await _sum(admin, f"downstream_rq_{what}") for what in ("active", "total")]
        if not active and total == before:
            return
        before = total
        await asyncio.sleep(_LOOK_EVERY_S)


async def _sum(admin: aiohttp.ClientSession, name: str) -> int:
    """A figure of Envoy's, over all its listeners."""
    async with admin.get(f"http://envoy/stats?filter=^http\\..*\\.{name}$") as response:
        lines = (await response.text()).splitlines()
    # Envoy counts its admin listener too, and with it the very request that asks.
    return sum(int(line.rpartition(" ")[2]) for line in lines if not line.startswith("http.admin."))
