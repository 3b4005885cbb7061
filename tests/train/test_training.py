"""The real driver with the real DeepSpeed on a toy: resume, ZeRO stages, one and two processes, precisions, best, export."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.train.toy import toy_config
from train.export import ExportError, export
from train.head import load_head
from train.reference import ReferenceHead

pytestmark = pytest.mark.slow
MEASURED = ("time", "tokens_per_second", "memory_gib")
WORDS = "the river runs past a mill where grain is ground and bread is baked each morning for the town".split()


@pytest.fixture(scope="module")
def toy(target_dir, tmp_path_factory):
    """Folder with a toy target, answers and a recipe of about 30 steps."""
    folder = tmp_path_factory.mktemp("training")
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    torch.manual_seed(0)
    model = LlamaForCausalLM(toy_config(vocab=49152, hidden=32)).float()
    with torch.no_grad():  # a target that only ever says the answers' words: they are what the draft vocabulary holds
        said = sorted({token for word in WORDS for token in tokenizer(" " + word)["input_ids"]})
        head = torch.zeros_like(model.lm_head.weight)
        head[said] = 20 * model.lm_head.weight[said]
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = []
    for i in range(48):
        answer = " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(6 + i % 9))
        messages = [{"role": "user", "content": f"Tell me {i}"}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"row{i}", "messages": messages, "truncated": i % 5 == 0})
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": str(folder / "target"),
        "output_dir": str(folder / "run"),
        "answers": {"file": str(folder / "answers.jsonl")},
        "features": {"mode": "store", "folder": str(folder / "features")},
        "head": {"draft_vocab_size": 400},
        "train": {"ttt_steps": 3, "epochs": 3, "micro_batch_tokens": 240, "learning_rate": 0.01, "precision": "fp32", "held_out": 0.1}
        | {"log_every": 1, "eval_every": 10, "save_every": 5},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def command(toy, name, *sets, processes=0):
    """processes 0: plain python; otherwise the deepspeed launcher."""
    script = ["train/draft_head.py", "--recipe", str(toy / "recipe.yaml"), "--set", f"output_dir={toy / name}"]
    script += [word for item in sets for word in ("--set", item)]
    if not processes:
        return [sys.executable, *script]
    port = 20000 + os.getpid() % 20000 + processes
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes), "--master_port", str(port), *script]


def run(repo_root, *args, **kwargs):
    done = subprocess.run(command(*args, **kwargs), cwd=repo_root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def head(toy, name):
    return load_file(toy / name / "head" / "model.safetensors")


def metrics(toy, name):
    rows = [json.loads(line) for line in (toy / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


@pytest.fixture(scope="module")
def whole_run(toy, repo_root):
    run(repo_root, toy, "whole")
    return "whole"


def test_loss_falls_and_evaluation_leaves_no_trace(toy, repo_root, whole_run):
    rows = [row for row in metrics(toy, whole_run) if "held_out" not in row]
    assert rows[-1]["loss"][0] < 0.85 * rows[0]["loss"][0]
    run(repo_root, toy, "no-eval", "train.eval_every=1000000")
    expected, found = head(toy, whole_run), head(toy, "no-eval")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_killed_run_continues_as_if_it_had_not_been_killed(toy, repo_root, whole_run):
    latest = toy / "killed" / "latest"
    process = subprocess.Popen(command(toy, "killed"), cwd=repo_root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (latest.exists() and latest.read_text() >= "step-000010"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (toy / "killed" / "head").exists()
    out = run(repo_root, toy, "killed")
    assert "up to date" not in out
    assert metrics(toy, "killed") == metrics(toy, whole_run)  # every step once, same losses, same learning rates
    expected, found = head(toy, whole_run), head(toy, "killed")
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert "up to date" in run(repo_root, toy, "killed")


def test_a_frozen_lm_head_stays_the_targets_and_the_rest_learns(toy, repo_root):
    run(repo_root, toy, "frozen", "head.train_lm_head=false", "train.epochs=1")
    state, target = head(toy, "frozen"), load_file(toy / "target" / "model.safetensors")
    ids_Vd = state["d2t"] + torch.arange(len(state["d2t"]))
    assert torch.equal(state["lm_head.weight"], target["lm_head.weight"][ids_Vd])
    assert not torch.equal(state["norm.weight"], target["model.norm.weight"])


SHORT = ["train.epochs=1", "train.micro_batch_tokens=120", "train.eval_every=4", "train.save_every=2", "train.gradient_accumulation=2"]
TWO = "train.gradient_accumulation=1"  # two processes, so that a step has two micro-batches as well
FP16 = ["train.precision=fp16", "head.train_lm_head=false"]
BF16 = ["train.precision=bf16", "train.packing=true", "train.loss=lk", "train.zero_stage=2"]
IN_ONE = [
    *(((f"one-{stage}"), [f"train.zero_stage={stage}"], None) for stage in (0, 1, 2, 3)),
    ("recomputed", ["train.zero_stage=3", "train.activation_checkpointing=true"], None),
    ("moved-a", ["train.zero_stage=1"], 4),
    ("moved-b", ["train.zero_stage=3"], 4),
    *((name, BF16, stop) for name, stop in (("bf16", None), ("bf16-cut", 4), ("bf16-cut", None))),
    *((name, FP16, stop) for name, stop in (("fp16", None), ("fp16-cut", 4), ("fp16-cut", None))),
    ("tokens", ["train.epochs=null", "train.tokens=700"], None),
]
IN_TWO = [
    *(((f"two-{stage}"), [f"train.zero_stage={stage}", TWO], None) for stage in (1, 2, 3)),
    ("moved-a", ["train.zero_stage=3", TWO], 8),
    ("moved-b", ["train.zero_stage=2"], 8),  # the recipe of one process: accumulation is halved by itself
]
BACK_IN_ONE = [("moved-a", ["train.zero_stage=2"], None), ("moved-b", ["train.zero_stage=3"], None)]


def run_all(toy, repo_root, name, runs, processes=1):
    listed = [
        {"recipe": str(toy / "recipe.yaml"), "sets": [*SHORT, f"output_dir={toy / run}", *sets], "stop": stop, "fp16": "fp16" in run}
        for run, sets, stop in runs
    ]
    (toy / f"{name}.json").write_text(json.dumps(listed))
    python = [sys.executable]
    if processes > 1:
        python += ["-m", "deepspeed.launcher.runner", "--num_gpus", str(processes), "--master_port", str(20000 + os.getpid() % 20000)]
    words = [*python, "tests/train/many_runs.py", str(toy / f"{name}.json")]
    done = subprocess.run(words, cwd=repo_root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def many(toy, repo_root):
    """All runs of the tables above, in three processes one after the other (the second is two)."""
    run_all(toy, repo_root, "in-one", IN_ONE)
    run_all(toy, repo_root, "in-two", IN_TWO, processes=2)
    run_all(toy, repo_root, "back-in-one", BACK_IN_ONE)


def curve(toy, name):
    """Losses by step [S, K], held-out rows included."""
    return torch.tensor([row["loss"] for row in metrics(toy, name)])


def same_curve(toy, name, other, tolerance):
    torch.testing.assert_close(curve(toy, name), curve(toy, other), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def test_stages_and_processes_have_one_loss_curve_and_one_head(toy, many):
    assert len(curve(toy, "one-1")) >= 12
    for name in ("one-0", "one-2", "one-3", "two-1", "two-2", "two-3"):
        same_curve(toy, name, "one-1", 1e-3)
        for key, tensor in head(toy, "one-1").items():
            torch.testing.assert_close(head(toy, name)[key], tensor, rtol=1e-3, atol=2e-4, msg=f"{name} {key}")


@pytest.mark.parametrize("name", ["moved-a", "moved-b"])
def test_a_run_moves_from_one_process_to_two_and_back_and_between_stages(toy, many, name):
    same_curve(toy, name, "one-1", 1e-3)
    steps = [row["step"] for row in metrics(toy, name) if "held_out" not in row]
    assert steps == list(range(1, len(steps) + 1))
    for key, tensor in head(toy, "one-1").items():
        torch.testing.assert_close(head(toy, name)[key], tensor, rtol=1e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_low_precision_resumes_exactly_and_learns_what_fp32_does(toy, many, name):
    """fp16 with its loss scale; bf16 packed, with another loss, under ZeRO-2."""
    assert metrics(toy, f"{name}-cut") == metrics(toy, name)
    whole, cut = head(toy, name), head(toy, f"{name}-cut")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    losses = curve(toy, name)
    assert losses.isfinite().all() and losses[-1, 0] < losses[0, 0]
    assert any(tensor.is_floating_point() and not torch.equal(tensor, tensor.bfloat16().float()) for tensor in whole.values())  # masters


def test_recomputing_activations_changes_nothing(toy, many):
    same_curve(toy, "recomputed", "one-3", 1e-6)


def test_a_token_budget_ends_the_run(toy, many):
    rows = [row for row in metrics(toy, "tokens") if "held_out" not in row]
    assert 2 <= len(rows) < len(curve(toy, "one-1")) and (toy / "tokens" / "head").exists()
    assert rows[-1]["learning_rate"] < rows[1]["learning_rate"]  # the schedule ends with it


def test_the_best_head_is_kept_and_exported(toy, many, tmp_path):
    held = [row for row in metrics(toy, "one-1") if "held_out" in row]
    best = json.loads((toy / "one-1" / "best" / "best.json").read_text())
    lengths = {row["step"]: row["accept_length"]["chain"] for row in held}
    assert len(held) >= 3 and best["accept_length"] == pytest.approx(max(lengths.values()), abs=1e-4)
    assert lengths[best["step"]] == max(lengths.values())
    assert all(1 <= row["accept_length"]["tree"] <= 8 for row in held)
    # Another head as best: export must take that one, and the last one when asked.
    last = load_file(toy / "one-1" / "head" / "model.safetensors")
    save_file(last | {"norm.weight": last["norm.weight"] + 1}, toy / "one-1" / "best" / "model.safetensors")
    best_norm = load_file(export(toy / "one-1", tmp_path / "best") / "model.safetensors")["norm.weight"]
    last_norm = load_file(export(toy / "one-1", tmp_path / "last", which="last") / "model.safetensors")["norm.weight"]
    assert torch.equal(last_norm, last["norm.weight"].bfloat16()) and torch.equal(best_norm, (last["norm.weight"] + 1).bfloat16())


def test_a_folder_with_another_run_is_refused_or_restarted(toy, repo_root, whole_run):
    changed = command(toy, whole_run, "train.epochs=2")
    refused = subprocess.run(changed, cwd=repo_root, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode != 0 and "`output_dir` holds a run whose train.epochs was 3, now 2" in refused.stderr
    assert (toy / whole_run / "head").exists()


def test_export_gives_a_head_that_the_checker_takes_and_refuses_a_broken_one(toy, whole_run, tmp_path):
    from talon_sglang.draft_head import DraftHeadError, check_draft_head

    out = export(toy / whole_run, tmp_path / "head")
    check_draft_head(out, toy / "target")
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4] and config["tie_word_embeddings"] is False
    state = load_file(out / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values() if tensor.is_floating_point())
    module, ids_Vd = load_head(out)
    reference = ReferenceHead.from_dirs(out, toy / "target")
    assert torch.equal(reference.draft_ids_Vd, ids_Vd) and len(ids_Vd) == 400 and sum(p.numel() for p in module.parameters()) > 0

    broken = toy / "broken"
    (broken / "head").mkdir(parents=True)
    for name in ("config.json", "target.json"):
        (broken / "head" / name).write_bytes((toy / whole_run / "head" / name).read_bytes())
    whole = head(toy, whole_run)
    save_file({name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}, broken / "head" / "model.safetensors")
    with pytest.raises(DraftHeadError):
        export(broken, tmp_path / "broken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head"]
    with pytest.raises(ExportError, match="no finished head"):
        export(toy / "none", tmp_path / "none")
