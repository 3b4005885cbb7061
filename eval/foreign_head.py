"""Heads with the optional parts that SGLang 0.5.23 serves and this toolkit does not train (`models/llama_eagle3.py`).

norm_before_fc: an RMSNorm over the three concatenated features before `fc`. norm_output: the state handed to the next step is the normed
one that lm_head reads. speculators trains with both unless told otherwise.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from train.head import Eagle3Head, HeadConfig, RMSNorm, draft_token_ids


class ForeignHead(Eagle3Head):
    """An `Eagle3Head` whose pieces do what these two fields of its config ask for; whoever composes the pieces need not know."""

    def __init__(self, config: HeadConfig, norm_before_fc: bool, norm_output: bool):
        super().__init__(config)
        self.norm_output = norm_output
        if norm_before_fc:
            self.fc = nn.Sequential(RMSNorm(3 * config.hidden_size, config.rms_norm_eps), self.fc)

    def finish(self, state_BTH, context_BATd):
        hidden_BTH = super().finish(state_BTH, context_BATd)
        return self.norm(hidden_BTH) if self.norm_output else hidden_BTH

    def logits(self, state):
        return self.lm_head(state) if self.norm_output else super().logits(state)


def load_served_head(head_dir: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Eagle3Head, torch.Tensor]:
    """Like train.head.load_head, and heads with norm_before_fc or norm_output as well: (module in eval mode, ids of the draft vocabulary).

    Raises RuntimeError (from `load_state_dict`) when a key is missing, unknown or of another shape.
    """
    head_dir = Path(head_dir)
    raw = json.loads((head_dir / "config.json").read_text())
    eagle = raw.get("eagle_config") or {}
    norm_before_fc = bool(eagle.get("norm_before_fc", raw.get("norm_before_fc")))
    head = ForeignHead(HeadConfig.from_json(head_dir / "config.json"), norm_before_fc, bool(raw.get("norm_output")))
    state = load_file(head_dir / "model.safetensors")
    ids_Vd = draft_token_ids(state.pop("d2t"))
    state.pop("t2d", None)
    if norm_before_fc:
        state["fc.0.weight"], state["fc.1.weight"] = state.pop("input_norm.weight"), state.pop("fc.weight")
    head.load_state_dict(state)
    return head.to(dtype).eval(), ids_Vd
