"""Asking the admin API of a running system, for commands that print what it says. Not here: what it can be asked."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from extproc.config.sections.fields import check_reachable

_PATIENCE_S = 10


class NoAnswer(Exception):
    """Nothing, nothing of ours, or a fault of ours answers there; the message says so to an operator."""


def ask(address: str, path: str, what: str) -> Any:  # noqa: ANN401 - JSON
    """`what` of the document at `path`. Raises NoAnswer."""
    try:
        where = check_reachable(address)
    except ValueError as error:
        raise NoAnswer(f"--admin: {error}") from error
    try:
        with urlopen(f"http://{where}{path}", timeout=_PATIENCE_S) as answer:
            return json.load(answer)[what]
    except HTTPError as error:
        with error:
            told = _told_fault(error)
        raise NoAnswer(f"{address} answers {error.code}: {told}" if told else _another(address)) from error
    except (HTTPException, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(_another(address)) from error
    except OSError as error:
        why = _why(error)
        raise NoAnswer(f"no answer from {address}: {why}; does Pointsman run, with this `admin.listen`?") from error


def _told_fault(error: HTTPError) -> str:
    """What our own API says of a fault of its own; empty for what it would not say to a path that it has."""
    if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    try:
        told = json.load(error)["error"]["message"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""
    return told if isinstance(told, str) else ""


def _another(address: str) -> str:
    return f"what answers at {address} is no admin API of Pointsman; is that its `admin.listen`?"


def _why(error: OSError) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    return str(getattr(cause, "strerror", None) or cause)
