"""The matrix: finished cells are kept and never mistaken for others; processes change nothing."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.replay import matrix as matrix_module
from extproc.replay.entrants import Entrant, entrants
from extproc.replay.figures import Bounds
from extproc.replay.formats import conversations
from extproc.replay.matrix import Cell, Matrix
from extproc.replay.offline import Fleet
from extproc.replay.traces import Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Small, and open."""
    return conversations.generate(60)


@pytest.fixture
def cell(trace: Trace) -> Cell:
    """One replay of it."""
    (robin,) = entrants(["round-robin"])
    return Cell(trace=trace.digest, entrant=robin, fleet=Fleet(engines=2), rate=20.0)


def test_a_finished_cell_is_not_worked_out_again(trace: Trace, cell: Cell, tmp_path: Path) -> None:
    """The second matrix finds it in the folder, whole, and reports no new one."""
    traces = {trace.digest: trace}
    first = Matrix(traces, Bounds(), folder=tmp_path).run([cell])
    told: list[Cell] = []
    again = Matrix(traces, Bounds(), folder=tmp_path).run([cell], lambda one, _: told.append(one))
    assert again == first
    assert told == []


def test_whatever_decides_an_outcome_makes_another_cell(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trace, policy, index, fleet, rate, seed, bounds and code: each has a file of its own."""
    matrix = Matrix({}, Bounds(), folder=tmp_path)
    exact, other = entrants(["round-robin@exact", "round-robin@10"])
    cells = [
        cell,
        replace(cell, trace="other"),
        replace(cell, entrant=exact),
        replace(cell, entrant=other),
        replace(cell, fleet=Fleet(engines=3)),
        replace(cell, rate=21.0),
        replace(cell, seed=2),
        replace(cell, in_flight=4),
    ]
    files = {matrix._file(one) for one in cells}
    files.add(Matrix({}, Bounds(ttft_s=1.0), folder=tmp_path)._file(cell))
    monkeypatch.setattr(matrix_module, "code_version", lambda: "new")
    files.add(matrix._file(cell))
    assert len(files) == len(cells) + 2


def test_another_packages_code_makes_another_cell(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its package: figures of code that has changed since would be stale."""
    package = tmp_path / "somebodys_policies"
    package.mkdir()
    (package / "__init__.py").write_text(_SOMEBODYS, encoding="utf-8")
    (package / "part.py").write_text("WEIGHT = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def file() -> Path | None:
        monkeypatch.delitem(sys.modules, package.name, raising=False)
        spec = importlib.import_module(package.name).Spec()
        return Matrix({}, Bounds(), folder=tmp_path)._file(replace(cell, entrant=Entrant("theirs", spec)))

    before = file()
    assert file() == before
    (package / "part.py").write_text("WEIGHT = 2\n", encoding="utf-8")
    assert file() != before


_SOMEBODYS = """
from dataclasses import dataclass
from policies.placement.policy import PolicySpec

@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(PolicySpec):
    pass
"""


def test_what_was_interrupted_is_not_taken_for_a_result(trace: Trace, cell: Cell, tmp_path: Path) -> None:
    """A half-written file has another name."""
    matrix = Matrix({trace.digest: trace}, Bounds(), folder=tmp_path)
    file = matrix._file(cell)
    assert file is not None
    file.with_suffix(".part").write_text('{"result": ', encoding="utf-8")
    assert matrix.run([cell])[0].figures.ttft_mean_s > 0
    assert [one.suffix for one in tmp_path.iterdir()] == [".json"]


def test_processes_change_nothing(trace: Trace, cell: Cell) -> None:
    """But the time it takes."""
    cells = [cell, replace(cell, seed=2)]
    alone = Matrix({trace.digest: trace}, Bounds()).run(cells)
    together = Matrix({trace.digest: trace}, Bounds(), jobs=2).run(cells)
    assert [one.figures for one in alone] == [one.figures for one in together]
    assert alone[0].figures != alone[1].figures


def test_capacity_is_measured_once_and_on_calm_engines(trace: Trace) -> None:
    """Speeds count; scrapes and disturbances do not."""
    matrix = Matrix({trace.digest: trace}, Bounds())
    full = matrix.capacity_per_s(trace, Fleet(engines=2))
    assert matrix.capacity_per_s(trace, Fleet(engines=2, scrape_interval_s=5.0)) == full
    assert len(matrix._capacities) == 1
    assert matrix.capacity_per_s(trace, Fleet(engines=2, speeds=(0.5, 0.5))) < full
