"""What the demo shows: progress, the table, what to try next. Live on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.demo.figures import Outcome, Report, times_faster
from extproc.demo.processes import ALIAS, MODEL

_PLAIN_WIDTH = 110
_LEGEND = """\
prefix hits  share of prompt tokens found cached, by the engines' own counters
ideal        the same with a single cache without end
TTFT         from sending a request to its first token, at the client
imbalance    requests in flight, averaged over time: busiest engine over the mean"""

Counter: TypeAlias = Callable[[Outcome], None]
"""Takes outcomes as they come."""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses for the commands to try."""

    http: str
    admin: str
    endpoint: str


DEFAULT_PLACE = Place("127.0.0.1:8080", "127.0.0.1:9700", "127.0.0.1:8001")


def make_console() -> Console:
    """A console that does not fold the table where there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


@contextlib.contextmanager
def progress(console: Console, policy: str, total: int) -> Iterator[Counter]:
    """Count answers on the console while the block runs."""
    if not console.is_terminal:
        yield _plain_counter(console, policy, total)
        return
    bar = Progress(
        TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TextColumn("answers"),
        TimeElapsedColumn(), console=console,
    )  # fmt: skip
    with bar:
        task = bar.add_task(policy, total=total)
        yield lambda _outcome: bar.advance(task)


def _plain_counter(console: Console, policy: str, total: int) -> Counter:
    """A line at every quarter."""
    done = 0

    def count(_outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if done * 4 // total != (done - 1) * 4 // total:
            console.print(f"{policy}: {done} of {total} answers")

    return count


def show_reports(console: Console, reports: Sequence[Report], ideal: float) -> None:
    """The table, the difference in one sentence, and the first error if there was one."""
    table = Table(title="The same conversations, placed by two policies")
    for heading in ("policy", "requests", "prefix hits", "ideal", "TTFT p50", "TTFT p99", "imbalance", "errors"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in reports:
        table.add_row(
            one.policy, str(one.requests), _percent(one.hit_rate), _percent(ideal), _ms(one.ttft_p50_s),
            _ms(one.ttft_p99_s), f"{one.imbalance:.2f}", str(one.errors),
        )  # fmt: skip
    console.print(table)
    console.print(_LEGEND)
    first, last = reports[0], reports[-1]
    console.print(f"{first.policy}'s median TTFT is {times_faster(first, last):.1f} times that of {last.policy}.")
    for one in reports:
        if one.first_error is not None:
            console.print(f"{one.policy}: first error: {one.first_error}", markup=False)


def show_next_steps(console: Console, place: Place, *, running: bool) -> None:
    """What to try with curl; how to start something to try it on, unless it runs."""
    console.rule("Running until Ctrl-C; try" if running else "A playground of your own")
    # no frame and no folding: a command should survive being copied
    for what, command in (() if running else _to_start()) + commands(place):
        console.print(f"# {what}", style="dim", markup=False)
        console.print(command, markup=False, soft_wrap=True)
    console.rule()


def _to_start() -> tuple[tuple[str, str], ...]:
    pointsman = _as_typed()
    return (
        ("in one terminal", f"{pointsman} sim --count 4"),
        ("in another", f"{pointsman} up docs/example.yaml"),
    )


def _as_typed() -> str:
    """Our command as the reader's shell finds it: `make demo` has put it into an environment that is not on PATH."""
    if shutil.which("pointsman"):
        return "pointsman"
    command = Path(sys.executable).with_name("pointsman")
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


def commands(place: Place) -> tuple[tuple[str, str], ...]:
    """What each is for, and the command."""
    chat = f"http://{place.http}/v1/chat/completions -d"
    admin = f"http://{place.admin}/v1"
    return (
        ("a chat, and which engine served it", f"curl -si {chat} '{_body(MODEL)}'"),
        ("a stream", f"""curl -sN {chat} '{_body(MODEL, '"stream":true,')}'"""),
        ("by an alias", f"curl -s {chat} '{_body(ALIAS)}'"),
        ("models", f"curl -s http://{place.http}/v1/models"),
        ("every endpoint and its figures", f"curl -s {admin}/fleet"),
        ("the last decision, with scores", f"curl -s '{admin}/decisions?limit=1'"),
        ("where a body would go, and why", f"curl -s {admin}/explain -d '{_body(MODEL)}'"),
        ("no new requests for one endpoint", f"curl -s -X POST {admin}/endpoints/{place.endpoint}:drain"),
        ("and back", f"curl -s -X POST {admin}/endpoints/{place.endpoint}:undrain"),
    )


def _body(model: str, fields: str = "") -> str:
    return f'{{"model":"{model}",{fields}"max_tokens":8,"messages":[{{"role":"user","content":"hello"}}]}}'


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
