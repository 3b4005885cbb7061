import json

import pytest
import torch

from tests.train.toy import toy_target
from train.fetch_target import FetchError, _undo_rope_interleave, fetch_target
from train.head import default_aux_layers


def test_features_are_the_inputs_of_the_named_layers_and_padding_is_ignored():
    target = toy_target(torch.float32)
    ids_BT = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones(2, 9, dtype=torch.bool)
    mask_BT[1, 6:] = False
    features_BTF, final_BTH = target.hidden(ids_BT, mask_BT)
    for row, length in ((0, 9), (1, 6)):
        states = target.model(ids_BT[row : row + 1, :length], output_hidden_states=True)
        expected = torch.cat([states.hidden_states[i] for i in (2, 4, 5)], -1)[0]
        torch.testing.assert_close(features_BTF[row, :length], expected)
        torch.testing.assert_close(final_BTH[row, :length] @ target.lm_head_VH.t(), states.logits[0])
        assert target.argmax(final_BTH[row, :length], chunk=4).tolist() == states.logits[0].argmax(-1).tolist()
    assert default_aux_layers(30) == (2, 15, 27) and default_aux_layers(32) == (2, 16, 29)


def test_rope_interleave_is_undone_per_head():
    halves = torch.arange(2 * 6 * 3).view(2 * 6, 3).float()  # 2 heads of 6 rows: r0 r1 r2 i0 i1 i2
    interleaved = torch.stack([halves[head * 6 + part * 3 + pair] for head in range(2) for pair in range(3) for part in range(2)])
    assert torch.equal(_undo_rope_interleave(interleaved, 2), halves)


def test_a_file_with_another_checksum_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not the model")
    with pytest.raises(FetchError, match="sha256 .* expected b179c9"):
        fetch_target(tmp_path / "out", tmp_path / "x.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_the_target_folder_is_whole_and_speaks(target_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((target_dir / "config.json").read_text())
    assert "quantization_config" not in config and config["eos_token_id"] == 2
    assert json.loads((target_dir / "generation_config.json").read_text())["eos_token_id"] == 2
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert fetch_target(target_dir) == target_dir  # nothing to do, so nothing is done
