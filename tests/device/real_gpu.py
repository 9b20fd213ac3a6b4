"""A real GPU in the place of the simulated one, where the variable asks for it: `make gpu` sets it.

Its ranks are spawned, since no process may be forked once CUDA or a thread of autograd has started; each has a GPU of its
own, so layouts of more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from tests.device import simulated_cuda

ASKED = "SAMESTEP_TESTS_ON_A_GPU"


def is_asked() -> bool:
    """Return whether tests of a device run on a real GPU."""
    return bool(os.environ.get(ASKED))


def refusal(ranks: int = 1) -> str:
    """Return why so many ranks cannot run on a device here; empty where they can, on real GPUs or on the simulated one."""
    if not is_asked():
        return simulated_cuda.refusal()
    if not (gpus := torch.cuda.device_count()):
        return f"{ASKED} is set, and torch {torch.__version__} sees no GPU"
    return "" if gpus >= ranks else f"{ranks} ranks need as many GPUs, and there {'is' if gpus == 1 else 'are'} {gpus}"


def join(store: dist.Store, rank: int, world: int, timeout: datetime.timedelta) -> None:
    """Join the world on a device, real or simulated."""
    if not is_asked():
        simulated_cuda.install()
    place = torch.device("cuda", rank if is_asked() else 0)
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout, device_id=place)
