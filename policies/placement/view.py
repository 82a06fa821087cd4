"""What filters, scorers and pickers look at: one request, the candidates, and the fleet at one moment.

Made once per choice and read only. Figures that several scorers need are gathered once, when first asked for: at 16
endpoints an array operation costs a microsecond or two whatever it does, so their number is what a decision costs. What
the default policy weighs of listed candidates it takes as attributes of objects by slot, and no array is made.
"""

from __future__ import annotations

from random import Random

import numpy as np

from policies.fleet_state import FleetState
from policies.placement.ledger import Ledger
from policies.placement.prefix_index import Matched, PrefixIndex
from policies.types import Floats, InferenceRequest, ListedSlots, Mask, Slots, listed_slots


class View:
    """The candidates of one choice. `matched_tokens[i]` is what `slots[i]` holds of the prompt; all shapes (n,).

    `listed`: the same slots for loops, where somebody has that at hand. `slots` are in rising order.
    """

    def __init__(
        self,
        request: InferenceRequest,
        state: FleetState,
        slots: Slots,
        matched_tokens: Floats | Matched,
        now_s: float,
        rng: Random,
        index: PrefixIndex,
        ledger: Ledger,
        listed: ListedSlots | None = None,
    ) -> None:
        self.request = request
        self.state = state
        self.slots = slots
        self.matched: Floats | Matched = matched_tokens  # as it was found, whatever the form
        self._matched: Floats | None = None
        self._listed = listed
        self.now_s = now_s
        self.rng = rng
        self.index = index
        self.ledger = ledger
        self._load: Floats | None = None
        self._kv_used: Floats | None = None
        self._kv_claimed: Floats | None = None
        self._running: Floats | None = None
        self._stale: Mask | None = None
        self.fell_back = False
        self._waiting: Floats | None = None

    def take(self, mask: Mask) -> View:
        """The same view over the candidates that `mask` keeps."""
        return View(
            self.request,
            self.state,
            self.slots[mask],
            self.matched_tokens[mask],
            self.now_s,
            self.rng,
            self.index,
            self.ledger,
        )

    @property
    def listed(self) -> ListedSlots | None:
        """The candidates for loops; None where they are too many."""
        if self._listed is None:
            self._listed = listed_slots(self.slots)
        return self._listed

    @property
    def matched_tokens(self) -> Floats:
        """What each candidate holds of the prompt."""
        if self._matched is None:
            matched = self.matched
            self._matched = matched.array() if isinstance(matched, Matched) else matched
        return self._matched

    def matched_of_listed(self, listed: ListedSlots) -> Matched:
        """The same for loops."""
        matched = self.matched
        return matched if isinstance(matched, Matched) else Matched(listed, [], matched.tolist())

    def matched_at(self, position: int) -> float:
        """The same of one."""
        matched = self.matched
        return matched.at(position) if isinstance(matched, Matched) else float(matched[position])

    @property
    def most_matched(self) -> float:
        """The most that any candidate holds of the prompt."""
        matched = self.matched
        return matched.most if isinstance(matched, Matched) else float(matched.max())

    @property
    def load(self) -> Floats:
        """The next three figures as rows, shape (3, n)."""
        if self._load is None:
            self._load = self.state.load(self.slots)
        return self._load

    @property
    def in_flight(self) -> Floats:
        """Requests in flight, our own count."""
        figures: Floats = self.load[0]
        return figures

    @property
    def prompt_tokens_in_flight(self) -> Floats:
        """Prompt tokens of the requests in flight, our own count."""
        figures: Floats = self.load[1]
        return figures

    @property
    def kv_capacity(self) -> Floats:
        """Size of the KV cache in tokens."""
        figures: Floats = self.load[2]
        return figures

    @property
    def kv_claimed(self) -> Floats:
        """Share of the KV capacity that our prompts in flight claim; may exceed 1."""
        if self._kv_claimed is None:
            self._kv_claimed = self.prompt_tokens_in_flight / self.kv_capacity
        return self._kv_claimed

    @property
    def foreign(self) -> Floats:
        """Requests in the engines that are none of ours, by their scrapes; none where those are stale."""
        if not self.state.has_foreign:
            return np.zeros(len(self.slots))
        return np.where(self.stale, 0.0, self.state.foreign_of(self.slots))

    @property
    def stale(self) -> Mask:
        """Whose scraped figures are too old to go by."""
        if self._stale is None:
            self._stale = self.state.stale(self.slots, self.now_s)
        return self._stale

    @property
    def waiting(self) -> Floats:
        """Requests waiting in the engine now: the scraped level and what we have sent more or less since.

        Our own requests in flight where the scrape is stale.
        """
        if self._waiting is None:
            self._waiting = self._now(self.state.waiting_level, self._sent_since, self.in_flight)
        return self._waiting

    @property
    def running(self) -> Floats:
        """Requests in the engine's batch now, in the same way."""
        if self._running is None:
            self._running = self._now(self.state.running_level, self._sent_since, self.in_flight)
        return self._running

    @property
    def kv_used(self) -> Floats:
        """Share of the KV cache in use now, in the same way; what our prompts claim where the scrape is stale."""
        if self._kv_used is None:
            level = self.state.in_flight_prompt_tokens_level[self.slots]
            since = (self.prompt_tokens_in_flight - level) / self.kv_capacity
            self._kv_used = self._now(self.state.kv_used_level, since, self.kv_claimed)
        return self._kv_used

    @property
    def _sent_since(self) -> Floats:
        return self.in_flight - self.state.in_flight_level[self.slots]

    def _now(self, level: Floats, since: Floats, ours: Floats) -> Floats:
        figures = np.maximum(level[self.slots] + since, 0.0)
        return self.fresh_or(figures, ours)

    @property
    def any_stale(self) -> bool:
        """Whether any candidate's figures are."""
        return bool(np.count_nonzero(self.stale))

    def fresh_or(self, observed: Floats, ours: Floats) -> Floats:
        """The scraped figure where it is fresh, our own accounting where it is stale."""
        if not self.any_stale:
            return observed
        self.fell_back = True
        return np.where(self.stale, ours, observed)
