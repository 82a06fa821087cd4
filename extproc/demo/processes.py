"""The demo's processes: simulated engines in one, `pointsman up` in another. Started, awaited, stopped; no traffic."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

from extproc.launcher import die_with_parent
from vllm_adapters.metrics import EngineFigures, parse_metrics

MODEL, ALIAS = "sim", "gpt-4o"
_HOST = "127.0.0.1"
_COME_UP_S = 60.0
"""A guard against waiting for ever; on an idle machine it takes about two seconds."""
_STOP_S = 15.0
"""Longer than the launcher lets running requests finish."""
_LOG_TAIL = 3_000


class DidNotComeUp(Exception):
    """A process ended, or did not answer in time. The message ends with its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens, on loopback. Engines take consecutive ports from `engines` on."""

    http: int
    admin: int
    grpc: int
    health: int
    metrics: int
    engines: int

    @classmethod
    def find(cls, engines: int) -> Self:
        """Ports nobody listens on now: for clients and operators the usual ones if possible."""
        grpc, health, metrics, spare_http, spare_admin = _any_free(5)
        http = 8080 if _free(8080) else spare_http
        admin = 9700 if _free(9700) else spare_admin
        return cls(http, admin, grpc, health, metrics, _free_row(engines))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # as every server does: a port whose last connections are still fading counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _any_free(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _free_row(count: int) -> int:
    """First of `count` consecutive free ports."""
    for first in range(8001, 32_000, count):
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise DidNotComeUp(f"no {count} consecutive ports are free")


class _Process:
    """One command of ours as a child process, its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        self._name = f"pointsman {arguments[0]}"
        self._command = (sys.executable, "-P", "-m", "extproc.cli", *arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C on the terminal is for the demo alone, which stops them in order
                preexec_fn=die_with_parent(),
            )

    def check(self) -> None:
        """Raise DidNotComeUp if it has ended."""
        if self._process is not None and self._process.returncode is not None:
            raise DidNotComeUp(f"`{self._name}` ended:\n{self.tail()}")

    def tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]

    async def stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@dataclass(frozen=True, slots=True)
class Setting:
    """What the engines are like."""

    engines: int
    hardware: str
    speed: float
    kv_capacity_tokens: int
    context_tokens: int


class System:
    """Fresh engines and a Pointsman over them with one policy. `async with` starts and stops both."""

    def __init__(
        self,
        folder: Path,
        policy: str,
        setting: Setting,
        *,
        pool: dict[str, Any] | None = None,
        decisions: int | None = None,
    ) -> None:
        """`pool`: what its config says beside the usual; `decisions`: so many are remembered.

        Raise DidNotComeUp if there are no ports left.
        """
        self.ports = Ports.find(setting.engines)
        first = self.ports.engines
        self.endpoints = [f"{_HOST}:{port}" for port in range(first, first + setting.engines)]
        self.http = f"{_HOST}:{self.ports.http}"
        self.admin = f"{_HOST}:{self.ports.admin}"
        config = folder / f"{policy}.yaml"
        written = self._config(policy, pool or {})
        if decisions is not None:
            written["observe"]["decisions"] = decisions
        config.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        self._engines = _Process(folder / f"engines-{policy}.log", *_sim_arguments(first, setting))
        # on a machine with many cores one Envoy worker per core would be a waste
        self._pointsman = _Process(folder / f"pointsman-{policy}.log", "up", str(config), "--concurrency", "2")
        self._http: aiohttp.ClientSession | None = None

    def _config(self, policy: str, pool: dict[str, Any]) -> dict[str, Any]:
        ports = self.ports
        return {
            "listen": {"http": self.http, "grpc": f"{_HOST}:{ports.grpc}", "health": f"{_HOST}:{ports.health}"},
            "pools": [
                {
                    "name": "chat",
                    "models": [MODEL],
                    "aliases": {ALIAS: MODEL},
                    "endpoints": {"static": self.endpoints},
                    "policy": policy,
                    **pool,
                }
            ],
            "wire": {"response_headers": ["request_id", "endpoint", "model"]},
            "observe": {"metrics": f"{_HOST}:{ports.metrics}"},
            "admin": {"listen": self.admin},
        }

    async def __aenter__(self) -> Self:
        """Start; returns once every endpoint takes requests. Raises DidNotComeUp."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        try:
            await self._engines.start()
            await self._pointsman.start()
            await self._come_up()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, whatever happened."""
        await self._stop()

    async def _stop(self) -> None:
        await self._pointsman.stop()
        await self._engines.stop()
        if self._http is not None:
            await self._http.close()

    async def _come_up(self) -> None:
        try:
            async with asyncio.timeout(_COME_UP_S):
                while not await self._serves():
                    self._engines.check()
                    self._pointsman.check()
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise DidNotComeUp(f"not ready after {_COME_UP_S:.0f} s:\n{self._pointsman.tail()}") from error

    async def _serves(self) -> bool:
        try:
            fleet = await self._fleet()
            await self._get(f"http://{self.http}/v1/models")
        except (aiohttp.ClientError, OSError):
            return False
        return len(fleet) == len(self.endpoints) and all(e["state"] == "ready" and e["routable"] for e in fleet)

    # -- looking in

    async def in_flight(self) -> dict[str, int]:
        """Requests in flight per endpoint, from the admin API."""
        return {endpoint["endpoint"]: endpoint["in_flight"] for endpoint in await self._fleet()}

    async def engine_figures(self) -> list[EngineFigures]:
        """What the engines say of themselves."""
        return [parse_metrics(await self._get(f"http://{endpoint}/metrics")) for endpoint in self.endpoints]

    async def matched_tokens(self, request_id: str) -> int | None:
        """What the router believed to be cached of a request's prompt; None if it does not remember the request."""
        url = f"http://{self.admin}/v1/decisions"
        async with self._session.get(url, params={"request_id": request_id}) as response:
            response.raise_for_status()
            decisions = (await response.json())["decisions"]
        return int(decisions[0]["matched_tokens"]) if decisions else None

    async def _fleet(self) -> list[dict[str, Any]]:
        async with self._session.get(f"http://{self.admin}/v1/fleet") as response:
            response.raise_for_status()
            endpoints: list[dict[str, Any]] = (await response.json())["endpoints"]
            return endpoints

    async def _get(self, url: str) -> bytes:
        async with self._session.get(url) as response:
            response.raise_for_status()
            return await response.read()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise AssertionError("not started")
        return self._http


def _sim_arguments(first_port: int, setting: Setting) -> tuple[str, ...]:
    options: dict[str, object] = {
        "--listen": f"{_HOST}:{first_port}",
        "--count": setting.engines,
        "--model": MODEL,
        "--hardware": setting.hardware,
        "--speed": setting.speed,
        "--kv-capacity-tokens": setting.kv_capacity_tokens,
        "--max-model-len": setting.context_tokens,
    }
    return ("sim", *(str(part) for option in options.items() for part in option))
