"""eval/serve.py with stand-ins for server, client and tokenizer: what is asked in which order, kept, continued and said."""

import contextlib
import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval import prompts as prompt_sets
from eval import serve
from eval.client import Answer, RequestError
from eval.servers import ServerError
from talon_sglang.draft_head import DraftHeadError

SETS = {"chat": 3, "code": 2}
NAMES = ["plain", "EAGLE3 N=16 K=4 D=4", "TALON N=16 K=4"]
TALON_REPORT = {"tree_depths": {"2": 3, "10": 2}, "tree_widths": {"4": 5}}


class World:
    """Servers that answer from a table. `refuse`: (server, prompt text, what happens) at which one goes away; `asked` records every
    request as (server, prompt text, temperature, concurrency), `events` also starts and ends.
    """

    def __init__(self):
        self.asked, self.started, self.alive, self.refuse, self.dead = [], [], [], None, set()

    @contextlib.contextmanager
    def serve(self, spec, **_kwargs):
        self.started.append(spec.name)
        self.alive.append(spec.name)
        self.dead.discard(spec.name)
        try:
            yield SimpleNamespace(url=spec.name, start_s=1.0, check_alive=lambda: self.check_alive(spec.name))
        finally:
            self.alive.remove(spec.name)

    def check_alive(self, name):
        if name in self.dead:
            raise ServerError(f"The {name} server was ended by signal 9 while serving: out of memory.", "log tail")

    def client(self, name):
        forwards = {"draft_forwards": 100.0, "rounds": 50.0, "drafted_nodes": 700.0, "accepted_nodes": 60.0}  # it has been in use before
        return contextlib.nullcontext(StandIn(self, name, forwards))


class StandIn:
    def __init__(self, world, name, forwards):
        self.world, self.name, self.forwards = world, name, forwards

    def generate_all(self, prompts, max_new_tokens, concurrency, *, rids, stream, temperature):
        assert len(set(rids)) == len(rids) == len(prompts)
        for text in prompts:
            if self.world.refuse and self.world.refuse[:2] == (self.name, text):
                reason = self.world.refuse[2]
                self.world.dead |= {self.name} if isinstance(reason, RequestError) else set()
                raise reason
            self.world.asked.append((self.name, text, temperature, concurrency))
            kind = self.name.split()[0]
            rounds, seconds = {"plain": (0, 4.0), "EAGLE3": (4, 2.0), "TALON": (5, 1.0)}[kind]
            for counter, growth in {"draft_forwards": 3, "rounds": 1, "drafted_nodes": 15, "accepted_nodes": 0.6}.items():
                self.forwards[counter] += growth * rounds
            meta = {"completion_tokens": 8, "spec_verify_ct": rounds} | ({"talon": TALON_REPORT} if kind == "TALON" else {})
            chunks = [(1, 0.5), (7, 0.7)] if stream else []
            yield Answer([1, 2, 3, 4, 5, 6, 7, 8][:max_new_tokens], meta, seconds, chunks)

    def counters(self):
        return {f"talon:{name}_total": value for name, value in self.forwards.items()}


@pytest.fixture
def world(monkeypatch):
    world = World()
    tokenizer = SimpleNamespace(encode=lambda turns: turns[0])
    monkeypatch.setattr(serve, "serve", world.serve)
    monkeypatch.setattr(serve, "Client", world.client)
    monkeypatch.setattr(serve, "free_memory_gib", lambda: 64.0)
    monkeypatch.setattr("talon_sglang.draft_head.check_draft_head", lambda *_: None)
    monkeypatch.setattr(prompt_sets, "ChatTokenizer", lambda _target: tokenizer)
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


def summary(argv, load="c=1 T=0"):
    return results(argv)["loads"][load]["summary"]


def measured(world):
    return [(name, text) for name, text, _, _ in world.asked if text not in serve.WARM_UP_TEXTS]


def finished(argv, load="c=1 T=0"):
    runs = results(argv)["loads"][load]["runs"]
    return {run: {name: len(blocks) for name, blocks in sets.items()} for run, sets in runs.items()}


def with_flags(argv, *flags):
    return [*argv[:-2], *flags, *argv[-2:]]


