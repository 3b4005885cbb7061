"""The findings of train/lint.py as one HTML file that needs nothing else."""

from html import escape
from pathlib import Path

from train.lint_report import EXAMPLES, replace_text, sentence, verdict, which_rows
from train.reasons import FATES, REASONS

STYLE = """
:root { color-scheme: light dark; --line: #8886; --on: #2e9e5b55; --edge: #2e9e5b; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
td.n { text-align: right; } code, pre { font: 13px/1.6 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; }
pre i { font-style: normal; opacity: .6; } pre b { font-weight: inherit; background: var(--on); border-right: 1px solid var(--edge); }
.dropped { color: #c0392b; } .shortened { color: #b7791f; } .repaired { color: #2b7a9b; } .kept { color: #2e9e5b; }
"""


def write_html(finding, path: Path, tolerance: float) -> None:
    """Written under a temporary name and renamed."""
    replace_text(path, render(finding, tolerance))


def render(finding, tolerance: float) -> str:
    report = finding.report
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Lint of {escape(Path(finding.file).name)}</title><style>{STYLE}</style>",
        f"<h1>{escape(Path(finding.file).name)}</h1><p><strong>{escape(verdict(finding, tolerance))}</strong></p>",
        f"<p>{report.rows} rows read, {report.kept} kept, {report.dropped} dropped.</p>",
        "<table><tr><th>outcome<th>reason<th>rows<th>what it means<th>which rows</tr>",
        *(_reason_row(finding, fate, code, count) for fate in FATES for code, count in report.by_fate(fate).items()),
        f"<tr><th>sum<th><td class=n>{sum(report.outcomes.values())}<td>of {report.rows} rows read<td></tr></table>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in sentence(finding).splitlines()) + "</ul>",
    ]
    if finding.previews:
        parts.append("<h2>Masks</h2><p>Marked tokens are trained; a line separates tokens. The rest is context.</p>")
    parts += [_preview(preview) for preview in finding.previews]
    return "\n".join(parts) + "\n</html>\n"


def _reason_row(finding, fate: str, code: str, count: int) -> str:
    which = escape(which_rows(finding, fate, code, EXAMPLES))
    return f"<tr><td class={fate}>{fate}<td><code>{code}</code><td class=n>{count}<td>{escape(REASONS[code])}<td>{which}</tr>"


def _preview(preview) -> str:
    tag = {True: "b", False: "i"}
    marked = "".join(f"<{tag[trained]}>{escape(text)}</{tag[trained]}>" for text, trained in preview.pieces if text)
    outcome = f"{preview.outcome.fate} ({preview.outcome.code})"
    return f"<h3>Row {preview.number}, {escape(outcome)}</h3><pre>{marked}</pre>"
