"""Whose folder it is, and what a damaged or half-written checkpoint does. (That a run continues exactly: test_training.py.)"""

import json

import pytest
import torch
from safetensors.torch import save_file

from train.checkpoint import RunFolder, _first_change, _flat, _folder
from train.recipe import RecipeError, load_recipe
from train.world import World


def facts(repo_root, processes, *sets):
    recipe = load_recipe(repo_root / "recipes/smollm2-135m-cpu-quick.yaml", sets)
    return {**_flat(recipe), "data": "x", "processes": processes}


@pytest.mark.parametrize(
    "processes, sets, change",
    [
        (4, (), None),
        (2, (), None),  # accumulation is halved, doubled, by itself
        (8, (), None),
        (2, ("train.gradient_accumulation=4",), None),  # the same eight micro-batches, said outright
        (3, (), "processes were 4 with 2 accumulation step(s), which 3 processes cannot share"),
        (4, ("train.gradient_accumulation=4",), "train.gradient_accumulation was 2, now 4"),
        (4, ("train.learning_rate=2e-3",), "train.learning_rate was 0.001, now 0.002"),
        (4, ("train.loss=kl",), "train.loss was 'soft_ce', now 'kl'"),
        (4, ("train.zero_stage=3", "train.activation_checkpointing=true", "train.save_every=7", "train.tree_rows=0"), None),
    ],
)
def test_what_may_change_in_a_folder(repo_root, processes, sets, change):
    begun = facts(repo_root, 4, "train.gradient_accumulation=2")
    assert _first_change(facts(repo_root, processes, "train.gradient_accumulation=2", *sets), begun) == change


def test_a_field_that_an_older_version_did_not_have_counts_as_its_default(repo_root):
    begun = facts(repo_root, 1)
    for name in ("train.loss", "train.packing", "train.tokens"):
        del begun[name]
    begun["train.zero_stage"] = 1  # older folders recorded it
    assert _first_change(facts(repo_root, 1), begun) is None
    assert _first_change(facts(repo_root, 1, "train.packing=true"), begun) == "train.packing was False, now True"


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    run = RunFolder(tmp_path, World(0, 1, torch.device("cpu")))
    assert run.load() is None
    (tmp_path / "latest").write_text("step-000004")
    with pytest.raises(RecipeError, match="The checkpoint step-000004 in `output_dir` cannot be read"):
        run.load()
    with _folder(tmp_path / "step-000004") as work:
        save_file({"weight/norm": torch.ones(3)}, work / "state.safetensors")
        (work / "state.json").write_text(json.dumps({"step": 4, "adam_steps": 4}))
    found = run.load()
    assert found.step == 4 and found.facts == {"adam_steps": 4} and found.tensors["weight/norm"].tolist() == [1, 1, 1]
    path = tmp_path / "step-000004" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RecipeError, match="cannot be read"):
        run.load()


def test_a_folder_gets_its_name_only_when_whole(tmp_path):
    with pytest.raises(KeyboardInterrupt), _folder(tmp_path / "step") as work:
        (work / "half").write_text("")
        raise KeyboardInterrupt
    assert not (tmp_path / "step").exists()
    with _folder(tmp_path / "step") as work:
        (work / "whole").write_text("")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["whole"]
