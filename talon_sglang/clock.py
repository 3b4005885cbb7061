"""Where the time of a decode round goes: wall-clock seconds by phase, in the scheduler process. (On a GPU these would be launch times.)

draft          growing the trees, less the following
  draft_forward    the draft's forwards over tree nodes
  indices          KV slots, lanes, attention plan
  expand           from the draft's logits to the next layer
  verify_input     from trees to SGLang's verify input
verify         SGLang's preparation, grammar, acceptance, KV compaction, logprobs
  verify_forward   the target's forward
draft_extend   preparation, root candidates
  draft_extend_forward   the draft's forward over the accepted tokens
observe        counters and trace
other          the rest of a round
prefill, prefill_forward ...
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """A phase inside another one stops the outer one's time, so that the phases add up to the whole."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str):
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def wrap_forward(self, owner, method: str) -> None:
        """Count every call of `owner.method` as a phase of its own, `X_forward` inside phase X."""
        call = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.phase(f"{self._open[-1]}_forward" if self._open else "outside"):
                return call(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> Counter[str]:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, Counter()
        return taken

    def _book(self) -> None:
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
