"""What a report shows, from the files of eval/serve.py, accept.py, cost.py and breakdown.py: one dictionary for page and Markdown."""

from collections.abc import Iterable

from markupsafe import Markup

from eval import charts
from eval.breakdown import FORWARDS, OVERHEAD
from eval.charts import Bar, Point
from eval.cost_model import PARTS

PART_SIZES = {"verify": "tree nodes", "draft": "lanes", "extend": "rows"}
PART_NAMES = {
    "plain": "plain decoding: target forward",
    "plain overhead": "plain decoding: rest of a step",
    "verify": "target verify",
    "draft": "draft forward",
    "extend": "draft extend",
    "overhead": "rest of a round",
}


def build(body: dict, accept: dict | None, cost: dict | None, breakdown: dict | None, trees: list[dict] | None) -> dict:
    """body: a results file with its summaries. What was not passed is None in the model, and the templates say how to make it."""
    css = run_classes(body["specs"])
    loads = [load_view(load, css) for load in body["loads"].values()]
    settings = body["settings"]
    return {
        "target": settings["target"]["name"],
        "head": settings["head"]["name"],
        "dtype": settings["dtype"],
        "runs": [{"name": name, "css": css[name]} for name in body["specs"]],
        "loads": loads,
        "best": best_talon(body),
        "sweep": sweep(body, css),
        "efficiency": efficiency(body, accept, css),
        "shapes": shapes(body, css),
        "latency": any(load["latency"] for load in loads),
        "trees": trees,
        "breakdown": breakdown_view(breakdown),
        "cost": cost_view(cost),
        "settings": settings_rows(body),
        "eagle_ignores_temperature": settings.get("device") == "cpu" and any(load["temperature"] > 0 for load in body["loads"].values()),
        "commands": list(body["commands"]),
    }


def run_classes(specs: dict[str, dict]) -> dict[str, str]:
    """A colour class for each run: one hue an algorithm, one shade a setting."""
    seen: dict[str, int] = {}
    classes = {}
    for name, spec in specs.items():
        kind = {"none": "plain", "EAGLE3": "eagle", "TALON": "talon"}[spec["algorithm"]]
        classes[name] = f"{kind}-{seen.get(kind, 0) % 4}"
        seen[kind] = seen.get(kind, 0) + 1
    return classes


def load_name(load: dict) -> str:
    requests = "one request" if load["concurrency"] == 1 else f"{load['concurrency']} requests"
    return f"{requests} at a time, {'greedy' if load['temperature'] == 0 else 'temperature ' + format(load['temperature'], 'g')}"


def tab_name(load: dict) -> str:
    return f"{load['concurrency']} at a time" + ("" if load["temperature"] == 0 else f", T={load['temperature']:g}")


def load_view(load: dict, css: dict[str, str]) -> dict:
    """One load: a chart of ratios by set and a table of everything."""
    summary = load["summary"]
    sets = list(dict.fromkeys(name for by_set in summary.values() for name in by_set if name != "all"))
    shown = [*sets, "all"] if len(sets) > 1 else sets
    groups = []
    for name in shown:
        rows = [(run, by_set[name]) for run, by_set in summary.items() if name in by_set]
        bars = [bar(run, css[run], one["faster_than_plain"]) for run, one in rows if one["faster_than_plain"]]
        groups.append((f"{'all sets' if name == 'all' else name} ({rows[0][1]['prompts']} prompts)", bars))
    return {
        "name": load_name(load),
        "tab": tab_name(load),
        "chart": charts.ratio_bars([group for group in groups if group[1]]),
        "rows": [
            table_row(run, css[run], "all sets" if name == "all" else name, summary[run][name])
            for name in shown
            for run in summary
            if name in summary[run]
        ],
        "latency": [latency_row(run, css[run], by_set["all"]) for run, by_set in summary.items() if by_set["all"]["latency"]],
        "in_turn": all(one["in_turn"] for run in summary.values() if (one := run["all"]["faster_than_plain"])),
    }


