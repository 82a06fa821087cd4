"""The messages, as they travel: msgpack maps. Bounded by construction, so that a receiver may refuse what is larger.

A message holds the whole present state, so lost ones do no harm to levels; a gap in `seq` shows them. What happened
since the message before is in it as well, and is lost with it; `totals` counts it all.
"""

from __future__ import annotations

import msgspec

VERSION = 1
HEARTBEAT_S = 1.0
"""A message comes at least so often, whether anything changed or not."""
LOADING, SERVING, DRAINING = "loading", "serving", "draining"
PORT_GAUGE = "pointsman_stats_port"
"""On the engine's metrics page: the port of the socket; its label `run` is that of the messages."""


class Engine(msgspec.Struct, omit_defaults=True):
    """One engine core: the only one, or one of several with data parallelism. Figures are as of its newest step.

    `kv_used`, `kv_peak`: 0..1, now and at most since the message before. Counters are since the start and count what
    vLLM's metrics of the same names count; `prefix_*`, `prompt` and `generated` are tokens. Adapters: requests by name.
    """

    index: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None
    kv_peak: float | None = None
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt: int = 0
    generated: int = 0
    preemptions: int = 0
    lora_running: dict[str, int] = {}
    lora_waiting: dict[str, int] = {}
    max_loras: int | None = None
    max_num_seqs: int | None = None
    kv_capacity_tokens: int | None = None


class Finished(msgspec.Struct, array_like=True):
    """A request that ended. Tokens; seconds. `request_id` is vLLM's own."""

    request_id: str
    reason: str
    prompt: int
    generated: int
    cached: int
    e2e_s: float
    queued_s: float


class Totals(msgspec.Struct, omit_defaults=True):
    """Since the start: requests with a first token, requests ended, by how they did, and the tokens of those."""

    first_tokens: int = 0
    finished: dict[str, int] = {}
    prompt: int = 0
    generated: int = 0


class Message(msgspec.Struct, omit_defaults=True):
    """The state of a server.

    `run`: drawn when the process started. `started_at_s`: Unix time, as on the metrics page. `server_port`: where its
    API listens, as far as its command line says. `first_tokens`, `ttfts_s`, `finished`: since the message before;
    `left_out`: requests that ended and are not listed. `largest_request_tokens`: of those that ended, since the message
    before. `troubles`: figures that could not be taken, since the start.
    """

    v: int = 0  # omitted if it were the default
    run: str = ""
    seq: int = 0
    phase: str = ""
    started_at_s: float | None = None
    server_port: int | None = None
    engines: list[Engine] = []
    first_tokens: int = 0
    ttfts_s: list[float] = []
    finished: list[Finished] = []
    left_out: int = 0
    largest_request_tokens: int = 0
    kv_bytes_per_token: float | None = None
    totals: Totals = msgspec.field(default_factory=Totals)
    troubles: int = 0


encode = msgspec.msgpack.Encoder().encode
