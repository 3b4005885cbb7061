"""What a server must survive: malformed requests, aborts, a KV pool too small for its load. Answers stay those of plain decoding, and
nothing leaks.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from eval.client import Client  # noqa: E402
from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, TEXT, VOCAB, spread_answer, write_toy  # noqa: E402

pytestmark = pytest.mark.slow
POOL = 900  # KV slots: too few for what the load test asks at once
END = TEXT.index("$")
EXTRA = ("--context-length", "512", "--enable-custom-logit-processor", "--schedule-conservativeness", "0.1")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    yield from serve_toy(tmp_path_factory)


@pytest.fixture(scope="module")
def sharing_url(tmp_path_factory):
    """Whose trees shrink to the root from 16 requests on, and are whole for one."""
    yield from serve_toy(tmp_path_factory, "--talon-batch-budget", "16")


def serve_toy(tmp_path_factory, *extra):
    target, head = write_toy(tmp_path_factory.mktemp("toy"), spread=True, good_draft=True)
    spec = ServerSpec(
        target,
        head,
        "TALON",
        nodes=12,
        width=4,
        steps=0,
        threads=1,
        max_total_tokens=POOL,
        max_running_requests=32,
        extra=(*EXTRA, *extra),
        launcher=FORKING,
    )
    with serve(spec, log_path=tmp_path_factory.mktemp("log") / "server.log") as server:
        yield server.url
        time.sleep(3)  # an idle scheduler checks its own books, and ends with an error when KV slots or request rows are missing
        server.check_alive()


# One client for all threads: making one takes longer than the toy takes to answer. Its idle connections end before the server ends them.
HTTP = httpx.Client(timeout=120, trust_env=False, limits=httpx.Limits(keepalive_expiry=2))


def post(url, content, path="/generate"):
    return HTTP.post(url + path, content=content, headers={"Content-Type": "application/json"})


def ask(**fields) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 8} | fields.pop("sampling", {})
    return json.dumps({"input_ids": [1, 2, 3], "sampling_params": sampling, **fields})


MALFORMED = {
    "not JSON": "{",
    "an array": "[]",
    "no prompt": json.dumps({"sampling_params": {}}),
    "text is a number": json.dumps({"text": 5}),
    "ids are text": ask(input_ids="abc"),
    "ids hold text": ask(input_ids=["a", "b"]),
    "ids hold fractions": ask(input_ids=[1.5, 2]),
    "ids hold null": ask(input_ids=[None]),
    "a huge id": ask(input_ids=[1, 10**9]),
    "an id beyond 64 bits": ask(input_ids=[2**70]),
    "an id just outside": ask(input_ids=[VOCAB]),
    "a negative id": ask(input_ids=[-1]),
    "no ids": ask(input_ids=[]),
    "an empty text": json.dumps({"text": "", "sampling_params": {}}),
    "NaN temperature": ask(sampling={"temperature": float("nan")}),
    "infinite temperature": ask(sampling={"temperature": float("inf")}),
    "negative temperature": ask(sampling={"temperature": -1}),
    "temperature is text": ask(sampling={"temperature": "hot"}),
    "NaN top_p": ask(sampling={"temperature": 1, "top_p": float("nan")}),
    "top_p of 2": ask(sampling={"top_p": 2}),
    "top_p of 0": ask(sampling={"top_p": 0}),
    "top_k of 0": ask(sampling={"temperature": 1, "top_k": 0}),
    "top_k is text": ask(sampling={"top_k": "many"}),
    "NaN min_p": ask(sampling={"temperature": 1, "min_p": float("nan")}),
    "NaN penalty": ask(sampling={"frequency_penalty": float("nan")}),
    "penalty of 9": ask(sampling={"presence_penalty": 9}),
    "repetition penalty of 0": ask(sampling={"repetition_penalty": 0}),
    "max_new_tokens is text": ask(sampling={"max_new_tokens": "lots"}),
    "negative max_new_tokens": ask(sampling={"max_new_tokens": -1}),
    "min above max": ask(sampling={"min_new_tokens": 9}),
    "n is text": ask(sampling={"n": "two"}),
    "stop is a number": ask(sampling={"stop": 5}),
    "stop ids are text": ask(sampling={"stop_token_ids": ["x"]}),
    "an unknown parameter": ask(sampling={"warmth": 1}),
    "sampling is a list": ask(sampling_params=[1]),
    "bias outside the vocabulary": ask(sampling={"logit_bias": {"1000000": 1.0}}),
    "bias of NaN": ask(sampling={"logit_bias": {"1": float("nan")}}),
    "bias for a word": ask(sampling={"logit_bias": {"word": 1.0}}),
    "a broken regex": ask(sampling={"regex": "("}),
    "a broken grammar": ask(sampling={"ebnf": "root ::= ("}),
    "a broken schema": ask(sampling={"json_schema": "{"}),
    "a regex and a schema": ask(sampling={"regex": "a", "json_schema": "{}"}),
    "a processor that is none": ask(custom_logit_processor="garbage"),
    "1 MB of text": json.dumps({"text": "a" * 2**20, "sampling_params": {}}),
    "a list of lists of lists": ask(input_ids=[[[1]]]),
    "logprobs of ids outside": ask(return_logprob=True, token_ids_logprob=[10**6]),
    "negative top logprobs": ask(return_logprob=True, top_logprobs_num=-3),
    "logprob start beyond the prompt": ask(return_logprob=True, logprob_start_len=99),
    "hidden states": ask(return_hidden_states=True),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_and_the_next_one_is_right(url, name):
    refused = post(url, MALFORMED[name])
    assert 400 <= refused.status_code < 500, (refused.status_code, refused.text[:300])
    after = post(url, ask()).json()
    assert after["output_ids"] == spread_answer(3, 8)


def gauges(url) -> dict[str, float]:
    with Client(url) as client:
        return client.counters()


def settle(url) -> dict[str, float]:
    """The server's books once it is idle and its prefix cache is empty."""
    for _ in range(100):
        if httpx.post(url + "/flush_cache", trust_env=False, timeout=60).status_code == 200:
            break
        time.sleep(0.1)
    post(url, ask())  # gauges are written with the next batch
    httpx.post(url + "/flush_cache", trust_env=False, timeout=60)
    state = httpx.get(url + "/server_info", trust_env=False, timeout=60).json()["internal_states"][0]
    return {key: state[key] for key in ("memory_usage",)} | {
        key: value for key, value in gauges(url).items() if key in ("sglang:num_running_reqs", "sglang:num_queue_reqs")
    }


