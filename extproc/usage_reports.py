"""What engines tell of requests whose answers did not say what they cost: streams that nobody asked for their usage.

Our plugin in vLLM lists the requests that have ended, with their tokens, by a name that has the `x-request-id` in it
that our request went out with. It comes about a quarter of a second after the answer's end, so a request waits for it
before it is settled by the estimate. Bounded by `most`, the oldest are forgotten.

An id may be a client's own choice. One that was used before, as far back as we remember, tells nothing for certain:
both its requests are settled by the estimate. Rejected: an id of ours in its place. It stands in the answer's id, and
in the logs of everybody who has taken part.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm_adapters.pushed import FinishedRequest
from vllm_adapters.request_ids import sent_ids

if TYPE_CHECKING:
    from extproc.flight import Flight

_PATIENCE_S = 2.0
"""Ten times what a report takes, by the plugin, the senses and us; then it was lost, or the engine has let go of it."""
_LONGEST_ID = 100
"""Characters. The plugin cuts names a bit above this, and what is cut would be found by nobody."""


class Report:
    """What is told of one request: tokens of its prompts, by the name of each, and of all its choices."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.generated = 0
        self.ambiguous = False

    @property
    def tokens(self) -> int | None:
        """What it has used; None where nobody has told, or it is not certain of which request."""
        return None if self.ambiguous or not self.prompts else sum(self.prompts.values()) + self.generated


class UsageReports:
    """Joins reports to requests. `most`: ids remembered, and requests that wait."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.most = most
        self._clock = clock
        self._by_id: OrderedDict[str, Report] = OrderedDict()
        self._waiting: deque[tuple[float, Flight]] = deque()

    def expect(self, flight: Flight, sent_id: str) -> None:
        """A request goes out under this id, and its engine may tell of it."""
        if not 0 < len(sent_id) <= _LONGEST_ID:
            return
        before = self._by_id.get(sent_id)
        if before is not None:
            before.ambiguous = True
            self._by_id.move_to_end(sent_id)
            return
        flight.report = self._by_id[sent_id] = Report()
        while len(self._by_id) > self.most:
            self._by_id.popitem(last=False)

    def take(self, finished: Iterable[FinishedRequest]) -> None:
        """An engine tells of requests that have ended there, ours and others'."""
        for request in finished:
            found = (self._by_id.get(sent_id) for sent_id in sent_ids(request.request_id))
            report = next((one for one in found if one is not None), None)
            if report is not None:
                report.prompts[request.request_id] = request.prompt
                report.generated += request.generated

    def wait_for(self, flight: Flight) -> bool:
        """Whether its engine may yet tell; then `due` will have it."""
        if flight.report is None or flight.report.ambiguous:
            return False
        self._waiting.append((self._clock() + _PATIENCE_S, flight))
        return True

    def due(self) -> Iterator[tuple[Flight, int | None]]:
        """Requests that have waited long enough, and what they have used if that was told."""
        now_s = self._clock()
        while self._waiting and (self._waiting[0][0] <= now_s or len(self._waiting) > self.most):
            flight = self._waiting.popleft()[1]
            report, flight.report = flight.report, None
            yield flight, None if report is None else report.tokens
