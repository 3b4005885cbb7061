"""What a draft distribution q costs against the target's distribution p, both over the draft vocabulary, summed over positions.

soft_ce  -sum p log q, EAGLE-3's loss.
kl       sum p log(p / q): soft_ce less the entropy of p. p is fixed, so the gradient is that of soft_ce; only the number that is logged
         differs: it reads as nats above the best possible.
tv       1 - sum min(p, q), the total variation: the chance that a token drawn from q is rejected (Leviathan et al. 2023, theorem 3.5).
         Its gradient vanishes where q is far from p, so it suits a head that is already good.
lk       -log sum min(p, q), the negative log of that acceptance (LK loss). Written in logarithms, so an overlap too small for float32 still
         has a finite loss and a gradient of order one; with the overlap itself under the log it would be NaN.

Everything is float32 or wider (see `train.ttt.widen`). Shape suffixes: N positions, Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as fn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits_NVd, probs_NVd) -> scalar


def soft_ce(logits_NVd: torch.Tensor, probs_NVd: torch.Tensor) -> torch.Tensor:
    return fn.cross_entropy(logits_NVd, probs_NVd, reduction="sum")


def kl(logits_NVd: torch.Tensor, probs_NVd: torch.Tensor) -> torch.Tensor:
    return soft_ce(logits_NVd, probs_NVd) - torch.special.entr(probs_NVd).sum()


def tv(logits_NVd: torch.Tensor, probs_NVd: torch.Tensor) -> torch.Tensor:
    return (1 - torch.minimum(torch.softmax(logits_NVd, dim=-1), probs_NVd).sum(-1)).sum()


def lk(logits_NVd: torch.Tensor, probs_NVd: torch.Tensor) -> torch.Tensor:
    log_q_NVd = torch.log_softmax(logits_NVd, dim=-1)
    return -torch.minimum(log_q_NVd, probs_NVd.log()).logsumexp(-1).sum()


LOSSES: dict[str, Loss] = {"soft_ce": soft_ce, "kl": kl, "tv": tv, "lk": lk}
