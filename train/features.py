"""What the target knows of a conversation, as training needs it, and how it is packed into few bytes.

Shape suffixes: T positions, H hidden size, F = 3H, P positions that a trained token is predicted from, R rows of width X,
which is V vectors of H numbers.
"""

import hashlib
from dataclasses import dataclass

import torch

from train.masks import Encoded, supervised_steps
from train.target import FrozenTarget

E4M3_MAX = 448.0  # largest number of torch.float8_e4m3fn
STORED = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Features:
    """`aux_TF`: inputs of the three auxiliary layers. `final_PH`: the state that the target's lm_head reads, and `argmax_P` (int32) its
    greedy next token, only at the positions of `predicting`."""

    aux_TF: torch.Tensor
    final_PH: torch.Tensor
    argmax_P: torch.Tensor


def predicting(chat: Encoded) -> torch.Tensor:
    """Positions whose next token is trained, in order (int64 [P]). The first token of an answer is not: in serving the target says it."""
    return supervised_steps(chat.span_ids(), 0).nonzero()[:, 0] + 1


def pack(features: Features, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors to store. Raises ValueError when a feature is not finite."""
    hidden = features.final_PH.shape[1]
    packed = {"argmax": features.argmax_P.to(torch.int32).cpu().contiguous()}
    for name, x_RX in (("aux", features.aux_TF.cpu()), ("final", features.final_PH.cpu())):
        if not x_RX.isfinite().all():
            raise ValueError(f"The target's {name} features hold infinite or undefined numbers; load it in another precision.")
        if dtype == "fp8":
            packed[name], packed[f"{name}_exponent"] = _to_fp8(x_RX, hidden)
        else:
            packed[name] = x_RX.to(STORED[dtype]).contiguous()
    return packed


def unpack(packed: dict[str, torch.Tensor]) -> Features:
    """The inverse of `pack`; fp8 comes back as bf16, which holds its numbers exactly."""
    wide = {}
    for name in ("aux", "final"):
        exponent = packed.get(f"{name}_exponent")
        wide[name] = packed[name] if exponent is None else _from_fp8(packed[name], exponent)
    return Features(wide["aux"], wide["final"], packed["argmax"])


def _to_fp8(x_RX: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each vector of `hidden` numbers is scaled by a power of two until its largest nearly fills the range
    -> fp8 [R, X], exponents [R, X / H].

    E4M3 keeps about two digits of every number down to 1/28,000 of the largest, so single huge channels do not cost the others.
    A power of two loses nothing against a free scale, fits one byte, and lets bf16 hold the result.
    """
    x_RVH = x_RX.float().unflatten(1, (-1, hidden))
    largest_RV = x_RVH.abs().amax(-1).clamp(min=2.0**-100)
    exponent_RV = torch.ceil(torch.log2(largest_RV / E4M3_MAX))
    scaled_RVH = torch.ldexp(x_RVH, -exponent_RV[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled_RVH.to(torch.float8_e4m3fn).flatten(1), exponent_RV.to(torch.int8)


def _from_fp8(x_RX: torch.Tensor, exponent_RV: torch.Tensor) -> torch.Tensor:
    scale_RV1 = torch.exp2(exponent_RV.float()).to(torch.bfloat16)[..., None]
    x_RVH = x_RX.to(torch.bfloat16).unflatten(1, (exponent_RV.shape[1], -1))
    return (x_RVH * scale_RV1).flatten(1)


def target_fingerprint(target: FrozenTarget) -> str:
    """Changes with any of the target's weights (256 values of each are looked at) and with the choice of auxiliary layers."""
    digest = hashlib.sha256(repr((target.aux_layers, target.config.model_type)).encode())
    for name, weight in target.model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 256)].cpu().bfloat16().view(torch.int16)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]


def compute_features(target: FrozenTarget, chats: list[Encoded]) -> list[Features]:
    """Features of a few conversations in one right-padded forward of the target."""
    lengths = [chat.useful_length for chat in chats]
    longest, device = max(lengths), target.embedding.weight.device
    ids_BT = torch.tensor([chat.ids[:length] + [0] * (longest - length) for chat, length in zip(chats, lengths)], device=device)
    mask_BT = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    aux_BTF, final_BTH = target.hidden(ids_BT, mask_BT)
    finals = [final_BTH[row, predicting(chat).to(device)] for row, chat in enumerate(chats)]
    argmaxes = target.argmax(torch.cat(finals)).to(torch.int32).split([len(final) for final in finals])
    return [Features(aux_BTF[row, :length], finals[row], argmaxes[row]) for row, length in enumerate(lengths)]
