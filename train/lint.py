#!/usr/bin/env python3
"""What training will make of a file of conversations, row by row, before anything is trained. No server, no GPU, no weights.

Every row gets one outcome: kept, repaired, shortened or dropped, with a reason code (docs/data.md lists them). The totals sum to the rows
read. Also: tokens and trained tokens, draft-vocabulary coverage by size and source, a preview of the masks, and the disk, memory and time
of the training. Reading goes through the same code as training.

Exit status: 0 no row is dropped (or no more than --tolerance allows), 1 rows are dropped, 2 nothing can be trained on.
"""

import argparse
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.reasons import Outcome, Report

EXAMPLES = """examples:
  python train/lint.py sharegpt.json --target .cache/smollm2-135m-instruct
  python train/lint.py answers.jsonl.zst --target models/Llama-3.1-8B-Instruct --html lint.html --preview 5
  python train/lint.py data.parquet --target T --list role-missing --list duplicate
  python train/lint.py data.jsonl --target T --tolerance 0.01 --json lint.json      # for CI: at most 1% of the rows may be dropped
  python train/lint.py prompts.jsonl --prompts --target T                           # only the questions count
  python train/lint.py --recipe recipes/smollm2-135m-cpu-quick.yaml                 # the file and settings of a recipe
"""


class LintError(ValueError):
    """One sentence: what cannot be read and what to do."""


@dataclass
class Preview:
    """A row to be shown: `pieces` are (text of one token, is it trained)."""

    number: int
    id: str
    outcome: Outcome
    pieces: list[tuple[str, bool]]


@dataclass
class Finding:
    """Everything that was found out about a file."""

    file: str
    target: str
    mode: str  # conversations, prompts
    report: Report = field(default_factory=Report)
    numbers: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # fate (or "also") -> code -> rows
    tokens: int = 0
    predicted: int = 0
    spans: int = 0
    longest: int = 0
    conversations: int = 0  # that are kept
    stored: int = 0  # tokens whose features are kept
    coverage: list[dict] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    estimate: object = None
    estimate_fault: str = ""
    plan: object = None

    def add(self, number: int, outcome: Outcome) -> None:
        self.report.add(outcome)
        for fate, code in ((outcome.fate, outcome.code), *(("also", code) for code in outcome.also)):
            if code != "ok":
                self.numbers.setdefault(fate, {}).setdefault(code, []).append(number)

    @property
    def sums(self) -> bool:
        return sum(self.report.outcomes.values()) == self.report.rows

    def exit_code(self, tolerance: float) -> int:
        if self.report.kept == 0:
            return 2
        return int(self.report.dropped > tolerance * self.report.rows)


def lint_conversations(args, tokenizer, config, plan) -> Finding:
    """Raises SourceError when the file cannot be read, ValueError when the tokenizer has no chat template."""
    from itertools import islice

    from train.corpus import encode_rows
    from train.masks import ChatEncoder
    from train.vocab import SourceCounts

    finding = Finding(str(args.file), str(args.target), "conversations", plan=plan)
    counts = SourceCounts(config.vocab_size)
    rows = encode_rows(args.file, ChatEncoder(tokenizer), plan.max_length, config.vocab_size)
    with ticker() as tick:
        for row in islice(rows, args.limit):
            finding.add(row.number, row.outcome)
            tick(finding.report.rows)
            if row.chat is None:
                continue
            finding.tokens += len(row.chat.ids)
            finding.predicted += row.chat.predicted
            finding.conversations += 1
            finding.stored += row.chat.useful_length
            finding.spans += len(row.chat.spans)
            finding.longest = max(finding.longest, len(row.chat.ids))
            counts.add(row.conversation.source, row.chat)
            if len(finding.previews) < args.preview:
                finding.previews.append(Preview(row.number, row.conversation.id, row.outcome, token_pieces(tokenizer, row.chat)))
    finding.coverage = coverage_table(counts.finish(), tokenizer, sorted({*args.draft_vocab, plan.draft_vocab_size}))
    finding.estimate, finding.estimate_fault = _estimate(config, plan, finding, args.tokens_per_second)
    return finding


