"""eval/stored_features.py on a toy: fp32 loses nothing, the coarser ones little, and sizes are those of the files."""

import pytest
import torch

from eval.stored_features import measure, table
from tests.train.toy import toy_head, toy_target
from train.masks import Encoded


def test_what_the_measurement_says_of_a_toy(tmp_path):
    target = toy_target(torch.float32, hidden=128)
    ids_Vd = torch.arange(0, 40, 2)
    head = toy_head(target, ids_Vd, torch.float32, std=0.05)
    chats = [Encoded(torch.randint(3, 40, (90,)).tolist(), [(20, 80)]) for _ in range(12)]
    figures = measure(target, head, ids_Vd, chats, 2, tmp_path)
    exact = figures["exact"]
    assert exact.positions_K.tolist() == [12 * 59, 12 * 59] and 0 < exact.hits_K[0] < exact.positions_K[0]
    assert figures["fp32"].hits_K.tolist() == exact.hits_K.tolist() and torch.equal(figures["fp32"].loss_K, exact.loss_K)
    for dtype, tolerance in (("bf16", 0.001), ("fp8", 0.01)):
        assert figures[dtype].loss_K.tolist() != exact.loss_K.tolist()
        torch.testing.assert_close(figures[dtype].loss_K, exact.loss_K, rtol=tolerance, atol=0.0)
    for dtype in ("fp8", "bf16", "fp32"):
        assert figures[dtype].disk == sum(path.stat().st_size for path in (tmp_path / dtype).glob("features-*"))
        assert figures[dtype].predicted == pytest.approx(figures[dtype].disk, rel=0.05)
    assert table(figures, 128, 12 * 79).row_count == 4
