"""A comparison as pictures: PNG files, and one page of HTML that holds tables and pictures and needs nothing else.

Needs matplotlib (the `plots` extra). One seed is drawn, the first: means over time of several runs would show a fleet
that never was.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from extproc.replay.comparison import Row, Table
from extproc.replay.comparison import winners as best_of
from extproc.replay.figures import Bounds
from extproc.replay.screen import COLUMNS, cell, legend

_DPI = 110
_MOST_IN_LEGEND = 16
_STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:90em}table{border-collapse:collapse;font-size:90%}"
    "td,th{border:1px solid #ccc;padding:.2em .5em;text-align:right}td:first-child{text-align:left}img{max-width:100%}"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG and what to call its file."""

    name: str
    png: bytes

    def as_url(self) -> str:
        """The picture inside its own address, so that a page needs no other file."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def write(folder: Path, tables: Sequence[Table], bounds: Bounds, heading: str) -> Path:
    """Write the pictures and `index.html`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, table in enumerate(tables, 1):
        pictures = list(_pictures(table, number))
        for picture in pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.png)
        sections.append(_section(table, pictures))
    page = folder / "index.html"
    page.write_text(_page(heading, sections, legend(bounds, tables)), encoding="utf-8")
    return page


def _pictures(table: Table, number: int) -> Iterator[Picture]:
    yield Picture(f"{number}-ttft", _png(_ttft(table)))
    for row in table.rows:
        if row.results[0].curves.at_s:
            yield Picture(f"{number}-{row.policy.replace('/', '-')}", _png(_over_time(row)))


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _ttft(table: Table) -> Figure:
    """Distribution of TTFT, a line per policy."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for row in table.rows:
        values = row.results[0].curves.ttft_s
        axes.plot(values, np.linspace(0, 1, len(values)), label=row.policy)
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", title=table.group.title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _over_time(row: Row) -> Figure:
    """Requests inside and hit rate, a line per engine."""
    curves = row.results[0].curves
    figure = Figure(figsize=(9, 5), layout="constrained")
    load, hit = figure.subplots(2, 1, sharex=True)
    for number, (loads, hits) in enumerate(zip(curves.load, curves.hit, strict=True), 1):
        load.plot(curves.at_s, loads, linewidth=0.8, label=f"engine {number}")
        hit.plot(curves.at_s, [np.nan if one is None else 100 * one for one in hits], linewidth=0.8)
    load.set(ylabel="requests inside", title=row.policy)
    if len(curves.load) <= _MOST_IN_LEGEND:
        load.legend(fontsize="x-small", ncols=2)
    hit.set(ylabel="prefix hits, %", xlabel="time, s")
    return figure


def _section(table: Table, pictures: Sequence[Picture]) -> str:
    best = best_of(table)
    head = "".join(f"<th>{html.escape(column.heading)}</th>" for column in COLUMNS)
    rows = "".join(
        f"<tr><td>{html.escape(row.policy)}</td>"
        + "".join(f"<td>{cell(column, row, best, bold='<b>{}</b>')}</td>" for column in COLUMNS)
        + "</tr>"
        for row in table.rows
    )
    images = "".join(f'<p><img alt="{html.escape(picture.name)}" src="{picture.as_url()}">' for picture in pictures)
    title = f"{table.group.trace.name}, {table.group.title}"
    about = f"{table.group.rate:.3g} per s, {table.group.fleet.engines} engines, ideal hit {table.ideal_hit:.1%}"
    return f"<h2>{html.escape(title)}</h2><p>{about}</p><table><tr><th>policy</th>{head}</tr>{rows}</table>{images}"


def _page(heading: str, sections: Sequence[str], explained: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Replay</title><style>{_STYLE}</style>'
        f"<h1>Replay</h1><p><code>{html.escape(heading)}</code></p>"
        f"<pre>{html.escape(explained)}</pre>{''.join(sections)}</html>\n"
    )