def lint_prompts(args, tokenizer) -> Finding:
    """The questions only: what train/regenerate.py will ask. Tokens are those of the questions."""
    from itertools import islice

    from train.data import iter_prompts

    finding = Finding(str(args.file), str(args.target), "prompts")
    with ticker() as tick:
        for raw, prompt, outcome in islice(iter_prompts(args.file), args.limit):
            finding.add(raw.number, outcome)
            tick(finding.report.rows)
            if prompt is not None:
                lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in prompt.turns]
                finding.tokens += sum(lengths)
                finding.spans += len(lengths)
                finding.longest = max(finding.longest, sum(lengths))
    return finding


def coverage_table(counts: dict, tokenizer, sizes: list[int]) -> list[dict]:
    """One row for each size: coverage overall and by source, ids that never occur. A size that is impossible has its `fault` instead."""
    from train.vocab import build_vocab, special_token_ids

    if not counts:
        return []
    counts_V, pinned, table = sum(counts.values()), special_token_ids(tokenizer), []
    for size in dict.fromkeys(min(size, len(counts_V)) for size in sizes):
        try:
            vocab = build_vocab(counts_V, size, pinned)
        except ValueError as error:
            table.append({"size": size, "fault": str(error)})
            continue
        by_source = {source: {"tokens": int(c.sum()), "coverage": vocab.share_of(c)} for source, c in counts.items()}
        table.append({"size": size, "coverage": vocab.coverage, "filled": vocab.filled, "by_source": by_source})
    return table


def token_pieces(tokenizer, chat, most: int = 1500) -> list[tuple[str, bool]]:
    """The text of each token and whether it is trained, the first `most` tokens; tokens that are parts of one character are joined."""
    pieces, shown, pending = [], [], []
    for token, span in zip(chat.ids[:most], chat.span_ids()[:most].tolist()):
        pending.append(token)
        text = tokenizer.decode(shown + pending)[len(tokenizer.decode(shown)) :]
        if not text.endswith("\ufffd") or len(pending) == 4:
            pieces.append((text, span > 0))
            shown, pending = pending, []
    return pieces


def _estimate(config, plan, finding: Finding, tokens_per_second: float | None):
    from train.estimate import Sizes, estimate

    if not finding.tokens:
        return None, "nothing to train on"
    try:
        sizes = Sizes.of(config, plan.draft_vocab_size)
    except ValueError as error:
        return None, str(error)
    return estimate(sizes, plan, finding.stored, finding.tokens, finding.predicted, finding.conversations, tokens_per_second), ""


@contextmanager
def ticker(seconds: float = 10):
    """Yields `tick(rows)`: a live counter on a terminal, else a line now and then, on stderr (stdout holds the report)."""
    from rich.console import Console

    console, last = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status("reading") as status:
            yield lambda rows: status.update(f"{rows} rows read") if rows % 64 == 0 else None
        return

    def tick(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"{rows} rows read", file=sys.stderr, flush=True)

    yield tick