def one(url, job) -> dict | None:
    """The answer to one job of the load; None if it was dropped in mid-stream."""
    sampling = {"temperature": 0, "max_new_tokens": job["new"], "ignore_eos": True} | job["rules"]
    if job.get("guess"):  # SGLang reserves the whole length for a request that ignores the end of text; here it guesses, and can be wrong
        sampling |= {"ignore_eos": False, "min_new_tokens": job["new"]}
    body = {"input_ids": job["ids"], "sampling_params": sampling}
    if job["drop"] is None:
        response = post(url, json.dumps(body))
        assert response.status_code == 200, response.text
        return response.json()
    with HTTP.stream("POST", url + "/generate", json=body | {"stream": True}) as response:
        for count, _ in enumerate(response.iter_lines()):
            if count >= job["drop"]:
                return None
    return None


def all_at_once(url, jobs, workers: int) -> list[dict | None]:
    """The answers to the jobs, `workers` at a time. The first ones reach the scheduler in one moment, however fast the machine is."""
    assert post(url, json.dumps({"mode": "in_place"}), "/pause_generation").status_code == 200
    with ThreadPoolExecutor(workers) as pool:
        answers = [pool.submit(one, url, job) for job in jobs]
        time.sleep(2)  # the server holds them
        assert post(url, "{}", "/continue_generation").status_code == 200
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("server", ["url", "sharing_url"])
def test_load_with_aborts(request, server):
    """200 requests, 32 at a time, a fifth dropped in mid-stream, in a pool that cannot hold them all."""
    url = request.getfixturevalue(server)
    draw = random.Random(0)
    rules = ({}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.4})
    jobs = [
        {
            "ids": [draw.randrange(VOCAB) for _ in range(draw.randint(1, 100))],
            "new": draw.randint(1, 120),
            "rules": draw.choice(rules),
            "drop": draw.randint(0, 40) if draw.random() < 0.2 else None,
            "guess": True,
        }
        for _ in range(200)
    ]
    before = settle(url)
    answers = all_at_once(url, jobs, 32)
    survivors = [(job, got) for job, got in zip(jobs, answers) if got is not None]
    for job, got in survivors:
        assert got["output_ids"] == spread_answer(job["ids"][-1], job["new"], **job["rules"], without=END)
    assert len(survivors) > 140
    assert settle(url) == before


@pytest.mark.parametrize("server, requests, prompt", [("url", 8, 100), ("sharing_url", 24, 20)])
def test_requests_that_outgrow_the_pool_are_retracted_and_end_as_if_alone(request, server, requests, prompt):
    """Requests that need twice the pool and more; among them a penalty, and a seed, whose draws hang on nothing but the position. The
    server that shares its budget begins with trees of the root alone, and has whole ones at the end.
    """
    url = request.getfixturevalue(server)
    rules = (
        {},
        {"frequency_penalty": 1.0},
        {"temperature": 1.0, "sampling_seed": 11},
        {"temperature": 1.0, "top_k": 9, "sampling_seed": 12},
    )
    fixed = {"new": 120, "drop": None, "guess": True}
    jobs = [{"ids": [(3 * i + k) % VOCAB for i in range(prompt)], "rules": rules[k % 4]} | fixed for k in range(requests)]
    alone = [one(url, job)["output_ids"] for job in jobs]
    retractions = 0
    for _ in range(3):
        together = all_at_once(url, jobs, requests)
        assert [got["output_ids"] for got in together] == alone
        retractions += sum(got["meta_info"]["num_retractions"] for got in together)
    assert retractions > 0, "the pool was large enough: nothing was retracted"
    assert alone[0] == spread_answer(jobs[0]["ids"][-1], 120, without=END)


def test_streams_that_share_a_prefix_survive_the_abort_of_their_neighbours(url):
    """Fifteen times: six streams behind a prefix of 128 tokens, two dropped in mid-stream and asked again."""
    prefix = [(7 * i) % VOCAB for i in range(128)]
    for attempt in range(15):
        jobs = [{"ids": [*prefix, last], "new": 40, "rules": {}, "drop": 1 + attempt % 5 if last in (1, 4) else None} for last in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda job: one(url, job), jobs))
            again = list(pool.map(lambda job: one(url, job | {"drop": None}), (jobs[1], jobs[4])))
        for job, got in [*zip(jobs, answers), (jobs[1], again[0]), (jobs[4], again[1])]:
            assert got is None or got["output_ids"] == spread_answer(job["ids"][-1], 40)
