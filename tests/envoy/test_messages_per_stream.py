"""The signature: no work per response token."""

from __future__ import annotations

import httpx
from harness import HANG_GUARD_S, System, chat, eventually


def test_two_thousand_tokens_cost_two_messages(system: System) -> None:
    """One stream of 2,000 tokens: exactly 2 ext_proc messages by our count, and the stream ends with the answer."""
    messages = system.total("pointsman_ext_proc_messages_total")
    opened = system.total("pointsman_ext_proc_streams_opened_total")
    answer = httpx.post(
        f"{system.url}/v1/chat/completions", json=chat(max_tokens=2_000, stream=True), timeout=HANG_GUARD_S
    )
    assert answer.text.count('"content":') >= 2_000
    assert answer.text.endswith("data: [DONE]\n\n")
    eventually(lambda: system.total("pointsman_ext_proc_streams_open") == 0, "the stream has ended")
    assert system.total("pointsman_ext_proc_streams_opened_total") - opened == 1
    assert system.total("pointsman_ext_proc_messages_total") - messages == 2
