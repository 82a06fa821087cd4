"""Where the parts listen, and with which certificates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from extproc.config.sections.fields import Model, check_address, check_reachable, given_twice, is_wildcard, refuse

LONGEST_LANE = 80
"""Of the lane's folder: with a socket's name behind it, it must fit into the 107 bytes that a Unix address has."""


def fits_a_socket(folder: Path) -> bool:
    """Whether a socket of the lane in `folder` has an address that can be bound."""
    return len(os.fsencode(folder)) <= LONGEST_LANE


class Tls(Model):
    """A certificate and its key, PEM files relative to the config file."""

    certificate: Path
    key: Path
    client_ca: Path | None = Field(None, description="callers must show a certificate that one of these signed")


class Listen(Model):
    """Where the parts listen. `http` is Envoy's; the rest are ours."""

    http: str = "127.0.0.1:8080"
    grpc: str = Field("127.0.0.1:9004", description="ext_proc, access logs and xDS, plaintext HTTP/2")
    grpc_from_envoy: str | None = Field(None, description="where Envoy finds `grpc`: IP:port or name:port")
    grpc_tls: str | None = Field(None, description="the same over TLS, by convention on port 9002")
    lane: Path | Literal[False] | None = Field(
        None, description="folder for Unix sockets by which an Envoy of ours on this host comes; off: it goes to `grpc`"
    )
    health: str = Field("127.0.0.1:9003", description="gRPC health checks")
    tls: Tls | None = Field(None, description="for `grpc_tls`; a self-signed certificate is made without it")
    http_tls: Tls | None = Field(None, description="for Envoy's `http`: clients speak TLS, HTTP/2 or HTTP/1.1 by ALPN")
    http3: str | None = Field(None, description="UDP, for HTTP/3 by Envoy as well; needs `http_tls`")

    _addresses = field_validator("http", "grpc", "health")(check_address)

    @field_validator("grpc_tls", "http3")
    @classmethod
    def _check_optional(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("grpc_from_envoy")
    @classmethod
    def _check_reachable(cls, value: str | None) -> str | None:
        return None if value is None else check_reachable(value)

    @field_validator("lane", mode="before")
    @classmethod
    def _off_is_no_folder(cls, value: object) -> object:
        """YAML reads a plain `off` as false; in quotes it is meant the same."""
        return False if value == "off" else value

    @field_validator("lane")
    @classmethod
    def _fits_a_socket(cls, value: Path | Literal[False] | None) -> Path | Literal[False] | None:
        if isinstance(value, Path) and not value.is_absolute():
            raise ValueError("an absolute path, please: Envoy opens its sockets as well, from a folder of its own")
        if isinstance(value, Path) and not fits_a_socket(value):
            raise ValueError(f"a Unix socket's path must be short: {LONGEST_LANE} bytes for the folder")
        return value

    @property
    def lane_folder(self) -> Path | None:
        """The folder, where one is named."""
        return self.lane or None

    @property
    def envoy_dials(self) -> str:
        """The address of `grpc` for Envoy. A wildcard is none: what stands for it is right on the same host only."""
        if self.grpc_from_envoy is not None:
            return self.grpc_from_envoy
        host, _, port = self.grpc.rpartition(":")
        return f"{'[::1]' if '[' in host else '127.0.0.1'}:{port}" if is_wildcard(self.grpc) else self.grpc

    @model_validator(mode="after")
    def _http3_has_a_certificate(self) -> Self:
        if self.http3 is not None and self.http_tls is None:
            raise ValueError("http3 needs http_tls: there is no HTTP/3 without TLS")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        given = [address for address in (self.http, self.grpc, self.grpc_tls, self.health) if address]
        refuse(given_twice("listen address", given))
        return self
