"""The ablations as JSON, Markdown and pictures, from a file of eval/accept.py."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.ablations import Ablation, Row
from eval.accept_file import AcceptFile
from eval.cost_model import CostModel
from eval.policies import Policy, parse_policy
from eval.policies.served import served_as
from eval.results import versions
from eval.rounds import Tally, acceptance, paired_difference

HEADER = ("accept", "±", "against base", "drafts", "lanes", "depth", "tree", "budget")
LEGEND = """accept: tokens per target forward (first and bonus token included), and its standard error over prompts.
against base: difference to the row marked "base" (of the same series or N), paired by prompt, and its standard error.
drafts: draft forwards a round, the draft extend included. lanes: nodes a round forwards through the draft after that.
depth, tree: of a tree on average, in layers and in drafted nodes. budget: accepted share of the drafted nodes.
x plain: predicted from the costs of eval/cost.py at batch 1 against plain decoding; empty for what no server runs."""


@dataclass(frozen=True)
class Figures:
    """One row of a table. Differences are accept lengths minus the base's, over the same prompts; None for the base itself."""

    policy: str
    series: str
    value: float | str
    base: str
    prompts: int
    accept: float
    error: float | None
    difference: float | None
    difference_error: float | None
    drafts: float
    lanes: float
    depth: float
    tree: float
    budget: float | None
    times_plain: float | None
    by_set: dict[str, list[float | None]]  # set -> [accept, error, difference, its error]


def table_json(ablation: Ablation, results: AcceptFile, costs: CostModel | None) -> list[Figures]:
    """One row a policy, all over the prompts that every one of them has been measured on; [] when there is none."""
    measured = [prompts_of(results, name) for row in ablation.rows for name in (row.policy, row.base)]
    shared = sorted(set.intersection(*(set(found) for found in measured)))
    return [figures(row, results, shared, costs) for row in ablation.rows] if shared else []


def figures(row: Row, results: AcceptFile, shared: list[tuple[str, str]], costs: CostModel | None) -> Figures:
    policy, base = parse_policy(row.policy), parse_policy(row.base)
    ours, theirs = ({key: prompts_of(results, one.name)[key] for key in shared} for one in (policy, base))
    all_ours, all_theirs = (list(found.values()) for found in (ours, theirs))
    found, is_base = acceptance(all_ours), policy.name == base.name
    difference = (None, None) if is_base else paired_difference(all_ours, all_theirs)
    by_set = {}
    for name in sorted({name for name, _ in ours}):
        mine, other = ([tally for (set_name, _), tally in side.items() if set_name == name] for side in (ours, theirs))
        if sum(tally.rounds for tally in mine):
            part = acceptance(mine)
            by_set[name] = [part.accept_length, part.standard_error, *((None, None) if is_base else paired_difference(mine, other))]
    return Figures(
        policy=policy.name,
        series=row.series,
        value=row.value,
        base=base.name,
        prompts=len(shared),
        accept=found.accept_length,
        error=found.standard_error,
        difference=difference[0],
        difference_error=difference[1],
        drafts=found.draft_forwards,
        lanes=sum(found.lanes),
        depth=sum(depth * share for depth, share in found.depths.items()),
        tree=sum(tally.drafted for tally in all_ours) / found.rounds,
        budget=found.budget_accepted,
        times_plain=None if costs is None else times_plain(costs, policy, asdict(found)),
        by_set=by_set,
    )


def prompts_of(results: AcceptFile, policy: str) -> dict[tuple[str, str], Tally]:
    """(set, prompt) -> tally."""
    rows = results.tallies.get(parse_policy(policy).name, {})
    return {(name, prompt): tally for name, found in rows.items() for prompt, tally in found.items()}


def times_plain(costs: CostModel, policy: Policy, figure: dict) -> float | None:
    """Predicted speed against plain decoding at batch 1; None for what no server runs."""
    if (served := served_as(policy)) is None:
        return None
    return costs.tokens_per_s(figure, served.nodes, 1, full_extend=served.algorithm != "TALON") / costs.plain_tokens_per_s(1)


# ------------------------------------------------------------ Markdown


