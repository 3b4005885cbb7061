"""The comparison with speculators: what is counted, what both sides are given, how a foreign head is run, and which stages there are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval import vs_speculators
from eval.foreign_head import ForeignHead, load_served_head
from eval.policies.rounds import Committed, DraftRounds
from eval.stages import Pipeline
from eval.versus import install
from eval.versus.clock import Clock, alternating, rate
from eval.versus.data import chat_of, facts, spread, tokens_and_mask
from eval.versus.report import collect, print_table
from tests.train.heads import HIDDEN, VOCAB, as_speculators, config, edit, edit_weights, target_json, write_head
from train.doctor import fix, status
from train.findings import Answers
from train.head import load_head
from train.masks import Encoded
from train.reference import ReferenceHead
from train.schedule import plan_epoch

# ------------------------------------------------------------ what is counted


def steps(*pairs) -> list[dict]:
    return [{"tokens": tokens, "wall_s": wall, "cpu_s": wall / 2} for tokens, wall in pairs]


def test_a_rate_leaves_the_first_two_steps_out():
    timed = steps((9, 100.0), (9, 100.0), (30, 1.0), (10, 3.0))
    assert rate(timed) == 10.0
    assert rate(timed, "cpu_s") == 20.0
    with pytest.raises(ValueError, match="2 steps were timed"):
        rate(timed[:2])


def test_a_clock_counts_nothing_between_the_last_tick_and_resume(tmp_path, monkeypatch):
    now = iter([0.0, 1.0, 5.0, 7.0])  # start, tick, resume, tick
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    clock.tick(10)
    clock.resume()
    clock.tick(20)
    clock.write(tmp_path / "deep" / "clock.json", side="ours")
    body = json.loads((tmp_path / "deep" / "clock.json").read_text())
    assert [(step["tokens"], step["wall_s"]) for step in body["steps"]] == [(10, 1.0), (20, 2.0)]
    assert body["side"] == "ours" and body["peak_mib"] > 0


def test_alternating_rounds_are_compared_with_their_neighbours():
    skipped = (1, 1.0), (1, 1.0)
    ours = [steps(*skipped, (100, seconds)) for seconds in (1.0, 2.0, 4.0)]
    theirs = [steps(*skipped, (100, seconds)) for seconds in (2.0, 4.0, 40.0)]
    found = alternating(ours, theirs)  # the machine slowed down under both; one outlier does not move the median
    assert found == {"ours": [100.0, 50.0, 25.0], "theirs": [50.0, 25.0, 2.5], "ratios": [2.0, 2.0, 10.0], "ratio": 2.0}
    with pytest.raises(ValueError, match="do not make pairs"):
        alternating(ours, theirs[:2])


def test_the_report_needs_no_head_that_was_not_measured(tmp_path, capsys):
    for name, seconds in (("ours", 1.0), ("theirs", 2.5)):
        (tmp_path / name).mkdir()
        timed = {"steps": steps((5, 9.0), (5, 9.0), (100, seconds)), "peak_mib": 700, "torch": "2.13.0"}
        (tmp_path / name / "clock.json").write_text(json.dumps(timed))
    for name, seconds in (("ours-1", 1.0), ("theirs-1", 4.0)):
        (tmp_path / f"speed-{name}").mkdir()
        timed = {"steps": steps((5, 9.0), (5, 9.0), (100, seconds))}
        (tmp_path / f"speed-{name}" / "clock.json").write_text(json.dumps(timed))
    summary = {"summary": {"talon:16,4": {"all": {"accept_length": 1.875, "standard_error": 0.02}}}}
    (tmp_path / "accept-ours.json").write_text(json.dumps(summary))
    body = collect(tmp_path)
    assert body["ratio"] == {"tokens_per_s": 2.5, "tokens_per_cpu_s": 2.5}
    assert set(body["heads"]) == {"ours", "theirs"}
    assert body["speed"]["wall_s"]["ratio"] == 4.0
    assert body["heads"]["ours"]["accept"]["talon:16,4"]["accept_length"] == 1.875 and body["heads"]["theirs"]["accept"] == {}
    from rich.console import Console

    print_table(body, Console(width=120))
    shown = capsys.readouterr().out
    assert "1.875 ± 0.020" in shown and "full runs: ratio 2.50" in shown


# ------------------------------------------------------------ what both sides are given


def test_the_mask_marks_the_answers_and_nothing_else():
    chat = Encoded([5, 6, 7, 8, 9, 5], [(1, 3), (4, 6)])
    row = tokens_and_mask(chat)
    assert row == {"input_ids": chat.ids, "loss_mask": [0, 1, 1, 0, 1, 1]}
    assert chat_of(row) == chat


def test_rows_are_taken_from_everywhere_in_the_file():
    assert spread(10, 10) == list(range(10))
    assert spread(480, 3) == [0, 160, 320]
    assert len(set(spread(480, 240))) == 240


def test_the_steps_told_to_speculators_are_those_that_we_make():
    rows = [{"input_ids": [1] * length, "loss_mask": [0] * (length - 2) + [1] * 2} for length in (20, 60, 33, 47, 90, 12)]
    found = facts(rows, budget=100, epochs=3, short=4)
    lengths = [len(row["input_ids"]) for row in rows]
    assert found["steps"] == sum(len(plan_epoch(lengths, 100, 1, 0, epoch)) for epoch in range(3))
    assert found["short_steps"] == len(plan_epoch(lengths[:4], 100, 1, 0, 0))
    assert (found["tokens"], found["answer_tokens"], found["longest"]) == (262, 12, 90)


# ------------------------------------------------------------ a foreign head


class NormedReference(ReferenceHead):
    """The slow reference of a head whose states are handed on normed: what the layer returns is normed, and lm_head norms no more."""

    def _layer(self, *args):
        return super()._norm(super()._layer(*args), "norm")

    def _norm(self, x, name):
        return x if name == "norm" else super()._norm(x, name)


@pytest.mark.parametrize(("norm_before_fc", "norm_output"), [(True, True), (True, False), (False, True)])
def test_a_head_that_speculators_trained_runs_as_its_config_says(tmp_path, norm_before_fc, norm_output):
    """From its layout through the doctor to draft log-probabilities, against the slow reference."""
    head_dir = write_head(tmp_path / "raw")
    as_speculators(head_dir)
    edit(head_dir, norm_before_fc=norm_before_fc, norm_output=norm_output)
    scale = torch.rand(3 * HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
    if norm_before_fc:
        edit_weights(head_dir, lambda state: state | {"input_norm.weight": scale.bfloat16()})
    _, left = fix(head_dir, tmp_path / "fixed", target_json(), Answers(norm_output=True if norm_output else None))
    assert status(left) == 0
    head, ids_Vd = load_served_head(tmp_path / "fixed", torch.float64)
    assert isinstance(head, ForeignHead)

    generator = torch.Generator().manual_seed(2)
    embedding_VH = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    features_TF = torch.randn(5, 3 * HIDDEN, generator=generator, dtype=torch.float64)
    tokens, drafted = [3, 8, 1, 9, 30, 11], [0, 7]
    committed = Committed(head, embedding_VH, [tokens], [features_TF], [5])
    rounds = DraftRounds(head, ids_Vd, embedding_VH, committed, torch.tensor([0]), torch.tensor([5]))
    zero = torch.tensor([0])
    found = [rounds.root_log_probs()[0]]
    for slot, token in enumerate(drafted, start=1):
        found.append(rounds.forward(zero, zero + slot, zero + slot - 1, zero + token)[0])

    from safetensors.torch import load_file

    weights = load_file(tmp_path / "fixed" / "model.safetensors")
    kind = NormedReference if norm_output else ReferenceHead
    reference = kind(weights, config(tmp_path / "fixed"), embedding_VH, torch.float64)
    if norm_before_fc:
        rms_T1 = features_TF.pow(2).mean(-1, keepdim=True).add(reference.config["rms_norm_eps"]).sqrt()
        features_TF = features_TF / rms_T1 * weights["input_norm.weight"].double()
    wanted = reference.chain_log_probs(features_TF, tokens, ids_Vd[drafted].tolist())
    torch.testing.assert_close(torch.stack(found).double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_head_of_our_own_is_loaded_as_before(tmp_path):
    head_dir = write_head(tmp_path / "head")
    (one, ids), (two, same_ids) = load_head(head_dir), load_served_head(head_dir)
    assert torch.equal(ids, same_ids)
    assert {name: tensor.tolist() for name, tensor in one.state_dict().items()} == {n: t.tolist() for n, t in two.state_dict().items()}


# ------------------------------------------------------------ stages and the other environment


def test_cuda_packages_are_noticed_before_they_are_installed():
    plan = {"install": [{"metadata": {"name": name}} for name in ("torch", "nvidia-cublas-cu12", "cuda-bindings", "numpy")]}
    assert install.cuda_packages(plan) == ["cuda-bindings", "nvidia-cublas-cu12"]
    pinned = dict(pin.split("==") for pin in (*install.PINS, *install.WITHOUT_REQUIREMENTS))
    assert install.as_pinned(pinned | {"torch": "2.13.0+cpu"})
    assert not install.as_pinned(pinned | {"speculators": "0.8.0"})


def listed(tmp_path, own_answers=False, servers=False, muon=False) -> list:
    places = vs_speculators.Places(tmp_path, tmp_path / "venv", tmp_path / "target", tmp_path / "a.jsonl", tmp_path / "p.jsonl", 3)
    return vs_speculators.all_stages(places, vs_speculators.Size(9, 64, 2, 3, 128, 2), own_answers, servers, muon)


def test_both_sides_get_the_same_numbers_and_take_turns(tmp_path):
    stages = {stage.name: [str(word) for word in stage.command] for stage in listed(tmp_path)}
    for side in ("ours", "theirs"):
        words = " ".join(stages[side])
        for ours, theirs in (("draft_vocab_size=128", "--draft-vocab-size 128"), ("ttt_steps=3", "--ttt-steps 3")):
            assert (ours if side == "ours" else theirs) in words
    assert "train.micro_batch_tokens=64" in stages["ours"] and "--length 64" in " ".join(stages["theirs"])
    order = [name for name in stages if name.startswith("speed")]
    assert order == [f"speed-{side}-{number}" for number in (1, 2) for side in ("ours", "theirs")]
    assert not [name for name in stages if "muon" in stages[name]]
    assert "answers" not in stages and "served-ours" not in stages
    more = {stage.name for stage in listed(tmp_path, own_answers=True, servers=True, muon=True)}
    assert more - set(stages) == {"answers", "theirs-muon", "export-theirs-muon", "accept-theirs-muon"} | {
        f"served-{name}" for name in ("ours", "theirs")
    }


def test_every_command_of_a_stage_is_there(tmp_path):
    for stage in listed(tmp_path, own_answers=True, servers=True, muon=True):
        assert (vs_speculators.REPO / stage.command[1]).is_file(), stage.name
        assert all(path.is_file() for path in stage.sources), stage.name
        assert stage.outputs, stage.name


def test_an_interrupted_comparison_goes_on_behind_what_is_finished(tmp_path, monkeypatch):
    """The real stages under a command that only writes their outputs; one is interrupted the first time."""
    from rich.console import Console

    ran, interruptions = [], ["prepare"]

    def call(self, stage, command):
        ran.append(stage.name)
        if stage.name in interruptions:
            interruptions.remove(stage.name)
            raise KeyboardInterrupt
        for path in stage.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("made") if path.suffix else path.mkdir(exist_ok=True)

    monkeypatch.setattr(Pipeline, "_call", call)
    for name in ("a.jsonl", "p.jsonl"):
        (tmp_path / name).write_text("given")
    stages = listed(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Pipeline(tmp_path, stages, Console(quiet=True), tmp_path).run()
    ran.clear()
    Pipeline(tmp_path, stages, Console(quiet=True), tmp_path).run()
    assert ran == [stage.name for stage in stages if stage.name not in ("target", "install", "rows")]


def test_an_unknown_stage_is_named(capsys):
    with pytest.raises(SystemExit):
        vs_speculators.main(["--only", "nothing"])
    assert "nothing is not a stage; choose one of target, install" in capsys.readouterr().err


def test_speculators_is_driven_by_names_that_it_has():
    """In its own environment, where there is one: what eval/versus/theirs.py exchanges and calls exists there."""
    python = vs_speculators.cache_dir() / "versus" / "venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("speculators is not installed; python eval/vs_speculators.py --only install does it")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from eval.versus.theirs import epochs_for, for_cpu\n"
        "for_cpu()\n"
        "from speculators.train.trainer import Trainer, get_local_rank\n"
        "assert str(get_local_rank()) == 'cpu' and Trainer.train_epoch\n"
        "import torch\n"
        "start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))\n"
        "def step():\n"
        "    weight = torch.nn.Parameter(torch.zeros(6, 4)); weight.grad = start.clone()\n"
        "    torch.optim.Muon([weight], lr=1.0).step()\n"
        "    return weight.detach(), weight.grad\n"
        "(found, grad), whole = step(), torch.linalg.svdvals\n"
        "assert found.dtype == torch.float32 and torch.equal(grad, start)\n"
        "assert found.bfloat16().float().ne(found).any()  # more digits than bf16 has\n"
        "assert 0.5 < whole(found).min() and whole(found).max() < 1.6  # near orthogonal, as Muon promises\n"
        "print(epochs_for(5, [40, 50, 60], 100))"
    )
    done = subprocess.run([python, "-c", code, str(Path(vs_speculators.REPO))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) in (2, 3, 5)  # one to three batches an epoch


def test_help_needs_nothing_installed():
    piped = {"capture_output": True, "text": True, "cwd": vs_speculators.REPO}
    shown = subprocess.run([sys.executable, "eval/vs_speculators.py", "--help"], check=False, **piped)
    assert shown.returncode == 0 and "examples:" in shown.stdout
