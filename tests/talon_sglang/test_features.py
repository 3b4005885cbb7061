"""Every request feature, once on a plain server and once with TALON: same ids, text, finish reason, token counts and logprobs.

The target is the toy Markov chain of tests/toy.py, whose drafts are often right and often wrong, so that features meet accepted runs.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor  # noqa: E402

from eval.servers import ServerSpec, serve  # noqa: E402
from tests.toy import FORKING, TEXT, spread_answer, write_toy  # noqa: E402

pytestmark = pytest.mark.slow
EXTRA = ("--enable-custom-logit-processor", "--chunked-prefill-size", "64", "--context-length", "512", "--decode-log-interval", "1")


class NoRepeats(CustomLogitProcessor):
    """Forbids the two tokens said last: every node of a tree needs another mask."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            for token in params["__req__"].output_ids[-params["window"] :]:
                row[token] = -float("inf")
        return logits


NoRepeats.__module__ = "__main__"  # so that it travels by value: the server does not import the tests


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """(plain, talon) URLs."""
    target, head = write_toy(tmp_path_factory.mktemp("spread"), spread=True, good_draft=True)
    # With overlap scheduling a plain SGLang server counts the last prompt token in place of the newest output token in its penalties.
    plain = ServerSpec(target, threads=1, extra=(*EXTRA, "--disable-overlap-schedule"), launcher=FORKING)
    talon = ServerSpec(target, head, "TALON", nodes=12, width=3, steps=0, threads=1, extra=EXTRA, launcher=FORKING)
    with serve(plain) as a, serve(talon) as b:
        yield a.url, b.url


def post(url, body, path="/generate"):
    return httpx.post(url + path, json=body, timeout=120, trust_env=False)


def generate(url, prompt, *, logprobs=True, **fields) -> dict:
    """The parts of an answer that must not depend on speculation."""
    sampling = {"temperature": 0, "max_new_tokens": 40} | fields.pop("sampling", {})
    body = {"text": prompt, "sampling_params": sampling, "return_logprob": logprobs, "logprob_start_len": 0} | fields
    response = post(url, body)
    assert response.status_code == 200, response.text
    answers = response.json() if isinstance(response.json(), list) else [response.json()]
    return [essence(answer) for answer in answers]


def essence(answer: dict) -> dict:
    meta = answer["meta_info"]
    keys = ("finish_reason", "prompt_tokens", "completion_tokens", "input_token_logprobs", "output_token_logprobs")
    keys += ("output_top_logprobs", "input_top_logprobs", "output_token_ids_logprobs")
    return {"text": answer["text"], "ids": answer["output_ids"]} | {key: meta.get(key) for key in keys}


