"""`sglang.Engine` with TALON, in a process of its own: answers, streaming, the report, and a refused request."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from tests.toy import spread_answer, write_toy  # noqa: E402

SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], speculative_draft_model_path=sys.argv[2], speculative_algorithm="TALON", speculative_num_draft_tokens=12,
        speculative_eagle_topk=3, speculative_num_steps=0, device="cpu", dtype="float32", skip_tokenizer_init=True, max_total_tokens=4096,
        mem_fraction_static=0.5, max_running_requests=8, log_level="error",
    )
    greedy = {"temperature": 0, "max_new_tokens": 20}
    one = engine.generate(input_ids=[1, 2, 3], sampling_params=greedy)
    many = engine.generate(input_ids=[[4], [5, 6]], sampling_params=greedy | {"frequency_penalty": 1.0})
    stream = list(engine.generate(input_ids=[1, 2, 3], sampling_params=greedy, stream=True))
    try:
        engine.generate(input_ids=[10**9], sampling_params=greedy)
        refused = ""
    except ValueError as error:
        refused = str(error)
    told = {"one": one, "many": many, "last": stream[-1], "refused": refused}
    print("TOLD" + json.dumps(told))
    engine.shutdown()
"""


@pytest.mark.slow
def test_engine(tmp_path, repo_root):
    target, head = write_toy(tmp_path, spread=True, good_draft=True)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(repo_root)}
    run = subprocess.run([sys.executable, script, target, head], env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOLD")]
    assert lines, run.stderr[-3000:]
    told = json.loads(lines[0][4:])
    assert told["one"]["output_ids"] == told["last"]["output_ids"] == spread_answer(3, 20)
    assert [answer["output_ids"] for answer in told["many"]] == [spread_answer(last, 20, frequency_penalty=1.0) for last in (4, 6)]
    assert told["one"]["meta_info"]["talon"] == told["last"]["meta_info"]["talon"]
    assert told["one"]["meta_info"]["talon"]["accept_length"] > 1
    assert "input_ids[0] is 1000000000" in told["refused"]
