"""A toy target and a toy EAGLE-3 head with hand-set weights, whose behaviour is known on paper.

The 64 tokens fall into three groups. The target walks through each group in a fixed cycle: after token t comes `after(t)`, whatever came
before.
    sure     0..23   the draft knows the next token almost with certainty
    hopeless 24..47  the draft spreads its bets evenly over the group
    broken   48..63  the draft's scores overflow: non-finite from the first layer on

How the weights do that: embeddings are one-hot (plus a constant channel), and the target's layers add nothing, so its head sees the last
token only. The draft's attention looks at its own position only
(constant queries and keys: the rotary score is largest at distance 0), and copies the one-hot of its token to the output; the target's
features are ignored.

Suffixes: V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, HEADS, HEAD_DIM = 64, 128, 2, 64
GROUPS = {"sure": range(0, 24), "hopeless": range(24, 48), "broken": range(48, 64)}
TEXT = "abcdefghijklmnopqrstuvwx" + 'yz0123456789 {}[]":,.-+' + "\n" + "ABCDEFGHIJKLMNO$"  # token i is TEXT[i]; $ ends a text
FORKING = (str(Path(__file__).with_name("forking_server.py")),)  # a launcher for ServerSpec: a server up in a third of the work
CONSTANT = VOCAB  # the hidden channel that is 1 for every token


def after(token: int) -> int:
    group = next(g for g in GROUPS.values() if token in g)
    return group[(token - group[0] + 7) % len(group)]  # 7 has no factor in common with 24 and 16, so each cycle visits its whole group


def answer(last: int, length: int) -> list[int]:
    """What the target says after a prompt that ends in `last`."""
    tokens = []
    for _ in range(length):
        last = after(last)
        tokens.append(last)
    return tokens


def write_toy(folder: Path, spread: bool = False, good_draft: bool = False) -> tuple[Path, Path]:
    """Write (target, head) folders in the layouts that SGLang loads. `spread` makes the target the Markov chain `spread_logits()`, and
    `good_draft` makes the head a noisy copy of that, in place of the three groups.
    """
    target, head = folder / "target", folder / "head"
    write(target, target_config(), target_weights() | ({"lm_head.weight": spread_VH()} if spread else {}))
    write(head, head_config(), head_weights() | ({"lm_head.weight": noisy_VH()} if good_draft else {}))
    tokenizer().save_pretrained(target)
    return target, head


def tokenizer():
    """One token per character. Servers with --skip-tokenizer-init do not read it, and then nothing ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({character: i for i, character in enumerate(TEXT)}, unk_token="O"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="$", chat_template=template, clean_up_tokenization_spaces=False)


def write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def target_config() -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def head_config() -> dict:
    aux = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return target_config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_config": aux,
    }


def embedding_VH() -> torch.Tensor:
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, :VOCAB] = torch.eye(VOCAB)
    embedding[:, CONSTANT] = 1.0
    return embedding


def spread_VH() -> torch.Tensor:
    """A target head under which several tokens are likely after each token; the draft's guesses are among them."""
    scores_VH = torch.zeros(VOCAB, HIDDEN)
    scores_VH[:, :VOCAB] = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)) * 0.25
    for token in range(VOCAB):
        scores_VH[after(token), token] += 0.3
    return scores_VH


def noisy_VH() -> torch.Tensor:
    """A draft head that is often, and not always, right about the spread target. (It sees the one-hot at sqrt(H), the target at 8.)"""
    noise_VH = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8)) * 0.05
    return spread_VH() * 8 / HIDDEN**0.5 + noise_VH


def spread_logits() -> torch.Tensor:
    """[V, V] logits of the spread target: row = last token, column = next."""
    normed_VH = embedding_VH() / (embedding_VH().pow(2).mean(-1, keepdim=True) + target_config()["rms_norm_eps"]).sqrt()
    return normed_VH @ spread_VH().T


def spread_answer(
    last: int, length: int, frequency_penalty: float = 0.0, repetition_penalty: float = 1.0, without: int | None = None
) -> list[int]:  # fmt: skip
    """What the spread target says, greedily, after a prompt that ends in `last`: SGLang's penalty rules, one token at a time, and never
    the token `without`.
    """
    logits_VV, counts_V, said = spread_logits(), torch.zeros(VOCAB), []
    if without is not None:
        logits_VV[:, without] = -torch.inf
    for _ in range(length):
        logits_V = logits_VV[last] - frequency_penalty * counts_V
        repeated_V = torch.where(logits_V < 0, logits_V * repetition_penalty, logits_V / repetition_penalty)
        last = int(torch.where(counts_V > 0, repeated_V, logits_V).argmax())
        said.append(last)
        counts_V[last] += 1
    return said


def target_weights() -> dict[str, torch.Tensor]:
    next_VH = torch.zeros(VOCAB, HIDDEN)
    for token in range(VOCAB):
        next_VH[after(token), token] = 5.0
    weights = {"model.embed_tokens.weight": embedding_VH(), "model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": next_VH}
    for i in range(target_config()["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights |= {layer + f"self_attn.{p}_proj.weight": torch.zeros(HIDDEN, HIDDEN) for p in "qkvo"}
        weights |= mlp(layer) | {layer + f"{n}_layernorm.weight": torch.ones(HIDDEN) for n in ("input", "post_attention")}
    return weights


def mlp(layer: str) -> dict[str, torch.Tensor]:
    return {layer + f"mlp.{p}_proj.weight": torch.zeros(64, HIDDEN) for p in ("gate", "up")} | {
        layer + "mlp.down_proj.weight": torch.zeros(HIDDEN, 64)
    }


def head_weights() -> dict[str, torch.Tensor]:
    look_at_self = torch.zeros(HIDDEN, 2 * HIDDEN)  # the first half of each rotary pair gets the (normed) constant channel, blown up
    for h in range(HEADS):
        look_at_self[h * HEAD_DIM : h * HEAD_DIM + HEAD_DIM // 2, CONSTANT] = 4.0
    copy_token = torch.zeros(HIDDEN, 2 * HIDDEN)
    copy_token[:VOCAB, :VOCAB] = torch.eye(VOCAB)  # head 0's value is the normed embedding: 8 x the one-hot of the token ...
    # ... minus the parent's one-hot (normed: sqrt(128) x), which the residual would otherwise carry along
    copy_token[:VOCAB, HIDDEN : HIDDEN + VOCAB] = -(0.5**0.5) * torch.eye(VOCAB)
    scores_VH = torch.zeros(VOCAB, HIDDEN)
    for token in GROUPS["sure"]:
        scores_VH[after(token), token] = 4.0
    for token in GROUPS["hopeless"]:
        scores_VH[list(GROUPS["hopeless"]), token] = 4.0
    for token in GROUPS["broken"]:
        scores_VH[:, token] = 3e38
    layer = "midlayer."
    return (
        {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN), "lm_head.weight": scores_VH}
        | {layer + f"self_attn.{p}_proj.weight": look_at_self for p in "qk"}
        | {layer + "self_attn.v_proj.weight": copy_token, layer + "self_attn.o_proj.weight": torch.eye(HIDDEN)}
        | mlp(layer)
        | {layer + f"{n}.weight": torch.ones(HIDDEN) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    )
