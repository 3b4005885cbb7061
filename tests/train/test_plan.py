"""The dry run: its formulas against measured tensors, its checks, and the five large recipes from their config facts alone."""

import gc
import json
import subprocess
import sys

import pytest
import torch

from tests.train.toy import toy_batch, toy_chats, toy_draft_target, toy_head, toy_target
from train import memory
from train.facts import count_parameters, target_config
from train.masks import Encoded
from train.plan import check, dry_run, find_rows, make_plan
from train.recipe import RecipeError, load_recipe
from train.ttt import unroll

LARGE = ("llama3.1-8b", "qwen3-8b", "qwen3-32b", "vicuna-13b", "deepseek-r1-distill-llama-8b")


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_passes_from_its_facts_alone(name, repo_root):
    recipe = load_recipe(repo_root / "recipes" / f"{name}.yaml")
    assert not recipe.target.exists()
    config, origin = target_config(recipe)
    assert origin.endswith(f"{name}.json")
    everything, kept = count_parameters(config)
    assert everything == json.loads((repo_root / "recipes/targets" / f"{name}.json").read_text())["_parameters"]
    head = check(recipe, config)
    rows, notes = find_rows(recipe, config)
    plan = make_plan(recipe, config, head, rows)
    assert len(notes) == 2 and plan.target_parameters == everything and plan.hours is None
    assert plan.steps[1] > 7 * plan.steps[8] > 0  # eight processes take an eighth of the steps
    one, eight = plan.memory[1], plan.memory[8]
    assert one.target_weights == 2 * everything and eight.optimizer == one.optimizer / 8 and eight.total < one.total
    assert one.optimizer == 12 * plan.head_parameters[0] and kept < everything
    assert plan.store_disk < 0.5 * recipe.plan.rows * min(recipe.plan.row_tokens, recipe.train.max_length) * 8 * config.hidden_size
    assert plan.tokens == sum(rows.lengths) * recipe.train.epochs


