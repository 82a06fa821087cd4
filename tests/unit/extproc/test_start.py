"""What starting the decision process does not take."""

from __future__ import annotations

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
