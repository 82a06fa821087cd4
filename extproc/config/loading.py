"""From a file to a validated Config, with errors an operator can act on: where, what, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from extproc.config.known_keys import keys_at
from extproc.config.near_misses import did_you_mean
from extproc.config.policy_kinds import KINDS
from extproc.config.pool_policies import build_policy, check_tenant_policies, profile_of
from extproc.config.schema import Config, Pool
from extproc.config.sections.callers import Access
from extproc.config.sections.listen import Tls
from extproc.config.sections.observing import Observe
from extproc.config.spaces import sections
from extproc.config.yaml_text import BadYaml, parse_yaml

_Section = TypeVar("_Section", bound=BaseModel)


class ConfigError(Exception):
    """The configuration cannot be used. The message has one line per fault."""


def load(path: Path) -> Config:
    """Read and validate the file at `path`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    config = parse(text, source=str(path))
    return _with_absolute_files(config, path.resolve().parent)


def parse(text: str, *, source: str = "config") -> Config:
    """Validate YAML text. Raises ConfigError."""
    try:
        document = parse_yaml(text)
    except BadYaml as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: expected a mapping with `pools:` at the top, found {type(document).__name__}")
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in explain(error))) from error
    _check_policies(config, source)
    return config


def explain(error: ValidationError) -> list[str]:
    """One line per fault: where it is and what to do about it."""
    faults = error.errors()
    return [f"{_path(fault['loc'])}: {_sentence(fault)}" for fault in faults if not _follows(fault, faults)]


def _follows(fault: Any, faults: list[Any]) -> bool:  # noqa: ANN401 - pydantic's ErrorDetails, as below
    """A fault that is only the shadow of another.

    A list counts as too short when its one item is wrong, and an inline policy is no preset's name either.
    """
    place = fault["loc"]
    if fault["type"] == "too_short":
        return any(other["loc"][: len(place)] == place for other in faults if other is not fault)
    if place[-1:] == ("str",) and fault["type"] == "string_type":
        return any(other["loc"][: len(place) - 1] == place[:-1] for other in faults if other is not fault)
    return False


_UNION_MEMBERS = {"int", "str", "Profile", "Endpoint", *KINDS}
_UNIONS = ("tagged-union[", "function-before[")


def _path(location: tuple[int | str, ...]) -> str:
    """`pools[0].endpoints.static` from pydantic's tuple; the names of union members are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_MEMBERS and not part.startswith(_UNIONS):
            path += f".{part}" if path else part
    return path or "top level"


_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_WORDS = {
    "missing": "required, but not given",
    "tuple_type": "should be a list",
    "string_type": "should be text; put it in quotes",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "should be a mapping"),
}
"""An operator's words for what pydantic says in a Python programmer's."""


def _sentence(fault: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails is a TypedDict only in its stubs
    if fault["type"] in _UNKNOWN:
        return _unknown_key(fault["loc"])
    if fault["type"] == "union_tag_invalid":
        tag = str(fault["ctx"]["tag"])
        meant = did_you_mean(tag, KINDS)
        return f"kind must be one of {', '.join(map(repr, KINDS))}, not {tag!r}{meant and f'; {meant}'}"
    # what stands where a digest should be may be the key itself
    given = None if fault["loc"][-1:] == ("sha256",) or fault["type"] == "missing" else fault.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{_message(fault)}{shown}"


def _message(fault: Any) -> str:  # noqa: ANN401 - as above
    if fault["type"] == "too_short":
        return f"should have at least {fault['ctx']['min_length']} item"
    return _WORDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")


def _unknown_key(location: tuple[int | str, ...]) -> str:
    meant = did_you_mean(str(location[-1]), keys_at(location[:-1]))
    return f"unknown key; {meant or 'see `pointsman check --schema` for what there is'}"


def _check_policies(config: Config, source: str) -> None:
    # Built once here so that a bad scorer name is found when the file is read, not when the first request comes.
    faults = []
    for position, pool in enumerate(config.pools):
        for part, make in (("policy", build_policy), ("hardware", profile_of)):
            try:
                make(pool)
            except ValueError as error:
                faults.append(f"{source}: pools[{position}].{part}: {error}")
    for where, quota in sections(config.tenants):
        try:
            check_tenant_policies(quota, where)
        except ValueError as error:
            faults.append(f"{source}: tenants.{where}.policies.{error}")
    if faults:
        raise ConfigError("\n".join(faults))


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
