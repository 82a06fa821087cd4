"""An engine's Prometheus metrics -> the figures routing needs. Which names mean what stands in families.py.

A page tells its dialect itself, by how its families' names begin. It is about 59 KB; reading it whole with a general
parser costs milliseconds. Only the lines of the dialect's families are looked at: a tenth of a millisecond.

With data parallelism one page speaks for several engines behind one address. Counts and capacities are summed, KV
usage is averaged: a policy chooses among addresses, the engines behind one share their requests out themselves, and
what an address can take is what they can take together. Each engine's own figures go along for people to see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_adapters.families import DIALECTS, Dialect, Source

_CONFIG_LABEL = re.compile(rb'[{,](kv_cache_size_tokens|num_gpu_blocks|block_size)="([^"]{0,40})"')
"""Only the labels that are read, anchored: a general pattern takes minutes over a page made to be slow."""
_ADAPTER_LABEL = re.compile(rb'[{,](max_lora|running_lora_adapters|waiting_lora_adapters)="([^"]{0,65536})"')

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
OTHER_REASON = "other"
"""How requests end, as far as we tell it apart."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One of several engines behind an endpoint: requests, and `kv_used` 0..1."""

    engine: str
    waiting: float | None = None
    running: float | None = None
    kv_used: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One scrape of one endpoint. Counts are requests, `kv_used` 0..1, capacities tokens; None where not reported.

    `progress`: grows with every step, or where steps are not counted with every token; None where neither is told.
    `prefix_queries_tokens`, `prefix_hits_tokens` are counters since the engine's start at `started_at_s` (Unix time),
    as are `prefilled_tokens`, `generated_tokens`, `preemptions` and `finished`, requests by how they ended.
    `hit_ratio`: of prompt tokens, where the engine tells that alone. `engines`: empty where there is only one.
    The adapters' figures are known together, from an engine that has served one: `max_adapters` is None before.
    `stats_port`: where our plugin in the engine pushes its figures, `stats_run`: how its messages are marked.
    """

    waiting: float | None = None
    running: float | None = None
    kv_used: float | None = None
    running_adapters: frozenset[str] = field(default=frozenset(), kw_only=True)
    waiting_adapters: frozenset[str] = field(default=frozenset(), kw_only=True)
    max_adapters: int | None = field(default=None, kw_only=True)
    kv_capacity_tokens: int | None = None
    prefix_queries_tokens: float | None = None
    prefix_hits_tokens: float | None = None
    started_at_s: float | None = None
    progress: float | None = None
    dialect: str = field(default="vllm", kw_only=True)
    engines: tuple[EngineLoad, ...] = field(default=(), kw_only=True)
    hit_ratio: float | None = field(default=None, kw_only=True)
    prefilled_tokens: float | None = field(default=None, kw_only=True)
    generated_tokens: float | None = field(default=None, kw_only=True)
    preemptions: float | None = field(default=None, kw_only=True)
    finished: dict[str, float] = field(default_factory=dict, kw_only=True)
    stats_port: int | None = field(default=None, kw_only=True)
    stats_run: str | None = field(default=None, kw_only=True)


class NotMetrics(Exception):
    """The page has none of the families that an engine reports."""


def parse_metrics(page: bytes) -> EngineFigures:
    """Read one /metrics page. Raises NotMetrics."""
    page = b"\n" + page
    for dialect in DIALECTS:
        if b"\n" + dialect.prefix.encode() in page:
            lines = _Lines(dialect, page)
            if lines.count("running") is not None and lines.waiting() is not None:
                return _figures(lines, page)
    raise NotMetrics("no vllm:num_requests_running and _waiting on the page, nor another engine's")


_Line: TypeAlias = tuple[bytes, float]
"""Labels and value."""
_MOST_ENGINES = 256
"""Shown apart behind one endpoint: more than any machine has."""


class _Lines:
    """The lines of one page that its dialect knows."""

    def __init__(self, dialect: Dialect, page: bytes) -> None:
        self.dialect = dialect
        self._of: dict[bytes, list[_Line]] = {}
        prefix = dialect.prefix.encode()
        for name, labels, text in dialect.line.findall(page):
            if (number := _number(text)) is not None:
                self._of.setdefault(prefix + name, []).append((labels, number))
        label = dialect.engine_label.encode()
        self._engine_label = re.compile(rb"[{,]" + label + rb'="([^"]{0,64})"') if label else None

    def labelled(self, what: str) -> list[_Line]:
        """The lines that tell of something through their labels, if the dialect has any."""
        return self._of.get(self.dialect.labelled.get(what, "").encode(), [])

    def of(self, figure: str) -> list[_Line]:
        """The lines of a figure, under the newest name that is there."""
        for source in self.dialect.sources.get(figure, ()):
            if lines := self._taken(source):
                return lines
        return []

    def _taken(self, source: Source) -> list[_Line]:
        lines = self._of.get(source.family, [])
        return lines if not source.label else [line for line in lines if source.takes(line[0])]

    def by_engine(self, figure: str) -> dict[str, float]:
        """A gauge by engine; of ranks that tell the same, the largest."""
        engines: dict[str, float] = {}
        for labels, number in self.of(figure):
            engine = self.engine(labels)
            engines[engine] = max(engines.get(engine, 0.0), number)
        return engines

    def engine(self, labels: bytes) -> str:
        """The engine that a line is of."""
        told = self._engine_label and self._engine_label.search(labels)
        return told[1].decode("utf-8", "replace") if told else ""

    def count(self, figure: str) -> float | None:
        """A gauge over all engines."""
        engines = self.by_engine(figure)
        return sum(engines.values()) if engines else None

    def share(self, figure: str) -> float | None:
        """The mean of a gauge."""
        engines = self.by_engine(figure)
        return sum(engines.values()) / len(engines) if engines else None

    def total(self, figure: str) -> float | None:
        """A counter over all its lines."""
        lines = self.of(figure)
        return sum(number for _, number in lines) if lines else None

    def waiting(self) -> float | None:
        """Everybody who waits: in the queue, or pushed out."""
        waiting = self.count("waiting")
        if waiting is None and (admitted := self.count("admitted")) is not None:
            waiting = max(0.0, admitted - (self.count("running") or 0.0))
        return None if waiting is None else waiting + (self.count("swapped") or 0.0)


def _figures(lines: _Lines, page: bytes) -> EngineFigures:
    return EngineFigures(
        dialect=lines.dialect.name,
        waiting=lines.waiting(),
        running=lines.count("running"),
        kv_used=_kv_used(lines),
        kv_capacity_tokens=_capacity_tokens(lines),
        engines=_engines(lines),
        prefix_queries_tokens=lines.total("queried"),
        prefix_hits_tokens=lines.total("hits"),
        hit_ratio=lines.share("hit_ratio"),
        prefilled_tokens=lines.total("prefilled"),
        generated_tokens=lines.total("generated"),
        preemptions=lines.total("preempted"),
        finished=_finished(lines),
        started_at_s=_started_at_s(page),
        progress=_progress(lines),
        **_pushed_at(page),
        **_adapters(lines),
    )


def _engines(lines: _Lines) -> tuple[EngineLoad, ...]:
    running = lines.by_engine("running")
    if not 1 < len(running) <= _MOST_ENGINES:
        return ()
    waiting, kv_used = lines.by_engine("waiting"), lines.by_engine("kv_used")
    names = sorted(running, key=lambda name: (len(name), name))  # 2 before 10
    return tuple(EngineLoad(name, waiting.get(name), running[name], kv_used.get(name)) for name in names)


def _progress(lines: _Lines) -> float | None:
    """Steps; for vLLM without them, tokens, of which each step makes some. Others count tokens as requests end."""
    steps = lines.total("steps")
    if steps is not None or lines.dialect.name != "vllm":
        return steps
    tokens = [lines.total("generated"), lines.total("prefilled")]
    return None if tokens == [None, None] else sum(filter(None, tokens))


def _finished(lines: _Lines) -> dict[str, float]:
    finished: dict[str, float] = {}
    label = lines.dialect.reason_label.encode() + b'="'
    for labels, number in lines.of("finished"):
        told = labels.partition(label)[2].partition(b'"')[0].decode("utf-8", "replace")
        reason = told if told in FINISH_REASONS else OTHER_REASON
        finished[reason] = finished.get(reason, 0.0) + number
    return finished


_START = re.compile(rb"\nprocess_start_time_seconds(?:\{[^\n]*\})? ([^\s#]+)")


def _started_at_s(page: bytes) -> float | None:
    found = _START.search(page)
    return _number(found[1]) if found else None


_PUSHED_AT = re.compile(rb'\npointsman_stats_port\{run="([0-9a-f]{1,64})"\} ([0-9.]{1,12})(?=[ \n])')


def _pushed_at(page: bytes) -> dict[str, Any]:
    """Of a server with our plugin and one API process. Several processes would each push a part of the figures."""
    found = _PUSHED_AT.findall(page)
    port = _number(found[0][1]) if len(found) == 1 else None
    return {"stats_port": int(port), "stats_run": found[0][0].decode()} if port and port < _PORTS else {}


_PORTS = 65_536


# -- the KV cache


def _kv_used(lines: _Lines) -> float | None:
    used = lines.share("kv_used")
    blocks, used_blocks = lines.count("kv_blocks"), lines.count("kv_used_blocks")
    if used is None and blocks and used_blocks is not None:
        used = used_blocks / blocks
    return None if used is None else min(used, 1.0)


_LARGEST_FIGURE = 1e18
"""Above any count an engine can reach, and far from where a sum of a page's lines would be infinite."""
_LARGEST_CAPACITY_TOKENS = 1 << 40
"""A trillion tokens of KV cache: what claims more is not believed."""


