"""Faults in files that a config names and that are read while we run, found beforehand.

By the loaders of then; a cluster's CA and token are looked at for what the client of its API server will want of them.
A running system logs them and goes on with what it had, so only `pointsman check` calls them errors. A file that is not
there may come later: that is a warning (config/files.py, as are the files without which nothing starts).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from extproc.access.key_file import read_keys
from extproc.access.keys import BadKeys
from extproc.config.files import tokenizer_files
from extproc.config.schema import Config, Pool
from extproc.fleet.discovery.endpoints import BadEndpoints
from extproc.fleet.discovery.sources import read_endpoints


def read_followed(config: Config) -> tuple[list[str], int]:
    """One line per fault, with the field that names the file; and how many API keys there are, as far as is known."""
    faults = [
        f"pools[{number}].{fault}"
        for number, pool in enumerate(config.pools)
        for found in (_endpoints(pool), _kubernetes(pool), _tokenizer(pool))
        for fault in found
    ]
    # this file must be there: nobody gets in without it
    file = config.access.api_keys_file
    keys = () if file is None else read_keys(file)
    if isinstance(keys, BadKeys):
        faults.append(f"access.api_keys_file: {file}: {keys}")
        keys = ()
    return faults, len({key.sha256 for key in (*keys, *config.access.api_keys)})


def _endpoints(pool: Pool) -> Iterator[str]:
    file = pool.endpoints.file
    if file is None or not os.access(file, os.R_OK):
        return
    found = read_endpoints(file)
    if isinstance(found, BadEndpoints):
        yield from (f"endpoints.file: {file}: {fault}" for fault in found.faults)


def _kubernetes(pool: Pool) -> Iterator[str]:
    source = pool.endpoints.kubernetes
    for name, why_not in (("ca_file", _why_no_ca), ("token_file", _why_no_token)):
        file = getattr(source, name, None)
        why = why_not(file) if file is not None and os.access(file, os.R_OK) else ""
        if why:
            yield f"endpoints.kubernetes.{name}: {file}: {why}"


def _why_no_ca(file: Path) -> str:
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        return "holds no certificate in PEM"
    except OSError as error:
        return str(error.strerror)
    return ""


def _why_no_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        return "is not text in UTF-8"
    except OSError as error:
        return str(error.strerror)
    return "" if token and token.isprintable() else "holds no token: one line of text"


def _tokenizer(pool: Pool) -> Iterator[str]:
    files = tokenizer_files(pool)
    if not files or not all(os.access(file, os.R_OK) for file in files):
        return
    from vllm_adapters.tokens import LocalTokenizer, NotInstalled, NoTokenizer

    try:
        LocalTokenizer(files[0].parent)
    except (NoTokenizer, NotInstalled, OSError) as error:
        yield f"prefix_index.precise.tokenizer: {error}"
