"""The matrix of a comparison: one cell per policy, fleet, rate and seed, worked off in processes, kept in files.

A cell's file is named by a hash of all that decides its outcome: the trace's requests, the policy's fields, the fleet,
rate and seed, and the source code that replays. So an interrupted matrix goes on where it stopped, and nothing stale is
ever taken for new. Not here: which cells there are (comparison.py), what is shown (screen.py, pages.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from extproc import is_compiled
from extproc.replay.entrants import Entrant, entrants
from extproc.replay.figures import Bounds, Curves, Figures, curves, figures
from extproc.replay.offline import Fleet, Replay, Run
from extproc.replay.traces import Trace

_SAMPLES = 120
IN_FLIGHT_PER_ENGINE = 64
"""When capacity is measured."""
_SOURCES = (
    ("policies", ("**/*",)),
    ("vllm_adapters.simulator", ("engine", "blocks", "hardware")),
    ("extproc.replay", ("offline", "engine_index", "quiet_engine", "traces", "figures", "matrix")),
)
"""Where an outcome is decided: packages, and which modules of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay. `trace`: a trace's digest. `in_flight`: a measurement of capacity instead of a comparison."""

    trace: str
    entrant: Entrant
    fleet: Fleet
    rate: float = 0.0
    seed: int = 1
    in_flight: int | None = None

    def inputs(self) -> dict[str, Any]:
        """What decides the outcome, as plain data."""
        return {
            "trace": self.trace,
            "policy": self.entrant.described(),
            "fleet": asdict(self.fleet),
            "rate": self.rate,
            "seed": self.seed,
            "in_flight": self.in_flight,
            "code": code_version(),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A cell's outcome. `took_s`: of one core, when it was worked out."""

    figures: Figures
    curves: Curves
    throughput_per_s: float
    took_s: float


@cache
def code_version() -> str:
    """A hash of the sources that decide an outcome, and of whether they are compiled: an exp's last bit may differ."""
    digest = hashlib.sha256(str(is_compiled()).encode())
    for package, modules in _SOURCES:
        folder = Path(str(resources.files(package)))
        for file in sorted(file for module in modules for file in folder.glob(f"{module}.py")):
            digest.update(str(file.relative_to(folder)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


class Matrix:
    """Works off cells. `folder` keeps finished ones, if given; `jobs` is the number of processes."""

    def __init__(
        self, traces: Mapping[str, Trace], bounds: Bounds, *, folder: Path | None = None, jobs: int = 1
    ) -> None:
        self._traces = dict(traces)
        self._bounds = bounds
        self._folder = folder
        self._capacities: dict[tuple[str, Fleet], float] = {}
        self._jobs = jobs
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def capacity_per_s(self, trace: Trace, fleet: Fleet) -> float:
        """Requests per second that least-request reaches with 64 requests per engine always in flight."""
        calm = replace(fleet, disturbances=(), scrape_interval_s=Fleet().scrape_interval_s)  # it looks at no scrape
        key = trace.digest, calm
        if key not in self._capacities:
            (least,) = entrants(["least-request"])
            in_flight = IN_FLIGHT_PER_ENGINE * fleet.engines
            (result,) = self.run([Cell(trace=trace.digest, entrant=least, fleet=calm, in_flight=in_flight)])
            self._capacities[key] = result.throughput_per_s
        return self._capacities[key]

    def run(self, cells: Sequence[Cell], done: Callable[[Cell, Result], None] | None = None) -> list[Result]:
        """Each cell's result; `done` hears of those that were not kept from before, as they are there."""
        results = {number: kept for number, cell in enumerate(cells) if (kept := self._kept(cell)) is not None}
        missing = {number: cell for number, cell in enumerate(cells) if number not in results}
        for number, result in self._work(missing):
            self._keep(cells[number], result)
            results[number] = result
            if done is not None:
                done(cells[number], result)
        return [results[number] for number in range(len(cells))]

    def _work(self, cells: Mapping[int, Cell]) -> Iterator[tuple[int, Result]]:
        """(number, result) as they are ready."""
        if self._jobs == 1 or len(cells) < 2:
            for number, cell in cells.items():
                yield number, work(cell, self._traces[cell.trace], self._bounds)
            return
        with ProcessPoolExecutor(self._jobs, initializer=_equip, initargs=(self._traces, self._bounds)) as pool:
            futures = {pool.submit(_work_equipped, cell): number for number, cell in cells.items()}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _file(self, cell: Cell) -> Path | None:
        if self._folder is None:
            return None
        inputs = json.dumps({**cell.inputs(), "bounds": asdict(self._bounds)}, sort_keys=True)
        return self._folder / f"{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.json"

    def _kept(self, cell: Cell) -> Result | None:
        file = self._file(cell)
        if file is None or not file.exists():
            return None
        kept = json.loads(file.read_text(encoding="utf-8"))["result"]
        return Result(Figures(**kept["figures"]), Curves(**kept["curves"]), kept["throughput_per_s"], kept["took_s"])

    def _keep(self, cell: Cell, result: Result) -> None:
        file = self._file(cell)
        if file is None:
            return
        unfinished = file.with_suffix(".part")  # renamed when whole: a file that is there is always complete
        unfinished.write_text(json.dumps({"inputs": cell.inputs(), "result": asdict(result)}), encoding="utf-8")
        unfinished.replace(file)


def work(cell: Cell, trace: Trace, bounds: Bounds) -> Result:
    """Replay one cell."""
    started_s = time.process_time()
    run = _replayed(cell, trace)
    throughput = run.drained_count / run.drained_s if run.drained_s else len(run.outcomes) / run.ended_s
    return Result(figures(run, bounds), curves(run), throughput, time.process_time() - started_s)


def _replayed(cell: Cell, trace: Trace) -> Run:
    one = cell.entrant
    replay = partial(
        Replay,
        spec=one.spec,
        fleet=cell.fleet,
        seed=cell.seed,
        exact=one.exact,
        policy=one.name,
        binding=one.binding,
    )
    if cell.in_flight is not None:
        return replay(trace, in_flight=cell.in_flight).run()
    paced = trace.at_rate(cell.rate, cell.seed)
    return replay(paced, sample_s=paced.span_s / _SAMPLES).run()


_equipment: tuple[Mapping[str, Trace], Bounds] | None = None
"""What a worker process was given when it started: traces are large, cells are many."""


def _equip(traces: Mapping[str, Trace], bounds: Bounds) -> None:
    global _equipment  # noqa: PLW0603 - a process's own
    _equipment = traces, bounds


def _work_equipped(cell: Cell) -> Result:
    if _equipment is None:
        raise RuntimeError("the worker was not equipped")
    traces, bounds = _equipment
    return work(cell, traces[cell.trace], bounds)