def bar(run: str, css: str, ratio: dict) -> Bar:
    return Bar(run, css, ratio["value"], ratio["low"], ratio["high"])


def table_row(run: str, css: str, set_name: str, one: dict) -> dict:
    return {
        "set": set_name,
        "run": run,
        "css": css,
        "tokens_per_s": f"{one['tokens_per_s']:.1f}",
        "accept": number(one["accept_length"]),
        "drafts": number(one["draft_forwards_per_round"]),
        "budget": share(one["budget_accepted"]),
        "same": "" if run == "plain" else share(one["same_as_plain"]),
        "faster": interval(one["faster_than_plain"]),
        "more": interval(one["more_than_plain"]),
        "eagle": ", ".join(interval(ratio) for ratio in one.get("faster_than_eagle3", {}).values()),
    }


def latency_row(run: str, css: str, one: dict) -> dict:
    times = {key: [f"{value:.0f}" for value in values] or [""] * 3 for key, values in one["latency"].items()}
    return {"run": run, "css": css, **times}


def best_talon(body: dict) -> dict | None:
    """The TALON run with the highest speed over all sets under the first load that has one, against plain and EAGLE3."""
    for load in body["loads"].values():
        found = {
            run: by_set["all"]
            for run, by_set in load["summary"].items()
            if body["specs"][run]["algorithm"] == "TALON" and by_set["all"]["faster_than_plain"]
        }
        if found:
            run = max(found, key=lambda name: found[name]["faster_than_plain"]["value"])
            against = {"plain decoding": found[run]["faster_than_plain"], **found[run].get("faster_than_eagle3", {})}
            figures = found[run]
            return {
                "run": run,
                "load": load_name(load),
                "prompts": figures["prompts"],
                "ratios": [
                    {"base": base, "value": f"{one['value']:.2f}", "low": f"{one['low']:.2f}", "high": f"{one['high']:.2f}"}
                    for base, one in against.items()
                ],
                "accept": number(figures["accept_length"]),
                "drafts": number(figures["draft_forwards_per_round"]),
                "same": share(figures["same_as_plain"]),
            }
    return None


def sweep(body: dict, css: dict[str, str]) -> list[dict]:
    """Tokens per second against concurrency, one chart a temperature that has several."""
    found = []
    for temperature in sorted({load["temperature"] for load in body["loads"].values()}):
        loads = [load for load in body["loads"].values() if load["temperature"] == temperature]
        if len(loads) > 1:
            series = [
                (
                    run,
                    css[run],
                    [(load["concurrency"], load["summary"][run]["all"]["tokens_per_s"]) for load in loads if run in load["summary"]],
                )
                for run in body["specs"]
            ]
            name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            found.append(
                {"name": name, "chart": charts.lines([one for one in series if one[2]], "requests at a time", "tokens per second")}
            )
    return found


def efficiency(body: dict, accept: dict | None, css: dict[str, str]) -> dict | None:
    """Accept length against draft forwards a round: served runs under the first load, and the policies of an accept file."""
    first = next(iter(body["loads"].values()), None)
    points = [
        Point(run, css[run], by_set["all"]["draft_forwards_per_round"], by_set["all"]["accept_length"])
        for run, by_set in (first["summary"] if first else {}).items()
        if by_set["all"]["accept_length"] and by_set["all"]["draft_forwards_per_round"]
    ]
    served = len(points)
    for policy, by_set in (accept or {}).get("summary", {}).items():
        one = by_set["all"]
        points.append(Point(policy, f"hollow {policy_class(policy)}", one["draft_forwards"], one["accept_length"], one["standard_error"]))
    if not points:
        return None
    rows = [{"name": p.name, "css": p.css, "drafts": number(p.x), "accept": number(p.y), "error": number(p.error)} for p in points]
    chart = charts.scatter(points, "draft forwards a round", "tokens a target forward")
    return {"chart": chart, "rows": rows, "served": served, "offline": len(points) - served}


def policy_class(policy: str) -> str:
    return "talon-0" if policy.startswith("talon") else "eagle-0" if "eagle" in policy else "plain-0"


