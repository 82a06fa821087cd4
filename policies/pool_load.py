"""How loaded a pool is, against what its endpoints can run at once: the signal by which more of them are started.

From our own counts, so it is there at once and needs nothing of the engines. Requests count that are in flight or wait
here for a place. Not those on endpoints that drain: they end there, and no new engine would take them over. Places are
those of the engines' batches, where an engine tells how large its own is, else by the pool's profile.

Rejected: the engines' waiting queues. They are zero as long as there is room, and with a queue of ours for ever; so
they say that more is needed only when it is late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.placement import Placement

_LEAVING = (State.DRAINING, State.STOPPED)
_SERVING = (State.READY, State.WARMING)
"""Not the degraded: what they should run, others have to."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """`requests`: in flight and waiting. `places`: what those endpoints can run at once that may take traffic."""

    requests: int
    places: float
    places_of_one: float

    @property
    def ratio(self) -> float:
        """1 where every place is taken; without any endpoint as if there were one, so that it stays a number."""
        return self.requests / (self.places or self.places_of_one)


def pool_load(placement: Placement, state: FleetState, waiting: int) -> PoolLoad:
    """The load of one pool, where `waiting` requests have no endpoint yet. In several pools one counts whole."""
    members = placement.members
    states = state.states_of(members)
    there = members[~np.isin(states, _LEAVING)]
    serving = members[np.isin(states, _SERVING) & state.routable_of(members)]
    of_one = float(placement.ledger.profile.max_num_seqs)
    told = state.most_running[serving]
    places = float(np.where(told > 0, told, of_one).sum())
    return PoolLoad(int(state.load(there)[0].sum()) + waiting, places, of_one)
