"""The soak's judgement of single answers, and what it reports about memory."""

import random
from collections import Counter

import httpx
import pytest

pytest.importorskip("psutil", reason="needs psutil, of the eval extra")
from eval import soak  # noqa: E402

BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}


class Fixed(random.Random):
    """Chooses the kind of request: below 0.05 malformed, below 0.25 broken off, else whole."""

    def __init__(self, kind: float):
        super().__init__(0)
        self.kind = kind

    def random(self):
        return self.kind


def send(kind: float, status: int, answer) -> tuple[str, Counter]:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=answer))
    counts = Counter()
    with httpx.Client(transport=transport, base_url="http://127.0.0.1") as http:
        return soak.send(http, BODY, Fixed(kind), counts), counts


def answer(tokens: int, retractions: int = 0) -> dict:
    return {"output_ids": [5] * tokens, "meta_info": {"num_retractions": retractions}}


@pytest.mark.parametrize(
    "kind, status, got, verdict",
    [
        (0.9, 200, answer(3), "whole"),
        (0.9, 200, [answer(3), answer(3)], "whole"),
        (0.9, 200, answer(2), "wrong"),
        (0.9, 200, [answer(3), answer(4)], "wrong"),
        (0.9, 500, {}, "wrong"),
        (0.01, 400, {}, "refused"),
        (0.01, 200, answer(3), "wrong"),
        (0.01, 500, {}, "wrong"),
    ],
)
def test_how_a_request_ended(kind, status, got, verdict):
    assert send(kind, status, got)[0] == verdict


def test_retracted_answers_are_counted():
    assert send(0.9, 200, [answer(3, 2), answer(3)])[1] == {"retracted": 1}


def test_growth_is_measured_after_the_warm_up(capsys):
    samples = [soak.Sample(minute, 100.0 if minute < 4 else 200.0 + 2.0 * minute, 9, 9, 1, 0.5) for minute in range(16)]
    soak.print_report(samples, Counter(whole=3))
    told = " ".join(capsys.readouterr().out.split())
    assert "208.0 to 230.0 MB, +2.00 MB a minute" in told and "3 whole" in told
