"""Who has the answers that clients may ask for again: `GET /v1/responses/{id}` must find the one engine that has it.

The id of an answer is ours to give: vLLM and SGLang take it from the body's `request_id`, which we add where a client
did not. Reading it from the answer instead would cost a message per chunk of every answer.

What is remembered is the flight, not an address: it learns later who really served, from the access log.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from cachetools import LRUCache

from extproc.flight import Flight

PREFIX: Final = "resp_"


@dataclass(init=False)
class Made:
    """An answer: whose flight it was, and under which name its engine knows the model."""

    flight: Flight
    model: str

    def __init__(self, flight: Flight, model: str) -> None:
        self.flight = flight
        self.model = model


class StoredResponses:
    """Answers by id; the ones least recently asked for are forgotten first."""

    def __init__(self) -> None:
        self._made: LRUCache[str, Made] = LRUCache(inf)  # the bound may change with a reload

    def __len__(self) -> int:
        return len(self._made)

    def remember(self, response_id: str, made: Made, most: int) -> None:
        """An answer by this id is being made; keep at most `most`."""
        self._made[response_id] = made
        while len(self._made) > most:
            self._made.popitem()

    def find(self, response_id: str, tenant: str | None) -> Made | None:
        """Who has it, if we know and it is the tenant's. Nobody learns that another's exists."""
        made = self._made.get(response_id)
        return made if made is not None and made.flight.tenant == tenant else None
