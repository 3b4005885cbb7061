"""The draft loop over captured steps: one graph a lane width, replayed layer after layer, and an early exit that never stalls the device.

The layer number lives on the device (`StaticTrees.depth`), so one graph serves every layer, and a batch size needs as many graphs as there
are lane widths, not layers.

Early exit: after each step the host starts copying the trees' `room` (0 = done) and reads the copy of the step *before*, while the device
already runs the next one. A round thus launches at most one step too many, and that step changes nothing. The same number narrows the
next step: after step i-1 left room for r nodes, the layer that step i adds and step i+1 expands has at most r - 1 nodes.

Under tensor parallelism every rank must launch the same steps, or a collective inside the draft forward hangs. The copies are read by step
number, never by whether they have arrived, so ranks with equal trees decide equally; `agree=rank_zero(group)` keeps them together even if
a tree should differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from talon_sglang.gpu.tree import StaticTrees

Work = Callable[[], None]


class Graph(Protocol):
    def replay(self) -> None: ...


class Eager:
    """The graph that is none: it does the work each time."""

    def __init__(self, work: Work):
        self.replay = work


class CudaGraph:
    """`work` captured on the current device; `pool` shares memory between graphs that never run at the same time."""

    def __init__(self, work: Work, pool=None, warmups: int = 2):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels compile and libraries allocate before the capture
            for _ in range(warmups):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            work()
        self.replay = self._graph.replay


class LateFlag:
    """Device integers that reach the host in order, each copied without waiting; `take` waits for the oldest one alone."""

    def __init__(self, device: torch.device | str):
        self._cuda = torch.device(device).type == "cuda"
        self._slots = [torch.zeros((), dtype=torch.int64, pin_memory=self._cuda) for _ in range(3)]
        self._free, self._sent = deque(range(3)), deque()

    def send(self, value: torch.Tensor) -> None:
        slot = self._free.popleft()  # IndexError if three are under way: the loop keeps two at most
        self._slots[slot].copy_(value, non_blocking=self._cuda)
        arrived = torch.cuda.Event() if self._cuda else None
        if arrived:
            arrived.record()
        self._sent.append((slot, arrived))

    def take(self) -> int:
        slot, arrived = self._sent.popleft()
        if arrived:
            arrived.synchronize()
        self._free.append(slot)
        return int(self._slots[slot])

    def drop(self) -> None:
        """Forget what has not been taken. A copy still under way ends before the next one into its slot, for both are on one stream."""
        while self._sent:
            self._free.append(self._sent.popleft()[0])


def rank_zero(group=None) -> Callable[[int], int]:
    """`agree` for the ranks of a CPU process group (gloo): every rank gets rank 0's number."""

    def agree(room: int) -> int:
        flag = torch.tensor(room)
        torch.distributed.broadcast(flag, group_src=0, group=group)
        return int(flag)

    return agree


class DraftLoop:
    """Args:
    trees: read for `room` and the bounds on widths.
    begin: layer 1 (`StaticRound.begin`).
    step: one layer over that many lanes a request (`StaticRound.step`).
    capture: makes a graph of a piece of work; `CudaGraph` on a GPU. It may run the work, so call `prepare` between rounds.
    flag: with `send`, `take` and `drop` as in `LateFlag`.
    agree: maps this rank's flag to the one that all ranks follow.
    widths: lane widths to capture; the widest that the rule needs is always among them.
    """

    def __init__(
        self,
        trees: StaticTrees,
        begin: Work,
        step: Callable[[int], None],
        *,
        capture: Callable[[Work], Graph] = Eager,
        flag=None,
        agree: Callable[[int], int] = lambda room: room,
        widths: tuple[int, ...] = (8, 16, 32),
    ):
        self.trees, self.agree = trees, agree
        self.flag = flag or LateFlag(trees.room.device)
        widest = max(trees.widest(0), trees.widest(1))
        self.widths = sorted({min(w, widest) for w in widths} | {widest})
        self._capture, self._begin, self._step = capture, begin, step
        self._graphs: dict[int, Graph] = {}

    def prepare(self) -> None:
        """Capture everything that a round can need, widest first, as memory pools like it."""
        for width in [*reversed(self.widths), 0]:
            self._graph(width)

    def run(self) -> list[int]:
        """Draft one round. Returns the widths of the steps that were launched."""
        trees, launched = self.trees, []
        self.flag.drop()
        self._graph(0).replay()
        bound = trees.widest(0)
        for i in range(trees.max_steps):
            width = next(w for w in self.widths if w >= bound)
            self._graph(width).replay()
            launched.append(width)
            self.flag.send(trees.room)
            bound = trees.widest(i + 1)
            if i > 0:
                room = self.agree(self.flag.take())  # what step i-1 left
                if room <= 1:  # 0: step i was idle; 1: step i has added the last node
                    break
                bound = min(bound, room - 1)
        return launched

    def _graph(self, width: int) -> Graph:
        """The graph of a step of that width; 0 is layer 1."""
        if width not in self._graphs:
            self._graphs[width] = self._capture(self._begin if width == 0 else lambda: self._step(width))
        return self._graphs[width]
