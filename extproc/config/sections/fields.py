"""What the sections of a config are made of: their base, and the kinds of values that several of them have.

Not here: anything that means something by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Annotated

import re2
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from policies.admission.patterns import quiet_re2

LAST_PORT = 65_535
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""Bounded by what Envoy's and gRPC's messages can hold."""
ModelName = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
"""It goes into a header, so no control characters."""
Share = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(gt=0, le=LAST_PORT)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""As Envoy spells them: in lower case."""
RuleHeader = Annotated[
    str,
    StringConstraints(pattern=r"^x-(gateway|pointsman)-[a-z0-9-]{1,60}$"),
]
"""Envoy shows us these whatever the config says; others would never match."""


def check_address(value: str) -> str:
    """`value` in the one spelling Envoy uses, if it is `IP:port` (IPv6 in brackets). Raises ValueError saying so."""
    match = _ADDRESS.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not IP:port, for example 127.0.0.1:8001 or [::1]:8001")
    host, port = match.groups()
    try:
        ip = ip_address(host.strip("[]"))
    except ValueError as error:
        raise ValueError(f"{value!r} is not IP:port: {error}") from None
    if not 0 < int(port) <= LAST_PORT or port.startswith("0"):
        raise ValueError(f"{value!r} has a port outside 1-{LAST_PORT}")
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def check_reachable(value: str) -> str:
    """`value` if it is `name:port`, or `IP:port` of one machine. Raises ValueError saying so."""
    if is_name(value):
        try:
            check_address(f"127.0.0.1:{value.rpartition(':')[2]}")
        except ValueError:
            raise ValueError(f"{value!r} is not name:port, with a port of 1-{LAST_PORT}") from None
        return value
    address = check_address(value)
    if is_wildcard(address):
        raise ValueError(f"{address} is an address to listen on, not one to connect to")
    return address


def is_name(address: str) -> bool:
    """`address` begins with a host name, not an IP."""
    return re.match(r"[A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*:[^:]*$", address) is not None


def is_wildcard(address: str) -> bool:
    """`address` (as check_address spells it) stands for every one of the machine's own."""
    return address.startswith(("0.0.0.0:", "[::]:"))


class Faults(ValueError):
    """Several faults of one section, each of which is told."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def refuse(faults: Iterable[str]) -> None:
    """Raise Faults if there is any."""
    if found := tuple(faults):
        raise Faults(found)


def given_twice(what: str, names: list[str]) -> Iterator[str]:
    """Which of `names` are there more than once, in a sentence if any is."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"{what} given more than once: {', '.join(twice)}"


def check_pattern(value: str) -> str:
    """`value`, if RE2 understands it. Raises ValueError saying why not."""
    try:
        re2.compile(value, quiet_re2())
    except re2.error as error:
        said = error.args[0]
        why = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        raise ValueError(f"no regular expression that RE2 understands: {why}") from None
    return value


Pattern = Annotated[str, AfterValidator(check_pattern)]
"""A regular expression that RE2 understands."""


class Model(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
