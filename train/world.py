"""Processes and devices: the deepspeed launcher, torchrun, or a plain `python`."""

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def join_world() -> World:
    """Initialise torch.distributed through DeepSpeed: NCCL with CUDA, gloo without."""
    import deepspeed

    if "RANK" not in os.environ:  # plain python: a world of one
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local_rank)
    if not cuda:  # DeepSpeed would compile a C++ operator for minutes that gains nothing for a head of this size
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
    size = dist.get_world_size()
    if not cuda and size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))  # oversubscribed threads spin against each other
    return World(dist.get_rank(), size, torch.device("cuda", local_rank) if cuda else torch.device("cpu"))


def sum_over_world(tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
