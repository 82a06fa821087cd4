"""Mooncake's traces: one JSON object a line, with the ids of its 512-token prompt blocks.

They name neither sessions nor the blocks of answers. Both are found again: a request whose ids begin with all full
blocks of an earlier one continues it, and what it has beyond them is that one's answer, then its own question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import Row, json_lines
from extproc.replay.traces import Trace, TraceRequest

BLOCK_TOKENS = 512
_JITTER_S = 3.0
"""The trace's arrivals come in batches of this length."""
_LEAST_SHARED = 2
"""Full blocks a request needs to be continued: a single one is a system prompt's."""


@dataclass(slots=True)
class _Line:
    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    ids: Sequence[int]
    session: int = -1
    answer: Sequence[int] = field(default=())

    @property
    def full(self) -> int:
        return min(self.prompt_tokens // BLOCK_TOKENS, len(self.ids))


def read(path: Path) -> Trace:
    """The trace in the file. Raises BadTrace."""
    lines = [_line(Row(fields, f"{path}, line {number}")) for number, fields in json_lines(path)]
    _link(lines)
    names = BlockNames("mooncake")
    return Trace(path.stem, BLOCK_TOKENS, [_request(line, names) for line in lines], _JITTER_S)


def _line(row: Row) -> _Line:
    return _Line(
        row.number("timestamp") / 1e3, row.count("input_length"), row.count("output_length"), row.numbers("hash_ids")
    )


def _link(lines: Sequence[_Line]) -> None:
    """Find who continues whom."""
    ends_with: dict[int, _Line] = {}
    for number, line in enumerate(lines):
        before = _continued(line, ends_with)
        if before is None:
            line.session = number
        else:
            line.session = before.session
            if not before.answer:
                total = (before.prompt_tokens + before.output_tokens) // BLOCK_TOKENS
                before.answer = line.ids[before.full : min(total, line.full)]
        if line.full >= _LEAST_SHARED:
            ends_with[line.ids[line.full - 1]] = line


def _continued(line: _Line, ends_with: dict[int, _Line]) -> _Line | None:
    for position in range(line.full - 1, 0, -1):
        before = ends_with.get(line.ids[position])
        if before is not None and before.full == position + 1 and before.prompt_tokens + 1 < line.prompt_tokens:
            return before
    return None


def _request(line: _Line, names: BlockNames) -> TraceRequest:
    prompt, answer = ([names.of(one) for one in ids] for ids in (line.ids[: line.full], line.answer))
    blocks, full = names.fill(prompt, answer, line.prompt_tokens, line.output_tokens, BLOCK_TOKENS)
    return TraceRequest(line.arrives_s, line.prompt_tokens, line.output_tokens, blocks, full, str(line.session))
