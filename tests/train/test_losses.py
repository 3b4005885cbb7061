"""The losses by their definitions, and that no logits, however wild, give a gradient that is not finite."""

import pytest
import torch

from train.losses import LOSSES, kl, lk, soft_ce, tv

EVERY = pytest.mark.parametrize("name", LOSSES)


def gradient(loss, logits_NVd, probs_NVd):
    logits_NVd = logits_NVd.clone().requires_grad_(True)
    value = loss(logits_NVd.float() if logits_NVd.dtype == torch.bfloat16 else logits_NVd, probs_NVd)
    return value.detach(), torch.autograd.grad(value, logits_NVd)[0]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 60.0, 120.0, 1e4, 1e30])
def test_gradients_are_finite_for_any_logits(name, dtype, scale):
    """Overlaps of p and q from whole to far below the smallest float32, ties, and a target with one certain token."""
    torch.manual_seed(0)
    logits_NVd = (torch.randn(64, 50) * scale).to(dtype)
    teacher_NVd = torch.randn(64, 50) * scale
    teacher_NVd[:8] = -logits_NVd[:8].float()  # as far apart as can be
    teacher_NVd[8:16] = logits_NVd[8:16].float()
    value, found = gradient(LOSSES[name], logits_NVd, torch.softmax(teacher_NVd, dim=-1))
    assert value.isfinite() and found.isfinite().all()
    assert found.float().abs().max() <= 1.01  # of one position: all four are bounded


@EVERY
def test_the_gradient_is_that_of_finite_differences(name):
    torch.manual_seed(1)
    logits_NVd, probs_NVd = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randn(5, 7, dtype=torch.float64).softmax(-1)
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, probs_NVd), logits_NVd)


def test_values_by_definition_and_their_order():
    torch.manual_seed(2)
    logits_NVd, p = torch.randn(9, 11, dtype=torch.float64), torch.randn(9, 11, dtype=torch.float64).softmax(-1)
    q = logits_NVd.softmax(-1)
    distance = (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(tv(logits_NVd, p), distance.sum())
    torch.testing.assert_close(lk(logits_NVd, p), -(1 - distance).log().sum())
    torch.testing.assert_close(kl(logits_NVd, p), (p * (p / q).log()).sum())
    same = p.log()
    for loss in (kl, tv, lk):  # zero where the draft is perfect; soft_ce keeps the entropy
        torch.testing.assert_close(loss(same, p), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)
    assert soft_ce(same, p) > 1


def test_kl_and_soft_ce_pull_alike():
    torch.manual_seed(3)
    logits_NVd, probs_NVd = torch.randn(6, 8), torch.randn(6, 8).softmax(-1)
    assert torch.equal(gradient(kl, logits_NVd, probs_NVd)[1], gradient(soft_ce, logits_NVd, probs_NVd)[1])


def test_lk_still_pulls_where_the_overlap_is_nothing_and_tv_does_not():
    """A gap of 200 nats: the overlap is 0 in float32. The log written outside (LK as in other trainers) would be NaN here."""
    logits_NVd, probs_NVd = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert torch.equal(gradient(tv, logits_NVd, probs_NVd)[1], torch.zeros(1, 2))
    value, found = gradient(lk, logits_NVd, probs_NVd)
    assert value == 200 and found.tolist() == [[1, -1]]
