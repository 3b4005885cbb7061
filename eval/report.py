"""Makes one HTML page, complete in itself, and a Markdown file from what eval/serve.py and the other measurements wrote."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.gallery import gallery
from eval.prompts import UsageError, read_named
from eval.report_model import build, run_legend
from eval.results import ResultsError, read_results
from eval.serve import console, positive, stop
from eval.trace import TraceError, read_trace

EXAMPLES = """examples:
  python eval/report.py results.json --out report.html
  python eval/report.py results.json --trace trace.jsonl --target .cache/smollm2-135m-instruct \\
    --accept accept.json --cost cost.json --breakdown breakdown.json --out report.html

The Markdown lies beside the page, as report.md. A section without its input says which command makes it.
"""
ASSETS = Path(__file__).resolve().parent / "report_page"


class ReportError(RuntimeError):
    """An input that cannot be used. `str()` is one sentence."""


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        body = read_results(args.results)
        accept = read_json(args.accept, "--accept", "eval/accept.py", "summary")
        cost = read_json(args.cost, "--cost", "eval/cost.py", "lines")
        breakdown = read_json(args.breakdown, "--breakdown", "eval/breakdown.py", "breakdowns")
        trees = read_trees(args) if args.trace else None
        model = build(body, accept, cost, breakdown, trees)
        write(args.out, page(model))
        write(args.out.with_suffix(".md"), markdown(model))
    except (ResultsError, ReportError, TraceError, UsageError) as error:
        return stop(str(error))
    console.print(f"Report: {args.out} ({args.out.stat().st_size / 1024:.0f} KiB) and {args.out.with_suffix('.md')}", soft_wrap=True)
    return 0


def read_trees(args: argparse.Namespace) -> list[dict]:
    if args.target is None or not (args.target / "tokenizer_config.json").exists():
        raise ReportError(f"--trace needs --target, a folder with the target's tokenizer, to name tokens; got {args.target}.")
    from transformers import AutoTokenizer

    questions = {}
    if args.prompts:
        sets = read_named(args.prompts, None, None)
        questions = {f"{name}/{prompt.id}": prompt.turns[0] for name, prompts in sets.items() for prompt in prompts}
    return gallery(read_trace(args.trace), AutoTokenizer.from_pretrained(args.target).decode, args.requests, questions)


def read_json(path: Path | None, flag: str, maker: str, field: str) -> dict | None:
    """A measurement file. Raises ReportError when it is none of `maker`, which always writes `field`."""
    if path is None:
        return None
    try:
        body = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"{flag} {path} cannot be read ({error.strerror}); pass the file that {maker} --out named.") from error
    except ValueError as error:
        raise ReportError(f"{flag} {path} is no JSON ({error}); pass the file that {maker} --out named.") from error
    if not isinstance(body, dict) or not body.get(field):
        raise ReportError(f"{flag} {path} has no {field}; pass a finished file of {maker}.")
    return body


def page(model: dict) -> str:
    """The HTML page: style, script and data inside, nothing from elsewhere."""
    assets = {"style": Markup((ASSETS / "page.css").read_text()), "script": Markup((ASSETS / "page.js").read_text())}
    return templates(autoescape=True).get_template("page.html.j2").render(**model, **assets, trees_json=script_json(model["trees"]))


def markdown(model: dict) -> str:
    return templates(autoescape=False).get_template("page.md.j2").render(**model)


def templates(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["run_legend"] = run_legend
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    return environment


def script_json(value: object) -> Markup:
    """JSON for a script element: no text of a model can end that element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ReportError(f"--out {path} cannot be written ({error.strerror}); choose another place or make room.") from error


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of eval/serve.py")
    parser.add_argument("--trace", type=Path, help="trace of eval/serve.py --trace, or of any server with --talon-trace")
    parser.add_argument("--target", type=Path, help="target model folder, for the text of the trace's tokens")
    parser.add_argument("--prompts", type=Path, help="the prompts of eval/serve.py, to show what was asked beside the trees")
    parser.add_argument("--requests", type=positive, default=6, help="requests of the trace to show (default: 6)")
    parser.add_argument("--accept", type=Path, help="JSON of eval/accept.py")
    parser.add_argument("--cost", type=Path, help="JSON of eval/cost.py")
    parser.add_argument("--breakdown", type=Path, help="JSON of eval/breakdown.py")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
