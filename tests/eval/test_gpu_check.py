"""The prepared device script, as far as a machine without a GPU can run it."""

import os
import subprocess
import sys

import pytest
import torch

from eval import gpu_check


def test_without_a_device_it_says_so_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out.strip() == gpu_check.NO_DEVICE


def test_a_failed_check_is_named_and_ends_non_zero(capsys, monkeypatch):
    def check_nothing(device):
        raise AssertionError("two differs from three")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("check_expansion", "check_kernel", "check_rounds"):
        monkeypatch.setattr(gpu_check, name, check_nothing)
    assert gpu_check.main([]) == 1
    assert "FAILED nothing: two differs from three" in capsys.readouterr().out


@pytest.mark.slow
def test_the_checks_run_in_tritons_interpreter(repo_root, tmp_path):
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "eval.gpu_check", "--json", str(tmp_path / "report.json")]
    env = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=repo_root, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.count("\nok ") == 4 and (tmp_path / "report.json").exists()
