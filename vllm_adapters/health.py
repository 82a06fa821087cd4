"""What a vLLM says about itself: the models it lists and the context they have.

`/health` is not asked: it answers 200 while the engine drains and before the model is usable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

MODELS_PATH = "/v1/models"
TRIAL_PATH = "/v1/completions"
TRIAL_HEADERS = {"x-pointsman-probe": "trial"}
"""So that who reads an engine's log can tell our requests from others."""


class _Model(msgspec.Struct):
    id: str
    owned_by: Any = None
    max_model_len: Any = None
    parent: Any = None


_MOST_MODELS = 10_000
"""With all adapters. A list without end would hold the decision loop up each time it is told."""


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(max_length=_MOST_MODELS)]


@dataclass(frozen=True, slots=True)
class Listing:
    """Names an endpoint serves, its context window in tokens, if it says, and which of the names are adapters."""

    models: frozenset[str]
    context_tokens: int | None
    adapters: frozenset[str] = frozenset()


def trial_of(model: str) -> dict[str, Any]:
    """The smallest generation there is."""
    return {"model": model, "prompt": "a", "max_tokens": 1}


def trial_passed(status: int) -> bool:
    """Whether the engine is at work. One that does not generate refuses us with 4xx, and is at work too."""
    return status < _SERVER_ERROR


_SERVER_ERROR = 500
OURSELVES = "pointsman"
"""Who owns the models of a list that a Pointsman answers."""


class NotAListing(Exception):
    """The answer is not a list of models."""


_decode = msgspec.json.Decoder(_Models).decode


def parse_models(body: bytes) -> Listing:
    """Read the answer of GET /v1/models. Raises NotAListing."""
    try:
        models = _decode(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAListing(str(error)) from error
    if any(model.owned_by == OURSELVES for model in models):
        raise NotAListing("this is a Pointsman, not an engine: requests sent there would come back for ever")
    windows = [model.max_model_len for model in models if _is_window(model.max_model_len)]
    return Listing(
        frozenset(model.id for model in models),
        max(windows, default=None),
        frozenset(model.id for model in models if isinstance(model.parent, str)),
    )


def _is_window(value: object) -> bool:
    """A context length that makes sense: base models state one, adapters null."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40
