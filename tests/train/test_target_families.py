"""Features and logits of tiny random targets of every family against transformers' own `output_hidden_states` and logits."""

import pytest
import torch
import transformers as tf

from tests.train.toy import toy_chats, toy_draft_target
from train.batches import make_batch
from train.facts import count_parameters
from train.features import compute_features, predicting
from train.head import Eagle3Head, HeadConfig
from train.plan import SERVED
from train.target import FrozenTarget
from train.ttt import unroll
from train.warm_start import norm_scale, warm_start

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(head_dim=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
GEMMA = dict(tie_word_embeddings=True, query_pre_attn_scalar=4, sliding_window=4)
FAMILIES = {
    "llama": tf.LlamaConfig(**SIZES),
    "llama, tied": tf.LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "mistral": tf.MistralConfig(**SIZES, sliding_window=4),
    "qwen2": tf.Qwen2Config(**SIZES),
    "qwen3": tf.Qwen3Config(**SIZES),
    "phi3": tf.Phi3Config(**SIZES),
    "gemma2": tf.Gemma2Config(
        **SIZES | {"tie_word_embeddings": True}, final_logit_softcapping=2.0, query_pre_attn_scalar=4, sliding_window=4
    ),
    "gemma3_text": tf.Gemma3TextConfig(**SIZES | {"tie_word_embeddings": True}, query_pre_attn_scalar=4, sliding_window=4),
    "qwen2_moe": tf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=8),
    "qwen3_moe": tf.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mixtral": tf.MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved as single files, with weights large enough that layers, caps and scales matter; built when asked for."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(3)
            model = tf.AutoModelForCausalLM.from_config(FAMILIES[name])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.3))
            made[name] = tmp_path_factory.mktemp("target") / "model"
            model.save_pretrained(made[name])
        return made[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_features_and_logits_are_the_models_own(folders, name):
    assert [path.name for path in folders(name).glob("*.safetensors")] == ["model.safetensors"]
    target = FrozenTarget.load(folders(name), torch.float32)
    chats = toy_chats()
    for chat, found in zip(chats, compute_features(target, chats)):  # three lengths in one padded batch
        with torch.no_grad():
            expected = target.model(torch.tensor([chat.ids[: chat.useful_length]]), output_hidden_states=True)
        aux_TF = torch.cat([expected.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(found.aux_TF, aux_TF, rtol=1e-4, atol=1e-4)
        logits_PV = expected.logits[0, predicting(chat)]
        torch.testing.assert_close(target.logits(found.final_PH), logits_PV, rtol=1e-3, atol=1e-4)
        assert found.argmax_P.tolist() == logits_PV.argmax(-1).tolist()


def test_gemmas_cap_reaches_the_distribution_that_is_learned(folders):
    target = FrozenTarget.load(folders("gemma2"), torch.float32)
    ids_Vd = torch.arange(3, 40, 3)
    draft = toy_draft_target(target, ids_Vd)
    draft.logit_cap = target.logit_cap
    (ids_T,) = ids_1T = torch.arange(3, 12)[None]
    logits_TV = target.model(ids_1T).logits[0].detach()
    expected = torch.softmax(logits_TV[:, ids_Vd], -1)
    torch.testing.assert_close(draft.probabilities(target.hidden(ids_1T)[1][0]), expected, rtol=1e-3, atol=1e-5)
    draft.logit_cap = None
    assert (draft.probabilities(target.hidden(ids_1T)[1][0]) - expected).abs().max() > 0.05 and len(ids_T) == 9


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_starts_from_any_of_them_and_learns(folders, name):
    target = FrozenTarget.load(folders(name), torch.float32)
    ids_Vd = torch.arange(0, 40, 2)
    head = Eagle3Head(HeadConfig.from_target(target.config, len(ids_Vd)))
    warm_start(head, target, ids_Vd)
    x_BH = torch.randn(3, 16)
    unit_BH = x_BH / (x_BH.square().mean(-1, True) + 1e-6).sqrt()
    torch.testing.assert_close(norm_scale(target.decoder.norm) * unit_BH, target.decoder.norm(x_BH), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.norm(x_BH), target.decoder.norm(x_BH), rtol=1e-4, atol=1e-4)
    chats = toy_chats()
    batch = make_batch(chats, compute_features(target, chats), 3)
    sums = unroll(head, batch, toy_draft_target(target, ids_Vd))
    sums.loss_K.sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0 for parameter in head.parameters())
    everything, kept = count_parameters(target.config)
    assert everything == sum(parameter.numel() for parameter in target.model.parameters()) and kept < everything


def test_every_family_that_is_let_through_is_checked_here():
    assert set(SERVED) <= {config.model_type for config in FAMILIES.values()}


@pytest.mark.parametrize("make, scaled", [(tf.CohereConfig, {"logit_scale": 0.25}), (tf.GraniteConfig, {"logits_scaling": 4.0})])
def test_a_target_that_scales_its_logits_is_refused_when_it_is_loaded(tmp_path, make, scaled):
    tf.AutoModelForCausalLM.from_config(make(**SIZES, **scaled)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="whose logits are not lm_head times its final hidden state") as caught:
        FrozenTarget.load(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


def test_few_layers_need_explicit_ones():
    small = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES | {"num_hidden_layers": 6}))
    with pytest.raises(ValueError, match="`head.aux_layers` is missing and the target has 6 layers"):
        FrozenTarget(small)
    assert FrozenTarget(small, (1, 2, 4)).aux_layers == (1, 2, 4)
    with pytest.raises(ValueError, match=r"`head.aux_layers` is \[1, 2, 6\]; name layers from 0 to 5"):
        FrozenTarget(small, (1, 2, 6))
