"""The files a config names, looked at before anything starts: each fault with the field that names the file.

Not here: the config's own text (loading.py), and the contents of files that are read while we run (followed_files.py).
Those may come later, so one that is not there is only worth a warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from extproc.config.schema import Config, Pool
from extproc.config.sections.callers import Access
from extproc.config.sections.endpoint_sources import Kubernetes
from extproc.config.sections.listen import Tls
from extproc.config.sections.observing import RequestLog

_Parsed = TypeVar("_Parsed")


class _BadFile(Exception):
    """A file cannot be read or is not what it ought to be."""


def file_faults(config: Config, *, of_envoy: bool = True) -> list[str]:
    """One line per file that would keep us from starting. `of_envoy`: also those that Envoy reads, beside us."""
    faults = [*_tls("listen.tls", config.listen.tls), *_request_log(config.observe.request_log)]
    if of_envoy:
        faults += [*_tls("listen.http_tls", config.listen.http_tls), *_jwt(config.access)]
    return faults


def file_warnings(config: Config) -> list[str]:
    """One line per file without which we start, and lack something."""
    return [
        f"pools[{number}].prefix_index.precise.tokenizer: {file}: cannot be read; prompts are matched approximately"
        for number, pool in enumerate(config.pools)
        for file in tokenizer_files(pool)
        if not os.access(file, os.R_OK)
    ] + [
        f"{place}: {file}: cannot be read; no endpoints until it can"
        for number, pool in enumerate(config.pools)
        for place, file in _followed(f"pools[{number}].endpoints", pool.endpoints.file, pool.endpoints.kubernetes)
        if not os.access(file, os.R_OK)
    ]


def tokenizer_files(pool: Pool) -> list[Path]:
    """What a tokenizer's folder holds in any case."""
    precise = pool.precise
    folder = None if precise is None or precise.tokenizer == "engine" else Path(precise.tokenizer)
    return [] if folder is None else [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def _followed(place: str, file: Path | None, kubernetes: Kubernetes | None) -> Iterator[tuple[str, Path]]:
    if file is not None:
        yield f"{place}.file", file
    for name in ("ca_file", "token_file"):
        named = getattr(kubernetes, name, None)
        if named is not None:
            yield f"{place}.kubernetes.{name}", named


def _tls(place: str, tls: Tls | None) -> Iterator[str]:
    if tls is None:
        return
    found: dict[str, Any] = {}
    for name, parse in (("certificate", _certificate), ("key", _private_key), ("client_ca", _certificate)):
        file = getattr(tls, name)
        try:
            found[name] = None if file is None else _read(file, parse)
        except _BadFile as error:
            yield f"{place}.{name}: {error}"
    if "certificate" in found and "key" in found and found["key"].public_key() != found["certificate"].public_key():
        yield f"{place}.key: {tls.key}: is not the key of {tls.certificate}"


def _certificate(content: bytes) -> Any:  # noqa: ANN401 - imported when one is looked at
    """The first certificate in a PEM file, once all could be read."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(content)[0]
    except ValueError as error:
        raise _BadFile("holds no certificate in PEM") from error


def _private_key(content: bytes) -> Any:  # noqa: ANN401 - as above
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it wants a password
        raise _BadFile("holds no private key in PEM that needs no password") from error


def _jwt(access: Access) -> Iterator[str]:
    jwt = access.jwt
    if jwt is None:
        return
    https = jwt.jwks_uri is not None and jwt.jwks_uri.startswith("https:")
    for name, file, parse in (
        ("jwks_file", jwt.jwks_file, _key_set),
        ("jwks_ca", jwt.jwks_ca if https else None, _not_empty),
    ):
        try:
            _ = None if file is None else _read(file, parse)
        except _BadFile as error:
            yield f"access.jwt.{name}: {error}"


def _key_set(content: bytes) -> None:
    try:
        keys = json.loads(content)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _BadFile("is no JSON with a list `keys`") from error
    if not isinstance(keys, list) or not keys:
        raise _BadFile("has no key in its list `keys`")


def _not_empty(content: bytes) -> None:
    """A whole system's bundle: what in it no library reads is nobody's fault here."""
    if not content:
        raise _BadFile("is empty")


def _read(file: Path, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise _BadFile(f"{file}: {error.strerror}") from error
    except _BadFile as error:
        raise _BadFile(f"{file}: {error}") from error


def _request_log(log: RequestLog | None) -> Iterator[str]:
    file = None if log is None else log.file
    if file is None:
        return
    why = _why_unwritable(file)
    if why:
        yield f"observe.request_log.file: {why}"


def _why_unwritable(file: Path) -> str:
    if not file.parent.is_dir():
        return f"{file.parent}: no such folder"
    if file.is_dir():
        return f"{file}: is a folder"
    # the folder in any case: a file that has grown is put aside there
    unwritable = [path for path in (file.parent, file) if path.exists() and not os.access(path, os.W_OK)]
    return f"{unwritable[0]}: cannot be written to" if unwritable else ""
