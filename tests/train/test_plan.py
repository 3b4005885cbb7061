"""The dry run: its formulas against measured tensors, its checks, and the five large recipes from their config facts alone."""

import json
import subprocess
import sys

import pytest
import torch

from tests.train.toy import toy_batch, toy_chats, toy_draft_target, toy_head, toy_target
from train import memory
from train.facts import count_parameters, target_config
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
    assert plan.cache_disk == plan.tokens * (8 * config.hidden_size + 4)


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
    from train.masks import Encoded

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
