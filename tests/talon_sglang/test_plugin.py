"""Registration, flags and the refusals at start; the last tests start the real command line."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="needs SGLang")
from talon_sglang import algorithm, plugin, settings  # noqa: E402
from talon_sglang.settings import DEFAULT_DEPTH_CAP, TalonError, TalonSettings, read_settings  # noqa: E402


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (settings.GATE_ENV, settings.TRACE_ENV, settings.HANDOFF_ENV):
        monkeypatch.delenv(name, raising=False)


def server_args(toy, **changes):
    target, head = toy
    absent = (
        "attention_backend speculative_draft_attention_backend decode_attention_backend prefill_attention_backend enable_lora lora_paths "
    )
    absent += (
        "speculative_token_map speculative_draft_window_size speculative_num_draft_tokens speculative_eagle_topk speculative_num_steps "
    )
    absent += "max_running_requests return_hidden_states_mode"
    off = "enable_multi_layer_eagle enable_dp_attention speculative_adaptive speculative_use_rejection_sampling "
    off += "speculative_use_block_verification enable_return_hidden_states enable_watermark enable_deterministic_inference"
    one = "page_size tp_size pp_size dp_size tokenizer_worker_num speculative_accept_threshold_single speculative_accept_threshold_acc"
    values = dict.fromkeys(absent.split()) | dict.fromkeys(off.split(), False) | dict.fromkeys(one.split(), 1)
    values |= dict(device="cpu", disaggregation_mode="null", speculative_draft_model_path=str(head), model_path=str(target))
    return SimpleNamespace(**(values | changes))


def test_defaults_are_the_papers_with_our_depth_cap(toy):
    args = server_args(toy)
    algorithm.settle(args)
    tree = TalonSettings.handed_over().tree
    assert (tree.node_budget, tree.first_layer_width, tree.gate, tree.depth_cap) == (60, 10, 0.03, DEFAULT_DEPTH_CAP)
    assert args.speculative_num_draft_tokens == 60 and args.max_running_requests == 48 and args.disable_overlap_schedule


@pytest.mark.parametrize("n, k, steps", [(2, 1, 1), (16, 4, 0), (60, 10, 8), (8, 20, None), (60, 1, 50)])
def test_the_reserve_is_at_most_two_n_slots(toy, n, k, steps):
    """SGLang reserves 2 * max(steps * topk, N) slots a request (mem_cache/allocation_sizing.py), and builds its multi-step draft backend
    for steps > 1.
    """
    args = server_args(toy, speculative_num_draft_tokens=n, speculative_eagle_topk=k, speculative_num_steps=steps)
    algorithm.settle(args)
    assert args.speculative_num_steps == 1 and args.speculative_num_steps * args.speculative_eagle_topk <= max(2, n)
    assert args.speculative_eagle_topk >= 2  # 1 would select SGLang's chain code
    tree = TalonSettings.handed_over().tree
    assert (tree.node_budget, tree.first_layer_width) == (n, k) and tree.depth_cap == (DEFAULT_DEPTH_CAP if steps is None else steps)


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens is 1: .* at least 2"),
        ({"speculative_eagle_topk": 0}, "--speculative-eagle-topk is 0"),
        ({"speculative_num_steps": -1}, "--speculative-num-steps is -1"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path is missing"),
        ({"device": "cuda"}, "--device cuda"),
        ({"attention_backend": "torch_native"}, "--attention-backend torch_native"),
        ({"attention_backend": "triton"}, "--attention-backend triton"),  # but for Triton's interpreter, see test_gpu_server.py
        ({"decode_attention_backend": "triton"}, "attention backend"),
        ({"page_size": 16}, "--page-size 16"),
        ({"tp_size": 2}, "--tp-size 2"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "data parallelism"),
        ({"enable_return_hidden_states": True}, "returning hidden states"),
        ({"return_hidden_states_mode": "last"}, "returning hidden states"),
        ({"enable_watermark": True}, "--enable-watermark"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"lora_paths": ["x"]}, "LoRA"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_use_rejection_sampling": True}, "rejection sampling"),
        ({"speculative_token_map": "x"}, "--speculative-token-map"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"speculative_accept_threshold_single": 0.5}, "accept threshold"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(toy, changes, pattern):
    with pytest.raises(TalonError, match=pattern) as caught:
        algorithm.settle(server_args(toy, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gate", ["0", "1.01", "-0.1", "nan", "wide"])
def test_a_gate_outside_its_range(monkeypatch, gate):
    monkeypatch.setenv(settings.GATE_ENV, gate)
    with pytest.raises(TalonError, match=f"TALON_GATE.* is {gate}"):
        read_settings(None, None, None)


def test_another_sglang_version_is_refused(toy, monkeypatch):
    monkeypatch.setattr(algorithm, "version", lambda _: "0.5.24")
    with pytest.raises(
        TalonError, match=r"SGLang 0\.5\.24 is installed, but this plugin is made for 0\.5\.23.*pip install sglang==0\.5\.23"
    ):
        algorithm.settle(server_args(toy))


def test_every_question_of_sglang_has_an_answer(monkeypatch):
    algorithm.check_interface()
    monkeypatch.setattr(algorithm.SpeculativeAlgorithm, "is_brand_new", lambda self: False, raising=False)
    with pytest.raises(TypeError, match="is_brand_new"):
        algorithm.check_interface()


def test_a_failed_registration_ends_a_server_that_asked_for_talon(monkeypatch, caplog):
    def fail():
        raise RuntimeError("moved")

    monkeypatch.setattr(plugin, "register_algorithm", fail)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm=talon"])
    with pytest.raises(SystemExit, match="could not be registered.*RuntimeError: moved"):
        plugin.load()
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm", "EAGLE3"])
    plugin.load()
    assert "could not be registered" in caplog.text


def test_loading_twice_is_harmless():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    plugin.register_algorithm()
    plugin.register_algorithm()
    assert SpeculativeAlgorithm.from_string("talon").is_eagle3()


def launch(toy, *words, env=()):
    target, head = toy
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(target),
        "--device",
        "cpu",
        "--skip-tokenizer-init",
        *words,
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TALON_")} | {"HF_HUB_OFFLINE": "1"} | dict(env)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, pattern",
    [
        (("--speculative-algorithm", "TALON"), "--speculative-draft-model-path is missing"),
        (("--speculative-algorithm", "TALON", "--speculative-draft-model-path", "/nowhere"), "the draft head /nowhere is neither"),
        (("--speculative-algorithm", "TALON", "--speculative-draft-model-path", "HEAD", "--talon-gate", "7"), "--talon-gate .* is 7"),
        (("--talon-gate", "0.1"), "--talon-gate is only for --speculative-algorithm TALON"),
    ],
)
def test_the_command_line_ends_with_one_sentence(toy, words, pattern):
    result = launch(toy, *[str(toy[1]) if word == "HEAD" else word for word in words])
    assert result.returncode not in (0, 2) and "Traceback" not in result.stderr.splitlines()[-1]
    last = result.stderr.strip().splitlines()[-1]
    assert re.search(pattern, last), result.stderr[-2000:]
