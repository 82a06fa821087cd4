"""What starting the decision process does not take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SELDOM_NEEDED = (
    "cryptography",
    "watchfiles",
    "kubernetes",
    "redis",
    "typer.testing",
    "extproc.demo",
    "extproc.replay.run",
)


@pytest.mark.parametrize("module", SELDOM_NEEDED)
def test_what_is_seldom_needed_is_not_imported(module: str) -> None:
    """By the decision process, as far as it has to go to be ready: each costs tens of milliseconds."""
    looked = f"import sys, extproc.app; raise SystemExit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0


@pytest.mark.parametrize(("named", "used"), [(None, "-event_engine_listener"), ("tcp_frame_size_tuning", None)])
def test_grpcio_reads_in_the_thread_that_hands_on_its_completions(named: str | None, used: str | None) -> None:
    """It is told so before it is imported, which would be too late; who names experiments of their own is obeyed."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if named is not None:
        environment["GRPC_EXPERIMENTS"] = named
    look = """
import builtins, os, sys
from pathlib import Path
from extproc.cli import serve
found, importing = [], builtins.__import__
def watch(name, *rest):
    if name == "grpc" and not found:
        found.append(os.environ.get("GRPC_EXPERIMENTS"))
    return importing(name, *rest)
before = "grpc" in sys.modules
builtins.__import__ = watch
try:
    serve(Path("/nowhere.yaml"))
except SystemExit:
    print(before, *found)
"""
    done = subprocess.run([sys.executable, "-c", look], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", used or named]
