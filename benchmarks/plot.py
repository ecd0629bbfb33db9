"""Line charts written directly as SVG: a title, two axes, a line with points per series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 48, 48
COLORS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed")

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, log_x: bool = False) -> str:
    """Return an SVG document. Points are (x, y) with y >= 0; `log_x` spaces doublings evenly (x >= 1)."""
    xs = sorted({x for points in series.values() for x, _ in points})
    top = nice_ceiling(max(y for points in series.values() for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        low, high, at = (math.log2(v) for v in (xs[0], xs[-1], x)) if log_x else (0.0, xs[-1], x)
        share = (at - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, "start", 'font-size="14" font-weight="600"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"),
        _text(LEFT, TOP - 10, y_label, "start", 'fill="#555555"'),
    ]
    for step in range(5):
        value = top * step / 4
        _, y = place(xs[0] or 1, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:,.0f}", "end"))
    shown = -math.inf
    for x in xs:
        at, base = place(x, 0)
        if at - shown > 36:  # keep labels apart
            shown = at
            parts.append(_text(at, base + 18, f"{x:,.0f}", "middle"))
    for index, (name, points) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        spots = [place(x, y) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in spots]
        left = WIDTH - RIGHT - 90
        parts.append(f'<rect x="{left}" y="{12 + 16 * index}" width="12" height="4" fill="{color}"/>')
        parts.append(_text(left + 18, 18 + 16 * index, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def nice_ceiling(value: float) -> float:
    """Round up to 1, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    scale = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(scale * step for step in (1, 2, 3, 4, 5, 6, 8, 10) if scale * step >= value)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
