"""The report: everything in one file, figures as in the results, drawings to scale, and a sentence for what is missing or wrong."""

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from eval import charts, report
from eval.charts import Bar, Point
from eval.gallery import gallery
from eval.report_model import build
from eval.results import Load, ResultsFile, read_results
from eval.servers import ServerSpec
from eval.stats import AnswerRow, Block
from eval.trace import DraftRound, TraceError

TARGET, HEAD = Path("target"), Path("head")
SPECS = [
    ServerSpec(TARGET),
    ServerSpec(TARGET, HEAD, "EAGLE3", nodes=16, width=4, steps=4),
    ServerSpec(TARGET, HEAD, "TALON", nodes=16, width=4),
    ServerSpec(TARGET, HEAD, "TALON", nodes=16, width=4, gate=0.1),
]
SECONDS = {"plain": 4.0, "EAGLE3 N=16 K=4 D=4": 5.0, "TALON N=16 K=4": 2.0, "TALON N=16 K=4 mu=0.1": 3.2}
LOADS = (Load(1), Load(4), Load(1, 1.0))
HOSTILE = "</script><b>|x"
ACCEPT = {"summary": {"opt-tree:16": {"all": {"draft_forwards": 2.2, "accept_length": 2.1, "standard_error": 0.1}}}}
COST = {
    "samples": {
        "plain batch=1": [{"part": "plain", "size": 1, "ms": 40.0, "count": 9}, {"part": "plain", "size": 4, "ms": 70.0, "count": 9}]
    },
    "lines": {"plain": {"fixed": 30.0, "slope": 10.0}},
}
PHASES = ("draft_forward", "verify_forward", "draft_extend_forward", "expand", "indices", "verify_input", "draft", "verify", "draft_extend")
PHASES += ("observe", "other", "scheduler")
BREAKDOWN = {"breakdowns": [{"name": "TALON N=16 K=4", "phase_ms": dict.fromkeys(PHASES, 2.5), "round_ms": 30.0, "overhead": 0.75}]}


def block(run, prompt, load):
    speculative = run != "plain"
    talon = {"tree_depths": {"2": 3, "7": 1}, "tree_widths": {"4": 4}} if run.startswith("TALON") else None
    counters = {"draft_forwards": 12.0, "rounds": 4, "drafted_nodes": 60, "accepted_nodes": 6} if speculative else None
    chunks = [[1, 0.5], [7, 0.7]]
    row = AnswerRow(prompt, 8, 4 if speculative else 0, SECONDS[run] * load.concurrency, [1, 2], talon, chunks)
    return Block(1, SECONDS[run], counters, [row])


def write_results(path, loads=LOADS):
    settings = {
        "target": {"name": "toy <target>", "fingerprint": "f00"},
        "head": {"name": "toy-head", "fingerprint": "beef"},
        "prompts": {"chat": ["1", "2"], "code": ["1", "2"]},
        **{"max_new_tokens": 8, "dtype": "float32", "device": "cpu", "threads": 1, "stream": True, "server_args": []},
    }
    results = ResultsFile(path, settings, "python eval/serve.py --target target --head head")
    for load in loads:
        for spec in SPECS:
            for name in ("chat", "code"):
                for prompt in ("1", "2"):
                    results.add(load, spec, name, block(spec.name, prompt, load))
    results.save()
    return path


def rounds_of(rid, count=3):
    """Rounds of a tree with a side branch; token ids count up, so that the text is known."""
    made, token = [], 10
    for number in range(count):
        tokens = [token, token + 1, 99, token + 2]
        made.append(DraftRound(rid, number, 5, tokens, [-1, 0, 0, 1], [0, 1, 1, 2], [0.0, -0.5, -1.5, -0.9], [0, 1, 3], token + 3, False))
        token += 3
    return made


def decode(ids):
    return "".join(f" {HOSTILE if token == 99 else token}" for token in ids)


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    return read_results(write_results(tmp_path_factory.mktemp("report") / "results.json"))


@pytest.fixture(scope="module")
def whole(body):
    trees = gallery(rounds_of("chat/1 c=1 T=0 #1") + rounds_of("code/1 c=1 T=0 #1"), decode, 6, {"chat/1": HOSTILE})
    return build(body, ACCEPT, COST, BREAKDOWN, trees)