def difference(a, b, where: str = "") -> str:
    """Where two answers differ first, but for the rounding of logprobs; "" if nowhere."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((found for key in a if (found := difference(a[key], b[key], f"{where}.{key}"))), "")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next((found for i in range(len(a)) if (found := difference(a[i], b[i], f"{where}[{i}]"))), "")
    if isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-4:
        return ""
    return "" if a == b else f"{where}: {a!r} is not {b!r}"


def same(servers, prompt="hello", **fields):
    expected, got = (generate(url, prompt, **fields) for url in servers)
    assert not difference(got, expected)
    return got


PENALTIES = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 0.3, "presence_penalty": 0.5, "logit_bias": {"0": 1.0, "9": -2.0}},
]


@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
def test_penalties_count_the_tokens_of_each_nodes_own_path(servers, sampling):
    for prompt in ("hello", "yes 1 2"):
        same(servers, prompt, sampling=sampling | {"max_new_tokens": 48})


def test_additive_penalties_come_before_the_repetition_penalty(servers):
    """Against the rule itself: without overlap scheduling a plain SGLang server takes the two kinds in an order that differs from process
    to process (its penalizers are a set of classes). With overlap, additive penalties come first, as here.
    """
    penalties = {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
    for prompt in ("hello", "yes 1 2"):
        (got,) = generate(servers[1], prompt, sampling=penalties | {"ignore_eos": True, "max_new_tokens": 48})
        assert got["ids"] == spread_answer(TEXT.index(prompt[-1]), 48, **penalties)


@pytest.mark.parametrize("least", [0, 1, 2, 3, 5, 8, 20])
def test_min_new_tokens_holds_at_every_node(servers, least):
    said = generate(servers[0], "hello", logprobs=False)[0]["ids"]
    for stop in (said[0], said[3], said[6]):
        (got,) = same(servers, sampling={"min_new_tokens": least, "stop_token_ids": [stop]})
        assert got["completion_tokens"] >= least


def test_the_logit_bias_of_one_request_leaves_its_neighbours_alone(servers):
    jobs = [{"logit_bias": {"5": 4.0}}, {}, {"logit_bias": {"1": -3.0}, "frequency_penalty": 1.0}, {"presence_penalty": 1.0}] * 2
    assert_batch_equals_plain(servers, jobs)


def assert_batch_equals_plain(servers, jobs):
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda sampling: generate(servers[1], "hello", sampling=sampling), jobs))
    for sampling, answer in zip(jobs, got):
        assert not difference(answer, generate(servers[0], "hello", sampling=sampling)), sampling


def test_custom_logit_processors(servers):
    said = generate(servers[0], "hello", logprobs=False)[0]["ids"]
    frequent = sorted(set(said), key=said.count)[-2:]
    (banned,) = same(
        servers, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(), sampling={"custom_params": {"token_ids": frequent}}
    )
    assert not set(banned["ids"]) & set(frequent)
    for window in (1, 4):  # this one reads the request's output so far
        fields = {"custom_logit_processor": NoRepeats.to_str(), "sampling": {"custom_params": {"window": window}, "frequency_penalty": 0.2}}
        (got,) = same(servers, **fields)
        assert all(token not in got["ids"][max(0, i - window) : i] for i, token in enumerate(got["ids"]))


@pytest.mark.parametrize("new", [0, 1, 2, 3, 5, 17])
def test_max_new_tokens(servers, new):
    same(servers, logprobs=new > 0, logprob_start_len=None, sampling={"max_new_tokens": new})


def test_stops(servers):
    text = generate(servers[0], "hello", logprobs=False)[0]["text"]
    ids = [TEXT.index(character) for character in text]
    for at in range(1, 14):
        same(servers, sampling={"stop": [text[at : at + 2]]})
        same(servers, sampling={"stop_token_ids": [ids[at]]})
        same(servers, sampling={"stop_token_ids": [ids[at]], "ignore_eos": True, "max_new_tokens": at + 1})
        same(servers, sampling={"stop": [text[at]], "no_stop_trim": True})
    same(servers, sampling={"stop_regex": "[0-9][a-z]"})


def test_end_of_text(servers):
    bias = {str(TEXT.index("$")): 3.0}
    for prompt in ("hello", "abc", "12 34"):
        same(servers, prompt, sampling={"logit_bias": bias})
        same(servers, prompt, sampling={"logit_bias": bias, "ignore_eos": True})
        same(servers, prompt, sampling={"logit_bias": bias, "min_new_tokens": 9})


def test_prompt_and_output_logprobs_also_after_a_prefix_hit(servers):
    prompt = "the quick brown fox " * 3
    for _ in range(2):
        same(servers, prompt, top_logprobs_num=3, token_ids_logprob=[1, 5, 9])
    same(servers, prompt + "again", top_logprobs_num=5)
    same(servers, prompt, logprob_start_len=20, sampling={"max_new_tokens": 4})
    same(servers, prompt, sampling={"frequency_penalty": 0.5}, top_logprobs_num=2)


GRAMMARS = [
    {"regex": "([a-f]{3}[0-9]){6}"},
    {"regex": "(ab|ac)*d"},
    {"ebnf": 'root ::= pair ("," pair)*\npair ::= [a-c] ":" [0-9] [0-9]?'},
    {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]})},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: next(iter(g)))
def test_grammars_follow_each_nodes_own_path(servers, grammar):
    for extra in ({}, {"frequency_penalty": 0.5}, {"min_new_tokens": 6}):
        for prompt in ("hello", "abc"):
            same(servers, prompt, logprobs=False, sampling=grammar | extra)


def test_several_choices(servers):
    same(servers, sampling={"n": 3})


def test_lists_of_prompts(servers):
    same(servers, ["hello", "abc", "1"], logprobs=False, sampling={"max_new_tokens": 9}, logprob_start_len=None)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200, 450, 490, 497, 498, 499, 500, 501, 505, 510, 511, 512])
def test_very_short_and_context_filling_prompts(servers, length):
    """`length` of 512 positions are the prompt; chunks of 64 are prefilled at a time. SGLang keeps room for a tree, so the last prompts
    are refused, with a sentence; those that are served are served exactly.
    """
    prompt, sampling = ("abcdefgh" * 64)[:length], {"max_new_tokens": 30}
    body = {"text": prompt, "sampling_params": sampling | {"temperature": 0}}
    room = 512 - length - 12
    if room <= 1:
        refused = post(servers[1], body)
        assert refused.status_code == 400 or refused.json()["output_ids"] == [], refused.text
        return
    same(servers, prompt, sampling={"max_new_tokens": min(30, room - 1)})


def stream(url, body, path):
    """The JSON of every server-sent event."""
    events = []
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=120, trust_env=False) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
    return events


def test_streams_add_up_to_the_whole_answer(servers):
    text = generate(servers[0], "hello", logprobs=False)[0]["text"]
    for sampling in ({}, {"stop": [text[6:8]]}, {"stop_token_ids": [TEXT.index(text[4])]}, {"max_new_tokens": 5}):
        (whole,) = generate(servers[0], "hello", logprobs=False, sampling=sampling)
        for url in servers:
            body = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 40} | sampling}
            events = stream(url, body, "/generate")
            assert events[-1]["text"] == whole["text"] and events[-1]["meta_info"]["finish_reason"] == whole["finish_reason"]
            assert all(whole["text"].startswith(event["text"]) for event in events)
            assert events[-1]["meta_info"]["completion_tokens"] == whole["completion_tokens"]


def test_openai_completions_and_chat(servers):
    ask = {"model": "default", "temperature": 0, "max_tokens": 24, "frequency_penalty": 0.4}
    chat = ask | {"messages": [{"role": "user", "content": "hello 1 2 3"}], "logprobs": True, "top_logprobs": 2}
    completion = ask | {"prompt": "hello", "logprobs": 2, "n": 2, "stop": ["qq"]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        plain, talon = (post(url, body, path).json() for url in servers)
        for a, b in zip(plain["choices"], talon["choices"], strict=True):
            assert not difference(b, a)
        assert plain["usage"]["completion_tokens"] == talon["usage"]["completion_tokens"]
    said = [
        "".join(e["choices"][0]["delta"].get("content") or "" for e in stream(url, chat, "/v1/chat/completions") if e["choices"])
        for url in servers
    ]
    assert said[0] == said[1] and len(said[0]) == 24


def test_greedy_in_other_words(servers):
    """top_k 1, and a min_p of 1, are greedy decoding at any temperature."""
    expected = generate(servers[0], "hello", logprobs=False)
    for sampling in ({"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "min_p": 1.0}, {"temperature": 0.7, "top_p": 1e-6}):
        for url in servers:
            assert generate(url, "hello", logprobs=False, sampling=sampling)[0]["ids"] == expected[0]["ids"]


def test_what_a_request_and_the_server_report(servers):
    reports = []
    for body in ({}, {"stream": True}):
        ask = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
        answer = stream(servers[1], ask, "/generate")[-1] if body else post(servers[1], ask).json()
        meta, report = answer["meta_info"], answer["meta_info"]["talon"]
        reports.append(report)
        assert report["rounds"] == meta["spec_verify_ct"] == sum(report["tree_depths"].values()) == sum(report["tree_widths"].values())
        assert report["draft_forwards_per_round"] == pytest.approx(
            sum(int(depth) * count for depth, count in report["tree_depths"].items()) / report["rounds"], rel=0.5
        )
        assert report["accept_length"] == pytest.approx(1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"])
        assert 0 < report["budget_accepted"] < 1 and report["accept_length"] > 1.2
    assert reports[0] == reports[1]
    assert "talon" not in post(servers[0], {"text": "hello"}).json()["meta_info"]
    metrics = httpx.get(servers[1] + "/metrics", trust_env=False).text
    assert "talon:tree_depth_bucket" in metrics and "talon:tree_width_bucket" in metrics
