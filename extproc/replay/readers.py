"""From what the user names to a Trace: a file, a folder, or `generated`; its form is recognised or named.

Forms (`FORMS`): each has a module in formats/. Recognised by what is in the file, not by its name; where that is not
enough, the error says so and names the forms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from extproc.replay.formats import azure, conversations, mooncake, openai_log, servegen, shared_prefix, weka
from extproc.replay.formats.lines import BadTrace, json_lines
from extproc.replay.traces import Trace

GENERATED = "generated"
"""Named instead of a file: the trace that comes with Pointsman."""

_GENERATORS: dict[str, Callable[[Path, int | None], Trace]] = {
    "shared-prefix": shared_prefix.read,
    "servegen": servegen.read,
}
"""Forms that are drawn from, so that the number of requests is the caller's choice."""
_RECORDS: dict[str, Callable[[Path], Trace]] = {
    "mooncake": mooncake.read,
    "weka": weka.read,
    "azure": azure.read,
    "openai": openai_log.read,
}
FORMS = (*_RECORDS, *_GENERATORS, GENERATED)


def read(source: str, form: str | None = None, requests: int | None = None) -> Trace:
    """The trace, its first `requests` if given. Raises BadTrace, OSError."""
    if GENERATED in (source, form):
        return conversations.generate(requests or conversations.REQUESTS)
    path = Path(source)
    if not path.exists():
        raise BadTrace(f"{source}: no such file or folder; the trace that comes with Pointsman is `{GENERATED}`")
    form = form or recognise(path)
    if form in _GENERATORS:
        trace = _GENERATORS[form](path, requests)
    elif form in _RECORDS:
        trace = _RECORDS[form](path)
    else:
        raise BadTrace(f"no form {form!r}; there are: {', '.join(FORMS)}")
    if not trace.requests:
        raise BadTrace(f"{source}: no requests in it")
    return trace if requests is None else trace.first(requests)


def recognise(path: Path) -> str:
    """The form of the file or folder. Raises BadTrace."""
    if path.is_dir():
        return _form_of_folder(path)
    if {".yaml", ".yml"} & set(path.suffixes):
        return "shared-prefix"
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.readline(4096)
    if "ContextTokens" in head:
        return "azure"
    if head.lstrip().startswith("{"):
        return _form_of_lines(path)
    raise _unknown(path)


def _form_of_folder(path: Path) -> str:
    if any(path.glob("*-trace.csv")):
        return "servegen"
    if any(path.glob("*.json")):
        return "weka"
    raise _unknown(path)


def _form_of_lines(path: Path) -> str:
    _, fields = next(json_lines(path))
    if "hash_ids" in fields and "input_length" in fields:
        return "mooncake"
    if openai_log.BODY_FIELDS & fields.keys():
        return "openai"
    raise _unknown(path)


def _unknown(path: Path) -> BadTrace:
    return BadTrace(f"{path}: its form is not recognised; name it with --format: {', '.join(FORMS)}")
