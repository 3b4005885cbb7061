"""The phases of a round add up, and an inner phase is not counted twice."""

import time
from types import SimpleNamespace

import pytest

from talon_sglang.clock import Clock


def test_inner_phases_stop_the_outer_clock():
    clock = Clock()
    model = SimpleNamespace(forward=lambda x: time.sleep(0.03) or x + 1)
    clock.wrap_forward(model, "forward")
    started = time.perf_counter()
    with clock.phase("other"):
        time.sleep(0.02)
        with clock.phase("draft"):
            assert model.forward(1) == 2
            time.sleep(0.01)
        with pytest.raises(ValueError), clock.phase("verify"):
            raise ValueError("a round that fails must not leave the clock in its phase")
        time.sleep(0.02)
    whole = time.perf_counter() - started
    model.forward(1)
    seconds = clock.take()
    assert set(seconds) == {"other", "draft", "draft_forward", "verify", "outside"}
    assert sum(seconds.values()) - seconds["outside"] == pytest.approx(whole, abs=0.05)
    assert seconds["other"] >= 0.04 and seconds["draft"] >= 0.01 and seconds["draft_forward"] >= 0.03
    assert not clock.take()