def test_servers_take_turns_with_the_same_first_turns(world, argv, capsys):
    assert serve.main(argv) == 0
    asked = measured(world)
    texts = [f"{name} {i}" for name, count in SETS.items() for i in range(count)]
    assert [text for _, text in asked] == [text for text in texts for _ in NAMES]
    in_turn = [[name for name, _ in asked[i : i + 3]] for i in range(0, len(asked), 3)]
    assert all(sorted(names) == sorted(NAMES) for names in in_turn)
    assert {names[0] for names in in_turn} == set(NAMES)  # being first is no privilege of one server
    assert len(world.asked) - len(asked) == 3 * len(serve.WARM_UP_TEXTS)  # the warm-up, and it is not in the figures
    assert world.alive == []
    figures = summary(argv)
    assert figures["plain"]["all"]["tokens"] == 5 * 8
    assert figures[NAMES[1]]["chat"]["accept_length"] == 2.0
    assert figures[NAMES[1]]["all"]["draft_forwards_per_round"] == 4
    talon = figures[NAMES[2]]["all"]
    assert talon["accept_length"] == 8 / 5
    assert talon["draft_forwards_per_round"] == 3
    assert talon["budget_accepted"] == pytest.approx(0.6 / 15)
    assert talon["same_as_plain"] == 1
    assert talon["faster_than_plain"]["value"] == 4
    assert talon["faster_than_plain"]["in_turn"]
    assert talon["faster_than_eagle3"][NAMES[1]]["value"] == 2
    assert talon["depths"] == {"2": 15, "10": 10}
    printed = " ".join(capsys.readouterr().out.split())
    assert "TALON N=16 K=4 against EAGLE3 N=16 K=4 D=4: 2.00 [2.00, 2.00] times the speed (5 prompts)" in printed


def test_one_server_at_a_time_and_then_the_ratio_says_so(world, argv, capsys):
    assert serve.main(with_flags(argv, "--one-by-one")) == 0
    texts = [f"{name} {i}" for name, count in SETS.items() for i in range(count)]
    assert measured(world) == [(name, text) for name in NAMES for text in texts]
    assert not summary(argv)[NAMES[2]]["all"]["faster_than_plain"]["in_turn"]
    assert "not measured in turn" in " ".join(capsys.readouterr().out.split())


def test_servers_that_do_not_fit_into_memory_come_one_after_the_other(world, argv, capsys, monkeypatch):
    monkeypatch.setattr(serve, "free_memory_gib", lambda: 6.0)
    assert serve.main(argv) == 0
    assert [name for name, _ in measured(world)] == [name for name in NAMES for _ in range(5)]
    assert "3 servers at once take about 8 GiB of memory and 6 are free" in " ".join(capsys.readouterr().out.split())


def test_every_load_is_measured_and_another_one_can_be_added(world, argv, capsys):
    assert serve.main(with_flags(argv, "--concurrency", "1", "2")) == 0
    before = results(argv)["loads"]
    world.asked, world.started = [], []
    assert serve.main(with_flags(argv, "--concurrency", "1", "2", "--temperature", "0", "0.7")) == 0
    after = results(argv)["loads"]
    assert list(after) == ["c=1 T=0", "c=2 T=0", "c=1 T=0.7", "c=2 T=0.7"]
    assert {key: after[key] for key in before} == before
    loads = {(temperature, concurrency) for _, text, temperature, concurrency in world.asked if text not in serve.WARM_UP_TEXTS}
    assert loads == {(0.7, 1), (0.7, 2)}
    assert summary(argv, "c=2 T=0.7")["plain"]["all"]["same_as_plain"] is None  # sampled answers differ between any two runs
    assert [line.split(" --")[0] for line in results(argv)["commands"]] == ["python eval/serve.py"] * 2


