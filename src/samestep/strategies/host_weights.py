"""Frozen weights in the host's memory (`model.offload`): the copies to the device for which compute waits.

`program/program.py` says which weights these are. A copy stands in front of the layer that calls the module, and what it allocates
is free behind the layer; under zero=2 and 3 it stands in front of the gather of the unit, which frees it. Its time is that of its
bytes over the link between host and device, and nothing hides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import LayoutError, did_you_mean
from samestep.models.spec import enclosing, gradients_within, is_below
from samestep.program.ops import BodyKey, Buffer, Op, OpKind, Ops, is_forward
from samestep.program.program import Program, host_modules, shard_bytes, units_on_host
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> LayoutError | None:
    """Return why weights that the job names cannot be on the host."""
    for root in step.offload:
        params = [
            param for param in step.model.params if any(is_below(alias, root) for alias in (param.name, *param.aliases))
        ]
        if not root or not params:
            known = sorted({path for param in step.model.params for path in enclosing(param.name.rpartition(".")[0])})
            return LayoutError(
                "weight-unknown",
                f"offload names {root!r}, and the model has no weights there{did_you_mean(root, known)}. Use a name of a module",
            )
        if trained := next((param.name for param in params if param.trainable), None):
            return LayoutError(
                "offload-trained-weight",
                f"offload names {root!r}, and {trained} takes a gradient. Use requires_grad_(False) on it, or the word "
                "offload in the layout, which holds the optimizer states in CPU memory",
            )
    if step.offload and step.model.differentiates_at:
        return LayoutError(
            "forward-takes-gradients",
            f"offload holds weights in CPU memory between two uses, and {gradients_within(step.model)}. Use no offload",
        )
    return None


def apply(program: Program) -> Program:
    """Return the program with the copies of weights on the host."""
    modules = tuple(host_modules(program.step, program.units, program.chunks))
    if not modules:
        return program
    program = replace(program, host_modules=modules)
    rewrite = _in_front_of_gathers if program.units else _in_front_of_layers
    known: dict[tuple[int, bool], Ops] = {}

    def rewritten(key: BodyKey, ops: Ops) -> Ops:
        same = (id(ops), is_forward(key))
        if same not in known:
            known[same] = tuple(rewrite(program, ops))
        return known[same]

    return program.with_bodies(rewritten)


def _in_front_of_layers(program: Program, ops: Ops) -> Iterator[Op]:
    """Copy what each layer calls before its forward, and before its backward or the forward that is repeated for it."""
    step, reached = program.step, set[int]()
    bytes_of = {param.name: step.weight_bytes(param) for param in step.model.params}
    for op in ops:
        if op.axis is not None or op.layer is None:
            yield op
            continue
        layer = step.model.layers[op.layer]
        host_modules = [host_module for host_module in program.host_modules if host_module.path in layer.called]
        if op.layer not in reached:
            reached.add(op.layer)
            reads = layer.backward_reads_weights
            copied = (
                host_modules
                if op.kind is OpKind.FORWARD
                else [module for module in host_modules if module.goes_back and reads]
            )
            yield from (_copy(module.path, sum(bytes_of[name] for name in module.params)) for module in copied)
        is_over = host_modules and op.kind in (OpKind.FORWARD, OpKind.BACKWARD)
        yield op.but(frees=(*op.frees, *(_buffer(module.path) for module in host_modules))) if is_over else op


def _in_front_of_gathers(program: Program, ops: Ops) -> Iterator[Op]:
    """Copy a rank's shard of a unit before each of its gathers, which frees it."""
    sizes = {unit.name: shard_bytes(program.step, unit) for unit in units_on_host(program.units, program.host_modules)}
    for op in ops:
        if op.kind is OpKind.ALL_GATHER and op.implied and op.owner in sizes:
            yield (copy := _copy(op.owner, sizes[op.owner]))
            op = op.but(after=(*op.after, copy.name), frees=(*op.frees, _buffer(op.owner)))
        yield op


def _copy(owner: str, size_bytes: int) -> Op:
    buffer = Buffer(_buffer(owner), "buffers", size_bytes)
    return Op(kind=OpKind.COPY, owner=owner, dtype="uint8", size_bytes=size_bytes, allocates=(buffer,))


def _buffer(owner: str) -> str:
    return f"copy of {owner}"
