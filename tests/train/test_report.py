"""What a run reports: metrics.jsonl, TensorBoard, Weights & Biases."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from train import report
from train.evaluation import HeldOut, Tokens
from train.recipe import RecipeError, load_recipe
from train.report import Reporter, check_trackers, peak_memory
from train.world import World

WORLD = World(0, 1, torch.device("cpu"))
TABLE_5K = torch.tensor([[8.0, 6.0], [2.0, 1.0], [4.0, 3.0], [4.0, 2.0], [2.0, 1.0]])


@pytest.fixture
def recipe(repo_root):
    return load_recipe(repo_root / "recipes/smollm2-135m-cpu-quick.yaml", ["train.log_every=2", "train.wandb=talon"])


def report_three_steps(recipe, folder, done=0):
    with Reporter(SimpleNamespace(folder=folder), recipe, WORLD, done, 3, seen=50 * done) as reporter:
        for step in range(done + 1, 4):
            reporter.train(step, TABLE_5K, 0.1 * step, tokens=50, seconds=0.5)
        reporter.held_out(3, HeldOut(TABLE_5K, Tokens(30, 12), Tokens()))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_hold_means_and_conditional_accuracy(recipe, tmp_path, capsys):
    recipe.train.wandb = None
    report_three_steps(recipe, tmp_path)
    two, three, held = rows_of(tmp_path)
    assert (two["step"], three["step"], held["held_out"]) == (2, 3, True)
    assert two["loss"] == [2, 2] and two["accuracy"] == [0.5, 0.33333] and two["conditional_accuracy"] == [0.5, 0.5]
    assert (
        two["tokens_per_second"] == 100
        and two["memory_gib"] == pytest.approx(peak_memory(WORLD.device) / 2**30, abs=0.5)
        and two["time"] > 1e9
    )
    assert held["accept_length"] == {"chain": 2.5} and "accept length chain 2.50" in capsys.readouterr().out
    report_three_steps(recipe, tmp_path, done=2)  # resumed after step 2: what came later is written anew
    assert [(row["step"], row["tokens"]) for row in rows_of(tmp_path)] == [(2, 100), (3, 150), (3, 150)]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_depth_nobody_reached_has_no_accuracy():
    table_5K = TABLE_5K.clone()
    table_5K[3:, 1] = 0
    assert report._means(table_5K)["conditional_accuracy"] == [0.5, None]


def test_wandb_gets_every_row_under_one_id(recipe, tmp_path, monkeypatch):
    started, logged, finished = [], [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(1))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: started.append(given) or run))
    report_three_steps(recipe, tmp_path)
    report_three_steps(recipe, tmp_path, done=2)
    assert [one["project"] for one in started] == ["talon"] * 2 and started[0]["id"] == started[1]["id"] and len(finished) == 2
    assert started[0]["config"]["train"]["ttt_steps"] == recipe.train.ttt_steps
    assert [step for step, _ in logged] == [2, 3, 3, 3, 3]
    assert logged[0][1]["train/accuracy_1"] == 0.33333 and logged[2][1]["held_out/accept_length_chain"] == 2.5


def test_wandb_that_is_not_installed_is_said_at_once(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="`train.wandb` is 'talon', but the package wandb is not installed"):
        check_trackers(recipe)


def test_wandb_itself_offline(recipe, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is optional and not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    report_three_steps(recipe, tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
