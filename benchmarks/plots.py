"""Plots of results as SVG, drawn with the standard library alone.

There are two kinds of plots here, and a third in `benchmarks.commands.field`. The same numbers always give the same
file, so a test can compare it with results.json, and a plot follows the reader's light or dark mode. A plotting library
does neither, and needs ten packages.

    dots     a line per row: the median, a whisker from the lowest to the highest, the budget
    curves   lines through points over logarithmic axes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from benchmarks.results import Row

WIDTH = 760
ROW_HEIGHT = 24
LETTER_WIDTH = 6.8
MARGIN = 24
CURVE_HEIGHT = 330
# Colours that colour-blind readers can distinguish, one set for each background.
LIGHT = {"back": "#ffffff", "ink": "#1f2328", "faint": "#d1d9e0", "a": "#0969da", "b": "#bc4c00", "c": "#1a7f37"}
DARK = {"back": "#0d1117", "ink": "#e6edf3", "faint": "#3d444d", "a": "#58a6ff", "b": "#f0883e", "c": "#3fb950"}
SHAPES = """\
text { font: 12px system-ui, sans-serif } .title { font-weight: 600; font-size: 14px }
line { stroke-width: 1 } .whisker { stroke-width: 3; stroke-linecap: round; opacity: .55 }
.budget { stroke-width: 2; stroke-dasharray: 4 3 } polyline { fill: none; stroke-width: 2 }"""


def _colours(of: Mapping[str, str]) -> str:
    marks = {"kept": "c", "missed": "b", "none": "a", "s0": "a", "s1": "b", "s2": "c"}
    rules = [f"rect {{ fill: {of['back']} }} text {{ fill: {of['ink']} }}"]
    rules += [f".grid {{ stroke: {of['faint']} }} .budget {{ stroke: {of['ink']} }}"]
    rules += [
        f".{name} {{ stroke: {of[colour]} }} circle.{name} {{ fill: {of[colour]} }}" for name, colour in marks.items()
    ]
    return "\n".join(rules)


STYLE = f"{SHAPES}\n{_colours(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{_colours(DARK)}\n}}"


@dataclass
class Curve:
    """The points of one line, in ascending order of x."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)


def number(value: float) -> str:
    """Return a number in short form: 1.25, 12.5, 125, 12,500, 1.25 M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g} M"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def dots(title: str, rows: Sequence[Row], unit: str) -> str:
    """Draw the value of each row that its budget limits: the ratio, or without a peer the number itself."""
    ends = [max(row.judged_value, row.high or 0.0, row.budget or 0.0) for row in rows]
    scale = _linear_scale(max(ends, default=1.0))
    left, right = MARGIN + LETTER_WIDTH * max((len(row.name) for row in rows), default=0), WIDTH - MARGIN
    top = 44
    bottom = top + ROW_HEIGHT * len(rows)

    def x(value: float) -> float:
        return left + (right - left) * max(0.0, value) / scale[-1]  # clocks of two processes may differ slightly

    out = [text(MARGIN / 2, 22, title, "title")]
    for tick in scale:
        out.append(line(x(tick), top, x(tick), bottom, "grid"))
        out.append(text(x(tick), bottom + 16, number(tick), anchor="middle"))
    out.append(text(right, bottom + 34, unit, anchor="end"))
    for i, row in enumerate(rows):
        y = top + ROW_HEIGHT * (i + 0.5)
        kind = {True: "kept", False: "missed", None: "none"}[row.is_within_budget]
        out.append(text(left - 10, y + 4, row.name, anchor="end"))
        if row.low is not None and row.high is not None:
            out.append(line(x(row.low), y, x(row.high), y, f"whisker {kind}"))
        out.append(f'<circle cx="{x(row.judged_value):.1f}" cy="{y:.1f}" r="5" class="{kind}"/>')
        if row.budget is not None:
            out.append(line(x(row.budget), y - ROW_HEIGHT / 2, x(row.budget), y + ROW_HEIGHT / 2, "budget"))
    return svg(bottom + 46, out, f"{title}: " + "; ".join(f"{row.name} {number(row.judged_value)}" for row in rows))


def curves(title: str, lines: Sequence[Curve], x_title: str, y_title: str) -> str:
    """Draw lines over logarithmic axes."""
    points = [point for each in lines for point in each.points]
    x_ticks, y_ticks = _decades([x for x, _ in points]), _decades([y for _, y in points])
    left, right, top, bottom = 90.0, float(WIDTH - MARGIN), 66.0, CURVE_HEIGHT - 50.0

    def position(value: float, ticks: Sequence[float], start: float, end: float) -> float:
        share = (math.log10(value) - math.log10(ticks[0])) / (math.log10(ticks[-1]) - math.log10(ticks[0]))
        return start + (end - start) * share

    out = [text(MARGIN / 2, 22, title, "title")]
    for tick in x_ticks:
        x = position(tick, x_ticks, left, right)
        out += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, number(tick), anchor="middle")]
    for tick in y_ticks:
        y = position(tick, y_ticks, bottom, top)
        out += [line(left, y, right, y, "grid"), text(left - 8, y + 4, number(tick), anchor="end")]
    out += [text(right, bottom + 36, x_title, anchor="end"), text(MARGIN / 2, 44, y_title)]
    at = left + 130.0
    for i, each in enumerate(lines):
        placed = [(position(x, x_ticks, left, right), position(y, y_ticks, bottom, top)) for x, y in each.points]
        out.append(f'<polyline class="s{i % 3}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="s{i % 3}"/>' for x, y in placed]
        out += [f'<circle cx="{at:.1f}" cy="40" r="5" class="s{i % 3}"/>', text(at + 10, 44, each.name)]
        at += 36 + LETTER_WIDTH * len(each.name)
    description = "; ".join(f"{each.name} {_description(each.points)}" for each in lines)
    return svg(CURVE_HEIGHT, out, f"{title}: {description}")


def _description(points: Sequence[tuple[float, float]]) -> str:
    """Return the points of a curve as text."""
    return ", ".join(f"{number(y)} at {number(x)}" for x, y in points)


def _linear_scale(end: float) -> list[float]:
    """Return round numbers from 0 to at least `end`, about six of them."""
    rough = max(end, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [step * i for i in range(math.ceil(end / step - 1e-9) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(min(values)) + 1e-9)
    high = math.ceil(math.log10(max(values)) - 1e-9)
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def svg(height: float, parts: Sequence[str], description: str, style: str = STYLE) -> str:
    """Return a picture of these parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img">\n<title>{escape(description)}</title>\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, written: str, kind: str = "", anchor: str = "start") -> str:
    """Return a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(written)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