def _capacity_tokens(lines: _Lines) -> int | None:
    tokens = int(_configured_tokens(lines) or lines.count("kv_tokens") or _tokens_of_blocks(lines))
    return tokens if 0 < tokens <= _LARGEST_CAPACITY_TOKENS else None


def _tokens_of_blocks(lines: _Lines) -> float:
    blocks, block_tokens = lines.by_engine("kv_blocks"), lines.by_engine("block_tokens")
    return sum(count * block_tokens.get(engine, 0.0) for engine, count in blocks.items())


def _configured_tokens(lines: _Lines) -> int:
    """What vLLM's configuration says; 0 if it says nothing that makes sense.

    Its size in tokens is one engine's, its number of blocks that of all engines together, on each one's line.
    """
    sizes: dict[str, int] = {}
    of_blocks = 0
    for labels, _ in lines.labelled("cache_config"):
        fields = dict(_CONFIG_LABEL.findall(labels))
        if fields.get(b"kv_cache_size_tokens", b"None") != b"None":
            sizes[lines.engine(labels)] = _whole(fields[b"kv_cache_size_tokens"])
        else:
            of_blocks = max(of_blocks, _whole(fields.get(b"num_gpu_blocks")) * _whole(fields.get(b"block_size")))
    return sum(sizes.values()) or of_blocks


