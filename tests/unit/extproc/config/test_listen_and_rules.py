"""What `listen` and `routing.paths` refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import cli
from extproc.config.loading import ConfigError, parse

POOL = "pools: [{name: p, models: [m], endpoints: {static: ['10.0.0.1:80']}}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen: {http3: '127.0.0.1:443'}", "http3 needs http_tls"),
        ("listen: {http3: nowhere}", "not IP:port"),
        ("listen: {grpc_from_envoy: '0.0.0.0:9004'}", "listen on, not one to connect to"),
        ("listen: {grpc_from_envoy: '[::]:9004'}", "listen on, not one to connect to"),
        ("listen: {grpc_from_envoy: pointsman.llm.svc}", "not IP:port"),
        ("listen: {grpc_from_envoy: 'pointsman:0'}", "'pointsman:0' is not name:port, with a port of 1-65535"),
        ("listen: {grpc_from_envoy: '10.0.0:9004'}", "not IP:port"),
        ("listen: {lane: /" + "d" * 80 + "}", "path must be short"),
        ("listen: {lane: run/lane}", "absolute path"),
        ("listen: {lane: on}", "Input should be False"),
        ("routing: {paths: [{prefix: /a, pool: p, headers: {authorization: x}}]}", "should match pattern"),
        ("routing: {paths: [{prefix: /a, pool: p, headers: {x-pointsman-cluster: x}}]}", "removed from what clients"),
    ],
)
def test_what_cannot_work_is_refused(text: str, words: str) -> None:
    """HTTP/3 without a certificate; headers that would never arrive."""
    with pytest.raises(ConfigError, match=words):
        parse(f"{text}\n{POOL}", source="f.yaml")


def test_http3_may_have_the_port_of_http() -> None:
    """One is UDP, the other TCP."""
    tls = "http_tls: {certificate: c.pem, key: k.pem}"
    config = parse(f"listen: {{http: '127.0.0.1:8443', http3: '127.0.0.1:8443', {tls}}}\n{POOL}", source="f.yaml")
    assert config.listen.http3 == config.listen.http


@pytest.mark.parametrize(
    ("listen", "dialled"),
    [
        ("grpc: '10.0.0.1:9004'", "10.0.0.1:9004"),
        ("grpc: '0.0.0.0:9004'", "127.0.0.1:9004"),
        ("grpc: '[::]:9004'", "[::1]:9004"),
        ("grpc: '0.0.0.0:9004', grpc_from_envoy: 'pointsman.llm.svc:9004'", "pointsman.llm.svc:9004"),
        ("grpc: '0.0.0.0:9004', grpc_from_envoy: '[2001:DB8::1]:90'", "[2001:db8::1]:90"),
    ],
)
def test_where_envoy_finds_us(listen: str, dialled: str) -> None:
    """What is said, else where we listen; a wildcard cannot be connected to, its loopback can."""
    assert parse(f"listen: {{{listen}}}\n{POOL}", source="f.yaml").listen.envoy_dials == dialled


@pytest.mark.parametrize("output", ["bootstrap", "filters"])
def test_no_envoy_is_sent_to_itself(output: str, tmp_path: Path) -> None:
    """`pointsman envoy` refuses to print a wildcard as our address, and names the field that mends it."""
    config = tmp_path / "pointsman.yaml"
    config.write_text(f"listen: {{grpc: '0.0.0.0:9004'}}\n{POOL}")
    refused = CliRunner().invoke(cli, ["envoy", str(config), "--format", output])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "listen.grpc_from_envoy" in refused.stderr
    config.write_text(f"listen: {{grpc: '0.0.0.0:9004', grpc_from_envoy: 'pointsman.llm.svc:9004'}}\n{POOL}")
    printed = CliRunner().invoke(cli, ["envoy", str(config), "--format", output])
    assert (printed.exit_code, "pointsman.llm.svc" in printed.stdout) == (0, True)
