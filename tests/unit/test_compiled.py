"""What is tested is what was asked for: the compiled modules where they were put on the path, in children as well."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from extproc import is_compiled

ROOT = Path(__file__).parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
MODULES = WHEEL["hooks"]["custom"]["modules"]
ASKED = "build/compiled" in os.environ.get("PYTHONPATH", "")


def test_this_process_runs_what_was_asked_for() -> None:
    """Or a whole run of tests would show nothing of what users run."""
    assert is_compiled() is ASKED


@pytest.mark.parametrize("path", MODULES)
def test_all_modules_that_are_to_be_compiled_are_or_none(path: str) -> None:
    """Of some alone nobody could say how fast they are."""
    module = import_module(path.removesuffix(".py").replace("/", "."))
    assert str(module.__file__).endswith(".so") is ASKED


def test_what_is_compiled_has_no_source_that_hides_it() -> None:
    """A child says what it runs, by the same word that the log and the metrics use."""
    said = subprocess.run(
        [sys.executable, "-m", "extproc.cli", "--version"], check=True, capture_output=True, text=True
    )
    assert said.stdout.strip().endswith("(compiled)" if ASKED else "(interpreted)")
