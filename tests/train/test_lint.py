"""train/lint.py as a user runs it, on a toy target."""

import json
import re

import pytest
import torch

from tests.train.chat_templates import tokenizer_for
from tests.train.test_data import CASES, Q2, A, Q, msgs, write
from tests.train.toy import toy_config
from train import lint
from train.estimate import Plan, Sizes, checkpoint_bytes, estimate, matrix_rate, memory_bytes
from train.feature_size import feature_bytes


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tokenizer = tokenizer_for("chatml")
    tokenizer.save_pretrained(folder)
    toy_config(vocab=len(tokenizer)).save_pretrained(folder)
    return folder


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = lint.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


FAST = ("--tokens-per-second", 1000, "--draft-vocab", "300,320")


def good_rows(count):
    return [msgs(Q, {**A, "content": f"It is {i}."}) for i in range(count)]


def test_exit_status_for_ci(tmp_path, target, capsys):
    clean = write(tmp_path, good_rows(10), "clean.jsonl")
    mixed = write(tmp_path, [*good_rows(9), msgs(Q)], "mixed.jsonl")
    useless = write(tmp_path, [msgs(Q)] * 3, "useless.jsonl")
    assert run(capsys, clean, "--target", target, *FAST)[0] == 0
    code, out, _ = run(capsys, mixed, "--target", target, *FAST)
    assert code == 1 and "1 rows (10.00%) are dropped, more than the tolerance of 0.00%" in out
    assert run(capsys, mixed, "--target", target, "--tolerance", 0.1, *FAST)[0] == 0
    assert run(capsys, mixed, "--target", target, "--tolerance", 0.09, *FAST)[0] == 1
    code, out, _ = run(capsys, useless, "--target", target, *FAST)
    assert code == 2 and "add --prompts" in out
    assert run(capsys, useless, "--target", target, "--prompts")[0] == 0


