"""New target weights in a running server: what was packed from the old ones (talon_sglang/cpu/linear.py) is not used any more."""

import httpx
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, GROUPS, HIDDEN, VOCAB, answer, target_config, target_weights, write  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT, LENGTH = [1, 2, 3], 20


def backwards_head() -> torch.Tensor:
    """A target head that goes down by one within the group instead of up by seven."""
    next_VH = torch.zeros(VOCAB, HIDDEN)
    for group in GROUPS.values():
        for place, token in enumerate(group):
            next_VH[group[place - 1], token] = 5.0
    return next_VH


@pytest.mark.parametrize("algorithm", ["none", "TALON"])
def test_answers_follow_the_new_weights(toy, tmp_path, algorithm):
    write(tmp_path / "new", target_config(), target_weights() | {"lm_head.weight": backwards_head()})
    speculation = {"head": toy[1], "algorithm": "TALON", "nodes": 8, "width": 2} if algorithm == "TALON" else {}
    spec = ServerSpec(toy[0], **speculation, extra=("--skip-tokenizer-init",), threads=1, launcher=FORKING)
    with serve(spec) as server, Client(server.url) as client:
        assert client.generate(PROMPT, LENGTH).output_ids == answer(3, LENGTH)
        reply = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": str(tmp_path / "new")}, timeout=60)
        assert reply.json()["success"], reply.text
        down = [(3 - step) % len(GROUPS["sure"]) for step in range(1, LENGTH + 1)]
        assert client.generate(PROMPT, LENGTH).output_ids == down
