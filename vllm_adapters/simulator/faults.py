"""The misbehaviour a simulated engine can be told to show, by `POST /sim/faults` or per request by a header."""

from __future__ import annotations

from typing import Annotated

import msgspec

HEADER = "x-sim-fault"
"""A request with this header shows the faults in it, and none of the server's own."""

_Status = Annotated[int, msgspec.Meta(ge=400, le=599)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong, in the order in which it would.

    `delay_headers_s`: real seconds before anything is done. `freeze`: accept and never answer; the server's own
    stops its steps and all its endpoints but `/sim`, until cleared. `reset_before_headers`: a TCP reset once the
    request was read. `status`: answer this at once. `cut_after_tokens`: close mid-answer (a whole answer: before
    it). `hold`: generate so many tokens, then keep the answer open until `POST /sim/release`. `gzip`: compress the
    answer, a stream event by event, for who accepts that (vLLM never does; what runs in front of it may).
    Only for the server: `refuse_s`: close its socket and its idle connections for so long, once;
    `metrics_status`: what `/metrics` answers; `silent_pushes`: nothing is pushed.
    """

    status: _Status | None = None
    delay_headers_s: _Seconds = 0.0
    reset_before_headers: bool = False
    cut_after_tokens: _Count | None = None
    freeze: bool = False
    hold: _Count | None = None
    gzip: bool = False
    refuse_s: _Seconds = 0.0
    metrics_status: _Status | None = None
    silent_pushes: bool = False


NONE = Faults()


def read(document: bytes | str) -> Faults:
    """The faults in a JSON document. Raises msgspec.DecodeError (or its ValidationError)."""
    return msgspec.json.decode(document, type=Faults)
