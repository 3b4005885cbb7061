"""Draws the deepest and the widest draft tree of a trace: as a PNG, and as text in the terminal.

Both show each token with its draft probability given its parent; the path that the target accepted is marked, and its bonus token added.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from eval.trace import DraftRound, TraceError, deepest_and_widest, read_trace, tokens_before

EXAMPLES = """examples:
  python eval/picture.py --trace trace.jsonl --tokenizer .cache/smollm2-135m-instruct --out trees.png
"""
SHOWN_CONTEXT = 70  # characters of the text before the tree

# Sizes in inches of the PNG, and the colours of its parts.
ROW, FONT, CHAR, GAP, PADDING = 0.26, 8.0, 0.068, 0.42, 0.35
INK, QUIET, EDGE, ACCEPTED, ACCEPTED_FILL, FILL = "#1c2733", "#6b7683", "#b9c2cc", "#0b7a4b", "#d6f2e3", "#f4f6f8"


@dataclass(frozen=True)
class Shown:
    """A tree with everything that both drawings need: its nodes, and behind them the bonus token as one more child of the accepted path.

    names: visible text, parents, depths: per node, the bonus last
    """

    title: str
    context: str
    tree: DraftRound
    names: list[str]

    @property
    def bonus(self) -> int:
        return len(self.tree.tokens)

    @property
    def parents(self) -> list[int]:
        return [*self.tree.parents, self.tree.accepted[-1]]

    @property
    def depths(self) -> list[int]:
        return [*self.tree.depths, self.tree.depths[self.tree.accepted[-1]] + 1]

    def children(self) -> list[list[int]]:
        """The likeliest first, but the bonus before all, so that the path to it runs straight."""
        below = [*self.tree.children(), []]
        below[self.tree.accepted[-1]].insert(0, self.bonus)
        return below

    def marked(self, node: int) -> bool:
        return node == self.bonus or node in self.tree.accepted

    def detail(self, node: int) -> str:
        """What stands behind the token: its draft probability, nothing at the root."""
        if node == self.bonus:
            return "bonus"
        return "" if node == 0 else probability_text(self.tree.probability(node))

    def describe(self) -> str:
        tree = self.tree
        layers = ", ".join(f"{width} (x{count})" if count > 1 else str(width) for width, count in runs(tree.widths))
        accepted = len(tree.accepted) - 1
        tokens = "token" if accepted == 1 else "tokens"
        return (
            f"{len(tree.tokens)} nodes, depth {tree.depth}, layers of {layers}; {accepted} drafted {tokens} accepted, then the bonus token"
        )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console()
    try:
        rounds = read_trace(args.trace)
        chosen = deepest_and_widest(rounds)
    except TraceError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return 1
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    titles = ("The deepest tree", "The widest tree")
    shown = [prepare(title, rounds, tree, tokenizer.decode) for title, tree in zip(titles, chosen, strict=True)]
    for one in shown:
        print_tree(one, console)
    draw(shown, args.out)
    console.print(f"Picture: {args.out}", soft_wrap=True)
    return 0


def prepare(title: str, rounds: list[DraftRound], tree: DraftRound, decode: Callable[[list[int]], str]) -> Shown:
    context = visible(decode(tokens_before(rounds, tree)), space=" ")
    context = context if len(context) <= SHOWN_CONTEXT else "…" + context[-SHOWN_CONTEXT:]
    return Shown(title, context, tree, [name_of(token, decode) for token in [*tree.tokens, tree.bonus]])


def name_of(token: int, decode: Callable[[list[int]], str]) -> str:
    """Visible text of one token; a token that is only a part of a character is shown by its number."""
    text = decode([token])
    return visible(text) if text and "\ufffd" not in text else f"#{token}"


def visible(text: str, space: str = "␣") -> str:
    """Spaces as `space`, line ends and other control characters as escapes."""
    return "".join(space if char == " " else char if char.isprintable() else repr(char)[1:-1] for char in text)


# ---- terminal ----


def print_tree(shown: Shown, console: Console) -> None:
    console.print()
    console.print(Text(shown.title, style="bold"))
    console.print(Text(shown.describe()))
    console.print(Text(f"after: {shown.context}", style="dim"))
    console.print(text_tree(shown))


def text_tree(shown: Shown) -> Tree:
    """A rich tree; a chain of only children shares one line, or deep trees would leave the screen. ● marks the accepted path."""
    children = shown.children()

    def grow(node: int, parent: Tree | None) -> Tree:
        label = text_node(shown, node)
        while len(children[node]) == 1:
            node = children[node][0]
            label = label + Text(" → ", style="dim") + text_node(shown, node)
        branch = Tree(label, guide_style="dim") if parent is None else parent.add(label)
        for child in children[node]:
            grow(child, branch)
        return branch

    return grow(0, None)


def text_node(shown: Shown, node: int) -> Text:
    style = "bold magenta" if node == shown.bonus else "bold green" if shown.marked(node) else ""
    label = Text(("● " if shown.marked(node) else "") + shown.names[node], style=style)
    return label.append(f" {shown.detail(node)}", style=style or "dim") if node > 0 else label


def probability_text(probability: float) -> str:
    return f"{probability:.2f}" if probability >= 0.005 else f"{probability:.0e}".replace("e-0", "e-")


def runs(values: list[int]) -> list[tuple[int, int]]:
    """[10, 1, 1, 1] -> [(10, 1), (1, 3)]."""
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


# ---- PNG ----


def rows_of(shown: Shown) -> list[int]:
    """Row of each node: every leaf has one of its own; a parent stands in the row of its first child, so the main line is straight."""
    children, rows, next_row = shown.children(), [0] * len(shown.names), 0

    def place(node: int) -> None:
        nonlocal next_row
        for child in children[node]:
            place(child)
        if children[node]:
            rows[node] = rows[children[node][0]]
        else:
            rows[node], next_row = next_row, next_row + 1

    place(0)
    return rows


def draw(shown: list[Shown], out: Path) -> None:
    """Writes a PNG with the trees below each other (temporary name, then renamed)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layouts = [Layout(one) for one in shown]
    width = max([layout.width for layout in layouts] + [len(one.describe()) * CHAR + 2 * PADDING for one in shown])
    height = sum(layout.height for layout in layouts)
    with plt.rc_context({"font.family": "DejaVu Sans Mono", "font.size": FONT}):
        figure = plt.figure(figsize=(width, height), dpi=160)
        top = height
        for layout in layouts:
            axes = figure.add_axes((0, (top - layout.height) / height, 1, layout.height / height))
            axes.set(xlim=(0, width), ylim=(layout.height, 0))  # inches on both axes, rows counted from the top
            axes.axis("off")
            layout.draw(axes)
            top -= layout.height
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(out.name + ".tmp")
        figure.savefig(temporary, format="png", facecolor="white")
        plt.close(figure)
    temporary.replace(out)


