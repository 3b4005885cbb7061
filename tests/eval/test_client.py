"""The client against a small HTTP stand-in, and the chat rendering against the tokenizer's own."""

import http.server
import json
import threading
import time

import pytest

from eval.client import ChatTokenizer, Client, RequestError, parse_counters

METRICS = """# HELP talon:rounds_total Request-rounds.
# TYPE talon:rounds_total counter
talon:rounds_total{model_name="a b } c",tp_rank="0"} 7.0
talon:rounds_total{model_name="other"} 2.0 1700000000000
talon:draft_forwards_total 1.5e+01

python_info{version="3"} 1.0
"""


class StandIn(http.server.BaseHTTPRequestHandler):
    """Echoes the prompt reversed; a prompt of [0] is refused; longer prompts answer faster, so that order is not arrival order."""

    seen: list[dict] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        ids = body["input_ids"]
        time.sleep(0.2 / len(ids))
        if body.get("stream"):
            return self._stream(ids)
        refused = ids == [0]
        meta = {"completion_tokens": len(ids), "spec_verify_ct": 2}
        self._send(400 if refused else 200, "no zeros please" if refused else json.dumps({"output_ids": ids[::-1], "meta_info": meta}))

    def _stream(self, ids):
        """All tokens so far in each event: first one token, then the rest; [9] breaks off."""
        events = [{"output_ids": ids[:count], "meta_info": {"completion_tokens": count, "spec_verify_ct": 2}} for count in (1, len(ids))]
        events = [{"error": {"message": "out of pages"}}] if ids == [9] else events
        self.send_response(400 if ids == [0] else 200)
        self.end_headers()
        for event in events:
            time.sleep(0.05)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self):
        self._send(200, METRICS)

    def _send(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def client():
    StandIn.seen = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.server_port}/") as client:
            yield client
        server.shutdown()


def test_answers_keep_the_order_of_the_prompts(client):
    prompts = [[1], [2, 3], [4, 5, 6], [7, 8, 9, 10]]
    answers = list(client.generate_all(prompts, 5, concurrency=4))
    assert [answer.output_ids for answer in answers] == [ids[::-1] for ids in prompts]
    assert [answer.tokens for answer in answers] == [1, 2, 3, 4]
    assert all(answer.rounds == 2 and answer.latency_s > 0 for answer in answers)


def test_sampling_parameters_reach_every_request(client):
    list(client.generate_all([[1, 2], [3, 4]], 5, temperature=0.7, ignore_eos=True))
    wanted = {"temperature": 0.7, "max_new_tokens": 5, "ignore_eos": True}
    assert [body["sampling_params"] for body in StandIn.seen[-2:]] == [wanted, wanted]


def test_requests_are_greedy_unless_asked_otherwise(client):
    client.generate([1], 5)
    client.generate([1], 5, temperature=1.0, top_k=3)
    sent = [body["sampling_params"] for body in StandIn.seen]
    assert sent == [{"temperature": 0.0, "max_new_tokens": 5}, {"temperature": 1.0, "max_new_tokens": 5, "top_k": 3}]


def test_a_refusal_carries_the_servers_words(client):
    with pytest.raises(RequestError, match="refused a request of 1 tokens with status 400: no zeros please"):
        client.generate([0], 5)


def test_a_missing_server_is_one_sentence():
    with Client("http://127.0.0.1:9") as client, pytest.raises(RequestError, match="did not answer a request of 2 tokens"):
        client.generate([1, 2], 5)


def test_counters_are_summed_over_labels(client):
    expected = {"talon:rounds_total": 9.0, "talon:draft_forwards_total": 15.0, "python_info": 1.0}
    assert client.counters() == parse_counters(METRICS) == expected


def test_chats_are_rendered_by_the_targets_own_template(target_dir):
    tokenizer = ChatTokenizer(target_dir)
    turns = ["Hello <|im_end|> there", "Hi!", "Name two colours."]
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), turns, strict=True)]
    expected = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.encode(turns) == list(expected)
    assert tokenizer.decode(tokenizer.encode(turns)).endswith("<|im_start|>assistant\n")


def test_a_streamed_answer_comes_in_chunks_with_their_times(client):
    answer = client.generate([4, 5, 6], 3, stream=True, rid="chat/1")
    assert StandIn.seen[-1]["rid"] == "chat/1"
    assert answer.output_ids == [4, 5, 6]
    assert [tokens for tokens, _ in answer.chunks] == [1, 2]
    assert all(seconds >= 0.04 for _, seconds in answer.chunks)
    assert sum(seconds for _, seconds in answer.chunks) <= answer.latency_s
    assert answer.rounds == 2


@pytest.mark.parametrize("ids, sentence", [([9], "broke off a request of 1 tokens: .*out of pages"), ([0], "status 400")])
def test_a_stream_that_fails_is_one_sentence(client, ids, sentence):
    with pytest.raises(RequestError, match=sentence):
        client.generate(ids, 5, stream=True)


def test_a_failure_does_not_wait_for_the_requests_in_flight(client, monkeypatch):
    def slow_or_wrong(ids, *_args, **_options):
        if ids == [0]:
            raise RequestError("no zeros please")
        time.sleep(3)

    monkeypatch.setattr(client, "generate", slow_or_wrong)
    started = time.monotonic()
    with pytest.raises(RequestError, match="no zeros"):
        list(client.generate_all([[0], [1], [2], [3]], 5, concurrency=2))
    assert time.monotonic() - started < 1.5
