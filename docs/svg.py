"""Charts as SVG: plain functions from numbers to text, without a library, in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

INK, MUTED, GRID, PAPER = "#24292f", "#6e7781", "#d0d7de", "#ffffff"
COLOURS = ("#2f5fd0", "#c2571a", "#12805c", "#8a3ffc", "#b3264a", "#6b6b00", "#00707f", "#5c5f66")
"""Colours with a contrast of 4.5 or more on white."""
FONT = "font-family='system-ui, sans-serif'"


def picture(width: int, height: int, parts: Iterable[str], title: str, digest: str) -> str:
    """Return an SVG with a white ground, which names itself and the digest of its data."""
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' {FONT}>\n"
        f"<!-- data: {digest} -->\n<title>{html.escape(title)}</title>\n"
        f"<rect width='{width}' height='{height}' fill='{PAPER}'/>\n{body}\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", fill: str = INK, bold: bool = False
) -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{fill}'{weight}>{html.escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", round_: int = 0) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(width, 0):.1f}' height='{height:.1f}' rx='{round_}' fill='{fill}' stroke='{stroke}'/>"


def line(points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1.5, dash: str = "") -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='{width}'{dashes}/>"


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line with a head at its second end."""
    angle = math.atan2(y2 - y1, x2 - x1)
    wings = [(x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in ((x2, y2), *wings))
    return line([(x1, y1), (x2, y2)], MUTED) + f"<polygon points='{head}' fill='{MUTED}'/>"


class Axes:
    """A plot area with linear or logarithmic axes."""

    def __init__(
        self,
        area: tuple[float, float, float, float],
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        """Make axes in an area of left, top, right and bottom, from the least to the greatest values."""
        self.area, self.x, self.y, self.logs = area, x, y, (log_x, log_y)

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, top, right, bottom = self.area
        return left + (right - left) * _part(x, self.x, self.logs[0]), bottom - (bottom - top) * _part(
            y, self.y, self.logs[1]
        )

    def frame(self, xs: Sequence[float], ys: Sequence[float], x_title: str, y_title: str) -> list[str]:
        """Return the grid at some values, with their numbers and the titles of the axes."""
        left, top, right, bottom = self.area
        parts = []
        for value in xs:
            place, _ = self.at(value, self.y[0])
            parts += [
                line([(place, top), (place, bottom)], GRID, width=1),
                text(place, bottom + 16, short(value), anchor="middle", fill=MUTED, size=11),
            ]
        for value in ys:
            _, place = self.at(self.x[0], value)
            parts += [
                line([(left, place), (right, place)], GRID, width=1),
                text(left - 6, place + 4, short(value), anchor="end", fill=MUTED, size=11),
            ]
        parts.append(text((left + right) / 2, bottom + 34, x_title, anchor="middle"))
        parts.append(text(left, top - 10, y_title))
        return parts


def _part(value: float, ends: tuple[float, float], is_log: bool) -> float:
    low, high = (math.log10(end) for end in ends) if is_log else ends
    return ((math.log10(value) if is_log else value) - low) / (high - low)


def short(value: float) -> str:
    """Return a number in few characters."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"


def legend(x: float, y: float, names: Sequence[tuple[str, str]], *, columns: int = 1, width: float = 150) -> list[str]:
    """Return names beside their colours, in columns."""
    parts = []
    for index, (name, colour) in enumerate(names):
        left, top = x + width * (index % columns), y + 16 * (index // columns)
        parts += [box(left, top - 9, 10, 10, colour), text(left + 15, top, name, size=11)]
    return parts
