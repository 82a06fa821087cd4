"""What a misspelt word was probably meant to be, for messages to operators."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` with the word that is closest; empty where none is close."""
    close = get_close_matches(word, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence that names what is unknown, what was probably meant, and what there is."""
    there = sorted(known)
    return " ".join(filter(None, (f"{what} {name!r};", did_you_mean(name, there), f"there are: {', '.join(there)}")))
