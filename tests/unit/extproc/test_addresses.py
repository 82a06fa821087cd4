"""Addresses that are taken: found before Envoy starts, and named by the config's field."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.addresses import AddressTaken, refuse_taken_address
from extproc.cli import cli
from extproc.config.sections.listen import Listen
from extproc.wire.grpc_server import HealthServer, PortTaken, envoy_server


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


def test_an_address_that_another_holds_is_refused(taken: str) -> None:
    """With what may hold it; one that cannot be had at all has its own words."""
    with pytest.raises(AddressTaken, match=f"listen.http: cannot listen on {taken}: .*; does another Pointsman run"):
        refuse_taken_address(taken)
    with pytest.raises(AddressTaken, match=r"listen.http: cannot listen on 192.0.2.1:80: Cannot assign"):
        refuse_taken_address("192.0.2.1:80")


def test_a_free_address_stays_free() -> None:
    """IPv6 in brackets too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refuse_taken_address(f"127.0.0.1:{port}")
    refuse_taken_address(f"127.0.0.1:{port}")


def test_up_starts_nothing_then(tmp_path: Path, taken: str) -> None:
    """And says so in a line."""
    file = tmp_path / "c.yaml"
    file.write_text(f"listen: {{http: '{taken}'}}\npools: [{{name: p, models: [m], endpoints: {{static: []}}}}]")
    result = CliRunner().invoke(cli, ["up", str(file)])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith("listen.http: ")


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("TAKEN", "cannot listen on TAKEN: the address is already in use; does another simulator run?"),
        ("192.0.2.1:80", "cannot listen on 192.0.2.1:80: Cannot assign requested address"),
        ("here", "--listen: 'here' is not IP:port, for example 127.0.0.1:8001"),
        ("127.0.0.1:99999", "there is no port 99999: the last one is 65535"),
    ],
)
def test_the_simulator_says_why_it_cannot_listen(taken: str, listen: str, why: str) -> None:
    """In a line, as the others do."""
    result = CliRunner().invoke(cli, ["sim", "--listen", listen.replace("TAKEN", taken)])
    assert (result.exit_code, result.stderr) == (2, f"{why.replace('TAKEN', taken)}\n")


@pytest.mark.parametrize("field", ["grpc", "grpc_tls", "health"])
async def test_our_own_addresses_are_named_by_their_fields(taken: str, field: str) -> None:
    """Whoever starts two sees which of the addresses to change."""
    free = "127.0.0.1:0"

    def listen() -> None:
        if field == "health":
            HealthServer(taken)
        envoy_server(Listen.model_construct(**{"grpc": free, "grpc_tls": free, field: taken}), {}, largest_body_bytes=1)

    with pytest.raises(PortTaken, match=f"listen.{field}: cannot listen on {taken}; does another Pointsman run"):
        listen()
    await asyncio.sleep(0)
