"""API keys: how one is made, how it is written down, and how a file of them is read.

Only the SHA-256 of a key is ever written down or kept. A slow hash (bcrypt) would be for passwords, which people
choose; these keys hold 256 random bits, and none of them can be guessed from its digest.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256

from pydantic import TypeAdapter, ValidationError

from extproc.config.sections.callers import ApiKey, ApiKeys
from extproc.config.wording import in_words, keys_of
from extproc.config.yaml_text import BadYaml, parse_yaml

_PREFIX = "pm-"
_RANDOM_BYTES = 32
_LIST = TypeAdapter[tuple[ApiKey, ...]](ApiKeys)


class BadKeys(Exception):
    """The text is not a list of API keys."""


def make_key() -> str:
    """A new key: 256 random bits behind a prefix by which scanners for leaked secrets can know it."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def name_for(tenant: str) -> str:
    """A name for one more key of a tenant's."""
    word = re.sub(r"[^A-Za-z0-9_.-]+", "-", tenant).strip("-._")[:40] or "key"
    return f"{word}-{secrets.token_hex(3)}"


def digest_of(key: str) -> str:
    """What is written down of a key: its SHA-256, as hex digits."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Keys from a file's text. Raises BadKeys, which never quotes what stands there."""
    try:
        document = parse_yaml(text)
    except BadYaml as error:
        where = "" if error.line is None else f"line {error.line}: "
        raise BadKeys(f"{where}not YAML or JSON, or a key of a mapping is given twice") from None
    if document is None:
        raise BadKeys("the file is empty; write `[]` to let nobody in")
    if isinstance(document, dict):
        document = document.get("api_keys")
    if not isinstance(document, list):
        raise BadKeys("expected a list of keys, or a mapping with one under `api_keys`")
    try:
        return _LIST.validate_python(document)
    except ValidationError as error:
        there_are = f"there are: {', '.join(ApiKey.model_fields)}"
        faults = in_words(error, keys_of(ApiKey), see=there_are, quote=False)
        raise BadKeys("; ".join(f"{place or 'the list'}: {what}" for place, what in faults)) from None
