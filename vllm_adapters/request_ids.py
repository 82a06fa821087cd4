"""How vLLM 0.32 names a request that came with an `X-Request-Id`, in its statistics as in its answers.

A chat is `chatcmpl-ID`; each of a batch `chatcmpl-ID_2`. A completion is `cmpl-ID-0`: it may have several prompts. All
choices of one prompt (`n`) have one name. Not here: the other APIs, whose answers always tell their usage.
"""

from __future__ import annotations

import re

_CHAT, _COMPLETION = "chatcmpl-", "cmpl-"
_OF_BATCH = re.compile(r"_\d{1,6}$")
_OF_PROMPTS = re.compile(r"-\d{1,6}$")


def sent_ids(name: str) -> tuple[str, ...]:
    """The ids that a request of this name may have come with, the likeliest first; none if it is not of this form."""
    if name.startswith(_CHAT):
        whole = name.removeprefix(_CHAT)
        of_batch = _OF_BATCH.sub("", whole)
        return (whole,) if of_batch == whole else (whole, of_batch)
    if name.startswith(_COMPLETION) and _OF_PROMPTS.search(name):
        return (_OF_PROMPTS.sub("", name.removeprefix(_COMPLETION)),)
    return ()