@pytest.mark.slow
def test_the_command_needs_no_deepspeed_and_no_network(repo_root, tmp_path):
    """One process runs all five; importing deepspeed would raise."""
    code = (
        "import sys, runpy\nsys.modules['deepspeed'] = None\n"
        "for name in sys.argv[1:]:\n    sys.argv = ['x', '--recipe', f'recipes/{name}.yaml', '--dry-run']\n"
        "    runpy.run_path('train/draft_head.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *LARGE], cwd=repo_root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.count("8 processes: ") == 5 and done.stdout.count("not there yet: run train/regenerate.py") == 5


def measured_activations(precision, hidden, chats, vocab, steps):
    """Bytes of distinct storages that autograd keeps for the backward pass of one micro-batch, parameters and inputs left out."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    target = toy_target(torch.float32, vocab=vocab, hidden=hidden, head_dim=hidden // 4)  # all tokens reachable: all carry loss
    ids_Vd = torch.arange(vocab)
    head = toy_head(target, ids_Vd, dtype)
    draft = toy_draft_target(target, ids_Vd)
    draft.embedding_VH, draft.lm_head_VdH = draft.embedding_VH.to(dtype), draft.lm_head_VdH.to(dtype)
    batch = toy_batch(target, chats, steps).to("cpu", dtype)
    given = [*head.parameters(), draft.embedding_VH, draft.lm_head_VdH, *vars(batch).values()]
    known, kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding the tensor keeps its address from being reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sums = unroll(head, batch, draft)
    assert sums.loss_K.requires_grad
    return sum(size for size, _ in kept.values()), batch


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("hidden, vocab, length", [(32, 40, 12), (64, 40, 24), (32, 300, 24), (16, 40, 120)])
def test_saved_activations_follow_the_formula(precision, hidden, vocab, length):
    chats = [Encoded(torch.randint(3, vocab, (length,)).tolist(), [(1, length)]) for _ in range(3)]
    steps = 5
    measured, batch = measured_activations(precision, hidden, chats, vocab, steps)
    shape = memory.Shape(hidden, 24, 4, 2, hidden // 4, vocab)
    estimate = memory.saved_activations(shape, precision, batch.ids_BT.numel(), batch.rows_BQ.numel(), length, steps)
    print(precision, hidden, vocab, length, estimate / measured)
    assert 0.85 < estimate / measured < 1.15


def test_partly_supervised_rows_cost_what_their_queries_cost():
    measured, batch = measured_activations("fp32", 32, toy_chats(), 40, 3)
    estimate = memory.saved_activations(memory.Shape(32, 24, 4, 2, 8, 40), "fp32", batch.ids_BT.numel(), batch.rows_BQ.numel(), 14, 3)
    print(estimate / measured)
    assert 0.8 < estimate / measured < 1.25


def test_what_checkpointing_keeps_follows_the_formula():
    """Live tensors after the forward pass of an unroll that recomputes; autograd's own copies are gone, so what is left are these."""
    hidden, vocab, steps, length = 128, 300, 6, 40
    target, ids_Vd = toy_target(torch.float32, vocab=vocab, hidden=hidden, head_dim=hidden // 4), torch.arange(vocab)
    head, draft = toy_head(target, ids_Vd, torch.float32), toy_draft_target(target, ids_Vd)
    batch = toy_batch(target, [Encoded(torch.randint(3, vocab, (length,)).tolist(), [(1, length)]) for _ in range(4)], steps)
    before = live_storages()
    sums = unroll(head, batch, draft, checkpointing=True)
    kept = sum(size for address, size in live_storages().items() if address not in before)
    shape = memory.Shape(hidden, 24, 4, 2, hidden // 4, vocab)
    rows, queries = batch.ids_BT.numel(), batch.rows_BQ.numel()
    whole = memory.saved_activations(shape, "fp32", rows, queries, length, steps)
    one_step = (whole - memory.saved_activations(shape, "fp32", rows, queries, length, 1)) / (steps - 1)
    estimate = memory.saved_activations(shape, "fp32", rows, queries, length, steps, recomputed=True) - one_step
    print(estimate / kept, estimate / whole)
    assert sums.loss_K.requires_grad and 0.7 < estimate / kept < 1.3


def live_storages() -> dict[int, int]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.device.type == "cpu"}


@pytest.mark.slow
def test_head_states_equal_what_deepspeed_holds(repo_root):
    """Every live tensor of a DeepSpeed engine after backward and after its step, against the formula, for each stage and precision."""
    script = "tests/train/measure_states.py"
    done = subprocess.run([sys.executable, script], cwd=repo_root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert {(row["precision"], row["stage"]) for row in rows} == {("fp32", 0), *((p, s) for p in ("fp32", "bf16") for s in (1, 2, 3))}
    for row in rows:
        states = memory.head_states(row["parameters"], 0, row["precision"], row["stage"], 1)
        expected = states["head_weights"] + states["gradients"] + states["optimizer"]
        assert row["after_backward"] == pytest.approx(expected, rel=0.02), row
        if row["stage"] == 3:  # the only stage whose bucket outlives the backward pass
            assert row["bucket"] == states["buffers"]


def small(recipe, *sets):
    return load_recipe(recipe, ["head.draft_vocab_size=100", *sets])


@pytest.fixture
def offline(repo_root, tmp_path, monkeypatch):
    """The quick recipe with facts instead of a target, in an empty cache."""
    monkeypatch.setenv("TALON_CACHE", str(tmp_path / "cache"))
    facts = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4}
    facts |= {"num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 600, "hidden_act": "silu"}
    (tmp_path / "facts.json").write_text(json.dumps(facts))

    def make(*sets, **changes):
        (tmp_path / "facts.json").write_text(json.dumps({k: v for k, v in (facts | changes).items() if v is not None}))
        return small(repo_root / "recipes/smollm2-135m-cpu-quick.yaml", f"target_facts={tmp_path / 'facts.json'}", *sets)

    return make


PLANNED = ("plan.rows=100", "plan.row_tokens=50")


@pytest.mark.parametrize(
    "sets, changes, message",
    [
        ((), {}, "`answers.file` is .* run train/regenerate.py first, or give `plan.rows`"),
        (PLANNED, {"vocab_size": 50}, "`head.draft_vocab_size` is 100, the target has 50 tokens"),
        (PLANNED, {"num_hidden_layers": 6}, "`head.aux_layers` is missing and the target has 6 layers"),
        ((*PLANNED, "head.aux_layers=[1,2,9]"), {}, r"`head.aux_layers` is \[1, 2, 9\]"),
        (PLANNED, {"max_position_embeddings": 256}, "`train.max_length` is 512, the target reads 256 tokens"),
        (PLANNED, {"model_type": "gpt2"}, "is a 'gpt2' model"),
        (PLANNED, {"vocab_size": None}, "facts.json lack `vocab_size`"),
        ((*PLANNED, "target_facts=none.json"), {}, "none.json cannot be read"),
    ],
)
def test_a_run_that_could_not_begin_is_refused_in_one_sentence(offline, sets, changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        dry_run(offline(*sets, **changes))
    assert "\n" not in str(caught.value)


def test_time_and_space_are_said(offline, capsys):
    dry_run(offline(*PLANNED, "plan.tokens_per_second=100", "train.epochs=3", "train.held_out=0", "train.micro_batch_tokens=600"))
    out = capsys.readouterr().out
    assert "5000 tokens" in out and "15000 in 3 epochs" in out and "0.0 hours at 100 tokens/s" in out
    assert "1 process: 27 steps" in out  # 12 rows of 50 tokens fill a micro-batch of 600: 9 steps in each of 3 epochs
    assert "features (0.0 GiB in fp8, " in out and "the whole target" in out and "target is not there" not in out


def test_a_disk_that_is_too_small_and_rows_that_are_too_long_are_noted(offline, capsys, monkeypatch):
    monkeypatch.setattr("train.plan.free_bytes", lambda path: 1000)
    dry_run(offline(*PLANNED))
    out = capsys.readouterr().out
    assert "`features.folder` needs" in out and "`output_dir` needs" in out and "exceeds `train.micro_batch_tokens` 300" in out


def test_facts_must_agree_with_the_target_that_is_there(offline, tmp_path):
    recipe = offline(*PLANNED)
    recipe.target.mkdir(parents=True)
    (recipe.target / "config.json").write_text(json.dumps(json.loads((tmp_path / "facts.json").read_text()) | {"num_hidden_layers": 9}))
    with pytest.raises(RecipeError, match="says num_hidden_layers 8, the target's config.json 9"):
        target_config(recipe)


@pytest.mark.slow
def test_answers_that_are_there_are_counted(offline, target_dir, tmp_path, capsys):
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "one two " * (i + 2)}]}
        for i in range(8)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = (f"target={target_dir}", f"answers.file={tmp_path / 'answers.jsonl'}", "target_facts=null", "head.draft_vocab_size=1000")
    dry_run(offline(*sets, "train.held_out=0"))
    out = capsys.readouterr().out
    assert "8 with " in out and "counted (" in out and "draft vocabulary covers" in out and "0.13 B parameters" in out
