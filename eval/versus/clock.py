"""What the optimiser loop of a training run cost, step by step, counted the same way on both sides.

Only the standard library: this file also runs in the other trainer's environment.
"""

import json
import os
import resource
import statistics
import time
from pathlib import Path

WARM_UP_STEPS = 2  # allocate buffers and optimiser state; left out of every rate


class Clock:
    """`resume()` when the loop is (again) about to start a step, `tick(tokens)` at the end of each step.

    A step's time is everything between two ticks: fetching and collating the batch, forward, backward, optimiser, logging. What lies
    between the last tick and the next `resume` (validation, checkpoints) counts nowhere. `tokens` are those of the step's conversations,
    without padding.
    """

    def __init__(self):
        self.steps: list[dict] = []
        self.resume()

    def resume(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def tick(self, tokens: int) -> None:
        wall, cpu = self._wall, self._cpu
        self.resume()
        self.steps.append({"tokens": int(tokens), "wall_s": round(self._wall - wall, 5), "cpu_s": round(self._cpu - cpu, 5)})

    def write(self, path: Path, **facts) -> None:
        """One JSON file, under a temporary name first. `facts`: whatever a reader should know about the run."""
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        body = {**facts, "threads": os.environ.get("OMP_NUM_THREADS"), "peak_mib": round(peak_mib), "steps": self.steps}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(body) + "\n")
        temporary.replace(path)


def rate(steps: list[dict], unit: str = "wall_s", skip: int = WARM_UP_STEPS) -> float:
    """Tokens per second over all steps but the first `skip`. unit: `wall_s`, or `cpu_s`, which a busy machine disturbs less.

    Raises ValueError with no step left.
    """
    counted = steps[skip:]
    if not counted:
        raise ValueError(f"{len(steps)} steps were timed and the first {skip} do not count; run more steps.")
    return sum(step["tokens"] for step in counted) / sum(step[unit] for step in counted)


def alternating(ours: list[list[dict]], theirs: list[list[dict]], unit: str = "wall_s") -> dict:
    """Rounds that were run in turn -> rates of each round, ratios of neighbours and their median.

    Raises ValueError when the rounds do not pair up.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} rounds of one side and {len(theirs)} of the other do not make pairs; run the speed stage again.")
    pairs = [(rate(a, unit), rate(b, unit)) for a, b in zip(ours, theirs)]
    ratios = [a / b for a, b in pairs]
    rates = {"ours": [round(a, 1) for a, _ in pairs], "theirs": [round(b, 1) for _, b in pairs]}
    return {**rates, "ratios": [round(one, 3) for one in ratios], "ratio": round(statistics.median(ratios), 3)}
