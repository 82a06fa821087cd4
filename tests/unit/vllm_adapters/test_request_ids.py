"""Names that vLLM gives requests, and the ids they came with."""

from __future__ import annotations

import pytest

from vllm_adapters.request_ids import sent_ids


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("chatcmpl-0b7e-11", ("0b7e-11",)),
        ("chatcmpl-mine_2", ("mine_2", "mine")),
        ("chatcmpl-", ("",)),
        ("cmpl-0b7e-11-0", ("0b7e-11",)),
        ("cmpl-0b7e-11-12", ("0b7e-11",)),
        ("cmpl-mine", ()),
        ("resp_1234", ()),
        ("", ()),
    ],
)
def test_an_id_is_found_in_the_name(name: str, ids: tuple[str, ...]) -> None:
    """Whatever it looks like itself; where it may be one or the other, both."""
    assert sent_ids(name) == ids
