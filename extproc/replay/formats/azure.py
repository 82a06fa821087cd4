"""Azure's LLM inference traces: a CSV of arrival, prompt and answer length. Nothing says which prompts begin alike."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import BadTrace, Row
from extproc.replay.traces import Trace, TraceRequest

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BLOCK_TOKENS = 128
_JITTER_S = 3.0
_MICROSECONDS = 26
"""Characters of a time down to the microsecond; the traces have one digit more."""


def read(path: Path) -> Trace:
    """The trace in the file. Raises BadTrace."""
    names = BlockNames("azure")
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if not set(_COLUMNS) <= set(lines.fieldnames or ()):
            raise BadTrace(f"{path}, line 1: expected the columns {', '.join(_COLUMNS)}")
        requests = [_request(Row(dict(line), f"{path}, line {lines.line_num}"), line) for line in lines]
    start_s = min((request[0] for request in requests), default=0.0)
    return Trace(path.stem, _BLOCK_TOKENS, [_placed(request, start_s, names) for request in requests], _JITTER_S)


def _request(row: Row, line: dict[str, str]) -> tuple[float, int, int]:
    return _time_s(row, line["TIMESTAMP"]), row.count("ContextTokens"), row.count("GeneratedTokens")


def _time_s(row: Row, written: str) -> float:
    try:
        return datetime.fromisoformat(written[:_MICROSECONDS]).timestamp()
    except (ValueError, TypeError):
        raise row.bad(f"TIMESTAMP is {written!r}, not a time") from None


def _placed(request: tuple[float, int, int], start_s: float, names: BlockNames) -> TraceRequest:
    at_s, prompt, output = request
    blocks, full = names.fill((), (), prompt, output, _BLOCK_TOKENS)
    return TraceRequest(at_s - start_s, prompt, output, blocks, full)
