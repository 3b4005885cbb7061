"""eval/agree.py with stand-ins for server, client and prompts: what is sent, kept, compared and said."""

import contextlib
import json
import random
import re
from types import SimpleNamespace

import pytest

from eval import agree
from eval.accept_file import AcceptFile
from eval.client import Answer, RequestError
from eval.rounds import Tally
from eval.servers import ServerError

PROMPTS = {"chat": {"a": [1, 2, 3, 4], "b": [5]}, "code": {"c": [6, 7]}}
ANSWERS = {"chat": {"a": [1] * 9, "b": [2] * 5}, "code": {"c": [3] * 7}}
ROUNDS = {"chat": {"a": 4, "b": 2}, "code": {"c": 3}}
POLICIES = ("talon:16,4,10,0.03", "sglang-eagle3:4,4,16", "chain:3", "eagle3:4,4,16", "opt-tree:16,0.5,10")


class World:
    """Servers that answer as accept.json says; `extra`: rounds more than that; `dies_at`: the ids at which the server goes away."""

    def __init__(self):
        self.specs, self.sent, self.sampling, self.extra, self.dies_at = [], [], [], 0, None

    @contextlib.contextmanager
    def serve(self, spec, **_):
        self.specs.append(spec)
        yield SimpleNamespace(url="", check_alive=self.check_alive)

    def check_alive(self):
        raise ServerError(f"The {self.specs[-1].name} server was ended by signal 9 while serving: out of memory.", "log tail")

    def generate_all(self, prompts, max_new_tokens, _concurrency, **sampling):
        self.sampling.append(sampling)
        for ids in prompts:
            if ids == self.dies_at:
                raise RequestError("connection lost")
            self.sent.append(ids)
            name, prompt = next((name, prompt) for name, rows in PROMPTS.items() for prompt, known in rows.items() if known == ids)
            yield Answer(ANSWERS[name][prompt], {"completion_tokens": 1, "spec_verify_ct": ROUNDS[name][prompt] + self.extra}, 1.0)


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(agree, "serve", world.serve)
    monkeypatch.setattr(agree, "Client", lambda url: contextlib.nullcontext(world))
    monkeypatch.setattr(agree, "check_folders", lambda args: None)
    monkeypatch.setattr(agree, "fingerprint", lambda folder: folder.name)
    monkeypatch.setattr(agree, "load_sets", lambda args: {name: list(rows.items()) for name, rows in PROMPTS.items()})
    return world


@pytest.fixture
def call(world, tmp_path, capsys):
    """call(words, **settings) -> (exit status, what was printed), with an accept.json of `settings`."""

    def run(*words, policies=POLICIES, head="H", **settings):
        accept = tmp_path / "accept.json"
        models = {name: {"name": name, "fingerprint": name} for name in ("target", "head")}
        prompts = {name: sorted(rows) for name, rows in PROMPTS.items()}
        whole = {**models, "prompts": prompts, "max_new_tokens": 9, "temperature": 0.0, "samples": 1, "seed": 0, "dtype": "float32"}
        whole["target"]["fingerprint"], whole["head"]["fingerprint"] = "T", "H"
        file = AcceptFile(tmp_path / "new.json", {**whole, **settings}, "")
        file.answers = ANSWERS
        tally = {name: {p: Tally(count, len(ANSWERS[name][p]) - 1.0) for p, count in rows.items()} for name, rows in ROUNDS.items()}
        file.tallies = {policy: tally for policy in policies}
        file.path = accept
        file.save()
        flags = ["--target", "T", "--head", head, "--prompts", "P", "--accept", str(accept), "--out", str(tmp_path / "agree.json")]
        return agree.main([*flags, *words]), capsys.readouterr().out.replace("\n", " ")

    return run


