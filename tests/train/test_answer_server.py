"""train/regenerate.py through a server: what is asked, resumed and marked (a small stand-in), and a real SGLang server's answers."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests import toy
from train import answer_server
from train.recipe import AnswerSettings, RecipeError
from train.regenerate import regenerate

PROMPTS = [{"id": f"p{i}", "turns": ["abc" + toy.TEXT[i], "de", "f"][: 1 + i % 3]} for i in range(12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The toy of tests/toy.py: a token is a character, and the next one depends on the last one only."""
    return toy.write_toy(tmp_path_factory.mktemp("toy"))[0]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


class Handler(BaseHTTPRequestHandler):
    """/generate answers `length` tokens "gh..." and an end token; `script(number, ids)` may return another (status, body)."""

    def reply(self, status: int, body: dict):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        info = {"/model_info": {"model_path": self.server.model, "model_type": "llama"}, "/server_info": {"version": "0.0-stand-in"}}
        self.reply(200, info[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            number = len(self.server.asked)
        answer = [6, 7, 8, 63]
        default = (200, {"output_ids": answer, "meta_info": {"finish_reason": {"type": "stop", "matched": 63}}})
        status, reply = self.server.script(number, body["input_ids"]) or default
        with self.server.lock:
            self.server.now -= 1
        if status is None:
            self.connection.close()
        else:
            with suppress(OSError):  # the asker has given up
                self.reply(status, reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def stand_in(target, monkeypatch):
    monkeypatch.setattr(answer_server, "RETRY_AFTER_S", (0.01, 0.01))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.model, server.asked, server.lock, server.now, server.most = str(target), [], threading.Lock(), 0, 0
    server.script = lambda number, ids: None
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def settings(server, **changes):
    return AnswerSettings(**{"server": server.url, "max_new_tokens": 10, "max_length": 60, "slots": 3, **changes})


def rows_of(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_turns_build_on_the_targets_own_answers_and_settings_are_recorded(target, prompts, tmp_path, stand_in):
    out = tmp_path / "answers.jsonl"
    gate = threading.Barrier(3, timeout=5)  # passes only if three requests are under way at once
    stand_in.script = lambda number, ids: gate.wait() and None if number <= 3 else None
    regenerate(target, prompts, out, settings(stand_in))
    rows = rows_of(out)
    assert rows.keys() == {row["id"] for row in PROMPTS} and stand_in.most == 3
    assert [message["content"] for message in rows["p2"]["messages"]] == ["abcc", "ghi", "de", "ghi", "f", "ghi"]
    assert rows["p2"]["sampling"] == {
        "temperature": 0.0,
        "max_new_tokens": 10,
        "max_length": 60,
        "seed": 0,
        "source": "sglang 0.0-stand-in",
    }
    third = next(body for body in stand_in.asked if len(body["input_ids"]) == len("abcc\nghi\nde\nghi\nf\n") and body["input_ids"][3] == 2)
    assert "".join(toy.TEXT[i] for i in third["input_ids"]) == "abcc\nghi\nde\nghi\nf\n"
    sent = third["sampling_params"]
    assert sent["temperature"] == 0 and sent["max_new_tokens"] == 10 and sent["top_p"] == 1 and sent["stop_token_ids"] == [63]
    regenerate(target, prompts, out, settings(stand_in))
    assert len(stand_in.asked) == sum(len(row["turns"]) for row in PROMPTS)  # up to date: nothing asked again


def test_truncated_empty_long_and_refused_conversations(target, prompts, tmp_path, stand_in, capsys):
    def script(number, ids):
        first = toy.TEXT[ids[3]]
        cut = {"output_ids": [6] * 10, "meta_info": {"finish_reason": {"type": "length", "length": 10}}}
        special = {"b": (200, cut), "c": (400, {"error": {"message": "too\nlong"}}), "d": (200, {**cut, "output_ids": [36] * 10})}
        special |= {"e": (200, {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "full"}}})}
        return special.get(first) if len(ids) == 5 else None

    stand_in.script = script
    regenerate(target, prompts, tmp_path / "out.jsonl", settings(stand_in, max_length=22))
    rows, printed = rows_of(tmp_path / "out.jsonl"), capsys.readouterr().out
    assert rows["p1"]["truncated"] and len(rows["p1"]["messages"]) == 2  # its second question is not asked
    assert not rows["p7"]["truncated"] and "p2" not in rows and "p4" not in rows
    assert "1 conversations ended early: the server refused the prompt (too long)" in printed
    assert "1 conversations ended early: the server gave up (full)" in printed
    assert "conversations ended early: prompt and answer could exceed max_length 22" in printed  # the third questions
    assert len(rows["p5"]["messages"]) == 4 and " 1 of them cut at the token limit" in printed


def test_a_server_that_dies_is_one_sentence_and_a_rerun_goes_on(target, prompts, tmp_path, stand_in):
    out = tmp_path / "out.jsonl"
    stand_in.script = lambda number, ids: (None, {}) if number > 9 else None
    with pytest.raises(
        RecipeError, match=r"`answers.server` http://127.0.0.1:\d+.* does not answer .*; start it again and rerun"
    ) as caught:
        regenerate(target, prompts, out, settings(stand_in))
    assert "\n" not in str(caught.value) and not out.exists()
    kept = rows_of(out.with_name("out.jsonl.partial"))
    assert 0 < len(kept) < len(PROMPTS)
    stand_in.script, before = (lambda number, ids: None), len(stand_in.asked)
    regenerate(target, prompts, out, settings(stand_in, slots=2))  # another concurrency is the same question
    assert rows_of(out).keys() == {row["id"] for row in PROMPTS} and {name: rows_of(out)[name] for name in kept} == kept
    asked = {toy.TEXT[body["input_ids"][3]] for body in stand_in.asked[before:]}  # the letter that tells the prompts apart
    assert asked == {row["turns"][0][3] for row in PROMPTS if row["id"] not in kept}


def test_a_short_hiccup_is_not_noticed(target, prompts, tmp_path, stand_in):
    stand_in.script = lambda number, ids: (503, {"error": {"message": "loading"}}) if number in (2, 3) else None
    regenerate(target, prompts, tmp_path / "out.jsonl", settings(stand_in, slots=1))
    assert len(rows_of(tmp_path / "out.jsonl")) == len(PROMPTS)


def test_another_model_is_refused(target, prompts, tmp_path, stand_in):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(json.loads((target / "config.json").read_text()) | {"hidden_size": 256}))
    stand_in.model = str(other)
    with pytest.raises(RecipeError, match="serves .*other, another model than `target`"):
        regenerate(target, prompts, tmp_path / "out.jsonl", settings(stand_in))
    assert not stand_in.asked


def test_a_server_without_scheme_is_refused():
    with pytest.raises(ValueError, match="server 'localhost:30000' is no URL such as http"):
        AnswerSettings(server="localhost:30000")


@pytest.mark.slow
def test_a_real_server_answers_as_the_toy_must(target, prompts, tmp_path, monkeypatch):
    """Greedy, several turns, several at a time: every token is known on paper. Then the server is killed under the next run."""
    pytest.importorskip("sglang", reason="needs SGLang")
    from eval.servers import ServerSpec, serve

    monkeypatch.setattr(answer_server, "RETRY_AFTER_S", (0.1,))
    with serve(ServerSpec(target, extra=("--skip-tokenizer-init",))) as server:
        regenerate(target, prompts, tmp_path / "out.jsonl", settings(server))
        rows = rows_of(tmp_path / "out.jsonl")
        for prompt in PROMPTS:  # a prompt ends in a line feed, whose token decides the first answer token
            said = toy.answer(toy.TEXT.index("\n"), 10)
            assert rows[prompt["id"]]["messages"][1]["content"] == "".join(toy.TEXT[i] for i in said).split("$")[0]
            assert rows[prompt["id"]]["truncated"] == ("$" not in "".join(toy.TEXT[i] for i in said))
        assert rows["p0"]["sampling"]["source"].startswith("sglang 0.5")
    with pytest.raises(RecipeError, match="does not answer"):
        regenerate(target, prompts, tmp_path / "more.jsonl", settings(server, seed=1))
