"""The decision log: the last N decisions with everything needed to explain them. Prompts are never in it.

A record keeps references to the arrays the decision already made; text is built only when somebody reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from policies.placement.placement import Unplaceable
from policies.types import Decision, Filtered, InferenceRequest, Refusal

_LONGEST_PATH = 200


@dataclass(slots=True)
class Record:
    """One decision, and what became of it once that is known."""

    time_s: float
    request_id: str
    kind: str
    asked_model: str
    model: str
    input_tokens: int
    stream: bool
    decision: Decision
    served_by: str | None = None
    outcome: dict[str, Any] | None = None


class DecisionLog:
    """Two rings, of decisions and of refusals, so that a flood of bad requests does not push the good ones out.

    `capacity` bounds each; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self._records: deque[Record] = deque(maxlen=capacity)
        self._refusals: deque[tuple[float, str, str, Refusal]] = deque(maxlen=capacity)
        self._by_id: dict[str, Record] = {}

    def add(self, time_s: float, request_id: str, request: InferenceRequest, decision: Decision) -> None:
        """Keep one decision. The request's prompt is not kept."""
        if not self._records.maxlen:
            return
        if len(self._records) == self._records.maxlen:
            self._by_id.pop(self._records[0].request_id, None)
        record = Record(
            time_s,
            request_id,
            request.kind,
            request.asked_model,
            request.model,
            request.input_tokens,
            request.stream,
            decision,
        )
        self._records.append(record)
        self._by_id[request_id] = record

    def add_refusal(self, time_s: float, request_id: str, path: str, refusal: Refusal) -> None:
        """Keep one refusal."""
        self._refusals.append((time_s, request_id, path[:_LONGEST_PATH], refusal))

    def read_refusals(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` refusals, newest first."""
        newest = list(self._refusals)[-limit:] if limit > 0 else []
        return [
            {"time": round(time_s, 3), "request_id": request_id, "path": path, **asdict(refusal)}
            for time_s, request_id, path, refusal in reversed(newest)
        ]

    def finish(self, request_id: str, served_by: str | None, outcome: dict[str, Any]) -> None:
        """Note how a request went, if its record is still here."""
        record = self._by_id.get(request_id)
        if record is not None:
            record.served_by = served_by
            record.outcome = outcome

    def read(self, limit: int, request_id: str | None = None) -> list[dict[str, Any]]:
        """The newest `limit` decisions, newest first, or the one with `request_id`."""
        if request_id is not None:
            record = self._by_id.get(request_id)
            return [_explain_record(record)] if record else []
        newest = list(self._records)[-limit:] if limit > 0 else []
        return [_explain_record(record) for record in reversed(newest)]


def _explain_record(record: Record) -> dict[str, Any]:
    return {
        "time": round(record.time_s, 3),
        "request_id": record.request_id,
        "kind": record.kind,
        "asked_model": record.asked_model,
        "model": record.model,
        "rewritten": record.asked_model != record.model,
        "input_tokens": record.input_tokens,
        "stream": record.stream,
        **explain(record.decision),
        "served_by": record.served_by,
        "outcome": record.outcome,
    }


def explain(decision: Decision) -> dict[str, Any]:
    """A decision in words and figures."""
    ranking = decision.ranking
    candidates = [
        {
            "endpoint": decision.slot_addresses[slot],
            "score": round(float(ranking.scores[position]), 6),
            "matched_tokens": int(decision.matched_tokens[position]),
            "parts": {name: round(float(part[position]), 6) for name, part in ranking.parts.items()},
        }
        for position, slot in enumerate(ranking.candidates.tolist())
    ]
    return {
        "pool": decision.pool,
        "policy": decision.policy,
        "endpoints": list(decision.addresses),
        "matched_tokens": decision.chosen_matched_tokens,
        "candidates": sorted(candidates, key=_by_score),
        "filtered": _explain_filtered(decision.filtered),
        "fallbacks": list(decision.fallbacks),
    }


def _by_score(candidate: dict[str, Any]) -> float:
    return -float(candidate["score"])


def explain_unplaceable(nowhere: Unplaceable) -> dict[str, Any]:
    """Why no candidate was left."""
    return {"endpoints": [], "filtered": _explain_filtered(nowhere.filtered)}


def _explain_filtered(filtered: Filtered) -> list[dict[str, Any]]:
    return [{"filter": name, "endpoints": list(addresses)} for name, addresses in filtered]
