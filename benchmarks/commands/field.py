"""The picture of all rows: a square for each, in two halves, one for each load, coloured by the ratio to redis-server.

Commands are in a field for each place, a line for each group; shapes are in one field, with a line for each place and
session. A row that misses its budget has a frame, and one without a number a cross. Each square has its numbers as a
title, which a browser shows if the file itself is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from benchmarks.commands.rows import LOADS, Run, SpeedRow
from benchmarks.plots import DARK, LIGHT, MARGIN, SHAPES, WIDTH, line, svg, text

# The upper ends of the colours' ranges; the last one has no end.
ENDS = (0.5, 1.0, 1.5, 3.0, 10.0, 30.0)
# From blue to brown, which colour-blind readers can distinguish, too.
COLOURS: Mapping[str, Sequence[str]] = {
    "light": ("#0550ae", "#4493f8", "#a5d1ff", "#ffd8a8", "#f28c28", "#c2410c", "#6b1d00"),
    "dark": ("#1158c7", "#4493f8", "#a9cdf5", "#f5d0a0", "#f08c2e", "#d9480f", "#8a2a0a"),
}
SQUARE, STEP = 14, 17
LABELS = 150
SHAPE_LABELS = 290
PER_LINE = (WIDTH - MARGIN - LABELS) // STEP


def _style() -> str:
    def rules(name: str, of: Mapping[str, str]) -> str:
        colours = [f".r{at} {{ fill: {colour} }}" for at, colour in enumerate(COLOURS[name])]
        shapes = f"rect {{ fill: {of['back']} }} text {{ fill: {of['ink']} }} line {{ stroke: {of['ink']} }}"
        return "\n".join([shapes, f".missed {{ fill: none; stroke: {of['ink']}; stroke-width: 1.5 }}", *colours])

    return f"{SHAPES}\n{rules('light', LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{rules('dark', DARK)}\n}}"


def drawn(run: Run) -> str:
    """Return the picture as SVG."""
    out = [text(MARGIN / 2, 22, "The time of a request, sparkis / redis-server", "title"), *_legend(44)]
    y = 92.0
    commands = [row for row in run.rows if row.group != row.name]
    for place, rows in groupby(commands, key=lambda row: row.place):
        out.append(text(MARGIN / 2, y, f"Every command: {place}", "title"))
        y += 10
        # The command table has the groups in no order of theirs.
        for group, of_group in groupby(sorted(rows, key=lambda row: row.group), key=lambda row: row.group):
            found = list(of_group)
            out.append(text(MARGIN / 2, y + SQUARE - 2, group))
            for at, row in enumerate(found):
                out += _square(row, LABELS + at % PER_LINE * STEP, y + at // PER_LINE * STEP)
            y += STEP * -(-len(found) // PER_LINE)
        y += 24
    shapes = [row for row in run.rows if row.group == row.name]
    out.append(text(MARGIN / 2, y, "One request of each shape, of 1, 20 and 1,000 elements", "title"))
    names = list(dict.fromkeys(row.name for row in shapes))
    for at, name in enumerate(names):
        out.append(text(_shape_x(at, 0), y + 20 + 12 * (at % 2), name))
    y += 40
    for where, rows in groupby(shapes, key=lambda row: row.place_and_session):
        out.append(text(MARGIN / 2, y + SQUARE - 2, where))
        sizes: dict[str, int] = {}
        for row in rows:
            nth = sizes[row.name] = sizes.get(row.name, -1) + 1
            out += _square(row, _shape_x(names.index(row.name), nth), y)
        y += STEP
    return svg(y + 12, out, _description(run), _style())


def _shape_x(shape: int, size: int) -> float:
    return SHAPE_LABELS + shape * (3 * STEP + 12) + size * STEP


def _legend(y: float) -> Iterator[str]:
    """Draw the colours with the ends of their ranges, the frame and the cross."""
    for at in range(len(ENDS) + 1):
        x = MARGIN / 2 + at * 62
        yield f'<rect x="{x:.1f}" y="{y}" width="{SQUARE}" height="{SQUARE}" class="r{at}"/>'
        yield text(x + SQUARE + 4, y + SQUARE - 2, f"≤ {ENDS[at]:g}" if at < len(ENDS) else f"> {ENDS[-1]:g}")
    x = MARGIN / 2 + (len(ENDS) + 1) * 62
    yield _frame(x, y, SQUARE)
    yield text(x + SQUARE + 4, y + SQUARE - 2, "misses its budget")
    yield from _cross(x + 130, y)
    yield text(x + 134 + SQUARE, y + SQUARE - 2, "fails")
    yield text(MARGIN / 2, y + 2 * SQUARE + 2, f"Left half: {LOADS[0].name}; right half: {LOADS[1].name}.")


def _square(row: SpeedRow, x: float, y: float) -> Iterator[str]:
    yield f"<g><title>{escape(said(row))}</title>"
    if row.error:
        yield from _cross(x, y)
    half = SQUARE / 2
    for at, timing in enumerate(row.timings):
        colour = sum(timing.ratio > end for end in ENDS)
        yield f'<rect x="{x + at * half:.1f}" y="{y:.1f}" width="{half:g}" height="{SQUARE}" class="r{colour}"/>'
        if timing.excess > 1:
            yield _frame(x + at * half, y, half)
    yield "</g>"


def _frame(x: float, y: float, width: float) -> str:
    inner = f'width="{width - 1.5:g}" height="{SQUARE - 1.5}"'
    return f'<rect x="{x + 0.75:.2f}" y="{y + 0.75:.2f}" {inner} class="missed"/>'


def _cross(x: float, y: float) -> Iterator[str]:
    yield line(x + 2, y + 2, x + SQUARE - 2, y + SQUARE - 2, "failed")
    yield line(x + 2, y + SQUARE - 2, x + SQUARE - 2, y + 2, "failed")


def said(row: SpeedRow) -> str:
    """Return a row with its numbers as a sentence."""
    size = f" of {row.size:,}" if row.group == row.name else ""
    if row.error:
        return f"{row.name}{size}, {row.place_and_session}: {row.error}"
    loads = "; ".join(
        f"{load.name} {timing.ratio:.2f} ({timing.low:.2f}-{timing.high:.2f}), {timing.ours_us:g} µs"
        for load, timing in zip(LOADS, row.timings, strict=True)
    )
    return f"{row.name}{size}, {row.place_and_session}: {loads}; {row.budget or 'no budget'}"


def _description(run: Run) -> str:
    return f"The time of each request, sparkis / redis-server: {run.kept}"
