"""Files that are followed: an endpoints file, the config itself.

A file is read whole again whenever its folder changes, so an atomic rename and a mounted ConfigMap's symlink swap both
work. Not here: what the text means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

_Parsed = TypeVar("_Parsed")

_RETRY_S = 1.0
"""How soon a folder that cannot be watched (not there yet) is tried again."""

_LOOK_MS = 100
"""How often watchfiles' thread looks whether something has happened, for which it takes the interpreter's lock; a
change is told of at the second look after it."""


async def follow_file(file: Path, on_text: Callable[[str | None], None]) -> None:
    """Call `on_text` with the file's text now and whenever it has changed; None when it cannot be read."""
    await follow_parsed(file, lambda text: text, on_text)


async def follow_parsed(
    file: Path, parse: Callable[[str | None], _Parsed], on_parsed: Callable[[_Parsed], None]
) -> None:
    """Call `on_parsed` with what `parse` makes of the file's text, now and whenever the text has changed.

    `parse` runs in the thread that reads the file, since a large file takes long; it gets None for one that cannot be
    read. What it raises is logged, and that change is missed.
    """
    import watchfiles  # not before there is a file to follow: it takes a tenth of our start

    seen: list[str | None] = []  # nothing yet, or the text last reported
    while True:
        try:
            await _report_change(file, seen, parse, on_parsed)
            changes = watchfiles.awatch(
                file.parent, recursive=False, debounce=_LOOK_MS, step=_LOOK_MS, yield_on_timeout=True
            )
            async for _ in changes:
                await _report_change(file, seen, parse, on_parsed)
        except (OSError, RuntimeError) as error:  # watchfiles' way to say that the folder is not there
            log.debug("cannot watch", folder=str(file.parent), error=str(error))
        except Exception:
            log.exception("cannot follow", file=str(file))  # and tries again: nobody else would notice the end
        await asyncio.sleep(_RETRY_S)


async def _report_change(
    file: Path, seen: list[str | None], parse: Callable[[str | None], _Parsed], on_parsed: Callable[[_Parsed], None]
) -> None:
    text = await asyncio.to_thread(read_text, file)
    if seen == [text]:
        return
    seen[:] = [text]
    try:
        on_parsed(await asyncio.to_thread(parse, text))
    except Exception:
        log.exception("change not taken over", file=str(file))  # the next change must still be seen


def read_text(file: Path) -> str | None:
    """The file's text; None if it cannot be read."""
    try:
        if not file.is_file():  # a pipe would never let go of the thread that reads it
            return None
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):  # ValueError: bytes that are no text, a name that no file can have
        return None


def why_unreadable(file: Path) -> str:
    """Why `read_text` has no text of it, as far as that can still be seen."""
    try:
        if file.is_dir():
            return "is a folder"
        if not file.exists():
            return "there is no such file"
        if file.is_file():
            file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "is not text in UTF-8"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError:
        pass
    return "cannot be read"
