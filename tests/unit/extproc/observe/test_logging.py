"""Logs: one event per line on stderr, in either form, at the level asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from extproc.observe.logging import configure_logging

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    """Logging as it was."""
    yield
    structlog.reset_defaults()


def write() -> None:
    """One event of each kind."""
    log = structlog.get_logger("test")
    log.debug("quiet")
    log.info("endpoint state", endpoint="10.0.0.1:80", reason="ünïcode")
    stumble()


def fall(prompt: str) -> None:
    """Something goes wrong."""
    raise ZeroDivisionError("boom", len(prompt))


def stumble() -> None:
    """And is logged with its traceback."""
    try:
        fall("PRI" + "VATE")
    except ZeroDivisionError:
        structlog.get_logger("test").exception("failed")


def test_json_lines_are_json(capsys: Captured) -> None:
    """With level, UTC time, every field, and the exception as text."""
    configure_logging("info", "json")
    write()
    out, err = capsys.readouterr()
    assert out == ""
    state, failed = map(json.loads, err.splitlines())
    assert state["event"] == "endpoint state"
    assert (state["level"], state["endpoint"], state["reason"]) == ("info", "10.0.0.1:80", "ünïcode")
    assert state["timestamp"].endswith("Z")
    assert "ZeroDivisionError: ('boom', 7)" in failed["exception"]


def test_a_console_reads_lines(capsys: Captured) -> None:
    """The same events for people."""
    configure_logging("info", "console")
    write()
    out, err = capsys.readouterr()
    assert out == ""
    assert "endpoint state" in err
    assert "10.0.0.1:80" in err
    assert "ZeroDivisionError" in err
    assert "quiet" not in err


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_variables(capsys: Captured, form: str) -> None:
    """They hold prompts and Authorization headers."""
    configure_logging("info", form)
    write()
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "PRIVATE" not in err


@pytest.mark.parametrize(
    ("level", "events"),
    [("debug", ["quiet", "endpoint state", "failed"]), ("info", ["endpoint state", "failed"]), ("error", ["failed"])],
)
def test_the_level_decides_what_is_written(capsys: Captured, level: str, events: list[str]) -> None:
    """Everything at least as grave."""
    configure_logging(level, "json")
    write()
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == events


def test_where_nobody_watches_auto_means_json(capsys: Captured) -> None:
    """Captured output is no terminal."""
    configure_logging("info", "auto")
    write()
    assert json.loads(capsys.readouterr().err.splitlines()[0])["event"] == "endpoint state"
