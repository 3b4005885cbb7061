"""SGLang reads SGLANG_USE_CPU_ENGINE when its modules are imported, so it is set before any test of this folder imports them."""

import os

import pytest

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from talon_sglang.cpu import activate  # noqa: E402

activate()


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """(target, head) folders of tests/toy.py."""
    from tests.toy import write_toy

    return write_toy(tmp_path_factory.mktemp("toy"))