def test_several_requests_at_a_time_come_in_blocks_that_keep_them_busy(world, argv, tmp_path):
    rows = [{"id": str(i), "category": "c", "turns": [f"c {i}"]} for i in range(11)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv[argv.index("--prompts") + 1] = str(tmp_path / "many.jsonl")
    assert serve.main(with_flags(argv, "--concurrency", "2")) == 0
    runs = results(argv)["loads"]["c=2 T=0"]["runs"]
    assert all([len(block["answers"]) for block in sets["c"]] == [8, 3] for sets in runs.values())


def test_a_setting_added_later_is_measured_alone(world, argv):
    assert serve.main(argv) == 0
    world.asked, world.started = [], []
    assert serve.main(with_flags(argv, "--talon", "16,4", "--talon", "60,10")) == 0
    assert world.started == ["TALON N=60 K=10"]
    figures = summary(argv)
    assert figures["TALON N=16 K=4"]["all"]["faster_than_plain"]["in_turn"]
    assert not figures["TALON N=60 K=10"]["all"]["faster_than_plain"]["in_turn"]


def test_a_server_that_dies_keeps_what_is_finished_and_the_rerun_continues(world, argv, capsys):
    world.refuse = (NAMES[1], "code 0", RequestError("connection lost"))
    assert serve.main(argv) == 1
    assert "The EAGLE3 N=16 K=4 D=4 server was ended by signal 9 while serving: out of memory." in capsys.readouterr().out
    assert finished(argv) == {name: {"chat": 3} for name in NAMES}  # no block of which only some servers have answered
    world.refuse, world.asked, world.started = None, [], []
    assert serve.main(argv) == 0
    assert world.started == NAMES
    assert sorted(set(text for _, text in measured(world))) == ["code 0", "code 1"]
    assert finished(argv) == {name: SETS for name in NAMES}
    world.started = []
    assert serve.main(argv) == 0
    assert world.started == []


def test_ctrl_c_keeps_what_is_finished(world, argv, capsys):
    world.refuse = (NAMES[2], "chat 2", KeyboardInterrupt())
    assert serve.main(argv) == 1
    assert "Interrupted; finished measurements are kept in" in capsys.readouterr().out
    assert finished(argv) == {name: {"chat": 2} for name in NAMES}
    assert summary(argv)[NAMES[2]]["all"]["prompts"] == 2
    assert world.alive == []


def test_what_is_finished_is_on_disk_before_the_servers_are_ended(world, argv, monkeypatch):
    """Ending servers takes a while, and whoever asked for the end may not wait."""
    seen, serve_one = [], world.serve

    @contextlib.contextmanager
    def watched(spec, **kwargs):
        with serve_one(spec, **kwargs) as server:
            try:
                yield server
            finally:
                seen.append(finished(argv))

    monkeypatch.setattr(serve, "serve", watched)
    world.refuse = (NAMES[2], "chat 2", KeyboardInterrupt())
    assert serve.main(argv) == 1
    assert seen == [{name: {"chat": 2} for name in NAMES}] * 3


def test_a_full_disk_is_one_sentence_and_leaves_the_file_as_it_was(world, argv, capsys, monkeypatch):
    world.refuse = (NAMES[0], "chat 1", KeyboardInterrupt())
    assert serve.main(argv) == 1
    before = Path(argv[-1]).read_text()
    world.refuse, write = None, Path.write_text

    def full(path, text, *args, **kwargs):
        write(path, text[: len(text) // 2], *args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("eval.results.SAVE_EVERY_S", -1.0)
    capsys.readouterr()
    assert serve.main(argv) == 1
    assert "cannot be written (No space left on device); make room, and the same command continues." in " ".join(
        capsys.readouterr().out.split()
    )
    assert Path(argv[-1]).read_text() == before
    assert not list(Path(argv[-1]).parent.glob("*.tmp"))
    monkeypatch.setattr(Path, "write_text", write)
    assert serve.main(argv) == 0
    assert finished(argv) == {name: SETS for name in NAMES}


def test_other_settings_need_fresh(world, argv, capsys):
    assert serve.main(with_flags(argv, "--limit", "1")) == 0
    assert serve.main(argv) == 1
    assert "pass --fresh to measure again" in " ".join(capsys.readouterr().out.split())
    assert serve.main(with_flags(argv, "--fresh")) == 0
    assert summary(argv)["plain"]["all"]["prompts"] == 5


def test_streamed_answers_give_latencies(world, argv, capsys):
    assert serve.main(with_flags(argv, "--stream")) == 0
    found = summary(argv)[NAMES[2]]["all"]["latency"]
    assert found == {"first": [500.0] * 3, "token": pytest.approx([100.0] * 3), "chunk": pytest.approx([700.0] * 3)}
    assert "500 ms to the first token" in " ".join(capsys.readouterr().out.split())


def test_the_trace_keeps_measured_rounds_only(world, argv, tmp_path, monkeypatch):
    trace = tmp_path / "trace.jsonl"
    args = serve.parse_args([*argv, "--trace", str(trace), "--talon", "16,4", "--talon", "60,10,0,0.1"])
    assert [spec.trace for spec in serve.server_specs(args)] == [None, None, trace, None]
    generate_all = StandIn.generate_all

    def traced(self, prompts, *args, **kwargs):
        if self.name == NAMES[2]:
            with trace.open("a") as file:
                file.writelines(f"{text}\n" for text in prompts)
        return generate_all(self, prompts, *args, **kwargs)

    monkeypatch.setattr(StandIn, "generate_all", traced)
    trace.write_text("of another evaluation\n")
    world.refuse = ("plain", "code 0", KeyboardInterrupt())
    assert serve.main(with_flags(argv, "--trace", str(trace))) == 1
    assert [line for line in trace.read_text().splitlines() if line.startswith("chat")] == ["chat 0", "chat 1", "chat 2"]
    with trace.open("a") as file:
        file.write('{"cut off')
    world.refuse = None
    assert serve.main(with_flags(argv, "--trace", str(trace))) == 0
    assert sorted(set(trace.read_text().splitlines())) == ["chat 0", "chat 1", "chat 2", "code 0", "code 1"]


def test_settings_of_a_configuration():
    assert serve.talon_config("16,4") == {"nodes": 16, "width": 4}
    assert serve.talon_config("60,10,0,0.1,48") == {"nodes": 60, "width": 10, "steps": 0, "gate": 0.1, "batch_budget": 48}
    assert serve.eagle3_config("10,8,60") == (10, 8, 60)


def test_prompts_of_one_file_form_a_set_per_category(world, argv, tmp_path):
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join(path.read_text() for path in sorted((tmp_path / "prompts").iterdir())))
    argv[argv.index("--prompts") + 1] = str(both)
    sets = prompt_sets.load_sets(serve.parse_args([*argv, "--limit", "2"]))
    assert {name: [prompt_id for prompt_id, _ in prompts] for name, prompts in sets.items()} == {
        "chat": ["chat-0", "chat-1"],
        "code": ["code-0", "code-1"],
    }


def test_an_id_used_twice_is_made_unique_and_a_prompt_beyond_the_context_left_out(world, argv, tmp_path, capsys):
    rows = [{"id": "x", "category": "c", "turns": [text]} for text in ("a", "b", "t" * 3000)]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv[argv.index("--prompts") + 1] = str(tmp_path / "one.jsonl")
    assert prompt_sets.load_sets(serve.parse_args(argv)) == {"c": [("x", "a"), ("x (2)", "b")]}
    assert "1 of 3 prompts are longer than" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, value, sentence",
    [
        ("--target", "absent", "--target absent has no config.json"),
        ("--head", "absent", "--head absent has no model.safetensors"),
        ("--prompts", "absent", "--prompts absent does not exist"),
        ("--prompts", "empty", "holds no usable prompt"),
        ("--prompts", "blank.jsonl", "holds no usable prompt"),
    ],
)
def test_missing_things_are_one_sentence(world, argv, tmp_path, monkeypatch, capsys, flag, value, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("")
    argv[argv.index(flag) + 1] = value
    assert serve.main(argv) == 1
    printed = capsys.readouterr().out
    assert sentence in printed
    assert len(printed.strip().splitlines()) == 1
    assert world.started == []


@pytest.mark.parametrize(
    "flag, value",
    [("--talon", "16"), ("--talon", "a,b"), ("--eagle3", "4,4"), ("--limit", "0"), ("--concurrency", "-1"), ("--temperature", "hot")],
)
def test_bad_values_name_themselves(argv, capsys, flag, value):
    with pytest.raises(SystemExit):
        serve.parse_args([*argv, flag, value])
    assert repr(value) in capsys.readouterr().err


def test_a_setting_named_twice_is_refused(argv, capsys):
    with pytest.raises(SystemExit):
        serve.parse_args([*argv, "--concurrency", "4", "4"])
    assert "--concurrency names the same setting twice" in capsys.readouterr().err


def test_a_head_of_another_target_is_refused_before_any_server_starts(world, argv, capsys, monkeypatch):
    def refuse(head, _target):
        raise DraftHeadError(f"{head} has vocab_size 100 and its target 200; pass this target's head.")

    monkeypatch.setattr("talon_sglang.draft_head.check_draft_head", refuse)
    assert serve.main(argv) == 1
    assert "has vocab_size 100 and its target 200" in " ".join(capsys.readouterr().out.split())
    assert world.started == []
