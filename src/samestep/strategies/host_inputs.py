"""Inputs of blocks in the host's memory (`recompute=offload`): their copies to the host, and back in time for the backward.

A block that repeats its forward keeps its input alone, hidden x tokens of a micro-batch. Here it is copied to the host while the block
computes, and back while the block behind it goes backward, each in a stream of its own; device memory holds two inputs at a time:

```
forward    compute     block 1      block 2      block 3
           to host     input 1      input 2
backward   compute     block 3 again, backward     block 2 again, backward     block 1 again, backward
           from host   input 2                     input 1
```
The host keeps inputs rather than all that a block saves: a block saves some 34 times its input, and no link is fast enough for that
(the same choice as gradient checkpointing with offload elsewhere: Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.3).

On the device stay: the input of a chunk's last block, with which the backward begins; that of a first block which a stage receives,
since the stage keeps what it was sent; and an input that takes no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from samestep.errors import LayoutError
from samestep.models.spec import gradients_within
from samestep.program.ops import BYTES_OF, BodyKey, Buffer, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.schedules import TaskKind


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why inputs of blocks cannot be on the host: the model goes back through its blocks more than once."""
    if step.layout.recompute == "offload" and step.model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"recompute=offload copies the input of a block back once, and {gradients_within(step.model)}. Use recompute=full",
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with the copies of blocks' inputs."""
    sizes = _moved_bytes(program)
    known: dict[int, Ops] = {}

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        if key.kind not in (TaskKind.FORWARD, TaskKind.BACKWARD):
            return ops
        if id(ops) not in known:
            known[id(ops)] = tuple(
                _to_host(ops, sizes) if key.kind is TaskKind.FORWARD else _from_host(ops, sizes, program)
            )
        return known[id(ops)]

    return program.with_bodies(rewrite)


def _blocks(program: Program) -> list[list[int]]:
    """Return the blocks of each chunk of this rank that repeat their forward."""
    layers = program.step.model.layers
    chunks = program.chunks or (range(len(layers)),)
    return [[index for index in chunk if layers[index].is_block and layers[index].has_backward] for chunk in chunks]


def _moved_bytes(program: Program) -> Mapping[int, int]:
    """Return the bytes of the input of each block whose input is on the host."""
    step, layers = program.step, program.step.model.layers
    roots = [layer.repeats or layer.name for layer in layers]  # a block that is called again does in each call the same
    received = {chunk.start for chunk in program.chunks if chunk.start}
    every = [index for blocks in _blocks(program) for index in blocks]
    stay = {roots[blocks[-1]] for blocks in _blocks(program) if blocks}
    stay |= {roots[index] for index in every if index in received or not layers[index].backward_reads_weights}
    row_bytes = step.microbatch_samples * BYTES_OF[step.compute_dtype]
    return {index: layers[index].moved_input_elements * row_bytes for index in every if roots[index] not in stay}


def _to_host(ops: Ops, sizes: Mapping[int, int]) -> Iterator[Op]:
    """Copy each input once the layer before has computed it; the next block waits until it has left."""
    computed, leaving = "", None
    for op in ops:
        if op.kind is OpKind.FORWARD and op.layer is not None and (leaving or op.layer in sizes):
            waits = (leaving.name,) if leaving else ()
            gone = tuple(op.name for op in leaving.allocates) if leaving else ()
            leaving = None
            if op.layer in sizes:
                leaving = _copy(OpKind.OFFLOAD, op, sizes[op.layer]).but(after=(computed,) if computed else ())
                yield leaving
            op = op.but(after=(*op.after, *waits), frees_before=(*op.frees_before, *gone))
        computed = op.name if _is_computed(op) else computed
        yield op


def _from_host(ops: Ops, sizes: Mapping[int, int], program: Program) -> Iterator[Op]:
    """Copy the input of the block before while a block repeats its forward."""
    repeated = [op for op in ops if op.kind is OpKind.RECOMPUTE]
    previous_of = {op.name: previous for op, previous in itertools.pairwise(repeated)}
    done, coming = "", dict[int, Op]()
    for op in ops:
        if op.kind is OpKind.RECOMPUTE:
            assert op.layer is not None
            fetch = coming.pop(op.layer, None)
            if fetch is None and op.layer in sizes:
                fetch = _copy(OpKind.FETCH, op, sizes[op.layer]).but(after=(done,) if done else ())
                yield fetch
            previous = previous_of.get(op.name)
            if previous is not None and previous.layer is not None and previous.layer in sizes:
                copy = _copy(OpKind.FETCH, previous, sizes[previous.layer]).but(after=(done,) if done else ())
                coming[previous.layer] = copy
                yield copy
            if fetch is not None:
                gone = tuple(op.name for op in fetch.allocates)
                op = op.but(after=(*op.after, fetch.name), frees_before=(*op.frees_before, *gone))
        done = op.name if _is_computed(op) else done
        yield op


def _copy(kind: OpKind, op: Op, size_bytes: int) -> Op:
    """Return the copy of the input of a block, which an op computes."""
    buffer = Buffer(f"input of {op.owner}", "activations", size_bytes)
    return Op(kind=kind, owner=op.owner, layer=op.layer, dtype="uint8", size_bytes=size_bytes, allocates=(buffer,))


def _is_computed(op: Op) -> bool:
    """Return whether an op is in the queue of compute, or has brought a stage its input."""
    return (op.axis is None and op.stream == "compute") or op.is_exposed or op.kind is OpKind.RECV
