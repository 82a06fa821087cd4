"""Recorded requests, one JSON object a line: a timestamp in milliseconds, and a body of /v1/chat/completions.

The body stands under `body`, or its fields beside the timestamp, as benchmark tools write it. The router's blocks and
token counts are those it would make of the very bytes; the engine's are cut at every 64 bytes, its 16 tokens. How long
the answer is: `output_length`, else the `max_tokens` asked for, else 256. Answers are not text, so a later turn finds
the prompt before it cached, but not the answer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import BadTrace, Row
from extproc.replay.traces import Trace, TraceRequest
from extproc.request.apis import by_path
from extproc.request.parsing import Parsed, parse_body, to_request
from extproc.request.tokens import TokenRates
from policies.types import Refusal

BODY_FIELDS = frozenset({"body", "messages"})
"""What a line of this form has at least one of."""
_BLOCK_TOKENS = 16
_BLOCK_BYTES = 64
_OUTPUT_TOKENS = 256
_PATH = "/v1/chat/completions"


class _Line(msgspec.Struct):
    timestamp: Any = None
    output_length: Any = None
    session_id: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


def read(path: Path) -> Trace:
    """The trace in the file, by time. Raises BadTrace."""
    names, decode = BlockNames("openai"), msgspec.json.Decoder(_Line).decode
    requests = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadTrace(f"{where}: {error}") from error
            requests.append(_request(fields, bytes(fields.body) or line, where, names))
    return _by_time(path.stem, requests)


def _by_time(name: str, requests: list[TraceRequest]) -> Trace:
    start_s = min((request.arrives_s for request in requests), default=0.0)
    moved = [replace(request, arrives_s=request.arrives_s - start_s) for request in requests]
    return Trace(name, _BLOCK_TOKENS, sorted(moved, key=lambda request: request.arrives_s))


def _request(fields: _Line, body: bytes, where: str, names: BlockNames) -> TraceRequest:
    row = Row({"timestamp": fields.timestamp, "output_length": fields.output_length}, where)
    parsed = _parsed(body, where)
    asked = to_request(parsed, parsed.model, TokenRates())
    default = parsed.max_tokens or _OUTPUT_TOKENS
    output = max(1, int(row.number("output_length", default) if fields.output_length is not None else default))
    known = _engine_blocks(bytes(parsed.prompt))
    blocks, full = names.fill(known, (), asked.input_tokens, output, _BLOCK_TOKENS)
    return TraceRequest(
        row.number("timestamp") / 1e3,
        asked.input_tokens,
        output,
        blocks,
        full,
        fields.session_id if isinstance(fields.session_id, str) else parsed.session_key,
        asked_blocks=asked.block_hashes,
        asked_tokens=asked.block_tokens,
    )


def _parsed(body: bytes, where: str) -> Parsed:
    api = by_path(_PATH)
    if api is None:
        raise RuntimeError(f"{_PATH} has no row in the table of APIs")
    parsed = parse_body(api, body, default_model="any")
    if isinstance(parsed, Refusal):
        raise BadTrace(f"{where}: {parsed.message}")
    return parsed


def _engine_blocks(prompt: bytes) -> list[int]:
    """A chain over the prompt's bytes, as an engine's is over its tokens."""
    blocks, seed = [], 0
    for start in range(0, len(prompt) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(prompt[start : start + _BLOCK_BYTES], seed)
        blocks.append(seed)
    return blocks
