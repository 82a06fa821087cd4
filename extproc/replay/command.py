"""The options of `pointsman replay`, and what they mean together. Heavy imports wait until the command runs."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from extproc.extras import how_to_install

if TYPE_CHECKING:
    from extproc.replay.offline import Fleet
    from extproc.replay.run import Options


class Index(StrEnum):
    """Which size of prefix index the policies run with."""

    PRESET = "preset"
    ENGINE = "engine"


class FirstTokens(StrEnum):
    """How the policies of an offline replay learn of first tokens."""

    SEEN = "seen"
    TIMED = "timed"
    NEVER = "never"


def replay(
    trace: Annotated[str, typer.Argument(help="a file or folder; `generated` for the trace that comes with us")],
    offline: Annotated[bool, typer.Option("--offline", help="On simulated engines, in virtual time.")] = False,
    live: Annotated[bool, typer.Option("--live", help="On simulated engines behind a real Envoy.")] = False,
    speed: Annotated[float, typer.Option(min=0.01, max=100, help="--live: so much faster than the hardware")] = 1.0,
    policies: Annotated[str, typer.Option(help="NAME[@INDEX],...: presets, or YAML files with a policy")] = (
        "default,least-request,round-robin"
    ),
    index: Annotated[Index, typer.Option(help="`engine`: also with an index of the engine's size")] = Index.PRESET,
    load: Annotated[str | None, typer.Option(help="shares of what the fleet can take, such as 0.8,0.95")] = None,
    rate: Annotated[str | None, typer.Option(help="requests per second instead")] = None,
    sessions_per_s: Annotated[str | None, typer.Option(help="for traces whose sessions wait for answers")] = None,
    disturbances: Annotated[bool, typer.Option("--disturbances", help="Five disturbances, each at its load.")] = False,
    flood: Annotated[
        bool, typer.Option("--flood", help="three times the traffic more, on one prefix, for a fifth of the time")
    ] = False,
    engines: Annotated[int, typer.Option(min=1, max=1024, help="how many")] = 8,
    hardware: Annotated[str, typer.Option(help="whose step times the engines have")] = "8b-h100",
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(min=1, help="of one engine; default: the hardware's")
    ] = None,
    scrape_interval_s: Annotated[float, typer.Option(min=0.001, help="how often the router sees the engines")] = 0.5,
    first_tokens: Annotated[
        FirstTokens,
        typer.Option(help="--offline: as they come, with the answer's end as in a running system, or never"),
    ] = FirstTokens.SEEN,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, with other arrivals and ties")] = 1,
    requests: Annotated[int | None, typer.Option(min=10, help="only so many; how many, where they are drawn")] = None,
    trace_format: Annotated[str | None, typer.Option("--format", help="if it is not recognised")] = None,
    good_ttft_s: Annotated[float, typer.Option(help="a good answer's first token comes sooner")] = 2.0,
    good_tpot_ms: Annotated[float, typer.Option(help="and its tokens closer together")] = 50.0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; default: one per core")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything there")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the tables there")] = None,
    plots: Annotated[Path | None, typer.Option(help="write pictures and a page into this folder")] = None,
    resume: Annotated[Path | None, typer.Option(help="folder that keeps finished runs, to go on from")] = None,
) -> None:
    """Put a trace through several policies on simulated engines and compare."""
    if offline == live:
        _fail("give one of --offline (virtual time) and --live (a real Envoy)")
    _require("rich", *(["matplotlib"] if plots else []))
    from extproc.replay.figures import Bounds
    from extproc.replay.run import Options

    _run(
        Options(
            source=trace,
            form=trace_format,
            policies=tuple(name.strip() for name in policies.split(",")),
            right_sized=index is Index.ENGINE,
            fleet=_fleet(engines, hardware, kv_capacity_tokens, scrape_interval_s, first_tokens),
            loads=_numbers("--load", load),
            rates=(*_numbers("--rate", rate), *_numbers("--sessions-per-s", sessions_per_s)),
            disturbances=disturbances,
            flood=flood,
            live_speed=speed if live else None,
            seeds=seeds,
            requests=requests,
            bounds=Bounds(ttft_s=good_ttft_s, tpot_s=good_tpot_ms / 1000),
            jobs=jobs or os.cpu_count() or 1,
            resume=resume,
            json_file=json_file,
            markdown_file=markdown,
            plots=plots,
            command=shlex.join(["pointsman", *sys.argv[1:]]),
        )
    )


def _run(options: Options) -> None:
    from extproc.demo.processes import DidNotComeUp
    from extproc.launcher import NoEnvoy
    from extproc.replay.entrants import NoSuchPolicy
    from extproc.replay.formats.lines import BadTrace
    from extproc.replay.live import Failed
    from extproc.replay.offline import Stuck
    from extproc.replay.run import Unusable, run
    from extproc.replay.screen import make_console
    from policies.placement.policy import BadScore

    console = make_console()
    console.print(options.command, markup=False, soft_wrap=True)
    try:
        run(options, console)
    except (BadScore, BadTrace, DidNotComeUp, Failed, NoEnvoy, NoSuchPolicy, Stuck, Unusable) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))


def _fleet(
    engines: int, hardware: str, kv_capacity_tokens: int | None, scrape_interval_s: float, first_tokens: FirstTokens
) -> Fleet:
    from extproc.replay.offline import Fleet
    from vllm_adapters.simulator.hardware import HARDWARE

    if hardware not in HARDWARE:
        _fail(f"no hardware {hardware!r}; there are: {', '.join(HARDWARE)}")
    return Fleet(
        engines=engines,
        hardware=hardware,
        kv_capacity_tokens=kv_capacity_tokens,
        scrape_interval_s=scrape_interval_s,
        first_tokens=first_tokens.value,
    )


def _numbers(option: str, written: str | None) -> tuple[float, ...]:
    """From a list with commas. Ends the command where one is no number above 0."""
    numbers = []
    for part in (written or "").split(",") if written else ():
        try:
            number = float(part)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            _fail(f"{option}: {part!r} is not a number above 0")
        numbers.append(number)
    return tuple(numbers)


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            _fail(f"this needs {package}, which is not installed: {how_to_install('plots')}")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(2)
