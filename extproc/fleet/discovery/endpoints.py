"""What discovery hands to the fleet: endpoints, as a source lists them, and how a text lists them.

Not here: how a source is read and when (sources.py and its neighbours).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from extproc.config.sections.endpoint_sources import Endpoint, Listed
from extproc.config.wording import in_words, keys_of
from extproc.config.yaml_text import BadYaml, parse_yaml


@dataclass(frozen=True, slots=True)
class Discovered:
    """One endpoint, as its source lists it.

    `terminating`: it is being shut down. It gets no new requests, but Envoy keeps it while the source lists it, so
    that the requests running on it end as they would have. The rest is for policies, as in the config's `Endpoint`.
    """

    address: str
    terminating: bool = False
    weight: float = 1.0
    zone: str | None = None
    cost: float = 0.0
    gpus: tuple[str, ...] = ()


def as_discovered(endpoints: Iterable[Discovered | Endpoint | str]) -> dict[str, Discovered]:
    """By address. An address alone is an endpoint of which nothing else is known.

    An address listed twice keeps its first place, and is terminating only if it is so wherever it is listed: a
    pod's successor may have its address before the pod itself is gone.
    """
    found: dict[str, Discovered] = {}
    for endpoint in endpoints:
        new = _discovered(endpoint)
        if new.address not in found or found[new.address].terminating:
            found[new.address] = new
    return found


def _discovered(endpoint: Discovered | Endpoint | str) -> Discovered:
    if isinstance(endpoint, str):
        return Discovered(endpoint)
    if isinstance(endpoint, Discovered):
        return endpoint
    return Discovered(
        endpoint.address, weight=endpoint.weight, zone=endpoint.zone, cost=endpoint.cost, gpus=endpoint.gpus
    )


_LIST = TypeAdapter[list[Endpoint | str]](list[Listed])
_MOST_TOLD = 5
"""Faults of one file that a line of the log holds."""


class BadEndpoints(Exception):
    """The source's content is not a list of endpoints. `faults`: all that is wrong; the message has the first few."""

    def __init__(self, *faults: str) -> None:
        more = len(faults) - _MOST_TOLD
        super().__init__("; ".join(faults[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else ""))
        self.faults = faults


def parse_endpoints(text: str) -> list[Discovered]:
    """Endpoints from a file's text. Raises BadEndpoints."""
    try:
        document = parse_yaml(text)
    except BadYaml as error:
        raise BadEndpoints(f"not YAML or JSON: {error}") from error
    if document is None:
        raise BadEndpoints("the file is empty; write `[]` if there are no endpoints")
    if isinstance(document, dict):
        document = document.get("endpoints")
    if not isinstance(document, list):
        raise BadEndpoints("expected a list of IP:port, or a mapping with one under `endpoints`")
    try:
        return list(as_discovered(_LIST.validate_python(document)).values())
    except ValidationError as error:
        raise BadEndpoints(*(f"{place}: {what}" for place, what in in_words(error, keys_of(Endpoint)))) from error
