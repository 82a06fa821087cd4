"""Verifying tokens (JWT) in Envoy, and telling us whose they are.

Envoy's own filter checks signature, issuer, audience and times, and fetches the issuer's keys; we get the claims as
dynamic metadata. Not here: what we make of them (extproc/access/gate.py).

Rejected: `claim_to_headers`. A header can be written by any client of a gateway that does not strip it, and a missing
filter would then mean a forged tenant instead of a refusal. Metadata only a filter can write, so what says "verified"
has been verified. Rejected: checking tokens ourselves. It would cost the decision loop more than the decision.
"""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import SplitResult, urlsplit

from extproc.config.schema import Config
from extproc.config.sections.callers import Access, Jwt
from extproc.control import envoy_types as envoy
from extproc.names import CREDENTIAL_HEADERS, JWT_KEY, JWT_NAMESPACE

_PROVIDER = "issuer"
_KEYS_CLUSTER = "pointsman_jwks"
_BEARER = "Bearer "
_FETCH_TIMEOUT = timedelta(seconds=5)
_KEYS_LIVE = timedelta(minutes=5)
"""How long fetched keys are used: an issuer shows a new key for longer than this before it signs with it."""


def authentication_filters(config: Config) -> list[envoy.HttpFilter]:
    """The filter that verifies tokens, if any are accepted; it stands before all others."""
    jwt = config.access.jwt
    if jwt is None:
        return []
    rule = envoy.RequirementRule(match=envoy.RouteMatch(prefix="/"), requires=_requirement(config.access))
    message = envoy.JwtAuthentication(providers={_PROVIDER: _provider(jwt, config.access)}, rules=[rule])
    return [envoy.HttpFilter(name=JWT_NAMESPACE, typed_config=envoy.pack(message))]


def _requirement(access: Access) -> envoy.JwtRequirement:
    """A good token; or anything, where we judge what else a request may bring: an API key is no token."""
    token = envoy.JwtRequirement(provider_name=_PROVIDER)
    if not access.takes_keys and access.tenant_header is None:
        return token
    anything = envoy.JwtRequirement(allow_missing_or_failed=envoy.Empty())
    return envoy.JwtRequirement(requires_any=envoy.JwtRequirementOrList(requirements=[token, anything]))


def _provider(jwt: Jwt, access: Access) -> envoy.JwtProvider:
    return envoy.JwtProvider(
        issuer=jwt.issuer,
        audiences=list(jwt.audiences),
        require_expiration=True,
        forward=access.forward_credentials,
        # said here, because by default a token in the query counts too, and queries stand in logs
        from_headers=[envoy.JwtHeader(name=CREDENTIAL_HEADERS[0], value_prefix=_BEARER)],
        payload_in_metadata=JWT_KEY,
        local_jwks=envoy.DataSource(filename=str(jwt.jwks_file)) if jwt.jwks_file else None,
        remote_jwks=_remote(jwt.jwks_uri) if jwt.jwks_uri else None,
    )


def _remote(uri: str) -> envoy.RemoteJwks:
    return envoy.RemoteJwks(
        http_uri=envoy.HttpUri(uri=uri, cluster=_KEYS_CLUSTER, timeout=_FETCH_TIMEOUT),
        cache_duration=_KEYS_LIVE,
        # fetched before the first request, and again before they grow old: no request waits for them
        async_fetch=envoy.JwksAsyncFetch(),
    )


def key_set_clusters(config: Config) -> list[envoy.Cluster]:
    """The cluster from which the issuer's keys are fetched, if they are."""
    jwt = config.access.jwt
    if jwt is None or jwt.jwks_uri is None:
        return []
    uri = urlsplit(jwt.jwks_uri)
    host, port = uri.hostname or "", uri.port or (443 if uri.scheme == "https" else 80)
    address = envoy.Address(socket_address=envoy.SocketAddress(address=host, port_value=port))
    hosts = [envoy.LbEndpoint(endpoint=envoy.Endpoint(address=address))]
    return [
        envoy.Cluster(
            name=_KEYS_CLUSTER,
            type=envoy.Cluster.STRICT_DNS,
            dns_lookup_family=envoy.Cluster.V4_PREFERRED,
            connect_timeout=_FETCH_TIMEOUT,
            load_assignment=envoy.ClusterLoadAssignment(
                cluster_name=_KEYS_CLUSTER, endpoints=[envoy.LocalityLbEndpoints(lb_endpoints=hosts)]
            ),
            transport_socket=_tls(uri, jwt) if uri.scheme == "https" else None,
        )
    ]


def _tls(uri: SplitResult, jwt: Jwt) -> envoy.TransportSocket:
    """TLS that believes nobody but the issuer: without these two Envoy would take any certificate."""
    host = uri.hostname or ""
    validation = envoy.CertificateValidationContext(
        trusted_ca=envoy.DataSource(filename=str(jwt.jwks_ca)),
        match_typed_subject_alt_names=[
            envoy.SubjectAltNameMatcher(
                san_type=envoy.SubjectAltNameMatcher.DNS, matcher=envoy.StringMatcher(exact=host)
            )
        ],
    )
    context = envoy.UpstreamTlsContext(
        sni=host, common_tls_context=envoy.CommonTlsContext(validation_context=validation)
    )
    return envoy.TransportSocket(name="envoy.transport_sockets.tls", typed_config=envoy.pack(context))
