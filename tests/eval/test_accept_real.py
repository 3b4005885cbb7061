"""eval/accept.py and real servers count the same rounds, prompt by prompt, at temperature 0 in float32."""

import json

import pytest

from eval.accept import main
from eval.client import ChatTokenizer, Client
from eval.servers import ServerSpec, serve

pytestmark = pytest.mark.slow
PROMPTS = ["Name three colours.", "What is the capital of France?", "Count from one to ten."]
TOKENS = 24
SERVED = {
    "talon:16,4": {"algorithm": "TALON", "nodes": 16, "width": 4},
    "sglang-eagle3:4,4,16": {"algorithm": "EAGLE3", "nodes": 16, "width": 4, "steps": 4},
    "chain:3": {"algorithm": "EAGLE3", "nodes": 4, "width": 1, "steps": 3},
}


@pytest.fixture(scope="module")
def head(shared_dir):
    return shared_dir / "heads" / "smollm2-135m-eagle3-8k"


@pytest.fixture(scope="module")
def offline(head, target_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("accept")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--target", target_dir, "--head", head, "--prompts", folder / "prompts.txt", "--max-new-tokens", TOKENS]
    words += ["--out", folder / "accept.json", *(word for policy in SERVED for word in ("--policy", policy))]
    assert main([str(word) for word in words]) == 0
    return json.loads((folder / "accept.json").read_text())


@pytest.mark.parametrize("policy", SERVED)
def test_every_prompt_takes_as_many_rounds_as_on_the_server(offline, policy, head, target_dir):
    tokenizer = ChatTokenizer(target_dir)
    with serve(ServerSpec(target_dir, head, threads=1, **SERVED[policy])) as server, Client(server.url) as client:
        served = list(client.generate_all([tokenizer.encode([text]) for text in PROMPTS], TOKENS))
    (name,) = [name for name in offline["tallies"] if name.startswith(policy)]
    (tallies,), (answers,) = offline["tallies"][name].values(), offline["answers"].values()
    assert [answers[prompt] for prompt in sorted(answers)] == [answer.output_ids for answer in served]
    assert [tallies[prompt]["rounds"] for prompt in sorted(tallies)] == [answer.rounds for answer in served]
