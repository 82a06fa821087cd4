"""The request log: what stands in a line, what is redacted, what happens when nobody writes."""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from extproc.access.gate import Caller
from extproc.config.sections import observing
from extproc.flight import Completion, Flight, Flights, Usage
from extproc.observe.request_log import Redactor, RequestLog
from policies.fleet_state import FleetState
from policies.types import InferenceRequest, Kind, Reason, Refusal

ENDED = Completion(
    "id", "10.0.0.2:1", 200, (), "via_upstream", 2, None, 1.25, 0.5, 10, 20, Usage(7, 3, None), "/v1/x?key=secret"
)


class Nobody:
    """FlightEvents that nobody hears."""

    moved = failed = settled = missing = lambda *_: None


class House:
    """A log to a file, with its losses counted."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.file = folder / "requests.jsonl"
        self.lost: Counter[str] = Counter()
        self.now_s = 100.0
        self.log = RequestLog(observing.RequestLog(file=self.file, **config), self._count, lambda: self.now_s)

    def _count(self, why: str) -> Any:
        house = self

        class One:
            def inc(self) -> None:
                house.lost[why] += 1

        return One()

    def flight(self, prompt: bytes = b"", caller: Caller | None = None) -> Flight:
        """A routed request."""
        flights = Flights(
            FleetState(), Nobody(), lambda: self.now_s, max_open=1, max_unsettled=1, access_log_timeout_s=1
        )
        flight = flights.open()
        flight.caller, flight.pool, flight.served_by = caller, "p", "10.0.0.2:1"
        request = InferenceRequest(Kind.CHAT, "m", "alias", 1, stream=True, prompt=prompt)
        self.log.routed(flight, "/v1/x", request, "10.0.0.1:1")
        return flight

    def lines(self) -> list[dict[str, Any]]:
        """All that was written, once all is."""
        self.log.close()
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def test_only_we_may_read_the_files(tmp_path: Path) -> None:
    """Whatever the umask, also those put aside and those begun anew."""
    before = os.umask(0)
    try:
        house = House(tmp_path, max_bytes=300, backups=1)
        for _ in range(3):
            house.log.missing(house.flight(), "no access-log entry")
        house.log.close()
    finally:
        os.umask(before)
    files = list(tmp_path.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_a_routed_requests_line(tmp_path: Path) -> None:
    """Everything that is known of it; no prompt unless asked for."""
    house = House(tmp_path)
    flight = house.flight(b"secret", Caller("acme", "laptop"))
    house.log.settled(flight, ENDED, "ok")
    [line] = house.lines()
    assert line.pop("time").startswith("20")
    assert line == {
        "request_id": flight.request_id, "tenant": "acme", "key": "laptop", "path": "/v1/x", "kind": "chat",
        "stream": True, "asked_model": "alias", "model": "m", "pool": "p", "first_endpoint": "10.0.0.1:1",
        "endpoint": "10.0.0.2:1", "attempts": 2, "status": 200, "outcome": "ok", "reason": None, "flags": [],
        "details": "via_upstream", "ttft_s": 0.5, "duration_s": 1.25, "request_bytes": 10, "response_bytes": 20,
        "prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": None,
    }  # fmt: skip


def test_a_request_without_an_entry_has_a_line_too(tmp_path: Path) -> None:
    """With what we know ourselves."""
    house = House(tmp_path)
    house.log.missing(house.flight(), "no access-log entry")
    [line] = house.lines()
    assert (line["outcome"], line["model"], line["status"]) == ("no access-log entry", "m", None)


def test_a_refusals_line(tmp_path: Path) -> None:
    """At once, with the reason and the time it took."""
    house = House(tmp_path)
    flight = house.flight()
    house.now_s += 0.5
    house.log.refused(flight, "/" + "x" * 1000, Refusal(404, "t", "message", Reason.UNKNOWN_PATH))
    house.log.answered(flight, "/v1/models")
    refused, answered = house.lines()
    assert (refused["status"], refused["reason"], refused["duration_s"]) == (404, "unknown_path", 0.5)
    assert len(refused["path"]) == 200
    assert (answered["status"], answered["outcome"]) == (200, "answered")


def test_a_strays_line_is_what_envoy_tells(tmp_path: Path) -> None:
    """But for the query of its path, where some clients put their keys."""
    house = House(tmp_path)
    house.log.stray(ENDED, "ok")
    [line] = house.lines()
    assert (line["path"], line["status"], line["endpoint"], line["tenant"]) == ("/v1/x", 200, "10.0.0.2:1", None)


def test_a_finished_flight_keeps_no_prompt(tmp_path: Path) -> None:
    """It may be remembered for as long as its answer can be asked for."""
    house = House(tmp_path, prompts=True)
    flight = house.flight(b"hello")
    house.log.settled(flight, ENDED, "ok")
    assert flight.note is None
    assert house.lines()[0]["prompt"] == "hello"


def test_files_are_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    """Their number and size are bounded."""
    house = House(tmp_path, max_bytes=2_000, backups=2)
    for _ in range(100):
        house.log.stray(ENDED, "ok")
    house.log.close()
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    assert all(file.stat().st_size <= 2_000 for file in tmp_path.iterdir())


def test_a_file_that_cannot_be_opened_is_told_at_the_start(tmp_path: Path) -> None:
    """Not line by line."""
    with pytest.raises(OSError, match="none"):
        House(tmp_path / "none")


def test_what_cannot_be_written_is_counted(tmp_path: Path) -> None:
    """Neither does the thread end, nor are lines shown on standard error."""
    (tmp_path / "requests.jsonl").symlink_to("/dev/full")
    house = House(tmp_path)
    house.log.stray(ENDED, "ok")
    house.log.close()
    assert house.lost == {"write_failed": 1}


def test_a_line_that_cannot_be_made_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    """The thread must outlive it."""
    house = House(tmp_path)
    house.log.stray(ENDED, object())  # type: ignore[arg-type]
    house.log.stray(ENDED, "ok")
    assert [line["outcome"] for line in house.lines()] == ["ok"]
    assert house.lost == {"not_encoded": 1}


def test_the_loop_never_waits_for_the_writer(tmp_path: Path) -> None:
    """What does not fit into the queue is dropped and counted."""
    house = House(tmp_path, queue=3)
    holding, release = Event(), Event()

    def hold(_: object) -> str:
        holding.set()
        assert release.wait(30)
        return ""

    house.log._writer._redactor.shown = hold  # type: ignore[method-assign]
    house.log._prompt_bytes = 1
    house.log.settled(house.flight(b"x"), ENDED, "ok")
    assert holding.wait(30)
    for _ in range(10):
        house.log.stray(ENDED, "ok")
    assert house.lost == {"queue_full": 7}
    release.set()
    assert len(house.lines()) == 4


def test_a_stop_does_not_wait_for_a_reader_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output may be a pipe that nobody empties."""
    monkeypatch.setattr("extproc.observe.request_log._STOP_S", 0.05)
    house = House(tmp_path, queue=1)
    release = Event()
    house.log._writer._redactor.shown = lambda _: str(release.wait(30))  # type: ignore[method-assign]
    house.log._prompt_bytes = 1
    for _ in range(3):
        house.log.settled(house.flight(b"x"), ENDED, "ok")
        time.sleep(0.01)
    house.log.close()
    assert not release.is_set()
    release.set()


