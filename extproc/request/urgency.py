"""How urgent a request is: its class in the pool's queue, its priority within the class, when it is due.

What a client asks for is bounded by what its tenant may have; without tenants everybody may have any class, and
nobody may go before others of his class. Not here: what classes and priorities do (policies/admission/queue.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PRIORITY_HEADER: Final = "x-pointsman-priority"
OBJECTIVE_HEADER: Final = "x-gateway-inference-objective"
ENGINE_PRIORITY_HEADER: Final = "x-vllm-priority"
FAIRNESS_HEADER: Final = "x-gateway-inference-fairness-id"
_LONGEST_FLOW: Final = 128
_SLO_HEADERS: Final = ("x-pointsman-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
_LONGEST_NUMBER: Final = 18
_MOST: Final = 100
"""Steps of priority either way; more would be the same as another class."""
_LONGEST_SLO_MS: Final = 3_600_000
_SHORTEST_SLO_MS: Final = 100
"""Nobody is due sooner: by asking for nothing at all a client would pass everybody who says what he needs."""


@dataclass(init=False)
class Urgency:
    """A class by name, and a priority in it, lower is sooner."""

    class_name: str
    priority: int

    def __init__(self, class_name: str, priority: int = 0) -> None:
        self.class_name = class_name
        self.priority = priority


def urgency_of(
    headers: Mapping[str, str], classes: Sequence[str], best_class: str | None, best_priority: int
) -> Urgency | None:
    """What the headers ask for, within bounds; None where they name a class that there is none of.

    `classes`: by name, the most urgent first. `best_class`: the most urgent one allowed, if there are such.
    """
    best = classes.index(best_class) if best_class in classes else 0
    asked, priority = headers.get(PRIORITY_HEADER), None
    if asked is not None:
        priority = _number(asked)
        if priority is None and asked not in classes:
            return None
    else:
        asked, priority = _of_other_kinds(headers)
    class_name = classes[max(classes.index(asked), best)] if asked in classes else classes[best]
    return Urgency(class_name, max(priority or 0, best_priority))


def engine_priority_of(headers: Mapping[str, str], best_priority: int) -> int | None:
    """What a client that asks the engine itself for a priority gets there: never less than `best_priority`.

    None if nothing need be said: it does not ask, and what the engine then gives it is not better than it may have.
    """
    said = headers.get(ENGINE_PRIORITY_HEADER)
    if said is None:
        return best_priority if best_priority > 0 else None
    return max(_integer(said) or 0, best_priority)


def slo_ttft_s(headers: Mapping[str, str]) -> float | None:
    """How soon the client wants its first token, in seconds; None where it does not say, or nonsense."""
    for name in _SLO_HEADERS:
        said = headers.get(name)
        if said is not None and said.isascii() and said.isdecimal() and len(said) < len(str(_LONGEST_SLO_MS)) + 1:
            return max(int(said), _SHORTEST_SLO_MS) / 1000
    return None


def flow_of(headers: Mapping[str, str]) -> str:
    """Whose turn it is where no tenant is known: what the client says itself, which gives it no more than its turns."""
    return headers.get(FAIRNESS_HEADER, "")[:_LONGEST_FLOW]


def _of_other_kinds(headers: Mapping[str, str]) -> tuple[str | None, int | None]:
    """A class or a priority from headers that others know: higher is sooner in the first, lower in the second."""
    objective = headers.get(OBJECTIVE_HEADER)
    if objective is not None:
        higher = _number(objective)
        return objective, None if higher is None else -higher
    return None, _number(headers.get(ENGINE_PRIORITY_HEADER, ""))


def _number(text: str) -> int | None:
    number = _integer(text, len(str(_MOST)) + 1)
    return None if number is None else max(-_MOST, min(_MOST, number))


def _integer(text: str, most_digits: int = _LONGEST_NUMBER) -> int | None:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= most_digits else None
