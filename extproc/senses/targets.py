"""What the senses are to watch: the fleet's endpoints, and where each tells of itself."""

from __future__ import annotations

from extproc.config.sections.watching import Dcgm
from extproc.fleet.fleet import Fleet
from extproc.senses.messages import Target


def targets_of(fleet: Fleet, dcgm: Dcgm | None) -> list[Target]:
    """One per endpoint."""
    return [_target(fleet, address, dcgm) for address in fleet.addresses()]


def _target(fleet: Fleet, address: str, dcgm: Dcgm | None) -> Target:
    port, path = fleet.metrics_of(address)
    return Target(
        address,
        grpc=fleet.assumed_by_grpc(address) is not None,
        metrics=(address if port is None else _at_port(address, port)) + path,
        exporter="" if dcgm is None else _at_port(address, dcgm.port),
        exporter_ms=Dcgm().interval_ms if dcgm is None else dcgm.interval_ms,
        gpus=fleet.gpus_of(address),
    )


def _at_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