class Outline(html.parser.HTMLParser):
    """Collects what a page loads, its ids, links, texts by element, and checks that elements are closed in order."""

    VOID = {"meta", "link", "input", "br", "th", "td", "dt", "dd", "li", "tr", "rect", "line", "circle"}

    def __init__(self, text):
        super().__init__()
        self.loads, self.ids, self.links, self.open = [], set(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found["href"]] if tag == "a" else []
        self.loads += [value for name, value in attributes if name in ("src", "srcset", "data") or (name == "href" and tag != "a")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element, line {self.getpos()[0]}"


def test_the_page_needs_nothing_from_elsewhere(whole):
    page = report.page(whole)
    outline = Outline(page)
    assert outline.loads == []
    assert {link.removeprefix("#") for link in outline.links} <= outline.ids
    assert not re.search(r"@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page)


def test_text_of_models_and_settings_cannot_leave_its_place(whole):
    page = report.page(whole)
    data = page.split('id="trees-data">')[1].split("</script>")[0]
    assert json.loads(data) == whole["trees"]
    assert any(" </script><b>|x".replace(" ", "␣") in name for one in whole["trees"] for name in one["rounds"][0]["names"])
    assert page.count("</script>") == 2
    assert "toy &lt;target&gt;" in page and "toy <target>" not in page


def test_page_and_markdown_show_the_figures_of_the_results(body, whole):
    page, text = report.page(whole), report.markdown(whole)
    for load in body["loads"].values():
        for run, by_set in load["summary"].items():
            if run != "plain":
                one = by_set["all"]["faster_than_plain"]
                shown = f"{one['value']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
                assert one["value"] == 4.0 / SECONDS[run]
                assert shown in page and shown in text
    assert whole["best"]["run"] == "TALON N=16 K=4"
    assert [ratio["value"] for ratio in whole["best"]["ratios"]] == ["2.00", "2.50"]
    for shown in ("opt-tree:16", "30.00", "python eval/serve.py --target target --head head"):
        assert shown in page and shown in text
    assert "SGLang's EAGLE3 ignores the temperature" in " ".join(page.split())
    assert 'class="missing"' not in page.replace('<noscript><p class="missing">', "")


def test_rows_of_a_markdown_table_have_the_width_of_its_head(whole):
    columns = None
    for line in report.markdown(whole).splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert cells == (columns or cells), line
        columns = cells


@pytest.mark.parametrize("form", [report.page, report.markdown])
def test_a_missing_input_is_replaced_by_the_command_that_makes_it(tmp_path, form):
    bare = build(read_results(write_results(tmp_path / "r.json", [Load(1)])), None, None, None, None)
    for script in ("eval/accept.py", "eval/cost.py", "eval/breakdown.py"):
        assert script in form(bare)
    assert "trace.jsonl" in form(bare)


def test_a_results_file_without_speculation_still_makes_a_page(tmp_path):
    results = ResultsFile(tmp_path / "r.json", json.loads(write_results(tmp_path / "whole.json").read_text())["settings"], "command")
    results.add(Load(), SPECS[0], "chat", block("plain", "1", Load()))
    results.save()
    model = build(read_results(tmp_path / "r.json"), None, None, None, None)
    assert "No speed is compared here" in report.page(model)
    assert "plain" in report.markdown(model)


# ------------------------------------------------------------ drawings


def numbers(svg, tag, *names):
    return [tuple(float(re.search(rf' {name}="([-\d.]+)', one)[1]) for name in names) for one in re.findall(rf"<{tag}[^>]*>", svg)]


def test_bars_and_whiskers_are_to_scale():
    bars = [Bar("a", "talon-0", 1.5, 1.2, 1.8), Bar("b", "eagle-0", 0.5, 0.45, 2.0)]
    svg = charts.ratio_bars([("chat", bars)])
    widths = [width for (width,) in numbers(svg, "rect", "width")]
    reference = next(float(re.search(r'x1="([\d.]+)', one)[1]) for one in re.findall(r"<line[^>]*>", svg) if "reference" in one)
    assert widths == pytest.approx([1.5 * reference, 0.5 * reference], abs=0.02)
    whiskers = [ends for ends in numbers(svg, 'line class="whisker"', "x1", "x2") if ends[0] != ends[1]]
    assert whiskers[0] == pytest.approx((1.2 * reference, 1.8 * reference), abs=0.02)
    assert all(0 <= x <= 100 for ends in whiskers for x in ends)


def test_every_drawing_stays_inside_its_frame(whole):
    parts = [load["chart"] for load in whole["loads"]] + [one["chart"] for one in whole["sweep"]] + [whole["efficiency"]["chart"]]
    parts += [view["chart"] for one in whole["shapes"] for view in one["views"]] + [panel["chart"] for panel in whole["cost"]]
    parts.append(whole["breakdown"]["chart"])
    for svg in parts:
        height = float(re.search(r'height="(\d+)"', svg)[1])
        for x in map(float, re.findall(r' (?:x|x1|x2|cx)="([-\d.]+)%?"', svg)):
            assert 0 <= x <= 100
        for y in map(float, re.findall(r' (?:y|y1|y2|cy)="([-\d.]+)"', svg)):
            assert 0 <= y <= height


def test_points_are_placed_by_their_values():
    points = [Point("a", "talon-0", 2.0, 2.0), Point("b", "eagle-0", 4.0, 1.5), Point("c", "eagle-1", 8.0, 2.25)]
    placed = numbers(charts.scatter(points, "x", "y"), "circle", "cx", "cy")
    (ax, ay), (bx, by), (cx, cy) = (placed[i] for i in (1, 2, 0))  # drawn from the top
    assert (bx - ax) / (cx - ax) == pytest.approx(2 / 6, abs=1e-3)
    assert (by - ay) / (by - cy) == pytest.approx(0.5 / 0.75, abs=1e-2)
    assert cy < ay < by


def test_parts_of_a_stacked_bar_meet():
    svg = charts.stacked([("one", [("a", "phase-0", 10.0), ("b", "phase-1", 30.0)]), ("two", [("a", "phase-0", 80.0)])], "ms")
    assert numbers(svg, "rect", "x", "width") == [(0, 12.5), (12.5, 37.5), (0, 100)]


@pytest.mark.parametrize("low, high", [(0, 1), (0, 7.3), (1.62, 2.26), (0, 460), (0, 0.004), (3, 3)])
def test_ticks_are_round_and_inside(low, high):
    found = charts.ticks(low, high)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert all(len(f"{tick:g}") <= 6 for tick in found)
    assert low == high or 2 <= len(found) <= 8


# ------------------------------------------------------------ trees


def test_text_and_new_tokens_of_the_rounds_follow_on_each_other():
    (one,) = gallery(rounds_of("chat/1 c=1 T=0 #1", 4), decode, 3, {"chat/1": "Why?", "chat/11": "No."})
    assert (one["name"], one["question"]) == ("chat/1 c=1 T=0", "Why?")
    for before, after in zip(one["rounds"], one["rounds"][1:]):
        assert before["text"] + "".join(before["new"]) == after["text"]
    last = one["rounds"][-1]
    assert last["text"] + "".join(last["new"]) == decode(range(10, 10 + 1 + 4 * 3))


def test_chosen_requests_are_of_many_sets_and_whole():
    rounds = [one for name in ("a/1", "a/2", "a/3", "b/1") for one in rounds_of(name)] + rounds_of("c/1")[1:]
    assert [one["name"] for one in gallery(rounds, decode, 3, {})] == ["a/1", "b/1", "a/2"]
    with pytest.raises(TraceError, match="holds no draft tree"):
        gallery(rounds_of("c/1")[1:], decode, 3, {})


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to run the page's script")
def test_the_script_draws_every_node_and_marks_the_accepted_path(whole, tmp_path):
    (tmp_path / "page.html").write_text(report.page(whole))
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(["chromium", *quiet, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, check=True, timeout=90)
    tree = done.stdout.split('id="tree"')[1].split("</svg>")[0]
    assert tree.count("<rect") == 5  # four nodes and the bonus token
    assert len(re.findall(r'<g class="on', tree)) == 4
    assert len(re.findall(r'<path class="on', tree)) == 3
    visible = [panel for panel in re.findall(r'<div class="panel"[^>]*>', done.stdout) if "hidden" not in panel]
    assert len(visible) == 1


# ------------------------------------------------------------ the command


def test_the_command_writes_page_and_markdown(tmp_path, capsys):
    path = write_results(tmp_path / "results.json")
    (tmp_path / "accept.json").write_text(json.dumps(ACCEPT))
    assert report.main([str(path), "--accept", str(tmp_path / "accept.json"), "--out", str(tmp_path / "out" / "report.html")]) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["report.html", "report.md"]
    assert "opt-tree:16" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["absent.json"], "absent.json cannot be read (No such file or directory)"),
        (["other.json"], "other.json is not a results file of eval/serve.py"),
        (["results.json", "--accept", "other.json"], "--accept other.json has no summary; pass a finished file of eval/accept.py."),
        (["results.json", "--cost", "torn.json"], "--cost torn.json is no JSON"),
        (["results.json", "--breakdown", "absent.json"], "--breakdown absent.json cannot be read"),
        (["results.json", "--trace", "torn.json"], "--trace needs --target"),
    ],
)
def test_wrong_inputs_are_one_sentence(tmp_path, monkeypatch, capsys, flags, sentence):
    monkeypatch.chdir(tmp_path)
    write_results(tmp_path / "results.json", [Load(1)])
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "torn.json").write_text('{"lines": ')
    assert report.main(flags) == 1
    printed = capsys.readouterr().out
    assert sentence in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "report.html").exists()
