"""The model's name in a multipart form. Nothing else of the form is looked at.

Parts are walked in order until the model is found; clients send their fields before the file, so an audio file is
rarely even searched. What a hostile form may cost is bounded: in parts, in header bytes per part, in the name's length.

Rejected: a streaming parser (python-multipart). It hands out copies of every part, and we need the place of one.
"""

from __future__ import annotations

import re

MOST_PARTS = 64
MOST_PART_HEADER_BYTES = 4_096
MOST_NAME_BYTES = 1_024

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^\s";]{1,200}))', re.IGNORECASE)
_MODEL = re.compile(rb'^content-disposition:\s*form-data\s*;(?:.*;)?\s*name="?model"?\s*(?:;|$)', re.IGNORECASE)


class NotAForm(ValueError):
    """The body is no form that we can read; the message says why."""


def boundary_of(content_type: str) -> bytes:
    """The line that stands before every part. Raises NotAForm."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise NotAForm("the content-type names no boundary")
    return b"--" + (found[1] or found[2]).encode("latin-1", "replace")


def find_model(body: bytes, boundary: bytes) -> tuple[int, int] | None:
    """Where the value of the part `model` starts and ends in the body; None if there is none. Raises NotAForm."""
    at = body.find(boundary)
    if at < 0:
        raise NotAForm("the boundary that the content-type names is not in the body")
    for _ in range(MOST_PARTS):
        start = at + len(boundary)
        if body.startswith(b"--", start):
            return None
        headers_end = body.find(b"\r\n\r\n", start, start + MOST_PART_HEADER_BYTES)
        if headers_end < 0:
            raise NotAForm(f"the headers of a part do not end within {MOST_PART_HEADER_BYTES} bytes")
        value = headers_end + 4
        at = body.find(b"\r\n" + boundary, value)
        if at < 0:
            raise NotAForm("the last part does not end")
        if any(_MODEL.match(line) for line in body[start:headers_end].split(b"\r\n")):
            return _within_bounds(value, at)
        at += 2
    raise NotAForm(f"there is no model among the first {MOST_PARTS} parts")


def _within_bounds(start: int, end: int) -> tuple[int, int]:
    if end - start > MOST_NAME_BYTES:
        raise NotAForm(f"the model's name is longer than {MOST_NAME_BYTES} bytes")
    return start, end


def model_part(boundary: bytes, model: str) -> bytes:
    """A part that names the model, to stand before the first one."""
    return boundary + b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + model.encode() + b"\r\n"