@pytest.mark.parametrize(
    "arguments,fault",
    [
        (("no.jsonl", "--target", "{target}"), "no.jsonl does not exist"),
        (("{file}", "--target", "{folder}"), "holds no config.json"),
        (("{file}",), "FILE and --target are needed"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_status_2(tmp_path, target, capsys, arguments, fault):
    file = write(tmp_path, good_rows(1))
    code, _, err = run(capsys, *(a.format(target=target, file=file, folder=tmp_path) for a in arguments))
    assert code == 2 and fault in err and err.count("\n") == 1


def test_a_messy_file_sums_and_lists_its_rows(tmp_path, target, capsys):
    file = write(tmp_path, [row for row, _, _ in CASES.values()])
    found = tmp_path / "lint.json"
    code, out, _ = run(capsys, file, "--target", target, "--json", found, "--max-length", 150, "--list", "role-missing", *FAST)
    told = json.loads(found.read_text())
    assert code == told["exit_status"] == 1 and told["rows"] == len(CASES)
    assert sum(count for codes in told["outcomes"].values() for count in codes.values()) == len(CASES)
    names = list(CASES)
    for name, (_, outcome, _) in CASES.items():
        fate, reason = outcome.split()
        number = names.index(name) + 1
        if number in told["numbers"]["dropped"]["duplicate"]:
            continue  # several cases hold the same conversation
        assert reason in told["outcomes"][fate] and (reason == "ok" or number in told["numbers"][fate][reason]), name
    assert f"of {len(CASES)} rows read" in out
    assert all(str(number) in out for number in told["numbers"]["dropped"]["role-missing"])
    for fate, codes in told["outcomes"].items():
        assert all(reason == "ok" or len(told["numbers"][fate][reason]) == count for reason, count in codes.items())
    assert told["predicted"] > 0 and [row["size"] for row in told["coverage"]][:2] == [300, 320]


def test_the_preview_marks_exactly_the_answers_in_both_outputs(tmp_path, target, capsys):
    question = "What <b>is</b> it? <|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>"
    file = write(tmp_path, [msgs({**Q, "content": question}, {**A, "content": "Because <i>🦉</i> é."}, Q2, A)])
    page = tmp_path / "lint.html"
    code, out, _ = run(capsys, file, "--target", target, "--html", page, *FAST)
    html = page.read_text(encoding="utf-8")
    (pre,) = re.findall(r"<pre>(.*?)</pre>", html, re.S)
    from html import unescape

    trained = [unescape(re.sub(r"</?b>", "", run)) for run in re.findall(r"(?:<b>[^<]*</b>)+", pre)]
    assert trained == ["Because <i>🦉</i> é.<|im_end|>", "It is good.<|im_end|>"]
    whole = tokenizer_for("chatml").apply_chat_template(
        [{**Q, "content": question}, {**A, "content": "Because <i>🦉</i> é."}, Q2, A], tokenize=False
    )
    assert unescape(re.sub(r"</?[bi]>", "", pre)) == whole
    assert "http" not in html and "<script" not in html  # self-contained
    assert "Because <i>🦉</i> é." in out and "row 1, kept" in out


def test_terminal_preview_colours_the_answers(tmp_path, target):
    from argparse import Namespace

    from train.lint_report import TRAINED, mask_text

    args = Namespace(file=write(tmp_path, [msgs(Q, A)]), target=target, limit=None, preview=1, draft_vocab=[300], tokens_per_second=1.0)
    tokenizer, config = lint.load_target(target)
    text = mask_text(lint.lint_conversations(args, tokenizer, config, Plan(300)).previews[0])
    assert "".join(text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED) == "It is good.<|im_end|>"


def test_settings_come_from_a_recipe(tmp_path, target, capsys):
    file = write(tmp_path, good_rows(5))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {target}\noutput_dir: {tmp_path}/run\nanswers: {{file: {file}}}\n"
        "features: {mode: online}\nhead: {draft_vocab_size: 310}\n"
        "train: {epochs: 3, micro_batch_tokens: 64, learning_rate: 1.0e-3, precision: fp32, max_length: 30}\n"
    )
    found = tmp_path / "lint.json"
    code, out, _ = run(capsys, "--recipe", recipe, "--json", found, *FAST)
    told = json.loads(found.read_text())
    assert code == 0 and told["outcomes"]["shortened"] == {"too-long": 5} and told["longest"] == 30
    assert [row["size"] for row in told["coverage"]] == [300, 310, 320]
    assert told["estimate"]["features_disk"] == 0 and told["estimate"]["seconds"] == pytest.approx(3 * told["tokens"] / 1000)
    assert "3 epoch(s) at 1,000 tokens/s (given with --tokens-per-second)" in out


def test_estimates_of_weights_and_optimizer_are_exact():
    from tests.train.toy import toy_head, toy_target

    toy = toy_target(torch.float32)
    head = toy_head(toy, torch.arange(20), torch.float32)
    sizes = Sizes.of(toy.config, 20)
    assert sizes.head == sum(parameter.numel() for parameter in head.parameters())
    assert sizes.target == sum(parameter.numel() for parameter in toy.model.parameters())
    assert sizes.target_matrix == sizes.target - toy.embedding.weight.numel()
    optimizer = torch.optim.AdamW(head.parameters())
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(s[name].numel() * 4 for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert checkpoint_bytes(sizes.head) == moments + 4 * sizes.head
    assert memory_bytes(sizes, Plan(20, precision="fp32"))["optimizer"] == moments


def test_zero_divides_what_it_shards_and_time_follows_tokens():
    sizes = Sizes.of(toy_config(), 20)

    def memory(**changes):
        return memory_bytes(sizes, Plan(20, processes=4, **changes))

    assert memory(zero_stage=0)["optimizer"] == pytest.approx(4 * memory(zero_stage=1)["optimizer"], abs=4)
    weights = 2 * sizes.head
    assert memory(zero_stage=1)["head and gradients"] == 2 * weights
    assert memory(zero_stage=2)["head and gradients"] == pytest.approx(1.25 * weights, abs=4)
    assert memory(zero_stage=3)["head and gradients"] == pytest.approx(0.5 * weights, abs=4)
    plan = Plan(20, epochs=2, precision="fp32")
    given = estimate(sizes, plan, 900, 1000, 500, 10, tokens_per_second=50.0)
    assert given.features_disk == feature_bytes(sizes.hidden, 900, 500, 10, "fp8")
    assert given.seconds == pytest.approx(1000 * 2 / 50) and given.rate_from == "given with --tokens-per-second"
    measured = estimate(sizes, plan, 900, 1000, 500, 10)
    assert "GFLOP/s" in measured.rate_from and measured.seconds == pytest.approx(2000 / measured.tokens_per_second)
    assert matrix_rate(torch.float32, 0.05) > 1e8


def test_a_target_without_a_head_still_gets_its_lint(tmp_path, target, capsys):
    from transformers import GPT2Config

    other = tmp_path / "gpt2"
    tokenizer_for("chatml").save_pretrained(other)
    GPT2Config(vocab_size=len(tokenizer_for("chatml")), n_layer=1, n_head=1, n_embd=8).save_pretrained(other)
    code, out, _ = run(capsys, write(tmp_path, good_rows(3)), "--target", other, *FAST)
    assert code == 0 and "no estimate: no head can be sized for a target of type 'gpt2'" in out
