"""TLS where Envoy asks us, and where clients ask Envoy; with and without a certificate of the caller's."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from harness import HANG_GUARD_S, Engine, System, chat, free_ports, pool_of

_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the test's own, and where it puts what it signs."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    @property
    def certificate(self) -> Path:
        """The CA's own certificate."""
        return self.folder / "ca.pem"

    def issue(self, common_name: str, *, ca: bool = False) -> tuple[Path, Path]:
        """(certificate, key) files for 127.0.0.1."""
        key = self.key if ca else ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        files = (self.folder / f"{common_name}.pem", self.folder / f"{common_name}.key")
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One CA for the module."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
    authority = Authority(tmp_path_factory.mktemp("ca"), ec.generate_private_key(ec.SECP256R1()), name)
    authority.issue("ca", ca=True)
    return authority


def _ask(address: str, credentials: grpc.ChannelCredentials) -> int:
    """One GET of the model list over ext_proc; the status of the answer. Raises grpc.RpcError."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for name, value in ((":method", "GET"), (":path", "/v1/models")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    with grpc.secure_channel(address, credentials) as channel:
        call = channel.stream_stream(_METHOD)(iter([message.SerializeToString()]), timeout=HANG_GUARD_S)
        return int(ext_proc.ProcessingResponse.FromString(next(call)).immediate_response.status.code)


def test_a_caller_without_a_certificate_is_refused_where_one_is_required(
    make_system: Callable[..., System], engines: list[Engine], authority: Authority
) -> None:
    """On the gRPC port: with a certificate of our CA the call is served, without one it never reaches us."""
    certificate, key = authority.issue("server")
    (port,) = free_ports(1)
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.certificate)}
    system = make_system(pools=[pool_of(engines)], listen={"grpc_tls": f"127.0.0.1:{port}", "tls": tls})
    opened = system.total("pointsman_ext_proc_streams_opened_total")
    root = authority.certificate.read_bytes()
    with pytest.raises(grpc.RpcError) as refused:
        _ask(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert system.total("pointsman_ext_proc_streams_opened_total") == opened
    client_certificate, client_key = authority.issue("client")
    credentials = grpc.ssl_channel_credentials(root, client_key.read_bytes(), client_certificate.read_bytes())
    assert _ask(f"127.0.0.1:{port}", credentials) == 200


def test_without_a_certificate_one_is_signed_for_ourselves(
    make_system: Callable[..., System], engines: list[Engine]
) -> None:
    """Gateways that verify nothing are served at once; who trusts exactly that certificate is, too."""
    (port,) = free_ports(1)
    make_system(pools=[pool_of(engines)], listen={"grpc_tls": f"127.0.0.1:{port}"})
    shown = ssl.get_server_certificate(("127.0.0.1", port)).encode()
    assert _ask(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(shown)) == 200


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_clients_speak_tls_to_envoy(
    make_system: Callable[..., System], engines: list[Engine], authority: Authority, version: str
) -> None:
    """By curl over HTTPS, either version by ALPN, against the project's own CA."""
    certificate, key = authority.issue("front")
    system = make_system(
        pools=[pool_of(engines)], listen={"http_tls": {"certificate": str(certificate), "key": str(key)}},
        verify=str(authority.certificate),
    )  # fmt: skip
    system.wait_pickable(engines[0].address)
    url = f"{system.url}/v1/chat/completions"
    body = '{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
    command = ["curl", "-sS", "-w", "\n%{http_version} %{http_code}", version, "--cacert", authority.certificate]
    done = subprocess.run([*command, "-d", body, url], capture_output=True, check=True, timeout=HANG_GUARD_S)
    assert done.stdout.splitlines()[-1] == (b"2 200" if version == "--http2" else b"1.1 200")


def test_clients_must_show_a_certificate_where_one_is_required(
    make_system: Callable[..., System], engines: list[Engine], authority: Authority
) -> None:
    """At the front door: no certificate, no request."""
    certificate, key = authority.issue("strict")
    pair = tuple(str(file) for file in authority.issue("allowed"))
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.certificate)}
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    trust.load_cert_chain(*pair)
    system = make_system(pools=[pool_of(engines)], listen={"http_tls": tls}, verify=trust)
    system.wait_pickable(engines[0].address)
    url = f"{system.url}/v1/chat/completions"
    assert httpx.post(url, json=chat(), verify=trust, timeout=HANG_GUARD_S).status_code == 200
    stranger = ssl.create_default_context(cafile=str(authority.certificate))
    with pytest.raises(httpx.TransportError):
        httpx.post(url, json=chat(), verify=stranger, timeout=HANG_GUARD_S)
