"""The clock inside a real server: every part of a round is seen, and the parts do not exceed the rounds."""

import json

import pytest

from eval.cost import main
from eval.cost_model import PARTS

pytestmark = pytest.mark.slow


def test_every_part_is_measured_and_fitted(shared_dir, target_dir, tmp_path):
    head = shared_dir / "heads" / "smollm2-135m-eagle3-8k"
    out, picture = tmp_path / "cost.json", tmp_path / "cost.png"
    words = ["--target", target_dir, "--head", head, "--nodes", 8, "--batches", 1, 2, "--dtype", "float32", "--threads", 1]
    assert main([*map(str, words), "--out", str(out), "--plot", str(picture)]) == 0
    body = json.loads(out.read_text())
    assert set(body["lines"]) == set(PARTS) and picture.stat().st_size > 0
    samples = [sample for samples in body["samples"].values() for sample in samples]
    assert {(s["part"], s["size"]) for s in samples} >= {("plain", 1), ("plain", 2), ("verify", 8), ("verify", 16), ("overhead", 2)}
    assert all(sample["ms"] > 0 for sample in samples)
    verify = {s["size"]: s["ms"] for s in samples if s["part"] == "verify"}
    draft = min(s["ms"] for s in samples if s["part"] == "draft")
    assert draft < verify[8], "the target has 30 layers, the draft one"
