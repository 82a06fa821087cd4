"""What filters, scorers and pickers look at: one request, the candidates, and the fleet at one moment.

Plain data, made once per choice, read only. Arrays are aligned with `slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from policies.fleet_state import FleetState
from policies.types import Floats, InferenceRequest, Mask, Slots


@dataclass(slots=True)
class View:
    """The candidates of one choice. `matched_tokens[i]` is what `slots[i]` holds of the prompt."""

    request: InferenceRequest
    state: FleetState
    slots: Slots
    matched_tokens: Floats
    stale: Mask
    now_s: float
    rng: Random

    def take(self, mask: Mask) -> View:
        """The same view over the candidates that `mask` keeps."""
        return View(
            self.request,
            self.state,
            self.slots[mask],
            self.matched_tokens[mask],
            self.stale[mask],
            self.now_s,
            self.rng,
        )

    def fresh_or(self, observed: Floats, ours: Floats) -> Floats:
        """The scraped figure where it is fresh, our own accounting where it is stale. Both shape (n,)."""
        return np.where(self.stale, ours, observed)
