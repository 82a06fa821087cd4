"""How is known what engines hold of a prompt."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from extproc.config.sections.fields import Model, Port, Positive, Share, check_address
from extproc.extras import how_to_install


class KvEvents(Model):
    """Where engines publish KV events. Their own word (vLLM 0.32 tells) counts for more than the ports."""

    port: Port | None = Field(None, description="engines bind it, and we connect; none: as they say")
    replay_port: Port | None = Field(None, description="where they say events again")
    ranks: int = Field(1, ge=1, le=256, description="data-parallel engines behind an address, each a port further")
    bind: Annotated[str, StringConstraints(pattern=r"^tcp://[^/\s]+:\d{1,5}$")] | None = Field(
        None, description="engines connect to this address of ours, with topics kv@<ip:port>@<model>"
    )

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else "tcp://" + check_address(value.removeprefix("tcp://"))

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.bind is not None and self.port is not None:
            raise ValueError("give port if engines bind one, or bind if they connect to us, not both")
        return self


class Tiers(Model):
    """What a block is worth where it is kept, beside one that need not be brought back first."""

    gpu: Share = 1.0
    cpu: Share = 0.8
    disk: Share = 0.5


class PreciseIndex(Model):
    """Knowing from the engines themselves which blocks they hold, and in exact tokens what a prompt has."""

    tokenizer: Literal["engine"] | Path = Field(
        description="folder with the model's tokenizer, relative to the config file; `engine`: ask the engines"
    )
    events: KvEvents = KvEvents()
    budget_ms: float = Field(20, gt=0, le=1_000, description="a decision waits no longer for tokens and matches")
    tiers: Tiers = Tiers()
    max_blocks: Positive = Field(200_000, description="kept per engine, the oldest forgotten")
    max_body_bytes: Positive = Field(1024 * 1024, description="larger requests are matched approximately")
    max_waiting: Positive = Field(64, description="questions open at once; more are answered approximately")
    cached_bytes: Positive = Field(64 * 1024 * 1024, description="for the tokens of texts that were seen")

    @field_validator("tokenizer")
    @classmethod
    def _libraries_are_there(cls, value: str | Path) -> str | Path:
        missing = [name for name in ("tokenizers", "jinja2") if find_spec(name) is None]
        if value != "engine" and missing:
            raise ValueError(f"{' and '.join(missing)} missing: {how_to_install('vllm')}, or take `engine`")
        return value


class PrefixIndex(Model):
    """How is known what endpoints hold of a prompt, beside our own book-keeping, which always goes on."""

    precise: PreciseIndex | None = Field(None, description="from the engines' KV events; none unless asked for")
