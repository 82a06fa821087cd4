"""The request log: a line of JSON per finished request, written and redacted in a thread of its own.

A routed request's line comes with its access-log entry, or without it once that is overdue; a refusal's at once. What
Envoy ended by itself, or what an earlier process of ours had routed, has a line with as much as Envoy tells.

The decision loop only puts plain data into a bounded queue; what does not fit is dropped and counted. Not here: our own
log (logging.py), and the last decisions with their scores (decisions.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueListener, RotatingFileHandler
from queue import Full, Queue
from typing import Protocol, cast

import msgspec
import re2
import structlog

from extproc.config.sections import observing
from extproc.flight import LONGEST_PATH, Completion, Flight, Note
from policies.admission.patterns import quiet_re2
from policies.types import InferenceRequest, Refusal

log = structlog.get_logger(__name__)

_DIGITS = 6
_MARGIN_BYTES = 256
"""Of a prompt beyond what is logged: a secret that the cut falls into must still be known as one."""
_STOP_S = 2.0
"""How long what is queued may take to be written when we stop."""


class Count(Protocol):
    """A counter that any thread may raise."""

    def inc(self) -> None:
        """One more."""


class Line(msgspec.Struct, kw_only=True):
    """One line; what is not known is null. Times in seconds. `prompt` stands only where prompts are asked for."""

    time: float | str = 0.0
    request_id: str
    tenant: str | None = None
    key: str | None = None
    path: str
    kind: str | None = None
    stream: bool | None = None
    asked_model: str | None = None
    model: str | None = None
    pool: str | None = None
    first_endpoint: str | None = None
    endpoint: str | None = None
    attempts: int | None = None
    status: int | None = None
    outcome: str
    reason: str | None = None
    flags: tuple[str, ...] = ()
    details: str | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    request_bytes: int | None = None
    response_bytes: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt: bytes | str | msgspec.UnsetType = msgspec.UNSET


class RequestLog:
    """Takes what happened to requests, on the decision loop; writes in a thread. Raises OSError for a bad file.

    `lost` gives the counter of lines lost for one cause; `clock` is the one flights are opened by.
    """

    def __init__(self, config: observing.RequestLog, lost: Callable[[str], Count], clock: Callable[[], float]) -> None:
        self._prompt_bytes = config.prompt_bytes + _MARGIN_BYTES if config.prompts else 0
        self._clock = clock
        self._waiting: Queue[Line] = Queue(config.queue)
        self._full = lost("queue_full")
        self._writer = _Writer(
            self._waiting, _handler(config, lost("write_failed")), Redactor(config), lost("not_encoded")
        )
        self._writer.start()

    def close(self) -> None:
        """Write what is queued, for a while, and stop."""
        self._writer.stop()

    # -- what happened

    def routed(self, flight: Flight, path: str, request: InferenceRequest, first_endpoint: str) -> None:
        """A request has its place: keep what its line will need."""
        flight.note = Note(
            path[:LONGEST_PATH],
            request.kind,
            request.asked_model,
            request.model,
            first_endpoint,
            bytes(request.prompt[: self._prompt_bytes]),
            stream=request.stream,
        )

    def settled(self, flight: Flight, completion: Completion, outcome: str) -> None:
        """A routed request has ended and Envoy has told how."""
        self._finish(flight, _ended(_routed(flight, outcome), completion))

    def missing(self, flight: Flight, outcome: str) -> None:
        """A routed request has ended, and Envoy will not tell how."""
        self._finish(flight, _routed(flight, outcome))

    def refused(
        self, flight: Flight, path: str, refusal: Refusal, *, kind: str | None = None, request_bytes: int | None = None
    ) -> None:
        """We answered with an error. `request_bytes`: of the body, None if it was refused before that came."""
        line = self._answered(flight, path, "refused")
        line.status, line.reason = refusal.status, refusal.reason
        line.kind, line.asked_model, line.request_bytes = kind, refusal.asked_model, request_bytes
        self._put(line)

    def answered(self, flight: Flight, path: str) -> None:
        """We answered without an engine."""
        line = self._answered(flight, path, "answered")
        line.status = 200
        self._put(line)

    def stray(self, completion: Completion, outcome: str) -> None:
        """A request ended of which we know nothing: never decided, or routed by a process before this one."""
        path = completion.path.partition("?")[0]
        line = Line(request_id=completion.request_id, path=path, endpoint=completion.address, outcome=outcome)
        self._put(_ended(line, completion))

    def _put(self, line: Line) -> None:
        """Queue a line, or drop and count it. A log record is made of it at the other end."""
        line.time = time.time()
        try:
            self._waiting.put_nowait(line)
        except Full:
            self._full.inc()

    def _answered(self, flight: Flight, path: str, outcome: str) -> Line:
        took_s = round(self._clock() - flight.opened_at_s, _DIGITS)
        line = Line(request_id=flight.request_id, path=path[:LONGEST_PATH], outcome=outcome, duration_s=took_s)
        return _named(line, flight)

    def _finish(self, flight: Flight, line: Line) -> None:
        if flight.note is not None and self._prompt_bytes:
            line.prompt = flight.note.prompt
        flight.note = None  # the flight may be remembered for long
        self._put(line)


def _named(line: Line, flight: Flight) -> Line:
    if flight.caller is not None:
        line.tenant, line.key = flight.caller.tenant, flight.caller.key_name
    return line


def _routed(flight: Flight, outcome: str) -> Line:
    note = flight.note
    line = Line(request_id=flight.request_id, path="", outcome=outcome, pool=flight.pool, endpoint=flight.served_by)
    if note is not None:
        line.path, line.kind, line.stream = note.path, note.kind, note.stream
        line.asked_model, line.model, line.first_endpoint = note.asked_model, note.model, note.first_endpoint
    return _named(line, flight)


def _ended(line: Line, completion: Completion) -> Line:
    line.attempts, line.status = completion.attempts, completion.status
    line.flags, line.details = completion.flags, completion.details
    line.ttft_s, line.duration_s = _rounded(completion.ttft_s), _rounded(completion.duration_s)
    line.request_bytes, line.response_bytes = completion.request_bytes, completion.response_bytes
    usage = completion.usage
    if usage is not None:
        line.prompt_tokens, line.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        line.cached_tokens = usage.cached_tokens
    return line


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)


# -- beside the decision loop


class _Writer(QueueListener):
    """The thread's end: redacts, encodes, writes. Nothing that goes wrong with one line ends it."""

    def __init__(self, waiting: Queue[Line], handler: logging.Handler, redactor: Redactor, failed: Count) -> None:
        super().__init__(waiting, handler)
        self._handler = handler
        self._redactor = redactor
        self._failed = failed

    def prepare(self, line: Line) -> logging.LogRecord:  # type: ignore[override] # what we put in
        line.time = datetime.fromtimestamp(float(line.time), UTC).isoformat(timespec="milliseconds")
        if isinstance(line.prompt, bytes):
            line.prompt = self._redactor.shown(line.prompt)
        return logging.makeLogRecord({"msg": msgspec.json.encode(line).decode()})

    def handle(self, line: Line) -> None:  # type: ignore[override] # as above
        try:
            super().handle(line)  # type: ignore[arg-type] # as above
        except Exception as error:  # noqa: BLE001 - the thread must outlive it
            self._failed.inc()
            log.warning("a line of the request log could not be made", error=type(error).__name__)

    def stop(self) -> None:
        """As QueueListener's, but not for longer than a reader that has stopped reading may make it."""
        with contextlib.suppress(Full):
            self.queue.put(self._sentinel, timeout=_STOP_S)  # type: ignore[attr-defined]  # not in the stubs
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                return  # it holds the handler's lock, and we would wait for it after all
            self._thread = None
        with contextlib.suppress(OSError):  # what it could not write before it cannot now
            self._handler.close()


