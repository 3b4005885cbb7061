"""Starting and ending servers, with small stand-in processes; the real server is started in tests/talon_sglang and test_serve_real.py."""

import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from eval import servers
from eval.servers import ServerError, ServerSpec, command_line, environment, reason_from_log, serve

SPEC = ServerSpec(Path("target"), device="cpu")
# Answers 200 to everything, and has a child that would outlive it.
HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
FAILING = """
import sys, time
sys.stderr.write("Traceback (most recent call last):\\n  File x\\nValueError: the head has 3 keys too many.\\n")
sys.stderr.write("RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).\\n")
sys.exit(7)
"""


@pytest.fixture
def stand_in(monkeypatch):
    def use(program):
        monkeypatch.setattr(servers, "command_line", lambda spec, port: [sys.executable, "-c", program.replace("PORT", str(port))])

    return use


def test_a_log_nobody_asked_for_is_kept_only_after_a_failure(stand_in):
    stand_in(HEALTHY)
    with serve(SPEC) as server:
        assert server.log_path.exists()
    assert not server.log_path.exists()
    with pytest.raises(KeyError), serve(SPEC) as server:
        raise KeyError
    assert server.log_path.exists()
    server.log_path.unlink()


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_is_up_inside_the_block_and_gone_with_its_children_after_it(stand_in, tmp_path):
    stand_in(HEALTHY)
    log = tmp_path / "logs" / "server.log"
    with pytest.raises(KeyError), serve(SPEC, log_path=log) as server:
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        server.check_alive()
        child = int(log.read_text().split()[1])
        assert not gone(child)
        raise KeyError("a failing test body must not leave servers behind")
    assert gone(server.pid)
    assert gone(child)


def test_a_start_that_fails_is_one_sentence_with_the_cause(stand_in, tmp_path):
    stand_in(FAILING)
    with pytest.raises(ServerError) as caught, serve(SPEC, log_path=tmp_path / "log"):
        pass
    sentence = str(caught.value)
    assert sentence.startswith(
        "The plain server stopped with exit code 7 while starting: ValueError: the head has 3 keys too many. The whole log"
    )
    assert "\n" not in sentence
    assert "Traceback" in caught.value.log_tail


def test_a_server_that_never_answers_is_given_up_and_ended(stand_in, tmp_path):
    stand_in("import os, time; print('still loading', os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(ServerError, match=r"not ready after 2 s; its last line was 'still loading") as caught:
        with serve(SPEC, log_path=tmp_path / "log", start_timeout_s=2):
            pass
    assert gone(int(caught.value.log_tail.split()[-1]))


def test_a_death_in_service_is_noticed(stand_in, tmp_path):
    stand_in(HEALTHY)
    with serve(SPEC, log_path=tmp_path / "log") as server:
        os.kill(server.pid, 9)
        time.sleep(0.2)
        with pytest.raises(ServerError, match="was ended by signal 9 while serving"):
            server.check_alive()


@pytest.mark.parametrize(
    "log, reason",
    [
        ("loading\nTraceback\n  File x\nmy.package.DraftHeadError: fc.weight is missing\n", "DraftHeadError: fc.weight is missing"),
        (
            "launch_server.py: error: unrecognized arguments: --talon-gat 1\n",
            "launch_server.py: error: unrecognized arguments: --talon-gat 1",
        ),
        ("ValueError: cause\nException: Rank 0 scheduler died\n", "ValueError: cause"),
        ("only progress\nKilled\n", "Killed"),
        ("", "its log is empty"),
    ],
)
def test_the_reason_is_the_first_cause(log, reason):
    assert reason_from_log(log) == reason


def test_the_command_line_passes_what_is_set_and_nothing_else():
    talon = ServerSpec(Path("t"), Path("h"), "TALON", nodes=16, width=4, steps=0, gate=0.1, trace=Path("f"), device="cpu", extra=("--x",))
    words = command_line(talon, 1234)
    flags = dict(zip(words, words[1:], strict=False))
    assert flags["--speculative-num-steps"] == "0"  # 0 means something to TALON, so it must not be dropped
    assert flags["--talon-gate"] == "0.1"
    assert flags["--talon-trace"] == "f"
    assert flags["--host"] == "127.0.0.1"
    assert words[-1] == "--x"
    assert not [word for word in command_line(SPEC, 1) if word.startswith(("--speculative", "--talon"))]


def test_cpu_settings_stay_on_the_cpu():
    on_gpu = ServerSpec(Path("t"), device="cuda")
    assert environment(SPEC)["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "--device" not in command_line(on_gpu, 1)
    assert "SGLANG_USE_CPU_ENGINE" not in {key: value for key, value in environment(on_gpu).items() if key not in os.environ}
    assert environment(ServerSpec(Path("t"), threads=3))["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"algorithm": "EAGLE"}, "algorithm is 'EAGLE'; use"),
        ({"head": Path("h")}, "head is set but algorithm is 'none'"),
        ({"algorithm": "EAGLE3", "gate": 0.1}, "belong to TALON"),
    ],
)
def test_contradictions_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        ServerSpec(Path("t"), **fields)
