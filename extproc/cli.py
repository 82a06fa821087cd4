"""The `pointsman` command. Each command reads its options and hands over; nothing is decided here.

Imports of the heavy parts wait until a command needs them, so that `pointsman --help` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer
import yaml
from pydantic import ValidationError

from extproc import __version__, is_compiled
from extproc.config.files import file_faults, file_warnings
from extproc.config.loading import ConfigError, load
from extproc.config.pool_policies import presets
from extproc.config.schema import Config
from extproc.config.summary import access_line, guard_lines, pool_lines, tenant_lines
from extproc.extras import how_to_install
from extproc.observe.logging import configure_logging
from extproc.replay.command import replay

log = structlog.get_logger(__name__)

cli = typer.Typer(
    help="Routes LLM requests over vLLM fleets, as an Envoy external processor.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

_GRPC_EXPERIMENTS = "-event_engine_listener"
"""Read as grpcio is imported. Its event engine reads from sockets in threads of its own, and each message wakes one
more of them; without it the thread that hands on completions does so itself, at a tenth less CPU for small requests."""

ConfigPath = Annotated[Path, typer.Argument(help="the configuration file", metavar="CONFIG")]


class EnvoyFormat(StrEnum):
    """What `pointsman envoy` prints."""

    BOOTSTRAP = "bootstrap"
    FILTERS = "filters"


def main() -> None:
    """Entry point of the console script."""
    cli()


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if wanted:
        typer.echo(f"{__version__} ({'compiled' if is_compiled() else 'interpreted'})")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Hold options of every command."""


@cli.command()
def up(
    config: ConfigPath,
    concurrency: Annotated[int | None, typer.Option(help="Envoy worker threads; default: one per core")] = None,
) -> None:
    """Run Envoy and the decision process, as one process tree."""
    from extproc.addresses import AddressTaken, refuse_taken_address
    from extproc.launcher import ChildFailed, Launcher, NoEnvoy

    loaded = _load(config)
    _refuse_files(config, file_faults(loaded))
    try:
        refuse_taken_address(loaded.listen.http)
        configure_logging(loaded.observe.log.level, loaded.observe.log.format)
        asyncio.run(Launcher(loaded, config.resolve(), concurrency=concurrency).run())
    except (AddressTaken, ChildFailed, NoEnvoy) as error:
        _fail(str(error))


@cli.command()
def serve(
    config: ConfigPath,
    last_good: Annotated[Path | None, typer.Option(hidden=True, help="where `up` has us keep the config")] = None,
    lane: Annotated[Path | None, typer.Option(hidden=True, help="where the Envoy of `up` comes to us")] = None,
) -> None:
    """Run the decision process alone; your own Envoy talks to it."""
    gc.disable()  # a tenth of what starting takes, to no avail: what is made now stays; App has it begin again
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC_EXPERIMENTS)

    import uvloop

    from extproc.app import load_to_serve
    from extproc.launcher import raise_file_limit
    from extproc.wire.grpc_server import BadCertificate, PortTaken

    try:
        loaded, faults = load_to_serve(config, last_good)
    except ConfigError as error:
        _fail(str(error))
    _refuse_files(config, file_faults(loaded, of_envoy=False))
    configure_logging(loaded.observe.log.level, loaded.observe.log.format)
    if faults:
        log.error("the config file is not valid: started with the last good one", faults=faults)
    raise_file_limit(warn=last_good is None)  # else `up` has warned
    try:
        uvloop.run(_serve(loaded, config.resolve(), last_good, lane))
    except (PortTaken, BadCertificate, OSError) as error:
        _fail(str(error))


async def _serve(config: Config, path: Path, last_good: Path | None, lane: Path | None) -> None:
    from extproc.app import App

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = App(config, path, last_good=last_good, lane=lane)
    await app.start()
    await stop.wait()
    await app.stop()


