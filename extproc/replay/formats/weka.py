"""Sessions of a coding agent, one JSON file each: requests that wait for the answer before, with their think times.

Block ids are a session's own; what sessions share is the tools' and system prompt, by its length. Four of the trace's
64-token blocks are taken as one: prompts are long and the blocks many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import BadTrace, Row
from extproc.replay.traces import Trace, TraceRequest

_TOGETHER = 4
_SESSIONS_S = 20.0
"""Mean time between starts of sessions; the trace does not say."""
_JITTER_S = 120.0
_LONGEST_THINK_S = 300.0
_LONGEST_PROMPT = 131_072
_SHORTEST_PROMPT = 64


@dataclass(frozen=True, slots=True)
class _Session:
    number: int
    starts_s: float
    shared_key: tuple[int, int]
    shared_blocks: int
    block_tokens: int


def read(folder: Path) -> Trace:
    """All sessions of the folder, started at random. Raises BadTrace."""
    files = sorted(folder.glob("*.json"))
    rng, names = Random(0), BlockNames("weka")
    rng.shuffle(files)
    starts_s, block_tokens = 0.0, 0
    requests: list[TraceRequest] = []
    for number, file in enumerate(files):
        fields = _load(file)
        starts_s += rng.expovariate(1 / _SESSIONS_S)
        session = _session(Row(dict(fields), str(file)), number, starts_s)
        if block_tokens not in {0, session.block_tokens}:
            raise BadTrace(f"{file}: block_size differs from that of the other sessions")
        block_tokens = session.block_tokens
        _add(fields, session, names, requests, str(file))
    return Trace(folder.name, block_tokens or 1, requests, _JITTER_S)


def _load(file: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(file.read_bytes())
    except ValueError as error:
        raise BadTrace(f"{file}: not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("requests"), list):
        raise BadTrace(f"{file}: no list of requests in it")
    return fields


def _session(row: Row, number: int, starts_s: float) -> _Session:
    block_tokens = _TOGETHER * row.count("block_size")
    shared = int(row.number("tool_tokens")), int(row.number("system_tokens"))
    return _Session(number, starts_s, shared, sum(shared) // block_tokens, block_tokens)


def _add(
    fields: Mapping[str, Any], session: _Session, names: BlockNames, requests: list[TraceRequest], file: str
) -> None:
    """Append the session's requests, each after the one before."""
    after = None
    for position, asked in enumerate(fields["requests"], 1):
        where = f"{file}, request {position}"
        if not isinstance(asked, dict):
            raise BadTrace(f"{where}: not an object")
        requests.append(_request(Row(asked, where), session, names, after))
        after = len(requests) - 1


def _request(row: Row, session: _Session, names: BlockNames, after: int | None) -> TraceRequest:
    prompt = min(max(row.count("in"), _SHORTEST_PROMPT), _LONGEST_PROMPT)
    output, size = row.count("out"), session.block_tokens
    ids = row.numbers("hash_ids")
    known = [
        names.of("shared", session.shared_key, block)
        if block < session.shared_blocks
        else names.of(session.number, block, ids[block * _TOGETHER : (block + 1) * _TOGETHER])
        for block in range(min(prompt // size, len(ids) // _TOGETHER))
    ]
    blocks, full = names.fill(known, (), prompt, output, size)
    think_s = min(row.number("think_time", 0), _LONGEST_THINK_S)
    return TraceRequest(session.starts_s, prompt, output, blocks, full, str(session.number), after, think_s)
