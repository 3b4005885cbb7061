"""SVG charts for the report page. Positions across are percentages, those downwards pixels: a chart fills any width, and its text keeps its
size on a phone. Colours come from the page's style sheet, through the classes that a caller passes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

BAR, BAR_GAP, GROUP_GAP, TITLE = 15, 4, 16, 20  # pixels


@dataclass(frozen=True)
class Bar:
    """One bar. low, high: its interval; css: class of its colour; name: for the tooltip."""

    name: str
    css: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """One point. error: half the height of its whisker in units of y, or None."""

    name: str
    css: str
    x: float
    y: float
    error: float | None = None


def ratio_bars(groups: Sequence[tuple[str, Sequence[Bar]]]) -> Markup:
    """Horizontal bars by group, each with its interval and value; a line at 1. An empty chart for no bars."""
    bars = [bar for _, found in groups for bar in found]
    if not bars:
        return Markup("")
    # Room on the right for the value, which stands behind the whisker.
    scale = 78 / max(1.1, *(min(bar.high, 2 * bar.value) for bar in bars))
    parts, y = [], 22
    for title, found in groups:
        parts.append(text(0, y + 12, title, "group"))
        y += TITLE
        for bar in found:
            middle, low, high = y + BAR / 2, bar.low * scale, min(bar.high * scale, 84)
            label = f"{bar.value:.2f}"
            parts.append(f"<g><title>{escape(bar.name)}: {label} [{bar.low:.2f}, {bar.high:.2f}]</title>")
            parts.append(f'<rect class="{bar.css}" x="0" y="{y}" width="{bar.value * scale:.2f}%" height="{BAR}" rx="2"/>')
            parts += [line(low, middle, high, middle, css) for css in ("halo", "whisker")]
            parts += [line(end, middle - 4, end, middle + 4, "whisker") for end in (low, high)]
            parts.append(text(high, middle + 4, label, "value", dx=7) + "</g>")
            y += BAR + BAR_GAP
        y += GROUP_GAP - BAR_GAP
    reference = line(scale, 20, scale, y - GROUP_GAP + 4, "reference") + text(scale, 13, "1 = plain decoding", "tick", dx=-2)
    return svg(y, reference + "".join(parts), "Speed relative to plain decoding")


def lines(series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], x_name: str, y_name: str) -> Markup:
    """Lines of (name, css, [(x, y), ...]); the x values are taken as equally spaced labels."""
    labels = sorted({x for _, _, points in series for x, _ in points})
    frame = Frame((0, len(labels) - 1 or 1), (0, max(y for _, _, points in series for _, y in points)), 230)
    parts = [frame.y_axis(y_name), text(frame.x(len(labels) - 1 or 1), 226, x_name, "tick", anchor="end")]
    parts += [text(frame.x(at), 208, f"{label:g}", "tick", anchor="middle") for at, label in enumerate(labels)]
    for name, css, points in series:
        placed = [(frame.x(labels.index(x)), frame.y(y), y) for x, y in sorted(points)]
        parts += [line(x0, y0, x1, y1, f"stroke {css}") for (x0, y0, _), (x1, y1, _) in zip(placed, placed[1:])]
        parts += [dot(x, y, css, f"{name}: {value:.1f}") for x, y, value in placed]
    return svg(230, "".join(parts), f"{y_name} by {x_name}")


def scatter(points: Sequence[Point], x_name: str, y_name: str) -> Markup:
    """Points with whiskers, each with its number (from 1, in the order given), moved down where numbers would overlap."""
    height = 320
    lows, highs = [point.y - (point.error or 0) for point in points], [point.y + (point.error or 0) for point in points]
    margin = 0.08 * (max(highs) - min(lows)) or 0.5
    frame = Frame((0, max(point.x for point in points) * 1.06), (min(lows) - margin, max(highs) + margin), height)
    parts = [frame.y_axis(y_name), frame.x_axis(x_name)]
    taken: list[tuple[float, float]] = []
    for number, point in sorted(enumerate(points, 1), key=lambda one: -one[1].y):
        x, y = frame.x(point.x), frame.y(point.y)
        if point.error:
            parts.append(line(x, frame.y(point.y - point.error), x, frame.y(point.y + point.error), f"stroke thin {point.css}"))
        parts.append(dot(x, y, point.css, f"{number}. {point.name}: {point.y:.2f} tokens, {point.x:.2f} draft forwards"))
        label_y = y + 4
        while any(abs(label_y - other_y) < 13 and abs(x - other_x) < 4 for other_x, other_y in taken):
            label_y += 13
        taken.append((x, label_y))
        parts.append(text(x, label_y, str(number), "number", dx=9))
    return svg(height, "".join(parts), f"{y_name} against {x_name}")


def fitted(points: Sequence[tuple[float, float]], fixed: float, slope: float, x_name: str, css: str) -> Markup:
    """Measured (size, ms) and the line through them."""
    most = max(x for x, _ in points)
    frame = Frame((0, most), (0, max(*(y for _, y in points), fixed + slope * most)), 170)
    parts = [frame.y_axis("ms"), frame.x_axis(x_name)]
    parts.append(line(frame.x(0), frame.y(fixed), frame.x(most), frame.y(fixed + slope * most), f"stroke {css}"))
    parts += [dot(frame.x(x), frame.y(y), css, f"{x:g}: {y:.2f} ms") for x, y in points]
    return svg(170, "".join(parts), f"Milliseconds by {x_name}")


def histogram(counts: dict[str, float], css: str, name: str) -> Markup:
    """Shares by value, as upright bars. counts: {value: how often}, in order."""
    total, height = sum(counts.values()), 130
    most = max(counts.values()) / total
    step = 100 / len(counts)
    every = math.ceil(len(counts) / 16)
    parts = []
    for at, (value, count) in enumerate(counts.items()):
        share = count / total
        tall, x = 88 * share / most, at * step
        parts.append(f"<g><title>{escape(name)} {escape(value)}: {share:.1%} of rounds</title>")
        parts.append(
            f'<rect class="{css}" x="{x + 0.08 * step:.2f}%" y="{108 - tall:.1f}" width="{0.84 * step:.2f}%" height="{tall:.1f}" rx="1"/>'
        )
        if step > 7:
            parts.append(text(x + step / 2, 103 - tall, f"{share:.0%}" if share >= 0.005 else "<1%", "tick", anchor="middle"))
        if at % every == 0:
            parts.append(text(x + step / 2, 124, value, "tick", anchor="middle"))
        parts.append("</g>")
    return svg(height, "".join(parts), name)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], unit: str) -> Markup:
    """Horizontal stacked bars of (title, [(name, css, value), ...]), on one scale."""
    scale = 100 / max(sum(value for _, _, value in parts) for _, parts in rows)
    out, y = [], 0
    for title, parts in rows:
        total, x = sum(value for _, _, value in parts), 0.0
        out.append(text(0, y + 13, f"{title}: {total:.1f} {unit}", "group"))
        for name, css, value in parts:
            out.append(f'<rect class="{css} part" x="{x:.2f}%" y="{y + 20}" width="{value * scale:.2f}%" height="24">')
            out.append(f"<title>{escape(name)}: {value:.2f} {unit} ({value / total:.0%})</title></rect>")
            x += value * scale
        y += 58
    return svg(y - 10, "".join(out), f"{unit} by phase")


# ------------------------------------------------------------ parts


@dataclass(frozen=True)
class Frame:
    """The plotting area: data ranges to percent across (9 to 97) and pixels down (22 to height - 38)."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    height: int

    def x(self, value: float) -> float:
        low, high = self.x_range
        return 9 + 88 * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - 38 - (self.height - 60) * (value - low) / ((high - low) or 1)

    def y_axis(self, name: str) -> str:
        grid = [line(9, self.y(tick), 97, self.y(tick), "gridline") for tick in ticks(*self.y_range)]
        marks = [text(9, self.y(tick) + 4, f"{tick:g}", "tick", anchor="end", dx=-6) for tick in ticks(*self.y_range)]
        return "".join(grid + marks) + text(0, 12, name, "tick")

    def x_axis(self, name: str) -> str:
        marks = [text(self.x(tick), self.height - 22, f"{tick:g}", "tick", anchor="middle") for tick in ticks(*self.x_range)]
        return "".join(marks) + text(97, self.height - 5, name, "tick", anchor="end")


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within [low, high], about `wanted` of them."""
    rough = (high - low) / wanted or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [round(step * at, 10) for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def svg(height: float, inner: str, title: str) -> Markup:
    return Markup(f'<svg class="chart" role="img" aria-label="{escape(title)}" width="100%" height="{height:.0f}">{inner}</svg>')


def line(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    return f'<line class="{css}" x1="{x0:.2f}%" y1="{y0:.1f}" x2="{x1:.2f}%" y2="{y1:.1f}"/>'


def dot(x: float, y: float, css: str, title: str) -> str:
    return f'<circle class="{css} dot" cx="{x:.2f}%" cy="{y:.1f}" r="5"><title>{escape(title)}</title></circle>'


def text(x: float, y: float, content: str, css: str, anchor: str = "start", dx: float = 0) -> str:
    return f'<text class="{css}" x="{x:.2f}%" y="{y:.1f}" dx="{dx:g}" text-anchor="{anchor}">{escape(content)}</text>'


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """HTML list of (name, css)."""
    items = "".join(
        f'<li><svg width="12" height="12"><rect class="{css}" width="12" height="12" rx="2"/></svg>{escape(name)}</li>'
        for name, css in entries
    )
    return Markup(f'<ul class="legend">{items}</ul>')
