"""A CUDA graph's contract on the CPU: the work runs once, its operators are recorded with the very tensors they touched, and a replay runs
the operators again on those tensors, without the Python around them. What a CUDA graph cannot hold is an error here too.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They give the host a value, or a shape that depends on one.
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "bincount")


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in SYNCHRONISING or by_mask or (name == "repeat_interleave" and isinstance(args[0], torch.Tensor)):
            raise RuntimeError(f"{func.__name__} cannot be captured: it needs a value on the host")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class RecordedGraph:
    def __init__(self, work):
        with Recorder() as recorder:
            work()
        self.calls = recorder.calls

    def replay(self):
        for func, args, kwargs, captured in self.calls:
            for old, new in zip(tree_leaves(captured), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)
