"""TLS for the gRPC port: the operator's certificate, or one we sign ourselves.

InferencePool gateways speak TLS to an endpoint picker and verify nothing unless told to, so a self-signed certificate
serves them; whoever verifies gives a certificate of their own. With `client_ca` a caller must show one, too.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from extproc.config.sections.listen import Tls
from extproc.wire.grpc_server import BadCertificate

_VALID = dt.timedelta(days=3650)
"""As long as the process could possibly run: it is made anew at every start."""


def server_credentials(tls: Tls | None) -> Any:  # noqa: ANN401 - grpcio has no types
    """Credentials for `add_secure_port`; self-signed without `tls`. Raises BadCertificate."""
    if tls is None:
        return grpc.ssl_server_credentials([self_signed()])
    pair = (_read(tls.key), _read(tls.certificate))
    _check_pair(*pair, tls)
    client_ca = _read(tls.client_ca) if tls.client_ca else None
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def self_signed() -> tuple[bytes, bytes]:
    """(key, certificate) in PEM for this host's names, on P-256: NGINX's shim shakes hands for every request."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pointsman")])
    now = dt.datetime.now(dt.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    names.append(x509.DNSName(socket.gethostname().encode("ascii", "ignore").decode() or "pointsman"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(encoding)


def _check_pair(key: bytes, certificate: bytes, tls: Tls) -> None:
    """Find out now what grpcio would only show as handshakes that fail."""
    try:
        private = serialization.load_pem_private_key(key, None)
        public = x509.load_pem_x509_certificate(certificate).public_key()
    except (ValueError, TypeError) as error:
        raise BadCertificate(f"{tls.certificate}, {tls.key}: {error}") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*form) != public.public_bytes(*form):
        raise BadCertificate(f"{tls.key} is not the key of {tls.certificate}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCertificate(str(error)) from error
