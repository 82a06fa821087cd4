"""What can be seen of us from outside: logs, metrics, the admin API."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from extproc.config.sections.fields import Model, Name, Pattern, Positive, check_address


class Log(Model):
    """Structured logs. Prompts never appear unless asked for."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else json")


class RequestLog(Model):
    """A line of JSON per finished request."""

    file: Path | None = Field(None, description="relative to the config file; standard output without one")
    max_bytes: Positive = Field(100 * 1024 * 1024, description="a file grown to this is put aside")
    backups: int = Field(5, ge=1, le=1_000, description="files put aside that are kept")
    queue: Positive = Field(10_000, description="lines waiting to be written; more are dropped and counted")
    prompts: bool = Field(False, description="log the beginning of every prompt")
    prompt_bytes: Positive = Field(4_096, le=1_048_576, description="so much of it")
    redact: tuple[Literal["email", "credit_card", "api_key"], ...] = ("email", "credit_card", "api_key")
    redact_patterns: dict[Name, Pattern] = Field(
        default_factory=dict, description="name -> regular expression (RE2); each match becomes [name]"
    )


class Observe(Model):
    """What can be seen from outside."""

    metrics: str = "0.0.0.0:9090"
    decisions: int = Field(1_000, ge=0, description="decisions kept for /v1/decisions")
    log: Log = Log()
    request_log: RequestLog | None = Field(None, description="none unless asked for; `{}` asks for one")

    _addresses = field_validator("metrics")(check_address)


class Admin(Model):
    """The operator's HTTP API."""

    listen: str = "127.0.0.1:9700"

    _addresses = field_validator("listen")(check_address)
