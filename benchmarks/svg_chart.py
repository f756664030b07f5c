"""A line chart as SVG text: axes, ticks, lines and a legend. Enough for a figure, and no dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 56, 48
_LEGEND_WIDTH = 145
_COLORS: Final = ("#1b6ca8", "#d1495b", "#3a7d44", "#b07d2b", "#6d4c9f", "#555555")
_NUM_TICKS: Final = 6


@dataclass(frozen=True, slots=True)
class Line:
    """Points in ascending order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Draw `lines` into one SVG document; the y axis starts at 0 unless the values lie close together."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_ticks = _ticks(min(xs), max(xs))
    # Nearly equal values would otherwise look alike.
    y_ticks = _ticks(min(ys) if min(ys) > 0.4 * max(ys) else 0.0, max(ys))

    def x_of(x: float) -> float:
        low, high = x_ticks[0], x_ticks[-1]
        return _LEFT + (x - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle", 'font-size="14"'),
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 10, x_label, "middle"),
        _text(16, _HEIGHT / 2, y_label, "middle", f'transform="rotate(-90 16 {_HEIGHT / 2})"'),
    ]
    parts += [_text(x_of(tick), _HEIGHT - _BOTTOM + 18, f"{tick:g}", "middle") for tick in x_ticks]
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    for index, line in enumerate(lines):
        color = _COLORS[index % len(_COLORS)]
        dashes = ' stroke-dasharray="6 4"' if line.is_dashed else ""
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        x, y = _LEFT + _LEGEND_WIDTH * index, _TOP - 14
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(_text(x + 30, y, line.name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    rough = (high - low or abs(high) or 1.0) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [round(index * step, 10) for index in range(first, last + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