class Layout:
    """Positions, in inches, of one tree on the picture: one column per depth, as wide as its longest token; one row per leaf."""

    header = 3 * ROW + PADDING

    def __init__(self, shown: Shown):
        self.shown, self.rows, self.depths = shown, rows_of(shown), shown.depths
        self.labels = [f"{drawable(name)} {shown.detail(node)}".rstrip() for node, name in enumerate(shown.names)]
        self.left, x = [], PADDING
        for depth in range(max(self.depths) + 1):
            self.left.append(x)
            x += max(self._box(node) for node in range(len(self.labels)) if self.depths[node] == depth) + GAP
        self.width = x - GAP + PADDING
        self.height = self.header + (max(self.rows) + 1) * ROW + 2 * PADDING

    def draw(self, axes) -> None:
        shown = self.shown
        axes.text(PADDING, PADDING, shown.title, fontsize=FONT * 1.5, weight="bold", color=INK, va="center")
        axes.text(PADDING, PADDING + 1.1 * ROW, shown.describe(), color=INK, va="center")
        axes.text(PADDING, PADDING + 2 * ROW, f"after: {drawable(shown.context)}", color=QUIET, va="center", parse_math=False)
        for node, parent in enumerate(shown.parents):
            if parent >= 0:
                self._edge(axes, parent, node)
        for node in range(len(self.labels)):
            self._node(axes, node)

    def _box(self, node: int) -> float:
        return len(self.labels[node]) * CHAR

    def _place(self, node: int) -> tuple[float, float]:
        return self.left[self.depths[node]], self.header + (self.rows[node] + 0.5) * ROW

    def _edge(self, axes, parent: int, node: int) -> None:
        (from_x, from_y), (to_x, to_y) = self._place(parent), self._place(node)
        bend = to_x - GAP * 0.55  # every edge leaves level, drops in the gap before its column and arrives level
        strong = self.shown.marked(node)
        axes.plot(
            [from_x + self._box(parent) + 0.04, bend, bend, to_x - 0.05],
            [from_y, from_y, to_y, to_y],
            color=ACCEPTED if strong else EDGE,
            linewidth=2.2 if strong else 0.8,
            linestyle=(0, (2, 1.2)) if node == self.shown.bonus else "-",
            zorder=3 if strong else 1,
        )

    def _node(self, axes, node: int) -> None:
        strong = self.shown.marked(node)
        box = {"boxstyle": "round,pad=0.22", "facecolor": ACCEPTED_FILL if strong else FILL, "edgecolor": ACCEPTED if strong else EDGE}
        box |= {"linewidth": 1.4 if strong else 0.6, "linestyle": "--" if node == self.shown.bonus else "-"}
        weight = "bold" if strong else "normal"
        axes.text(*self._place(node), self.labels[node], color=INK, weight=weight, va="center", bbox=box, zorder=4, parse_math=False)


def drawable(text: str) -> str:
    """Characters that the picture's font lacks, as escapes; a box with a cross in it tells nobody anything."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans Mono")).get_charmap()
    return "".join(char if ord(char) in known else char.encode("ascii", "backslashreplace").decode() for char in text)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="file that a TALON server wrote (--talon-trace)")
    parser.add_argument("--tokenizer", type=Path, required=True, help="target model folder")
    parser.add_argument("--out", type=Path, default=Path("trees.png"), help="PNG to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
