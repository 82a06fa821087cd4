"""Who may call, as whom, and how much of the fleet they may take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from extproc.config.policy_kinds import Policy
from extproc.config.sections.fields import HeaderName, Model, ModelName, Name, Positive, given_twice, refuse

LONGEST_TENANT = 128
"""Characters of a tenant's name, whoever gives it."""
TenantName = Annotated[str, StringConstraints(pattern=rf"^[^\x00-\x1f\x7f]{{1,{LONGEST_TENANT}}}$")]


class ApiKey(Model):
    """One key. The key itself stands nowhere: `pointsman key` makes one and prints this of it."""

    name: Name
    tenant: TenantName
    sha256: str = Field(description="of the key, as 64 hex digits")

    @field_validator("sha256")
    @classmethod
    def _is_a_digest(cls, value: str) -> str:
        # who puts the key itself here must not find it in an error message
        if re.fullmatch(r"[0-9a-fA-F]{64}", value) is None:
            raise ValueError("not a SHA-256 as 64 hex digits; `pointsman key` makes a key and prints its line")
        return value.lower()


def _keys_differ(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    names, digests = [key.name for key in keys], [key.sha256 for key in keys]
    refuse([*given_twice("key name", names), *given_twice("sha256", digests)])
    return keys


ApiKeys = Annotated[tuple[ApiKey, ...], AfterValidator(_keys_differ)]


class Jwt(Model):
    """Tokens that Envoy verifies, and which of their claims names the tenant."""

    issuer: Annotated[str, StringConstraints(min_length=1)] = Field(description="what the claim `iss` must be")
    audiences: tuple[str, ...] = Field(description="one of these must be in the claim `aud`; [] accepts any")
    tenant_claim: Annotated[str, StringConstraints(min_length=1)] = Field(
        "tenant", description="whose value is the tenant; dots lead into objects"
    )
    jwks_file: Path | None = Field(None, description="the issuer's public keys, relative to the config file")
    jwks_uri: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+/\S*$")] | None = Field(
        None, description="the same, fetched by Envoy"
    )
    jwks_ca: Path = Field(
        Path("/etc/ssl/certs/ca-certificates.crt"), description="who may sign the certificate of an https `jwks_uri`"
    )

    @field_validator("jwks_uri")
    @classmethod
    def _has_a_port(cls, value: str | None) -> str | None:
        try:
            _ = None if value is None else urlsplit(value).port
        except ValueError:
            # urlsplit's words quote what may be half of a password
            raise ValueError("its port is no number up to 65535") from None
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_file is None) == (self.jwks_uri is None):
            raise ValueError("give exactly one of: jwks_file, jwks_uri")
        return self


class Access(Model):
    """Who may call, and as whom. Any one of the sources given lets a caller in; with none, everybody may call."""

    api_keys: ApiKeys = ()
    api_keys_file: Path | None = Field(None, description="YAML or JSON list of the same, watched")
    jwt: Jwt | None = None
    tenant_header: HeaderName | None = Field(
        None, description="header that names the tenant, set by a gateway before us"
    )
    forward_credentials: bool = Field(False, description="let engines see the keys and tokens of clients")

    @property
    def takes_keys(self) -> bool:
        """API keys let callers in, even if there is none (any more)."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def guarded(self) -> bool:
        """Not everybody may call."""
        return self.takes_keys or self.jwt is not None or self.tenant_header is not None

    @property
    def in_envoy(self) -> tuple[object, ...]:
        """What of this stands in the configuration Envoy was started with."""
        return self.takes_keys, self.jwt, self.tenant_header, self.forward_credentials


Amount = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Rate(Model):
    """A bucket that fills with `per_s` a second, up to `burst`."""

    per_s: Amount
    burst: Amount | None = Field(None, description="at once; none: what ten seconds bring, and one at least")

    @property
    def most(self) -> float:
        """What the bucket holds."""
        return max(10 * self.per_s, 1.0) if self.burst is None else self.burst


class Budget(Model):
    """Tokens per period; periods are counted from 1970-01-01 in UTC, so those of a day begin at midnight."""

    tokens: Amount
    period_s: Annotated[float, Field(ge=1, le=1e12, allow_inf_nan=False)] = 86_400


class Quota(Model):
    """What one tenant may take, and its own view of the fleet; what is not given is not limited, and as for all."""

    requests: Rate | None = None
    tokens: Rate | None = Field(None, description="of prompts and answers, cached or not")
    concurrency: Positive | None = Field(None, description="requests at once")
    budget: Budget | None = None
    may_borrow: bool = Field(False, description="take from `tenants.spare` when its own `tokens` are used up")
    best_class: Name | None = Field(None, description="of the pools' queues; no request of it is more urgent")
    best_priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        0, description="within a class, lower is sooner; a request that asks for more gets this"
    )
    pools: Annotated[tuple[Name, ...], Field(min_length=1)] | None = Field(
        None, description="the pools it sees; the models of others do not exist for it. None: all"
    )
    aliases: dict[ModelName, ModelName] = Field(
        default_factory=dict,
        description="name it may use -> model of a pool it sees; goes before a pool's alias",
    )
    default_model: ModelName | None = Field(
        None, description="for its requests that name no model, instead of `routing.default_model`"
    )
    policies: dict[Name, str | Policy] = Field(
        default_factory=dict, description="pool -> the policy that places its requests there, instead of the pool's"
    )


class Tenants(Model):
    """Quotas by tenant. Who a request's tenant is, `access` says."""

    default: Quota = Field(Quota(), description="of each tenant that is not named")
    named: dict[TenantName, Quota] = Field(default_factory=dict)
    spare: Rate | None = Field(None, description="tokens for those that may borrow")
    usage: Literal["as_asked", "inject"] = Field(
        "as_asked", description="inject: ask streams for their usage where the client does not say"
    )

    def of(self, tenant: str) -> Quota:
        """One tenant's quota."""
        return self.named.get(tenant, self.default)
