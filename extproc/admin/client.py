"""Asking the admin API of a running system, for commands that print what it says. Not here: what it can be asked."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from extproc.config.sections.fields import check_reachable

_PATIENCE_S = 10


class NoAnswer(Exception):
    """Nothing, or nothing of ours, answers there; the message says so to an operator."""


def ask(address: str, path: str, what: str) -> Any:  # noqa: ANN401 - JSON
    """`what` of the document at `path`. Raises NoAnswer."""
    try:
        where = check_reachable(address)
    except ValueError as error:
        raise NoAnswer(f"--admin: {error}") from error
    try:
        with urlopen(f"http://{where}{path}", timeout=_PATIENCE_S) as answer:
            return json.load(answer)[what]
    except (HTTPError, HTTPException, ValueError, LookupError, TypeError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise NoAnswer(
            f"what answers at {address} is no admin API of Pointsman; is that its `admin.listen`?"
        ) from error
    except OSError as error:
        why = _why(error)
        raise NoAnswer(f"no answer from {address}: {why}; does Pointsman run, with this `admin.listen`?") from error


def _why(error: OSError) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    return str(getattr(cause, "strerror", None) or cause)
