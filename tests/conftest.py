"""Fixtures for all tests: where the clone, the target model and the development data are, and how many threads PyTorch may use."""

import os
import subprocess
import sys
from pathlib import Path

# Before torch is imported anywhere: tests start servers and training processes beside this one, and PyTorch processes that
# together run more threads than there are cores slow each other down by orders of magnitude.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # train/ and eval/ are run from the clone, not installed


# The files that take minutes, in front: with two processes, the last long file would otherwise run alone.
FIRST = (
    "test_server",
    "test_kits",
    "test_training",
    "test_features",
    "test_any_tree",
    "test_robustness",
    "test_sampling_server",
    "test_serve_real",
    "test_cost_real",
    "test_accept_real",
    "test_toy_server",
    "test_gpu_server",
)


def pytest_collection_modifyitems(items) -> None:
    rank = {name: i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(FIRST)))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Development data beside the clone (prompt sets, a trained head); tests that need it are skipped without it."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the development data in ../shared, which is not part of the repository")
    return folder


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, fetched once into the cache."""
    from train.paths import cache_dir

    folder = cache_dir() / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        command = [sys.executable, REPO / "train" / "fetch_target.py"]
        fetched = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        if fetched.returncode != 0:
            pytest.fail(f"train/fetch_target.py failed: {(fetched.stderr or fetched.stdout).strip().splitlines()[-1]}")
    return folder
