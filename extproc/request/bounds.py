"""How large the shape of a request may be, beyond its bytes: nesting, list lengths, prompt tokens.

Each is off unless set. Not here: the limit on bytes (plans.py), which holds always, and that of our parser's own depth
(parsing.py), beyond which nothing is read at all. What is checked here has been parsed, so it is JSON and not nested
without end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from policies.types import Reason, Refusal

_INVALID = "invalid_request_error"


@dataclass(init=False)
class Bounds:
    """The bounds of a config, never changed; None sets none. `items`: of one list of the prompt."""

    nesting: int | None
    items: int | None
    tokens: int | None

    def __init__(self, nesting: int | None = None, items: int | None = None, tokens: int | None = None) -> None:
        self.nesting = nesting
        self.items = items
        self.tokens = tokens

    def judge_body(self, body: bytes, prompt_fields: Iterable[memoryview]) -> Refusal | None:
        """A refusal for a JSON body, of whose prompt these are the fields' raw values, that is beyond a bound."""
        if self.nesting is not None and _brackets(body) > self.nesting and nesting(body) > self.nesting:
            return Refusal(400, _INVALID, f"the body is nested deeper than {self.nesting} levels", Reason.INVALID_JSON)
        if self.items is not None and any(items(raw) > self.items for raw in prompt_fields):
            message = f"a list of the prompt (messages, tools, texts) has more than {self.items} items"
            return Refusal(400, _INVALID, message, Reason.TOO_MANY_ITEMS)
        return None

    def judge_tokens(self, tokens: int) -> Refusal | None:
        """A refusal for a prompt of so many tokens, if that is too many."""
        if self.tokens is None or tokens <= self.tokens:
            return None
        message = f"the prompt has about {tokens} tokens; at most {self.tokens} are taken here"
        return Refusal(413, _INVALID, message, Reason.PROMPT_TOO_LONG)


_STRUCTURE = b'[]{}"'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_STEPS = np.zeros(256, np.int16)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def _brackets(body: bytes) -> int:
    """No body is nested deeper than this. Ten times as fast to find, and enough for most."""
    return body.count(b"[") + body.count(b"{")


def nesting(body: bytes) -> int:
    """How deep the lists and objects of a JSON text are nested. Linear, and no recursion.

    Escaped backslashes go first, then escaped quotes, and what is left of quotes begins and ends strings.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    skeleton = np.frombuffer(body.translate(None, _NO_STRUCTURE), np.uint8)
    in_string = np.cumsum(skeleton == ord('"'), dtype=np.uint8) & 1  # it may overflow, but stays odd or even
    depths = np.cumsum(_STEPS[skeleton[in_string == 0]], dtype=np.int16)
    return int(depths.max(initial=0))


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_BEGINS_NUMBER = frozenset(b"-0123456789")


def items(raw: bytes | memoryview) -> int:
    """How many items a JSON list has; none if it is no list, or one of token ids."""
    if bytes(raw[:1]) != b"[":
        return 0
    found = _decode_list(raw)
    return 0 if found and bytes(found[0])[0] in _BEGINS_NUMBER else len(found)