def _whole(text: bytes | None) -> int:
    """A sensible number of tokens or blocks; 0 for anything else."""
    if text is None or not text.isdigit() or len(text) > _MOST_CAPACITY_DIGITS:
        return 0
    return int(text)


_MOST_CAPACITY_DIGITS = len(str(_LARGEST_CAPACITY_TOKENS))


# -- adapters


def _adapters(lines: _Lines) -> dict[str, Any]:
    """The adapters that the newest line tells of; nothing without one.

    Lines of earlier moments stay on the page, each with the time it was set as its value. vLLM's waiting set repeats
    the running one and lags behind it in what was measured, so it adds little.
    """
    told = lines.labelled("adapters")
    labels = max(told, key=lambda line: line[1])[0] if told else b""
    fields = dict(_ADAPTER_LABEL.findall(labels))
    most = fields.get(b"max_lora", b"")
    if not most.isdigit() or len(most) > _MOST_DIGITS:
        return {}
    return {
        "max_adapters": int(most),
        "running_adapters": _names(fields.get(b"running_lora_adapters", b"")),
        "waiting_adapters": _names(fields.get(b"waiting_lora_adapters", b"")),
    }


_MOST_DIGITS = 6


def _names(joined: bytes) -> frozenset[str]:
    return frozenset(name.strip() for name in joined.decode("utf-8", "replace").split(",") if name.strip())


def _number(text: bytes) -> float | None:
    """A count or share, or None: one NaN or infinity would make every score NaN."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= _LARGEST_FIGURE else None
