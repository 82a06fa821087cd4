"""From a file to a validated Config, with errors an operator can act on: where, what, and how to mend it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from extproc.config.known_keys import keys_at
from extproc.config.pool_policies import build_policy, profile_of, tenant_policy_faults
from extproc.config.schema import Config, Pool
from extproc.config.sections.callers import Access, Quota, Tenants
from extproc.config.sections.listen import Tls
from extproc.config.sections.observing import Observe
from extproc.config.spaces import sections
from extproc.config.wording import in_words
from extproc.config.yaml_text import BadYaml, parse_yaml

_Section = TypeVar("_Section", bound=BaseModel)


class ConfigError(Exception):
    """The configuration cannot be used. The message has one line per fault."""


def load(path: Path) -> Config:
    """Read and validate the file at `path`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    config = parse(text, source=str(path))
    return _with_absolute_files(config, path.resolve().parent)


def parse(text: str, *, source: str = "config") -> Config:
    """Validate YAML text. Raises ConfigError."""
    try:
        document = parse_yaml(text)
    except BadYaml as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: expected a mapping with `pools:` at the top, found {_shape(document)}")
    faults: list[str] = []
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        faults, config = explain(error), _salvaged(document)
    faults += _policy_faults(config)
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return config


def _shape(document: object) -> str:
    if document is None:
        return "nothing"
    return "a list" if isinstance(document, list) else "a single value"


def explain(error: ValidationError) -> list[str]:
    """One line per fault of a section of the config: where it is and what to do about it."""
    see = "see `pointsman check --schema` for what there is"
    return [f"{place or 'top level'}: {what}" for place, what in in_words(error, keys_at, see=see)]


def _policy_faults(config: Config) -> Iterator[str]:
    """What cannot be built, found when the file is read and not when the first request comes."""
    for position, pool in enumerate(config.pools):
        for part, make in (("policy", build_policy), ("hardware", profile_of)):
            try:
                make(pool)
            except ValueError as error:
                yield f"pools[{position}].{part}: {error}"
    for where, quota in sections(config.tenants):
        for fault in tenant_policy_faults(quota, where):
            yield f"tenants.{where}.policies.{fault}"


def _salvaged(document: dict[Any, Any]) -> Config:
    """Of a document that is not valid, policies and hardware where they are: its other faults must not hide theirs."""
    pools, tenants = document.get("pools"), document.get("tenants")
    tenants = tenants if isinstance(tenants, dict) else {}
    named = tenants.get("named")
    return Config.model_construct(
        pools=tuple(
            _valid_fields(Pool, pool, "policy", "hardware") for pool in (pools if isinstance(pools, list) else ())
        ),
        tenants=Tenants.model_construct(
            default=_valid_fields(Quota, tenants.get("default"), "policies"),
            named={
                str(name): _valid_fields(Quota, quota, "policies")
                for name, quota in (named if isinstance(named, dict) else {}).items()
            },
        ),
    )


def _valid_fields(section: type[_Section], given: object, *names: str) -> _Section:
    """A section with those of `names` that are valid in `given`, and defaults for the others."""
    found: dict[str, Any] = {}
    for name in names:
        if isinstance(given, dict) and name in given:
            with contextlib.suppress(ValidationError):
                found[name] = TypeAdapter(section.model_fields[name].rebuild_annotation()).validate_python(given[name])
    return section.model_construct(**found)


def _with_absolute_files(config: Config, folder: Path) -> Config:
    """Resolve file names against the config file's folder, so that the working directory does not matter."""
    pools = tuple(_with_absolute_tokenizer(_with_absolute_endpoints(pool, folder), folder) for pool in config.pools)
    listen = config.listen.model_copy(
        update={name: _with_absolute_pems(getattr(config.listen, name), folder) for name in ("tls", "http_tls")}
    )
    access, observe = _with_absolute_keys(config.access, folder), _with_absolute_log(config.observe, folder)
    return config.model_copy(update={"pools": pools, "listen": listen, "access": access, "observe": observe})


def _with_absolute_keys(access: Access, folder: Path) -> Access:
    updates: dict[str, object] = {}
    if access.api_keys_file is not None:
        updates["api_keys_file"] = folder / access.api_keys_file
    if access.jwt is not None and access.jwt.jwks_file is not None:
        updates["jwt"] = access.jwt.model_copy(update={"jwks_file": folder / access.jwt.jwks_file})
    return access.model_copy(update=updates)


def _with_absolute_log(observe: Observe, folder: Path) -> Observe:
    log = observe.request_log
    if log is None or log.file is None:
        return observe
    return observe.model_copy(update={"request_log": log.model_copy(update={"file": folder / log.file})})


def _with_absolute_endpoints(pool: Pool, folder: Path) -> Pool:
    found = _with_absolute(pool.endpoints, folder, "file")
    if found.kubernetes is not None:
        kubernetes = _with_absolute(found.kubernetes, folder, "ca_file", "token_file")
        found = found.model_copy(update={"kubernetes": kubernetes})
    return pool.model_copy(update={"endpoints": found})


def _with_absolute_tokenizer(pool: Pool, folder: Path) -> Pool:
    precise = pool.precise
    if precise is None or precise.tokenizer == "engine":
        return pool
    index = pool.prefix_index.model_copy(update={"precise": _with_absolute(precise, folder, "tokenizer")})
    return pool.model_copy(update={"prefix_index": index})


def _with_absolute_pems(tls: Tls | None, folder: Path) -> Tls | None:
    return None if tls is None else _with_absolute(tls, folder, "certificate", "key", "client_ca")


def _with_absolute(section: _Section, folder: Path, *names: str) -> _Section:
    given = {name: path for name in names if (path := getattr(section, name)) is not None}
    return section.model_copy(update={name: folder / path for name, path in given.items()})
