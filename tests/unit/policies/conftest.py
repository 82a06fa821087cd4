"""A small fleet to place requests on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.prefix_index import PrefixIndex
from policies.placement.view import View
from policies.types import InferenceRequest, Kind


@pytest.fixture
def state() -> FleetState:
    """Four ready, acknowledged, freshly observed endpoints that serve `m`."""
    state = FleetState(stale_after_s=1.0)
    for number in range(4):
        slot = state.add(f"10.0.0.{number}:80")
        state.state[slot] = State.READY
        state.routable[slot] = True
        state.kv_capacity_tokens[slot] = 10_000
        state.observed_at_s[slot] = 0.0
        state.set_models(slot, frozenset({"m"}))
    return state


@pytest.fixture
def request_of() -> Callable[..., InferenceRequest]:
    """A request for `m` of 1,000 tokens."""

    def make(**fields: object) -> InferenceRequest:
        values = {"kind": Kind.CHAT, "model": "m", "asked_model": "m", "input_tokens": 1_000} | fields
        return InferenceRequest(**values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def view_of(state: FleetState, request_of: Callable[..., InferenceRequest]) -> Callable[..., View]:
    """A view over all four endpoints; `matched` gives their matched tokens."""

    def make(matched: tuple[float, ...] = (0, 0, 0, 0), now_s: float = 0.0, **fields: object) -> View:
        return View(
            request_of(**fields),
            state,
            np.arange(4, dtype=np.intp),
            np.array(matched, float),
            now_s,
            Random(1),
            PrefixIndex(10_000),
            Ledger(),
        )

    return make