# -- redaction


def shown(prompt: bytes, **config: Any) -> str:
    """What is logged of a prompt."""
    return Redactor(observing.RequestLog(prompts=True, **config)).shown(prompt)


@pytest.mark.parametrize(
    ("prompt", "logged"),
    [
        (rb"mail bob.k+x@mail.acme.co.uk now", "mail [email] now"),
        (rb"mail \u0062ob\u0040acme.org now", "mail [email] now"),
        (
            b"4111111111111111, 4111 1111 1111 1111, 4111-1111-1111-1111.",
            "[credit_card], [credit_card], [credit_card].",
        ),
        (b"on 2024-01-01 at 12:30, 123456789012", "on 2024-01-01 at 12:30, 123456789012"),
        (b"Authorization: Bearer abcdefghijklmnop1234==", "Authorization: [api_key]"),
        (rb"key:\nsk-proj-abcdefghijklmnop", "key:\n[api_key]"),
        (rb"{\"key\": \"\\npm-abcdefghijklmnop\"}", '{"key": "[api_key]"}'),
        (b"AKIAIOSFODNN7EXAMPLEX and ghp_abcdefghijklmnopqrst", "[api_key] and [api_key]"),
        (b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln", "[api_key]"),
        (b"a risk-assessment of a task-", "a risk-assessment of a task-"),
    ],
)
def test_built_in_patterns(prompt: bytes, logged: str) -> None:
    """However the secret is written in JSON."""
    assert shown(prompt) == logged


def test_only_what_is_named_is_redacted() -> None:
    """And what the operator adds, in RE2's language."""
    prompt = b"bob@acme.org has badge E123456"
    assert shown(prompt, redact=["email"]) == "[email] has badge E123456"
    assert shown(prompt, redact=[], redact_patterns={"badge": r"E\d{6}"}) == "bob@acme.org has badge [badge]"
    assert shown(prompt, redact=[], redact_patterns={"x": r"(E)(\d)"}) == r"bob@acme.org has badge [x]23456"


@pytest.mark.parametrize("kept", range(85, 125))
def test_no_half_of_a_secret_is_left_at_the_cut(kept: int) -> None:
    """Wherever the cut falls."""
    logged = shown((b"x" * 99 + b" bob.the.builder@acme.org " + b"y" * 1000)[: kept + 256], prompt_bytes=kept)
    assert "bob" not in logged


def test_half_a_surrogate_pair_can_be_logged() -> None:
    """JSON may hold what UTF-8 cannot."""
    assert shown(rb"\ud83d\ude00 \ud83d \u00e4").encode() == rb"\ud83d\ude00 \ud83d " + "ä".encode()
    assert shown("ä".encode()[:1]) == ""


def test_a_pattern_that_re2_does_not_understand_is_a_fault_of_the_config() -> None:
    """Look-behind and references have no linear-time meaning."""
    with pytest.raises(ValueError, match="no regular expression that RE2 understands"):
        observing.RequestLog(redact_patterns={"x": r"(a)\1"})
