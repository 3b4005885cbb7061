"""Whatever the trees look like, the answers are a plain server's: greedy, by a grammar, and with a sampling seed.

The target is the toy Markov chain, which wanders between tokens where the draft is sure (deep trees), hopeless (wide ones) and broken (the
root alone), so one request meets them all. The plain server runs SGLang's deterministic inference, which is where SGLang minds seeds.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.talon_sglang.test_features import GRAMMARS  # noqa: E402
from tests.toy import FORKING, GROUPS, TEXT, after, write_toy  # noqa: E402

pytestmark = pytest.mark.slow
PLAIN = (str(Path(__file__).with_name("deterministic_server.py")),)
# (N, K, depth cap, batch budget): one guess, one layer, a chain, wider than the budget; never more than the root, shrinking under load
TREES = [(2, 1, 1, 0), (5, 4, 1, 0), (7, 1, 6, 0), (24, 30, 0, 0), (8, 3, 0, 1), (24, 4, 0, 40)]
PROMPTS = ["he", "12", "AB"]  # sure, hopeless, broken

# No token of "k-q" is what the draft proposes after one of them, as far as it is sure of one.
FORBIDDEN = "klmnopq"
assert not {after(TEXT.index(c)) for c in FORBIDDEN} & {TEXT.index(c) for c in FORBIDDEN}
assert all(TEXT.index(c) in GROUPS["sure"] for c in FORBIDDEN)
ALL_FORBIDDEN = {"regex": "[k-q]{24}"}

GREEDY = [{}, {"frequency_penalty": 0.5}, {"min_new_tokens": 4, "stop": ["e"]}]
CONSTRAINED = [*GRAMMARS, ALL_FORBIDDEN, {"regex": "([A-O]{2}[0-9]){8}"}, {"regex": "[a-z]{12}", "min_new_tokens": 12}]
SEEDED = [
    {"sampling_seed": 1},
    {"sampling_seed": 2},
    {"sampling_seed": -7, "temperature": 0.7},
    {"sampling_seed": 1, "top_k": 8},
    {"sampling_seed": 1, "top_p": 0.8},
    {"sampling_seed": 2**62, "frequency_penalty": 1.0, "logit_bias": {"3": 1.0}},
    {"sampling_seed": 5, "regex": "([a-f]{3}[0-9]){6}"},
]
JOBS = (
    [(prompt, {"temperature": 0} | rules) for prompt in PROMPTS for rules in GREEDY + CONSTRAINED]
    + [(prompt, {"temperature": 1} | rules) for prompt in PROMPTS for rules in SEEDED]
)  # fmt: skip


def ask(url: str, prompt: str, sampling: dict, **fields) -> dict:
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 32} | sampling} | fields
    response = httpx.post(url + "/generate", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def spec(folders, extra=(), **settings) -> ServerSpec:
    target, head = folders
    settings = {"threads": 1, "max_running_requests": 16, "launcher": FORKING} | settings
    return ServerSpec(target, head if settings.get("algorithm") else None, extra=extra, **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("spread"), spread=True)


@pytest.fixture(scope="module")
def expected(folders):
    """What the plain server says to each job, one request at a time: a neighbour would change SGLang's seeded draws (seeds.py)."""
    with serve(spec(folders, ("--disable-overlap-schedule",), launcher=PLAIN)) as server:
        return [essence(ask(server.url, *job)) for job in JOBS]


def essence(answer: dict) -> tuple:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


@pytest.mark.parametrize("n, k, steps, batch", TREES)
def test_answers_are_the_plain_servers(folders, expected, n, k, steps, batch):
    """All jobs at once, with unseeded sampled neighbours, in an order that mixes the kinds."""
    mates = [(prompt, {"temperature": temperature, "top_k": 30}) for prompt in PROMPTS for temperature in (0.8, 1.5)]
    order = sorted(range(len(JOBS)), key=lambda i: i * 7 % len(JOBS))
    jobs = [JOBS[i] for i in order] + mates
    talon = spec(folders, algorithm="TALON", nodes=n, width=k, steps=steps, batch_budget=batch)
    with serve(talon) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda job: ask(server.url, *job), jobs))
    for i, answer in zip(order, answers):
        assert essence(answer) == expected[i], JOBS[i]
        if k <= 4 and ALL_FORBIDDEN.items() <= JOBS[i][1].items():  # a wider first layer has the improbable tokens too
            assert answer["meta_info"]["spec_num_correct_drafts"] == 0 and len(answer["text"]) == 24
