"""SGLang's stock Triton attention backend serves TALON through the fixed-shape round, in Triton's interpreter on a CPU: the answers of
plain decoding, and the same trees as the CPU path's.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang", reason="needs SGLang")
pytest.importorskip("triton", reason="needs Triton")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, GROUPS, answer  # noqa: E402

pytestmark = pytest.mark.slow
N, K, LENGTH = 6, 2, 8


def served(toy, trace, extra=(), env=None):
    """{last token of a prompt: what the server answered}, for one request of each group, in one batch."""
    spec = ServerSpec(
        *toy,
        algorithm="TALON",
        nodes=N,
        width=K,
        trace=trace,
        max_total_tokens=512,
        max_running_requests=4,
        threads=1,
        extra=("--skip-tokenizer-init", *extra),
        env=env or {},
        launcher=FORKING,
    )
    lasts = [tokens[3] for tokens in GROUPS.values()]
    with serve(spec) as server, Client(server.url) as client, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda last: client.generate([1, 2, last], LENGTH).output_ids, lasts))
    return dict(zip(lasts, answers))


def trees(trace):
    """The distinct trees of a trace. A request's rounds do not depend on its batch, so both servers meet the same ones."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return {(tuple(row["tokens"]), tuple(row["parents"]), tuple(row["accepted"])) for row in rows}


def test_the_triton_backend_gives_plain_decodings_answers_and_the_cpu_paths_trees(toy, tmp_path):
    answers = served(
        toy,
        tmp_path / "triton.jsonl",
        ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1"),
        {"TRITON_INTERPRET": "1"},
    )
    assert answers == {last: answer(last, LENGTH) for last in answers}
    served(toy, tmp_path / "cpu.jsonl")
    found = trees(tmp_path / "triton.jsonl")
    assert found == trees(tmp_path / "cpu.jsonl") and {len(tokens) for tokens, _, _ in found} == {1, N}
