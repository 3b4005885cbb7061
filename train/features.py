"""A folder of target features, so that every token passes through the target once and not once per epoch.

A conversation's entry is found by a hash of its token ids and of the target, so entries can come from train/regenerate.py (which has them
at hand while it decodes) or be computed before training, and a stale entry is never found. Files are safetensors shards, each written
under a temporary name and renamed. Cost: 2 bytes x 4 x hidden size per token.

Shape suffixes: T positions, H hidden size, F = 3H, X = F + H, N rows.
"""

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from train.target import FrozenTarget


@dataclass
class Features:
    """`kept_TX`: the three auxiliary features, then the final normed hidden state (bf16 in the store).
    `argmax_T` (int32): the target's greedy next token, -1 where it has not been computed."""

    kept_TX: torch.Tensor
    argmax_T: torch.Tensor


def target_fingerprint(target: FrozenTarget) -> str:
    """Changes with the target's weights and the choice of auxiliary layers."""
    digest = hashlib.sha256(repr((target.aux_layers, target.config.model_type, target.config.num_hidden_layers)).encode())
    last = target.model.model.layers[-1].self_attn.o_proj.weight
    for tensor in (target.model.model.norm.weight, last, target.embedding.weight[:64]):
        digest.update(tensor.detach().float().cpu().bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


class FeatureStore:
    """Entries by token ids. `put` collects, `flush` writes one shard; `get` reads. Several processes may write to one folder."""

    def __init__(self, folder: str | Path, fingerprint: str):
        self.folder, self.fingerprint = Path(folder), fingerprint
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pending: dict[str, torch.Tensor] = {}
        self._files: dict[Path, object] = {}
        self._where: dict[str, Path] = {}
        self.refresh()

    def refresh(self) -> None:
        """Notice shards that other processes have written."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._files:
                self._files[path] = safe_open(path, "pt")
                for name in self._files[path].keys():
                    self._where[name.removesuffix("/kept").removesuffix("/argmax")] = path

    def key(self, ids: list[int]) -> str:
        return hashlib.sha1(f"{self.fingerprint}:{','.join(map(str, ids))}".encode()).hexdigest()

    def __contains__(self, ids: list[int]) -> bool:
        return self.key(ids) in self._where

    def get(self, ids: list[int]) -> Features:
        """Raises KeyError when these ids have no entry."""
        key = self.key(ids)
        file = self._files[self._where[key]]
        return Features(file.get_tensor(f"{key}/kept"), file.get_tensor(f"{key}/argmax"))

    def put(self, ids: list[int], features: Features) -> None:
        key = self.key(ids)
        self._pending[f"{key}/kept"] = features.kept_TX.to(torch.bfloat16).contiguous().cpu()
        self._pending[f"{key}/argmax"] = features.argmax_T.to(torch.int32).contiguous().cpu()

    def flush(self) -> None:
        if self._pending:
            path = self.folder / f"{uuid.uuid4().hex}.safetensors"
            save_file(self._pending, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
            self._pending = {}
            self.refresh()


def compute_features(target: FrozenTarget, chats: list[list[int]]) -> list[Features]:
    """Features of a few token sequences in one right-padded target forward; the argmax is left open (-1)."""
    longest = max(map(len, chats))
    device = target.embedding.weight.device
    ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in chats], device=device)
    lengths_B = torch.tensor([len(ids) for ids in chats], device=device)
    features_BTF, final_BTH = target.hidden(ids_BT, torch.arange(longest, device=device) < lengths_B[:, None])
    kept_BTX = torch.cat([features_BTF, final_BTH], dim=-1)
    return [Features(kept_BTX[i, : len(ids)], torch.full((len(ids),), -1, dtype=torch.int32)) for i, ids in enumerate(chats)]
