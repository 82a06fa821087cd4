r"""Patterns that a prompt must not have, or whose share one wants to know: RE2, so that no prompt makes a search slow.

A prompt comes as JSON, in which `\u0069gnore` is how one may write `ignore`. It is searched as it came and, where it
has escapes at all, once more with these decoded: both in at most `search_bytes` of it, the first half of them from its
beginning and the other from its end, where the newest message is. What lies between is not searched, and is told.

Decoding is one pass in C over these bytes, not a parse of the whole body: its keys and brackets stay in the text. So
does what is between two parts of a message. Not covered: other spellings of the same (look-alike letters, base64,
token ids). A pattern stops the clumsy, not the determined.

Rejected: re2.Set, which finds all patterns in one pass. It has no way out when a pattern is too large for its cache:
one of ours took three seconds where the pattern alone took a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import re2


@dataclass(frozen=True, slots=True)
class PatternSpec:
    """A pattern by its name; `refuses`: else it is only counted."""

    name: str
    regex: str
    refuses: bool = True


@dataclass(frozen=True, slots=True)
class Searched:
    """The patterns that were found, in the config's order. `partly`: the prompt is longer than what was searched."""

    found: tuple[PatternSpec, ...]
    partly: bool

    @property
    def refused(self) -> PatternSpec | None:
        """The first pattern found that does not let the request pass."""
        return next((pattern for pattern in self.found if pattern.refuses), None)


class Patterns:
    """Compiled once. Raises re2.error for a pattern that RE2 does not understand; the config has refused it by then."""

    def __init__(self, specs: Sequence[PatternSpec], search_bytes: int) -> None:
        self._search_bytes = search_bytes
        self._compiled: list[tuple[PatternSpec, Any]] = [(spec, re2.compile(spec.regex, quiet_re2())) for spec in specs]

    def search(self, prompt: bytes) -> Searched:
        """Find them in a prompt's raw JSON."""
        texts = [text for window in windows(prompt, self._search_bytes) for text in readings(window)]
        found = tuple(
            spec for spec, pattern in self._compiled if any(pattern.search(text) is not None for text in texts)
        )
        return Searched(found, len(prompt) > self._search_bytes)


def windows(prompt: bytes, most: int) -> tuple[bytes, ...]:
    """What of a prompt is searched: all of it, or so many bytes from both its ends."""
    if len(prompt) <= most:
        return (prompt,)
    head, start = prompt[: most - most // 2], len(prompt) - most // 2
    before = prompt[max(start - most, 0) : start]
    backslashes = len(before) - len(before.rstrip(b"\\"))
    return head, prompt[start + backslashes % 2 :]  # of an escape cut in two the rest must not begin another


def readings(text: bytes) -> Iterator[bytes]:
    """A piece of JSON as it is, and with its escapes decoded if it has any."""
    yield text
    if b"\\" in text:
        decoded = unescaped(text)
        if decoded is not None:
            yield decoded


def unescaped(text: bytes) -> bytes | None:
    """A piece of JSON as if it were all one string's inside; None where no engine could read it either."""
    quoted = text.replace(b"\\\\", rb"\u005c").replace(b'\\"', rb"\u0022").replace(b'"', rb"\u0022")
    last = quoted.rfind(b"\\", -_LONGEST_ESCAPE)
    if last >= 0 and len(quoted) - last < (_LONGEST_ESCAPE if quoted[last + 1 : last + 2] in {b"u", b""} else 2):
        quoted = quoted[:last]  # cut in two by the window's end
    try:
        decoded: str = json.loads(f'"{quoted.decode("utf-8", "replace")}"', strict=False)
    except ValueError:
        return None
    return decoded.encode("utf-8", "replace")


_LONGEST_ESCAPE = 6


def quiet_re2() -> re2.Options:
    """Options under which RE2 does not write to standard error what it raises as well."""
    options = re2.Options()
    options.log_errors = False
    return options