def markdown(chosen: list[Ablation], tables: dict[str, list[Figures]], results: AcceptFile) -> str:
    settings = results.settings
    prompts = ", ".join(f"{name} {len(ids)}" for name, ids in settings["prompts"].items())
    about = (
        f"{settings['target']['name']}, head {settings['head']['name']}, temperature {settings['temperature']:g}, "
        f"{settings['max_new_tokens']} new tokens, {settings['dtype']}; prompts: {prompts}."
    )
    parts = ["# Ablations", about, f"```\n{results.command}\n```", LEGEND]
    for one in chosen:
        count = tables[one.name][0].prompts
        parts += [
            f"## {one.question}",
            f"`{one.name}`, {count} prompts",
            main_table(one, tables[one.name]),
            "Accept length by prompt set:",
            set_table(one, tables[one.name]),
        ]
    return "\n\n".join(parts) + "\n"


def main_table(ablation: Ablation, rows: list[Figures]) -> str:
    predicted = any(row.times_plain is not None for row in rows)
    lines = [[*_head(ablation), *HEADER, *(["x plain"] if predicted else [])]]
    for row in rows:
        cells = [f"{row.accept:.3f}", _error(row.error), _difference(row), f"{row.drafts:.2f}", f"{row.lanes:.1f}"]
        cells += [f"{row.depth:.2f}", f"{row.tree:.1f}", "" if row.budget is None else f"{row.budget:.1%}"]
        cells += ["" if row.times_plain is None else f"{row.times_plain:.2f}"] if predicted else []
        lines.append([*_place(ablation, row), *cells])
    return _table(lines)


def set_table(ablation: Ablation, rows: list[Figures]) -> str:
    sets = list(dict.fromkeys(name for row in rows for name in row.by_set))
    lines = [[*_head(ablation), *sets]]
    for row in rows:
        found = [row.by_set.get(name) for name in sets]
        lines.append([*_place(ablation, row), *("" if one is None else f"{one[0]:.2f} ± {_error(one[1], 2)}" for one in found)])
    return _table(lines)


def _head(ablation: Ablation) -> list[str]:
    return ["policy"] if ablation.name == "versus" else ["series", ablation.axis]


def _place(ablation: Ablation, row: Figures) -> list[str]:
    if ablation.name == "versus":
        return [f"`{row.policy}`"]
    return [row.series, row.value if isinstance(row.value, str) else f"{row.value:g}"]


def _difference(row: Figures) -> str:
    return "base" if row.difference is None else f"{row.difference:+.3f} ± {_error(row.difference_error)}"


def _error(error: float | None, digits: int = 3) -> str:
    return "" if error is None else f"{error:.{digits}f}"


def _table(lines: list[list[str]]) -> str:
    rows = [f"| {' | '.join(cell.strip() for cell in line)} |" for line in lines]
    return "\n".join([rows[0], f"|{'---|' * len(lines[0])}", *rows[1:]])


# ------------------------------------------------------------ files


def write(folder: Path, text: str, tables: dict[str, list[Figures]], results: AcceptFile) -> None:
    """tables.md and tables.json, each written under a temporary name and renamed."""
    body = {"settings": results.settings, "versions": versions(), "command": results.command}
    body["ablations"] = {name: [vars(row) for row in rows] for name, rows in tables.items()}
    for name, content in (("tables.md", text), ("tables.json", json.dumps(body, indent=1) + "\n")):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(content)
        temporary.replace(folder / name)


def plot(ablation: Ablation, rows: list[Figures], path: Path) -> None:
    """Accept length with standard errors, and draft forwards, over the ablated setting; without a scale, the two against each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if ablation.name == "versus":
        figure, panel = pyplot.subplots(figsize=(7, 5), constrained_layout=True)
        for place, row in enumerate(rows):
            look = {"color": f"C{place % 10}", "marker": "os^Dv"[place % 5], "linestyle": "", "capsize": 3}
            panel.errorbar(row.drafts, row.accept, yerr=row.error or 0, label=row.policy, **look)
        panel.legend(fontsize=8)
        panel.set(xlabel="draft forwards a round", ylabel="accept length", title=ablation.question)
    else:
        figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
        for series in ablation.series:
            mine = [row for row in rows if row.series == series]
            places = [row.value for row in mine]
            panels[0].errorbar(
                places, [row.accept for row in mine], yerr=[row.error or 0 for row in mine], fmt="o-", capsize=3, label=series
            )
            panels[1].plot(places, [row.drafts for row in mine], "o-", label=series)
        for panel, label in zip(panels, ("accept length", "draft forwards a round")):
            panel.set(xlabel=ablation.axis, ylabel=label, xscale="log" if ablation.log else panel.get_xscale())
        panels[0].legend(fontsize=8)
        figure.suptitle(ablation.question)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)
    pyplot.close(figure)