def shapes(body: dict, css: dict[str, str]) -> list[dict]:
    """Depth and width of the trees of each TALON run, over all sets under the first load."""
    first = next(iter(body["loads"].values()), {"summary": {}})
    found = []
    for run, by_set in first["summary"].items():
        one = by_set["all"]
        if one["depths"] and one["widths"]:
            kinds = (("depth of the tree", one["depths"]), ("nodes of its widest layer", one["widths"]))
            views = [{"name": name, "counts": counts, "chart": charts.histogram(counts, css[run], name)} for name, counts in kinds]
            found.append({"run": run, "rounds": sum(one["depths"].values()), "views": views})
    return found


def breakdown_view(breakdown: dict | None) -> dict | None:
    if breakdown is None:
        return None
    phases = [(phase, f"phase-{i}") for i, phase in enumerate(FORWARDS)] + [(phase, f"rest-{i % 3}") for i, phase in enumerate(OVERHEAD)]
    rows = breakdown["breakdowns"]
    bars = [(row["name"], [(phase, css, max(0.0, row["phase_ms"][phase])) for phase, css in phases]) for row in rows]
    key = [("draft forwards", "phase-0"), ("target verify", "phase-1"), ("draft extend", "phase-2"), ("everything else", "rest-0")]
    table = [[phase.replace("_", " "), *(f"{row['phase_ms'][phase]:.2f}" for row in rows)] for phase, _ in phases]
    table.append(["all", *(f"{row['round_ms']:.1f}" for row in rows)])
    table.append(["not a forward", *(f"{row['overhead']:.0%}" for row in rows)])
    return {
        "chart": charts.stacked(bars, "ms a round"),
        "legend": charts.legend(key),
        "names": [row["name"] for row in rows],
        "rows": table,
    }


def cost_view(cost: dict | None) -> list[dict] | None:
    if cost is None:
        return None
    samples = [sample for found in cost["samples"].values() for sample in found]
    panels = []
    for part in PARTS:
        points = [(sample["size"], sample["ms"]) for sample in samples if sample["part"] == part]
        if points and part in cost["lines"]:
            fixed, slope = cost["lines"][part]["fixed"], cost["lines"][part]["slope"]
            size = PART_SIZES.get(part, "sequences")
            css = "plain-0" if part.startswith("plain") else "talon-0"
            panels.append(
                {
                    "name": PART_NAMES[part],
                    "size": size,
                    "fixed": f"{fixed:.2f}",
                    "slope": f"{slope:.3f}",
                    "chart": charts.fitted(points, fixed, slope, size, css),
                }
            )
    return panels


def settings_rows(body: dict) -> list[tuple[str, str]]:
    settings, machine = body["settings"], body["machine"]
    prompts = ", ".join(f"{name} {len(ids)}" for name, ids in settings["prompts"].items())
    rows = [
        ("target", f"{settings['target']['name']} (fingerprint {settings['target']['fingerprint']})"),
        ("draft head", f"{settings['head']['name']} (fingerprint {settings['head']['fingerprint']})"),
        ("prompts by set", prompts),
        ("new tokens", f"at most {settings['max_new_tokens']}"),
        ("number format", settings["dtype"]),
        ("threads of a server", str(settings["threads"] or "PyTorch's choice")),
        ("answers streamed", "yes" if settings.get("stream") else "no"),
        ("more server arguments", " ".join(settings["server_args"]) or "none"),
        ("machine", f"{machine['cpu']}, {machine['cores']} usable cores, {machine['memory_gib']} GiB"),
    ]
    rows += [("GPU", ", ".join(machine["gpus"]))] if machine.get("gpus") else []
    rows += [(package, version) for package, version in body["versions"].items()]
    return rows


def number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def interval(ratio: dict | None) -> str:
    return "" if ratio is None else f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def run_legend(runs: Iterable[dict]) -> Markup:
    return charts.legend((one["name"], one["css"]) for one in runs)
