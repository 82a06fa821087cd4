"""The decision log: the last N decisions with everything needed to explain them. Prompts are never in it.

A record keeps references to the figures the decision was made of; text is built only when somebody reads. Reading is
safe in another thread than the one that adds: a decision never changes, and the rings are copied in one step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from extproc.flight import LONGEST_PATH, Completion
from policies.placement.placement import Unplaceable
from policies.types import Decision, Filtered, InferenceRequest, Refusal

_DIGITS = 6
_MOST_ROWS = 5_000
"""Candidates and filtered endpoints told in one answer. JSON of more holds the interpreter for tens of milliseconds."""


@dataclass(init=False)
class Record:
    """One decision, and what became of it once that is known."""

    time_s: float
    request_id: str
    kind: str
    asked_model: str
    model: str
    input_tokens: int
    stream: bool
    tenant: str | None
    class_name: str | None
    decision: Decision
    served_by: str | None
    outcome: str | None
    completion: Completion | None

    def __init__(
        self,
        time_s: float,
        request_id: str,
        kind: str,
        asked_model: str,
        model: str,
        input_tokens: int,
        tenant: str | None,
        class_name: str | None,
        decision: Decision,
        *,
        stream: bool,
    ) -> None:
        self.time_s = time_s
        self.request_id = request_id
        self.kind = kind
        self.asked_model = asked_model
        self.model = model
        self.input_tokens = input_tokens
        self.stream = stream
        self.tenant = tenant
        self.class_name = class_name
        self.decision = decision
        self.served_by = None
        self.outcome = None
        self.completion = None


class DecisionLog:
    """Two rings, of decisions and of refusals, so that a flood of bad requests does not push the good ones out.

    `capacity` bounds each; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._refusals: deque[tuple[float, str, str, str | None, Refusal]] = deque(maxlen=capacity)

    def add(self, time_s: float, request_id: str, request: InferenceRequest, decision: Decision) -> None:
        """Keep one decision. The request's prompt is not kept."""
        records = self._records
        records[request_id] = Record(
            time_s,
            request_id,
            request.kind,
            request.asked_model,
            request.model,
            request.input_tokens,
            request.tenant,
            request.class_name,
            decision,
            stream=request.stream,
        )
        if len(records) > self._capacity:
            records.popitem(last=False)

    def add_refusal(
        self, time_s: float, request_id: str, path: str, refusal: Refusal, tenant: str | None = None
    ) -> None:
        """Keep one refusal."""
        self._refusals.append((time_s, request_id, path[:LONGEST_PATH], tenant, refusal))

    def read_refusals(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` refusals, newest first."""
        newest = list(self._refusals)[-limit:] if limit > 0 else []
        return [
            {"time": round(time_s, 3), "request_id": request_id, "path": path, "tenant": tenant, **asdict(refusal)}
            for time_s, request_id, path, tenant, refusal in reversed(newest)
        ]

    def finish(
        self, request_id: str, served_by: str | None, outcome: str, completion: Completion | None = None
    ) -> None:
        """Note how a request went, if its record is still here."""
        record = self._records.get(request_id)
        if record is not None:
            record.served_by, record.outcome, record.completion = served_by, outcome, completion

    def read(self, limit: int, request_id: str | None = None) -> list[dict[str, Any]]:
        """The newest `limit` decisions, newest first, or the one with `request_id`.

        All of them name the endpoints picked. The candidates are told as far as `_MOST_ROWS` reaches; how many are
        left out of a decision stands in its `rows_left_out`.
        """
        if request_id is not None:
            record = self._records.get(request_id)
            return [_explain_record(record, whole=True)] if record else []
        newest = list(self._records.values())[-limit:] if limit > 0 else []
        rows = accumulate(_rows(record.decision) for record in reversed(newest))
        return [_explain_record(r, whole=count <= _MOST_ROWS) for r, count in zip(reversed(newest), rows, strict=True)]


def _rows(decision: Decision) -> int:
    return len(decision.ranking.candidates) + sum(len(addresses) for _, addresses in decision.filtered)


def _explain_record(record: Record, *, whole: bool) -> dict[str, Any]:
    decision = record.decision
    return {
        "time": round(record.time_s, 3),
        "request_id": record.request_id,
        "kind": record.kind,
        "asked_model": record.asked_model,
        "model": record.model,
        "rewritten": record.asked_model != record.model,
        "input_tokens": record.input_tokens,
        "stream": record.stream,
        "tenant": record.tenant,
        "class": record.class_name,
        **(explain(decision) if whole else _outline(decision) | {"candidates": [], "filtered": []}),
        "rows_left_out": 0 if whole else _rows(decision),
        "served_by": record.served_by,
        "outcome": None if record.outcome is None else _explain_end(record.outcome, record.completion),
    }


def _explain_end(outcome: str, completion: Completion | None) -> dict[str, Any]:
    if completion is None:
        return {"outcome": outcome}
    return {
        "outcome": outcome,
        "status": completion.status,
        "flags": list(completion.flags),
        "details": completion.details,
        "attempts": completion.attempts,
        "failed": completion.failed,
        "ttft_s": _rounded(completion.ttft_s),
        "duration_s": _rounded(completion.duration_s),
        "usage": None if completion.usage is None else asdict(completion.usage),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)


def explain(decision: Decision) -> dict[str, Any]:
    """A decision in words and figures."""
    return _outline(decision) | {
        "candidates": sorted(_explain_candidates(decision), key=_by_score),
        "filtered": _explain_filtered(decision.filtered),
    }


def _outline(decision: Decision) -> dict[str, Any]:
    return {
        "pool": decision.pool,
        "policy": decision.policy,
        "choice": decision.choice,
        "endpoints": list(decision.addresses),
        "matched_tokens": decision.chosen_matched_tokens,
        "fallbacks": list(decision.fallbacks),
        "waited_s": round(decision.waited_s, _DIGITS),
        "detour_s": round(decision.detour_s, _DIGITS),
        "prefix_index": "precise" if decision.precise else "approximate",
    }


def _explain_candidates(decision: Decision) -> Iterator[dict[str, Any]]:
    """One row per candidate. Whole arrays are rounded at once: an item at a time takes ten times as long."""
    ranking = decision.ranking
    scores, parts_by_name = ranking.working()
    names, slots = tuple(parts_by_name), ranking.candidates.tolist()
    columns = [np.round(figures, _DIGITS).tolist() for figures in (scores, *parts_by_name.values())]
    for slot, tokens, score, *parts in zip(slots, decision.matched_tokens, *columns, strict=True):
        yield {
            "endpoint": decision.slot_addresses[slot],
            "score": score,
            "matched_tokens": int(tokens),
            "parts": dict(zip(names, parts, strict=True)),
        }


def _by_score(candidate: dict[str, Any]) -> float:
    return -float(candidate["score"])


def explain_unplaceable(nowhere: Unplaceable) -> dict[str, Any]:
    """Why no candidate was left."""
    return {"endpoints": [], "filtered": _explain_filtered(nowhere.filtered)}


def _explain_filtered(filtered: Filtered) -> list[dict[str, Any]]:
    return [{"filter": name, "endpoints": list(addresses)} for name, addresses in filtered]
