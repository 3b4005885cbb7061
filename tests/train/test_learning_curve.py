"""The learning curve, from the metrics that a run writes."""

import json

import pytest

from train.learning_curve import CurveError, draw, read_curve

TRAIN = {"step": 10, "loss": [3.0], "accuracy": [0.2], "tokens": 900, "time": 60.0}
HELD = {"step": 10, "held_out": True, "accuracy": [0.25, 0.1], "accept_length": {"chain": 1.5, "tree": 1.75}, "tokens": 900, "time": 120.0}


@pytest.fixture
def write(tmp_path):
    def write(*rows, end=""):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
        return tmp_path

    return write


def test_evaluations_in_order_whatever_stands_between_them(write):
    later = HELD | {"step": 20, "tokens": 1800, "time": 180.0, "accept_length": {"chain": 1.6}}
    first, second = read_curve(write(TRAIN, HELD, TRAIN | {"step": 20}, later, end='{"step": 3'))
    assert (first.step, first.tokens, first.minutes, first.accuracy, first.chain, first.tree) == (10, 900, 1.0, 0.25, 1.5, 1.75)
    assert (second.tokens, second.chain, second.tree) == (1800, 1.6, None)


def test_the_picture_is_a_png(write, tmp_path):
    draw({"a": read_curve(write(TRAIN, HELD)), "b": read_curve(tmp_path)}, tmp_path / "pictures/curve.png")
    assert (tmp_path / "pictures/curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["curve.png"]


def test_what_is_missing_is_said(write, tmp_path):
    with pytest.raises(CurveError, match="holds no metrics.jsonl; pass the `output_dir`"):
        read_curve(tmp_path / "nowhere")
    with pytest.raises(CurveError, match="holds no evaluation yet"):
        read_curve(write(TRAIN))
    with pytest.raises(CurveError, match="older version that did not count tokens"):
        read_curve(write({key: value for key, value in HELD.items() if key != "tokens"}))
