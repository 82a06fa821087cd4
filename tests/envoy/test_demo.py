"""The demo as a user starts it: the table at the end, the exit code, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HANG_GUARD_S, eventually, unmeasured

SMALL = ("--sessions", "4", "--turns", "2", "--engines", "2", "--speed", "10")


def _start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "extproc.cli", "demo", *SMALL, *options]
    environment = {**unmeasured(), "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment
    )


def _processes_of(folder: Path) -> list[int]:
    """Every process that has the folder in its environment: the demo's, and its children's children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # no process, not ours, or gone by now
            continue
        if f"TMPDIR={folder}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def _until(demo: subprocess.Popen[str], words: str) -> str:
    """Read what it prints up to and with the line that has `words`."""
    assert demo.stdout is not None
    printed = ""
    for line in demo.stdout:
        printed += line
        if words in line:
            return printed
    raise AssertionError(f"it ended without {words!r}:\n{printed}")


@pytest.fixture
def running_demo(short_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in the middle of its work, with more to do than a test waits for."""
    demo = _start(short_path, "--turns", "1000")
    _until(demo, "starting")
    eventually(lambda: len(_processes_of(short_path)) >= 5, "demo, engines, launcher, decision process and Envoy run")
    yield demo
    if demo.poll() is None:
        demo.kill()
    demo.communicate()


@pytest.mark.timeout(600)  # a hang guard for two systems one after the other, on a machine with other work
def test_the_demo_compares_two_policies_and_leaves_nothing_behind(short_path: Path) -> None:
    """Both policies in the table, every request answered, exit code 0, no process and no file left."""
    demo = _start(short_path)
    printed, _ = demo.communicate(timeout=8 * HANG_GUARD_S)
    assert demo.returncode == 0, printed
    rows = re.findall(r"│ (round-robin|default) +│ +(\d+) │ +(\d+)% │ +(\d+)% │.*│ +(\d+) │", printed)
    assert [(policy, requests, errors) for policy, requests, _, _, errors in rows] == [
        ("round-robin", "8", "0"),
        ("default", "8", "0"),
    ]
    assert all(int(hits) <= int(ideal) for _, _, hits, ideal, _ in rows)
    assert "pointsman up" in printed
    assert not _processes_of(short_path)
    assert not list(short_path.iterdir())


def test_a_kept_demo_serves_what_it_suggests_until_interrupted(short_path: Path) -> None:
    """Every suggested curl command works against the running system; Ctrl-C then ends all of it."""
    demo = _start(short_path, "--keep")
    printed = _until(demo, ":undrain")  # the last command it suggests
    commands = [line for line in printed.splitlines() if line.startswith("curl ")]
    assert len(commands) == 9
    for command in commands:
        answer = subprocess.run(
            ["bash", "-c", f"{command} --fail"], capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
        )
        assert answer.returncode == 0, (command, answer.stderr)
        assert answer.stdout
    demo.send_signal(signal.SIGINT)
    printed_after, _ = demo.communicate(timeout=HANG_GUARD_S)
    assert demo.returncode == 0, printed_after
    assert not _processes_of(short_path)


def test_an_interrupt_while_it_runs_stops_everything(running_demo: subprocess.Popen[str], short_path: Path) -> None:
    """Ctrl-C before the end: its own exit code, and no process left."""
    running_demo.send_signal(signal.SIGINT)
    printed, _ = running_demo.communicate(timeout=HANG_GUARD_S)
    assert running_demo.returncode == 130, printed
    assert not _processes_of(short_path)


def test_killing_the_demo_leaves_no_orphans(running_demo: subprocess.Popen[str], short_path: Path) -> None:
    """Even a SIGKILL of the demo: the kernel tells its children."""
    running_demo.kill()
    running_demo.wait()
    eventually(lambda: not _processes_of(short_path), "every process of the demo is gone")