class _PrivateFiles(RotatingFileHandler):
    """Files that only we may read: they hold who asked, and perhaps what. One that is there keeps its mode."""

    def _open(self) -> TextIOWrapper:
        return cast("TextIOWrapper", open(self.baseFilename, self.mode, encoding=self.encoding, opener=_open_private))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _handler(config: observing.RequestLog, failed: Count) -> logging.Handler:
    handler: logging.Handler = (
        logging.StreamHandler(sys.stdout)
        if config.file is None
        else _PrivateFiles(config.file, maxBytes=config.max_bytes, backupCount=config.backups, encoding="utf-8")
    )
    # by default each failure would write a traceback, and with it the line, to standard error
    handler.handleError = lambda record: failed.inc()  # type: ignore[method-assign] # noqa: ARG005 - called by name
    return handler


# -- redaction

_START = r"(?:\b|\\[bfnrt])"
"""Where a word may start; in JSON within JSON a line break is a backslash and a letter, and no boundary."""
BUILT_IN = {
    "email": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "credit_card": _START + r"(?:\d[ -]?){12,18}\d\b",
    "api_key": (
        r"(?i:bearer)\s+[A-Za-z0-9._~+/-]{16,}=*"
        rf"|{_START}(?:sk|pk|rk|pm|hf|key|glpat|gh[oprsu]|xox[abeprs])[-_][A-Za-z0-9_-]{{16,}}"
        rf"|{_START}(?:AKIA|AIza)[A-Za-z0-9_-]{{16,}}"
        rf"|{_START}eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*)?"
    ),
}
"""What each built-in name stands for. Rather too much than too little."""

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_MEANT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Redactor:
    """Makes of a prompt's first bytes what may be logged. RE2: no pattern takes longer than in proportion to it."""

    def __init__(self, config: observing.RequestLog) -> None:
        patterns = {name: BUILT_IN[name] for name in config.redact} | config.redact_patterns
        self._rules = [(re2.compile(pattern, quiet_re2()), f"[{name}]") for name, pattern in patterns.items()]
        self._most_bytes = config.prompt_bytes

    def shown(self, prompt: bytes) -> str:
        """Unescaped, since an @ may be written as an escape; redacted; cut."""
        cut = len(prompt) > self._most_bytes
        text = _ESCAPE.sub(_unescape, prompt.decode("utf-8", "ignore"))
        for pattern, shown in self._rules:
            text = pattern.sub(lambda _, shown=shown: shown, text)
        # whatever the redactions did to its length, half a secret at the end is shorter than the margin
        return text[:-_MARGIN_BYTES] if cut else text


def _unescape(escape: re.Match[str]) -> str:
    """What a JSON escape means; half of a surrogate pair stays as it is written, for it means nothing alone."""
    digits, letter = escape.groups()
    if letter is not None:
        return _MEANT.get(letter, letter)
    meant = chr(int(digits, 16))
    return escape[0] if "\ud800" <= meant <= "\udfff" else meant
