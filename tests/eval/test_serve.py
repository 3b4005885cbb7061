"""eval/serve.py with stand-ins for server, client and tokenizer: what is measured, kept, continued and said."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from eval import serve
from eval.client import Answer, RequestError
from eval.servers import ServerError

SETS = {"chat": 3, "code": 2}


class World:
    """Servers that answer from a table. `refuse`: (server, prompt text) at which it goes away; `asked` records every request."""

    def __init__(self):
        self.asked, self.started, self.refuse, self.alive = [], [], None, True

    @contextlib.contextmanager
    def serve(self, spec, **_kwargs):
        self.started.append(spec.name)
        self.alive = True
        self.spec, self.forwards, self.count = spec, 100, 50  # counters of a server that has already been warmed up
        yield SimpleNamespace(url="", start_s=1.0, check_alive=self.check_alive)

    def check_alive(self):
        if not self.alive:
            raise ServerError(f"The {self.spec.name} server was ended by signal 9 while serving: out of memory.", "log tail")

    def client(self, _url):
        return contextlib.nullcontext(SimpleNamespace(generate_all=self.generate_all, counters=self.counters))

    def generate_all(self, prompts, max_new_tokens, _concurrency=1):
        for text in prompts:
            if self.refuse == (self.spec.name, text):
                self.alive = False
                raise RequestError("connection lost")
            self.asked.append((self.spec.name, text))
            rounds = {"none": 0, "EAGLE3": 4, "TALON": 5}[self.spec.algorithm]
            self.forwards, self.count = self.forwards + 3 * rounds, self.count + rounds
            seconds = {"none": 4.0, "EAGLE3": 2.0, "TALON": 1.0}[self.spec.algorithm]
            yield Answer([1, 2, 3, 4, 5, 6, 7, 8][:max_new_tokens], {"completion_tokens": 8, "spec_verify_ct": rounds}, seconds)

    def counters(self):
        return {"talon:draft_forwards_total": self.forwards, "talon:rounds_total": self.count}


@pytest.fixture
def world(monkeypatch):
    world = World()
    tokenizer = SimpleNamespace(encode=lambda turns: turns[0])
    monkeypatch.setattr(serve, "serve", world.serve)
    monkeypatch.setattr(serve, "Client", world.client)
    monkeypatch.setattr(serve, "ChatTokenizer", lambda _target: tokenizer)
    return world


@pytest.fixture
def argv(tmp_path):
    for name, file in (("target", "config.json"), ("head", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name, count in SETS.items():
        rows = [{"id": f"{name}-{i}", "category": name, "turns": [f"{name} {i}", "second turn"]} for i in range(count)]
        (prompts / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = {"--target": tmp_path / "target", "--head": tmp_path / "head", "--prompts": prompts, "--out": tmp_path / "results.json"}
    return [str(word) for pair in flags.items() for word in pair]


def results(argv):
    with open(argv[-1]) as file:
        return json.load(file)


def measured(world):
    return [(name, text) for name, text in world.asked if text not in serve.WARM_UP_TEXTS]


def test_every_server_gets_the_same_first_turns(world, argv, capsys):
    assert serve.main(argv) == 0
    names = ["plain", "EAGLE3 N=16 K=4 D=4", "TALON N=16 K=4"]
    texts = [f"{name} {i}" for name, count in SETS.items() for i in range(count)]
    assert measured(world) == [(name, text) for name in names for text in texts]
    assert len(world.asked) - len(measured(world)) == 3 * len(serve.WARM_UP_TEXTS)  # the warm-up, and it is not in the figures
    figures = results(argv)["summary"]
    assert figures["plain"]["all"]["tokens"] == 5 * 8
    assert figures[names[1]]["chat"]["accept_length"] == 2.0
    assert figures[names[1]]["all"]["draft_forwards_per_round"] == 4
    assert figures[names[2]]["all"]["accept_length"] == 8 / 5
    assert figures[names[2]]["all"]["draft_forwards_per_round"] == 3
    assert figures[names[2]]["all"]["same_as_plain"] == 1
    assert figures[names[2]]["all"]["faster_than_plain"]["median"] == 4
    assert figures[names[2]]["all"]["faster_than_eagle3"][names[1]]["median"] == 2
    printed = capsys.readouterr().out
    assert "TALON N=16 K=4 against EAGLE3 N=16 K=4 D=4: 2.00 [2.00, 2.00] times the speed (5 prompts)" in " ".join(printed.split())


def test_a_server_that_dies_keeps_what_is_finished_and_the_rerun_continues(world, argv, capsys):
    world.refuse = ("EAGLE3 N=16 K=4 D=4", "code 1")
    assert serve.main(argv) == 1
    assert "The EAGLE3 N=16 K=4 D=4 server was ended by signal 9 while serving: out of memory." in capsys.readouterr().out
    assert {run: list(sets) for run, sets in results(argv)["runs"].items()} == {"plain": ["chat", "code"], "EAGLE3 N=16 K=4 D=4": ["chat"]}
    world.refuse, world.asked, world.started = None, [], []
    assert serve.main(argv) == 0
    assert world.started == ["EAGLE3 N=16 K=4 D=4", "TALON N=16 K=4"]
    assert measured(world)[:2] == [("EAGLE3 N=16 K=4 D=4", "code 0"), ("EAGLE3 N=16 K=4 D=4", "code 1")]
    assert len(measured(world)) == 2 + 5
    world.started = []
    assert serve.main(argv) == 0
    assert world.started == []


def test_ctrl_c_keeps_what_is_finished(world, argv, capsys, monkeypatch):
    def interrupted(_spec, _client, prompts, *_args):
        raise KeyboardInterrupt

    assert serve.main([*argv[:-2], "--eagle3", "4,4,16", *argv[-2:]]) == 0
    monkeypatch.setattr(serve, "measure_set", interrupted)
    assert serve.main([*argv[:-2], "--eagle3", "1,3,4", *argv[-2:]]) == 1
    assert "Interrupted; finished prompt sets are kept in" in capsys.readouterr().out
    assert set(results(argv)["runs"]) == {"plain", "EAGLE3 N=16 K=4 D=4", "TALON N=16 K=4"}


def test_other_settings_need_fresh(world, argv, capsys):
    assert serve.main([*argv[:-2], "--limit", "1", *argv[-2:]]) == 0
    assert serve.main(argv) == 1
    assert "pass --fresh to measure again" in " ".join(capsys.readouterr().out.split())
    assert serve.main([*argv[:-2], "--fresh", *argv[-2:]]) == 0
    assert results(argv)["summary"]["plain"]["all"]["prompts"] == 5


def test_the_trace_is_that_of_the_first_talon_setting_without_its_warm_up(world, argv, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("a line from the warm-up\n")
    args = serve.parse_args([*argv, "--trace", str(trace), "--talon", "16,4", "--talon", "60,10,0,0.1"])
    assert [spec.trace for spec in serve.server_specs(args)] == [None, None, trace, None]
    assert serve.main([*argv[:-2], "--trace", str(trace), *argv[-2:]]) == 0
    assert trace.read_text() == ""


def test_settings_of_a_configuration():
    assert serve.talon_config("16,4") == (16, 4, None, None)
    assert serve.talon_config("60,10,0,0.1") == (60, 10, 0, 0.1)
    assert serve.eagle3_config("10,8,60") == (10, 8, 60)


def test_prompts_of_one_file_form_a_set_per_category(world, argv, tmp_path):
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join(path.read_text() for path in sorted((tmp_path / "prompts").iterdir())))
    argv[argv.index("--prompts") + 1] = str(both)
    sets = serve.load_sets(serve.parse_args([*argv, "--limit", "2"]))
    assert {name: [prompt_id for prompt_id, _ in prompts] for name, prompts in sets.items()} == {
        "chat": ["chat-0", "chat-1"],
        "code": ["code-0", "code-1"],
    }


def test_an_id_used_twice_is_made_unique_and_a_prompt_beyond_the_context_left_out(world, argv, tmp_path, capsys):
    rows = [{"id": "x", "category": "c", "turns": [text]} for text in ("a", "b", "t" * 3000)]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv[argv.index("--prompts") + 1] = str(tmp_path / "one.jsonl")
    assert serve.load_sets(serve.parse_args(argv)) == {"c": [("x", "a"), ("x (2)", "b")]}
    assert "1 of 3 prompts are longer than" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, value, sentence",
    [
        ("--target", "absent", "--target absent has no config.json"),
        ("--head", "absent", "--head absent has no model.safetensors"),
        ("--prompts", "absent", "--prompts absent does not exist"),
        ("--prompts", "empty", "holds no usable prompt"),
    ],
)
def test_missing_things_are_one_sentence(world, argv, tmp_path, monkeypatch, capsys, flag, value, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    argv[argv.index(flag) + 1] = value
    assert serve.main(argv) == 1
    printed = capsys.readouterr().out
    assert sentence in printed
    assert len(printed.strip().splitlines()) == 1
    assert world.started == []


@pytest.mark.parametrize(
    "flag, value", [("--talon", "16"), ("--talon", "a,b"), ("--eagle3", "4,4"), ("--limit", "0"), ("--concurrency", "-1")]
)
def test_bad_values_name_themselves(argv, capsys, flag, value):
    with pytest.raises(SystemExit):
        serve.parse_args([*argv, flag, value])
    assert repr(value) in capsys.readouterr().err
