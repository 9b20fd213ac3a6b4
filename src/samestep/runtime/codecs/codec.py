"""What a gradient codec is to torch: it starts each collective of a reduction, and says when its result is there."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from samestep.program.codecs import CODECS
from samestep.program.ops import OpKind
from samestep.runtime.processes.mesh import all_gather, reduce_scatter


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Let what follows see the result in the buffer that was given."""
        ...


class Codec(Protocol):
    """Carries out the reductions of one bucket, or one unit, through all steps of a run: it may keep state between them."""

    def reduce(self, kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> Pending:
        """Start one collective of the program on a flat buffer in master precision, in place.

        Of a reduce_scatter the result is this rank's part of the buffer, `own_part`; of the others the whole buffer.
        Collective over `group`: each of its ranks calls it with the same kind; if one does not, the others wait for it.
        """
        ...


def codec_of(name: str) -> Codec:
    """Return a new codec of the kind that a row of `CODECS` names."""
    module = CODECS[name].module
    assert module is not None, f"{name} is priced alone"
    made: Codec = importlib.import_module(module).codec()
    return made


def own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat buffer that the ranks of a group divide evenly: a view."""
    return flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def result_of(kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the part of a flat buffer that a collective in place leaves its result in: a view."""
    return own_part(flat, group) if kind is OpKind.REDUCE_SCATTER else flat


def send(kind: OpKind, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start one collective on a flat buffer as it is, in place.

    An all_gather sends this rank's part of it; reduce and broadcast have the group's first rank as their root. Collective
    over `group`: if a rank does not call it, the others wait for it.
    """
    if kind is OpKind.ALL_REDUCE:
        work = dist.all_reduce(flat, group=group, async_op=True)
    elif kind is OpKind.REDUCE:
        work = dist.reduce(flat, group_dst=0, group=group, async_op=True)
    elif kind is OpKind.BROADCAST:
        work = dist.broadcast(flat, group_src=0, group=group, async_op=True)
    elif kind is OpKind.REDUCE_SCATTER:
        work = reduce_scatter(own_part(flat, group), flat, group=group, async_op=True)
    else:
        assert kind is OpKind.ALL_GATHER, f"a flat buffer has no use for {kind}"
        work = all_gather(flat, own_part(flat, group), group=group, async_op=True)
    assert work is not None
    return work
