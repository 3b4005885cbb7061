"""Export refuses what would not serve, and writes what the doctor finds nothing in."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.heads import config, target_json, weights, write_head
from train.doctor import examine
from train.export import ExportError, export
from train.layouts import read_checkpoint


@pytest.fixture
def finished(tmp_path):
    """A run folder with a finished fp32 head, and its target's folder."""
    target, run = tmp_path / "target", tmp_path / "run"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(target_json()))
    head = write_head(run / "head")
    save_file({name: t.float() if t.is_floating_point() else t for name, t in weights(head).items()}, head / "model.safetensors")
    (head / "target.json").write_text(json.dumps({"target": str(target)}))
    return run, target


def test_the_doctor_finds_nothing_in_an_export_which_holds_the_trained_weights(finished, tmp_path):
    run, _ = finished
    out = export(run, tmp_path / "out")
    assert examine(read_checkpoint(out), target_json())[0] == []
    trained, exported = load_file(run / "head" / "model.safetensors"), weights(out)
    assert trained.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in trained.items())


def test_a_float16_target_gets_a_float16_head(finished, tmp_path):
    run, target = finished
    theirs = target_json() | {"torch_dtype": "float16", "dtype": "float16"}
    (target / "config.json").write_text(json.dumps(theirs))
    out = export(run, tmp_path / "out")
    assert config(out)["torch_dtype"] == "float16" and weights(out)["fc.weight"].dtype == torch.float16
    assert examine(read_checkpoint(out), theirs)[0] == []


def test_nan_weights_are_refused_and_an_earlier_export_stays(finished, tmp_path):
    run, _ = finished
    out = export(run, tmp_path / "out")
    state = load_file(run / "head" / "model.safetensors")
    state["midlayer.mlp.up_proj.weight"][3, 1] = float("nan")
    save_file(state, run / "head" / "model.safetensors")
    with pytest.raises(ExportError, match="up_proj.weight holds 1 NaN"):
        export(run, out)
    assert all(torch.isfinite(t).all() for t in weights(out).values()) and not (tmp_path / ".out.tmp").exists()


def test_an_export_needs_a_finished_run_and_its_target(finished, tmp_path):
    run, target = finished
    shutil.rmtree(target)
    with pytest.raises(ExportError, match="name it with --target"):
        export(run, tmp_path / "out")
    with pytest.raises(ExportError, match="holds no finished head"):
        export(tmp_path, tmp_path / "out")
