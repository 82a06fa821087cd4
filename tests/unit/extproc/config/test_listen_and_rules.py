"""What `listen` and `routing.paths` refuse."""

from __future__ import annotations

import pytest

from extproc.config.loading import ConfigError, parse

POOL = "pools: [{name: p, models: [m], endpoints: {static: ['10.0.0.1:80']}}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen: {http3: '127.0.0.1:443'}", "http3 needs http_tls"),
        ("listen: {http3: nowhere}", "not IP:port"),
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
