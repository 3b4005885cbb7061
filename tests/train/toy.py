"""Small random models and chats for the tests of train/."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from train.batches import make_batch
from train.features import Features, compute_features
from train.head import Eagle3Head, HeadConfig
from train.masks import Encoded
from train.target import FrozenTarget
from train.ttt import DraftTarget

VOCAB = 40


def toy_config(vocab: int = VOCAB, hidden: int = 16, **changes) -> LlamaConfig:
    values = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaConfig(**{**values, **changes})


def toy_target(dtype=torch.float64, **changes) -> FrozenTarget:
    torch.manual_seed(0)
    return FrozenTarget(LlamaForCausalLM(toy_config(**changes)).to(dtype))


def toy_head(target: FrozenTarget, ids_Vd: torch.Tensor, dtype=torch.float64, std: float = 0.3) -> Eagle3Head:
    torch.manual_seed(1)
    head = Eagle3Head(HeadConfig.from_target(target.config, len(ids_Vd))).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=std)
    return head


def toy_chats() -> list[Encoded]:
    """Two spans, a span that starts at row 1, and one that is too short for late steps; all of different length."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    return [Encoded(ids(14), [(3, 7), (9, 14)]), Encoded(ids(9), [(1, 9)]), Encoded(ids(6), [(2, 4)])]


def toy_features(target: FrozenTarget, chat: Encoded) -> Features:
    """Exact features of the useful positions, in the target's dtype."""
    return compute_features(target, [chat])[0]


def toy_draft_target(target: FrozenTarget, ids_Vd: torch.Tensor) -> DraftTarget:
    member_V = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    member_V[ids_Vd] = True
    return DraftTarget(target.embedding.weight, target.lm_head_VH[ids_Vd], member_V, ids_Vd)


def toy_batch(target: FrozenTarget, chats: list[Encoded], steps: int, rows: list[list[int]] | None = None):
    return make_batch(chats, [toy_features(target, chat) for chat in chats], steps, rows)
