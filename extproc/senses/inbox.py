"""What the senses report becomes what the fleet knows. On the decision loop; no I/O.

An endpoint that lists its models and takes no traffic has to generate first, half-open: only here is known whether it
takes traffic, so only here a trial is ordered, and its listing held back until the trial was answered. One that takes
our request, does not refuse it and is seen at work has passed: it waits behind others there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from extproc.fleet.fleet import Fleet
from extproc.precise import Matcher
from extproc.senses.messages import (
    Exported,
    FellSilent,
    FromSenses,
    Heard,
    Indexed,
    Matched,
    Probed,
    Scraped,
    Tried,
    Try,
)
from policies.lifecycle import Evidence
from vllm_adapters.health import Listing, trial_passed
from vllm_adapters.pushed import FinishedRequest, Pushed

_TRIAL_PATIENCE_S = 1.0
"""Engines that shut down refuse within milliseconds; a token comes sooner unless others are before it."""
_TRIAL_GRACE_S = 5.0
"""A trial that nothing was heard of for so much longer than it may take is lost, and made again."""


class SensesEvents(Protocol):
    """Who counts scrapes, probes and trials."""

    def exported(self, *, ok: bool) -> None:
        """A host was asked for its GPUs."""

    def scraped(self, *, ok: bool) -> None:
        """A scrape was tried."""

    def probed(self, *, ok: bool) -> None:
        """A probe was tried."""

    def tried(self, *, ok: bool) -> None:
        """A trial was answered."""

    def heard(self, address: str, result: str, messages: int) -> None:
        """So many messages of a plugin were taken, lost, malformed, ignored; or listening to it failed (`deaf`)."""

    def push_troubled(self, address: str, figures: int) -> None:
        """An endpoint's plugin could not take so many figures from its engine."""


@dataclass(slots=True)
class _Trial:
    """A generation we wait for, and what the endpoint listed."""

    listing: Listing
    began_s: float


class Inbox:
    """Takes messages from the senses.

    `tell` orders a trial; `trials` says whether any are wanted, `trial_timeout_s` how long one may take. `on_finished`
    hears of the requests that engines have ended.
    """

    def __init__(
        self, fleet: Fleet, events: SensesEvents, clock: Callable[[], float], matcher: Matcher | None = None
    ) -> None:
        self.trials = True
        self.trial_timeout_s = 30.0
        self.tell: Callable[[Try], object] = lambda _order: None
        self.on_finished: Callable[[tuple[FinishedRequest, ...]], None] = lambda _requests: None
        self._matcher = matcher or Matcher()
        self._fleet = fleet
        self._events = events
        self._clock = clock
        self._pending: dict[str, _Trial] = {}
        self._troubles: dict[str, tuple[str, int]] = {}
        """By endpoint: the plugin's run, and the figures it could not take in it, as far as they were counted."""

    def take(self, message: FromSenses) -> None:
        """Pass one message on."""
        if isinstance(message, Scraped):
            self._scraped(message)
        elif isinstance(message, Exported):
            self._events.exported(ok=message.gpus is not None)
            self._fleet.exported(message.address, message.gpus)
        elif isinstance(message, Heard):
            self._heard(message)
        elif isinstance(message, FellSilent):
            self._fleet.push_fell_silent(message.address)
        elif isinstance(message, Probed):
            self._probed(message)
        elif isinstance(message, Tried):
            self._tried(message)
        elif isinstance(message, Matched):
            self._matcher.answered(message)
        elif isinstance(message, Indexed):
            self._matcher.on_indexed(message)

    def forget(self, address: str) -> None:
        """An endpoint is watched no more, or by other senses than before."""
        self._pending.pop(address, None)
        self._troubles.pop(address, None)

    def forget_all(self) -> None:
        """The senses fell: nobody tries, answers, listens or looks any more, and other ones will know of no trial."""
        self._pending.clear()
        self._matcher.lost()
        self._fleet.pushes_fell_silent()
        self._fleet.gpus_fell_silent()

    def _scraped(self, message: Scraped) -> None:
        self._events.scraped(ok=message.figures is not None)
        if message.figures is not None and not message.spare:
            self._fleet.scraped(message.address, message.figures)

    def _heard(self, message: Heard) -> None:
        for result in ("taken", "lost", "malformed", "ignored", "deaf"):
            if messages := getattr(message, result):
                self._events.heard(message.address, result, messages)
        if message.pushed is not None:
            self._note_troubles(message.address, message.pushed)
            self.on_finished(message.pushed.finished)
            self._fleet.pushed(message.address, msgspec.structs.replace(message.pushed, finished=()))

    def _note_troubles(self, address: str, pushed: Pushed) -> None:
        """It tells of all since its start; of those are counted that came since it was last heard."""
        run, counted = self._troubles.get(address, ("", 0))
        new = pushed.troubles - (counted if run == pushed.run else 0)
        if new > 0 and self._fleet.state.slot_of(address) is not None:  # else nobody would forget it
            self._troubles[address] = pushed.run, pushed.troubles
            self._events.push_troubled(address, new)

    def _probed(self, message: Probed) -> None:
        ok = message.evidence is Evidence.PROBE_OK
        self._events.probed(ok=ok)
        address, listing = message.address, message.listing
        if not ok:
            self._fleet.observe(address, message.evidence)
        elif listing is None:
            self._answered_over_grpc(address)
        elif self._awaits_trial(address, listing):
            return
        else:
            self._fleet.listed_models(address, listing)

    def _answered_over_grpc(self, address: str) -> None:
        assumed = self._fleet.assumed_by_grpc(address)
        if assumed is not None:
            self._fleet.listed_models(address, assumed)

    def _awaits_trial(self, address: str, listing: Listing) -> bool:
        """Whether a generation must be answered before this listing counts. Orders it if nobody has."""
        models = self._fleet.served_models(address, listing)
        if not (self.trials and models and self._fleet.wants_trial(address)):
            self._pending.pop(address, None)
            return False
        now_s, trial = self._clock(), self._pending.get(address)
        if trial is None or now_s - trial.began_s > self.trial_timeout_s + _TRIAL_GRACE_S:
            self._pending[address] = _Trial(listing, now_s)
            self.tell(Try(address, models[0]))
            return True
        trial.listing = listing
        passed = now_s - trial.began_s > _TRIAL_PATIENCE_S and self._fleet.at_work(address)
        if passed:
            del self._pending[address]
            self._events.tried(ok=True)
        return not passed

    def _tried(self, message: Tried) -> None:
        trial = self._pending.pop(message.address, None)
        if trial is None:
            return  # passed meanwhile, or not asked for (any more)
        ok = message.status is not None and trial_passed(message.status)
        self._events.tried(ok=ok)
        if ok:
            self._fleet.listed_models(message.address, trial.listing)
        else:
            self._fleet.observe(message.address, Evidence.PROBE_FAILED)