def parse_args(argv=None) -> argparse.Namespace:
    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    def sizes(text: str) -> list[int]:
        return [positive(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES)
    parser.add_argument(
        "file", nargs="?", help="conversations: .json, .jsonl, .txt, .parquet, also .gz/.zst, or a hub name owner/name[:split]"
    )
    parser.add_argument("--target", type=Path, help="folder of the target model: its tokenizer and config.json are read, not its weights")
    parser.add_argument("--recipe", type=Path, help="take what is not given here from this recipe")
    parser.add_argument(
        "--prompts", action="store_true", help="the file holds questions for train/regenerate.py; answers in it do not matter"
    )
    parser.add_argument("--limit", type=positive, help="read the first LIMIT rows only")
    parser.add_argument(
        "--list", action="append", default=[], metavar="CODE", help="list all rows with this reason code, or `all` (repeatable)"
    )
    parser.add_argument("--preview", type=int, default=2, help="rows shown with their mask (default 2)")
    parser.add_argument("--html", type=Path, help="write the report as one self-contained HTML file")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    parser.add_argument("--tolerance", type=float, default=0.0, help="share of rows that may be dropped without exit status 1 (default 0)")
    parser.add_argument("--draft-vocab", type=sizes, default=[4096, 8192, 16384, 32000], metavar="N,N", help="sizes to report coverage for")
    parser.add_argument("--max-length", type=positive, help="token limit of a conversation (default 2048)")
    parser.add_argument(
        "--tokens-per-second", type=float, help="training speed for the time estimate (default: estimated from this machine)"
    )
    for name, text in (
        ("epochs", "1"),
        ("ttt-steps", "7"),
        ("micro-batch-tokens", "4096"),
        ("processes", "1"),
        ("draft-vocab-size", "32000"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=f"for the estimates (default {text})")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="for the estimates (default bf16)")
    parser.add_argument("--features-dtype", choices=("fp8", "bf16", "fp32"), help="of the kept features, for the estimate (default fp8)")
    parser.add_argument("--online", action="store_true", default=None, help="estimate for features.mode online: nothing kept on disk")
    args = parser.parse_args(argv)
    if not 0 <= args.tolerance <= 1:
        parser.error(f"--tolerance {args.tolerance} is not a share from 0 to 1")
    if args.tokens_per_second is not None and not args.tokens_per_second > 0:
        parser.error(f"--tokens-per-second {args.tokens_per_second} is not above 0")
    return args


def settle(args: argparse.Namespace):
    """Fill what a recipe says into the arguments -> the Plan of the estimates."""
    from train.estimate import Plan

    values = {"draft_vocab_size": 32000}
    if args.recipe:
        from train.recipe import load_recipe

        recipe = load_recipe(args.recipe)
        settings = recipe.train
        args.target = args.target or recipe.target
        args.file = args.file or (recipe.answers.prompts if args.prompts else recipe.answers.file)
        values = {name: getattr(settings, name) for name in Plan.__dataclass_fields__ if hasattr(settings, name)}
        values |= {"draft_vocab_size": recipe.head.draft_vocab_size, "online": recipe.features.mode == "online"}
        values |= {"features_dtype": recipe.features.dtype}
    if not args.file or not args.target:
        raise LintError("FILE and --target are needed, or a --recipe that names them; see --help.")
    given = {name: getattr(args, name, None) for name in Plan.__dataclass_fields__}
    return Plan(**{**values, **{name: value for name, value in given.items() if value is not None}})


def load_target(folder: Path):
    """(tokenizer, config) of a target; LintError when they cannot be read."""
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise LintError(f"--target {folder} holds no config.json; name the folder of a Hugging Face model.")
    try:
        config = AutoConfig.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder), getattr(config, "text_config", None) or config
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LintError(f"--target {folder}: its tokenizer or config cannot be loaded ({reason[:160]}).") from None


def main(argv=None) -> int:
    args = parse_args(argv)
    from train import lint_report
    from train.readers import SourceError
    from train.recipe import RecipeError

    try:
        plan = settle(args)
        tokenizer, config = load_target(args.target)
        finding = lint_prompts(args, tokenizer) if args.prompts else lint_conversations(args, tokenizer, config, plan)
        lint_report.print_report(finding, args.list, args.tolerance)
        if args.json:
            lint_report.write_json(finding, args.json, args.tolerance)
        if args.html:
            from train.lint_html import write_html

            write_html(finding, args.html, args.tolerance)
    except (LintError, RecipeError, SourceError, OSError, ValueError) as error:
        print(f"lint: {error}", file=sys.stderr)
        return 2
    return finding.exit_code(args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
