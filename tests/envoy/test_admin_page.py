"""docs/admin-api.md against what a running system answers: the same fields, and each of them explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import HANG_GUARD_S, System, chat

PAGE = (Path(__file__).parents[2] / "docs" / "admin-api.md").read_text(encoding="utf-8")
_EXAMPLE = re.compile(r"```\n\$ curl [^\n]*/v1/(\S+?)[ '?\n][^\n]*\n?(\{.*?\n\})\n```", re.DOTALL)


def shown() -> Iterator[tuple[str, Any]]:
    """Each answer on the page, with the end of its path; without what `...` stands for."""
    for path, text in _EXAMPLE.findall(PAGE):
        yield path, json.loads(re.sub(r",?\s*\.\.\.", "", text))


def fields(document: Any) -> set[str]:
    """The names of all fields, but not pools' names and not the parts that are a policy's own."""
    if isinstance(document, list):
        return {name for entry in document for name in fields(entry)}
    if not isinstance(document, dict):
        return set()
    below = {name for key, value in document.items() if key != "parts" for name in fields(value)}
    return (document.keys() - {"chat"}) | below


@pytest.fixture(scope="module")
def told(system: System) -> dict[str, Any]:
    """The same answers by a running system."""
    url, admin = f"{system.url}/v1/chat/completions", f"{system.admin_url}/v1"
    served = [httpx.post(url, json=chat("much to read " * 99), timeout=HANG_GUARD_S) for _ in range(2)]
    assert httpx.post(url, json=chat(model="nope"), timeout=HANG_GUARD_S).status_code == 404
    request_id = served[-1].headers["x-pointsman-request-id"]
    system.decision(request_id)
    fleet = httpx.get(f"{admin}/fleet").json()
    drained = fleet["endpoints"][0]["endpoint"]
    assert httpx.post(f"{admin}/endpoints/{drained}:drain").status_code == 200
    return {
        "fleet": fleet,
        "decisions": httpx.get(f"{admin}/decisions", params={"request_id": request_id}).json(),
        "refusals": httpx.get(f"{admin}/refusals").json(),
        "explain": httpx.post(f"{admin}/explain", json=chat()).json(),
        "error": httpx.post(f"{admin}/explain", json=chat(model="nope")).json(),
    }


EXPLAIN_THEMSELVES = {
    "request_id", "score", "parts", "attempts", "ttft_s", "duration_s", "prompt_tokens", "completion_tokens",
    "cached_tokens", "decisions", "refusals", "zones",
}  # fmt: skip


@pytest.mark.parametrize("path", ["fleet", "decisions", "refusals", "explain"])
def test_an_answer_has_the_fields_that_the_page_shows(told: dict[str, Any], path: str) -> None:
    """No more and no fewer."""
    examples = [document for where, document in shown() if where == path]
    answers = [told[path], told["error"]] if path == "explain" else [told[path]]
    assert len(examples) == len(answers)
    for example, answer in zip(examples, answers, strict=True):
        assert fields(example) == fields(answer)


@pytest.mark.parametrize("path", ["fleet", "decisions", "refusals", "explain"])
def test_every_field_is_explained(told: dict[str, Any], path: str) -> None:
    """In words, beside the example."""
    words = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    missing = {field for field in fields(told[path]) if f"`{field}`" not in words}
    assert missing <= EXPLAIN_THEMSELVES