@cli.command()
def check(
    config: Annotated[Path | None, typer.Argument(help="the configuration file", metavar="CONFIG")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file instead.")] = False,
    list_presets: Annotated[bool, typer.Option("--presets", help="Print the presets' names instead.")] = False,
) -> None:
    """Validate a configuration file and the files it names; every fault is told with its place."""
    from extproc.followed_files import read_followed

    if schema or list_presets:
        typer.echo(json.dumps(Config.model_json_schema(), indent=2) if schema else "\n".join(presets()))
        return
    if config is None:
        _fail("name a configuration file, or ask for --schema or --presets")
    loaded = _load(config)
    followed_faults, keys = read_followed(loaded)
    _refuse_files(config, [*file_faults(loaded), *followed_faults])
    for line in (
        *pool_lines(loaded),
        access_line(loaded.access, keys),
        *tenant_lines(loaded),
        *guard_lines(loaded),
    ):
        typer.echo(line)
    for warning in file_warnings(loaded):
        typer.echo(f"{config}: warning: {warning}", err=True)
    typer.echo(f"{config} is valid")


def _refuse_files(config: Path, faults: Sequence[str]) -> None:
    """End the command if there is any fault."""
    if faults:
        _fail("\n".join(f"{config}: {fault}" for fault in faults))


@cli.command()
def envoy(
    config: ConfigPath,
    output: Annotated[EnvoyFormat, typer.Option("--format", help="a whole Envoy, or parts for yours")] = (
        EnvoyFormat.BOOTSTRAP
    ),
) -> None:
    """Print Envoy configuration for CONFIG."""
    from extproc.control import envoy_config

    loaded = _load(config)
    try:
        envoy_config.require_reachable(loaded)
    except envoy_config.NotReachable as error:
        _fail(f"{config}: {error}")
    make = envoy_config.bootstrap if output is EnvoyFormat.BOOTSTRAP else envoy_config.filters
    typer.echo(envoy_config.to_yaml(make(loaded)), nl=False)


@cli.command()
def key(
    tenant: Annotated[str, typer.Option(help="whose requests it will mark")],
    name: Annotated[str | None, typer.Option(help="of the key, as logs show it; default: TENANT and a number")] = None,
) -> None:
    """Make an API key: prints it, once, and the line that lets it in."""
    from extproc.access.keys import digest_of, make_key, name_for
    from extproc.config.sections.callers import ApiKey
    from extproc.config.wording import in_words, keys_of

    made = make_key()
    try:
        entry = ApiKey(name=name or name_for(tenant), tenant=tenant, sha256=digest_of(made))
    except ValidationError as error:
        faults = "; ".join(f"{place}: {what}" for place, what in in_words(error, keys_of(ApiKey)))
        _fail(f"no name for a tenant or a key: {faults}")
    typer.echo(f"key, for the client, shown only now:\n  {made}\n")
    typer.echo("line, for `access.api_keys` or the file of `access.api_keys_file`:")
    typer.echo(f"  - {json.dumps(entry.model_dump())}")


@cli.command()
def profiles(
    admin: Annotated[str, typer.Option(help="address of a running system's admin API")] = "127.0.0.1:9700",
) -> None:
    """Print what a running system has learned of its hardware, as `hardware` sections to put into a config."""
    from extproc.admin.client import NoAnswer, ask

    try:
        learned = ask(admin, "/v1/profiles", "profiles")
    except NoAnswer as error:
        _fail(str(error))
    pools = [{"name": name, "hardware": profile} for name, profile in learned.items()]
    typer.echo(yaml.safe_dump({"pools": pools}, sort_keys=False), nl=False)


@cli.command()
def sim(
    listen: Annotated[str, typer.Option(help="address of the first engine; the others take the next ports")] = (
        "127.0.0.1:8001"
    ),
    count: Annotated[int, typer.Option(min=1, max=256, help="how many engines")] = 1,
    model: Annotated[list[str] | None, typer.Option(help="name served; may be given again")] = None,
    speed: Annotated[float, typer.Option(help="how much faster than the hardware time passes")] = 1.0,
    hardware: Annotated[str, typer.Option(help="whose step times the engines have")] = "8b-h100",
    kv_capacity_tokens: Annotated[int | None, typer.Option(help="KV cache of one engine; default: the hardware's")] = (
        None
    ),
    max_model_len: Annotated[int, typer.Option(help="context window in tokens")] = 131_072,
    max_num_seqs: Annotated[int, typer.Option(help="sequences that run at once")] = 256,
    record: Annotated[int, typer.Option(help="how many requests /sim/requests remembers")] = 0,
    metrics: Annotated[str, typer.Option(help="whose names metrics have: vllm, sglang, triton-trtllm")] = "vllm",
    stats_port: Annotated[int | None, typer.Option(help="push figures as our vLLM plugin does; 0: on any port")] = None,
) -> None:
    """Run simulated vLLM engines: the HTTP surface and the timing of real ones, without a GPU."""
    from vllm_adapters.simulator.options import SimOptions
    from vllm_adapters.simulator.server import serve as serve_engines

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        _fail(f"--listen: {listen!r} is not IP:port, for example 127.0.0.1:8001")
    try:
        options = SimOptions(
            host=host.strip("[]"),
            port=int(port),
            count=count,
            models=tuple(model or ["sim"]),
            speed=speed,
            hardware=hardware,
            kv_capacity_tokens=kv_capacity_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            record=record,
            metrics=metrics,
            stats_port=stats_port,
        )
        asyncio.run(_until_stopped(serve_engines(options, typer.echo)))
    except (ValueError, OSError) as error:
        _fail(str(error))


@cli.command()
def demo(
    sessions: Annotated[int, typer.Option(min=1, help="conversations, all at the same time")] = 40,
    turns: Annotated[int, typer.Option(min=1, help="questions in each")] = 5,
    engines: Annotated[int, typer.Option(min=1, max=64, help="simulated engines")] = 4,
    speed: Annotated[float, typer.Option(min=0.01, help="how much faster than the hardware the engines are")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the conversations")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the system running until Ctrl-C.")] = False,
) -> None:
    """Compare two policies on simulated engines behind a real Envoy, in about a minute."""
    from extproc.launcher import NoEnvoy

    try:
        from extproc.demo.run import Demo, run
        from extproc.demo.workload import Shape
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        _fail(f"the demo needs {package}, which is not installed: {how_to_install('demo', 'embedded')}")
    try:
        sys.exit(run(Demo(Shape(sessions=sessions, turns=turns), engines, speed, seed, keep)))
    except NoEnvoy as error:
        _fail(str(error))


cli.command()(replay)


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run until done, SIGINT or SIGTERM."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _load(path: Path) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