def test_servers_run_what_was_measured_offline(call, world, tmp_path):
    status, printed = call()
    assert status == 0
    settings = [(spec.algorithm, spec.nodes, spec.width, spec.steps, spec.gate, spec.dtype, spec.threads) for spec in world.specs]
    assert settings == [
        ("TALON", 16, 4, 10, 0.03, "float32", 1),
        ("EAGLE3", 16, 4, 4, None, "float32", 1),
        ("EAGLE3", 4, 1, 3, None, "float32", 1),
    ]
    assert world.sampling[0] == {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    assert world.sent[:3] == [[5], [6, 7], [1, 2, 3, 4]]  # the shortest first
    found = json.loads((tmp_path / "agree.json").read_text())["agreements"]
    assert list(found) == list(POLICIES[:3])
    one = found["talon:16,4,10,0.03"]
    assert (one["prompts"], one["same_answer"], one["same_rounds"], one["difference"]) == (3, 3, 3, 0.0)
    assert one["offline"] == one["served"] == pytest.approx(21 / 9)
    assert "+0.0%" in printed


def test_a_difference_above_the_tolerance_fails(call, world, tmp_path):
    world.extra = 1  # 21 tokens in 12 rounds, not in 9
    status, printed = call("--policy", "talon:16,4")
    assert status == 1 and "the served accept length differs by more than 2% from the offline one" in printed
    one = json.loads((tmp_path / "agree.json").read_text())["agreements"]["talon:16,4,10,0.03"]
    assert (one["same_answer"], one["same_rounds"]) == (3, 0) and one["difference"] == pytest.approx(9 / 12 - 1)
    assert call("--policy", "talon:16,4", "--tolerance", "0.3")[0] == 0


def test_a_dead_server_keeps_its_answers_and_a_rerun_sends_the_rest(call, world):
    world.dies_at = [6, 7]
    status, printed = call("--policy", "talon:16,4")
    assert status == 1 and "out of memory" in printed and world.sent == [[5]]
    world.dies_at = None
    status, _ = call("--policy", "talon:16,4")
    assert status == 0 and world.sent == [[5], [6, 7], [1, 2, 3, 4]]


def test_ctrl_c_keeps_its_answers(call, world, monkeypatch):
    def interrupted(prompts, *_, **__):
        yield next(World().generate_all(prompts[:1], 9, 1))
        raise KeyboardInterrupt

    whole = world.generate_all
    world.generate_all = interrupted
    status, printed = call("--policy", "chain:3")
    assert status == 1 and "the same command continues from there" in printed and "chain:3  1" in re.sub(" +", "  ", printed)
    world.generate_all = whole
    assert call("--policy", "chain:3")[0] == 0 and [5] not in world.sent and len(world.sent) == 2


def test_above_temperature_0_on_a_cpu_only_talon_is_compared(call, world, tmp_path):
    status, printed = call("--device", "cpu", temperature=1.0)
    assert status == 0 and [spec.algorithm for spec in world.specs] == ["TALON"]
    assert "chain:3 is left out: stock SGLang verifies by argmax on a CPU" in printed and "tolerance 5%" in printed
    assert world.sampling[0]["temperature"] == 1.0
    one = json.loads((tmp_path / "agree.json").read_text())["agreements"]["talon:16,4,10,0.03"]
    assert one["same_answer"] is None and one["same_rounds"] is None


@pytest.mark.parametrize(
    ("words", "settings", "complaint"),
    [
        ((), {"head": "other"}, "--head other is not the head"),
        (("--policy", "talon:8,2"), {}, "talon:8,2,10,0.03 is not in"),
        (("--policy", "opt-tree:16"), {}, "exists only offline"),
        ((), {"policies": POLICIES[3:]}, "no policy that can be compared"),
        ((), {"samples": 2, "temperature": 1.0}, "has 2 answers a prompt"),
        ((), {"prompts": {"chat": ["a", "b", "z"]}}, "has 2 of the 3 prompts of set chat"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(call, world, words, settings, complaint):
    status, printed = call(*words, **settings)
    assert status == 1 and complaint in printed and not world.sent


def test_replies_of_other_settings_are_refused(call, world):
    assert call("--policy", "talon:16,4")[0] == 0
    status, printed = call("--policy", "talon:16,4", max_new_tokens=8)
    assert status == 1 and "measured with max_new_tokens = 9, this call has 8" in printed
    assert call("--policy", "talon:16,4", "--fresh", max_new_tokens=8)[0] == 0


def test_a_missing_accept_file_is_one_sentence(world, tmp_path, capsys):
    words = ["--target", "T", "--head", "H", "--prompts", "P", "--accept", str(tmp_path / "none.json")]
    assert agree.main(words) == 1
    assert "is not a results file of eval/accept.py" in capsys.readouterr().out.replace("\n", " ")


def test_the_error_of_a_served_length_is_over_prompts(tmp_path):
    """Twice the prompts with the same spread: the error shrinks by the square root of two."""
    rng = random.Random(0)
    offline = AcceptFile(tmp_path / "a.json", {}, "")
    served = agree.AgreeFile(tmp_path / "b.json", {"temperature": 1.0}, "")
    errors = []
    for count in (400, 800):
        offline.tallies = {"p": {"s": {str(i): Tally(10, 20.0) for i in range(count)}}}
        offline.answers = {"s": {str(i): [] for i in range(count)}}
        served.replies = {"p": {"s": {str(i): agree.Reply([0] * rng.randrange(15, 26), 10) for i in range(count)}}}
        errors.append(served.agreement("p", offline).served_error)
    assert errors[0] / errors[1] == pytest.approx(2**0.5, rel=0.1)
