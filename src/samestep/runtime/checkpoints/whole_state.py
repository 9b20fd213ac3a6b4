"""The whole model's weights, gathered from the ranks that hold parts of them, and set from what a loop gives: a dict, or what it writes.

Every rank lists the parts that it would write into a checkpoint; each part is then broadcast by its rank, and put in its
place by those that want the whole. So at any time a rank holds one part besides what it keeps.

A state dict, and what a loop writes into the whole weights of `run.gathered()`, are set as a checkpoint's weights are: every rank copies
the parts that it holds of the whole. The optimizer's state, the averages of weights and the number of steps stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.errors import ModelError
from samestep.job_tables import NumericsTable
from samestep.output.text import listed
from samestep.runtime.checkpoints import checkpoint, checkpoint_files, other_state, writer
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint
from samestep.runtime.checkpoints.manifests import check_shapes
from samestep.runtime.prepared_run import PreparedRun
from samestep.runtime.processes.messages import broadcast_value, gather_values
from samestep.runtime.weights.placement import WeightSlice, whole
from samestep.state.fingerprints import digest, fingerprint

_NAMED = 3
"""The most names that a refusal lists."""


class _SentPart(NamedTuple):
    """A part of a weight, or a buffer, that one rank sends to the others; plain data."""

    name: str
    shape: list[int]
    """Shape of the whole."""
    dim: int
    intervals: list[list[int]]
    """Of a weight that the layout cuts, the intervals along `dim` in which the part lies."""
    start: int
    """The first element of the flattened intervals that it holds."""
    numel: int
    dtype: str


def state_dict(run: PreparedRun, *, on_every_rank: bool) -> dict[str, Tensor]:
    """Return weights in master precision and persistent buffers by name, on the host; on other ranks than 0 maybe nothing.

    Collective over the world, see [Note: collective calls].
    """
    parts_here = list(_parts(run))
    listed = gather_values([[*part] for part, _ in parts_here], run.layout.world_size)
    keeps = on_every_rank or run.place.rank == 0
    tensors: dict[str, Tensor] = {}
    for source, parts in enumerate(listed):
        for index, part in enumerate(_SentPart(*part) for part in parts):
            tensor = parts_here[index][1] if source == run.place.rank else None
            flat = _broadcast_part(run, source, part, tensor)
            if keeps:
                _put(tensors, part, flat)
    names = run.assembly.model.state_names
    return {name: tensors[first] for name, first in names.items() if first in tensors}


def stored_state_dict(
    plan: Blueprint, manifest: Mapping[str, Any], folder: Path, numerics: NumericsTable
) -> dict[str, Tensor]:
    """Return the result of `state_dict` for a run with the values of a checkpoint, whose model is not built.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds another model's weights.
    """
    wide = numerics.precision == "float64"
    params = dict(plan.module.named_parameters(remove_duplicate=False))
    shapes = {name: list(param.shape) for name, param in params.items() if name in manifest["shapes"]}
    check_shapes(manifest, shapes, folder)
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        value = checkpoint_files.values(plan, OpenCheckpoint.open(folder, manifest, stack))
        for name, module_tensor in plan.module.state_dict(keep_vars=True).items():
            if isinstance(module_tensor, Tensor):
                first = plan.canonical.get(name, name)
                tensor = tensors[first] if first in tensors else value(name).clone()
                is_cast = tensor.is_floating_point() and (wide or name in params)
                tensors[name] = tensor.to(torch.float64 if wide else torch.float32) if is_cast else tensor
    return tensors


def _parts(run: PreparedRun) -> Iterator[tuple[_SentPart, Tensor]]:
    """Yield the weights' parts and the buffers that this rank sends."""
    elsewhere = writer.weights_held_elsewhere(run)
    frozen = run.assembly.weights.store.frozen
    for piece in (*run.updater.pieces, *frozen):
        if piece.name in elsewhere:
            continue
        lies = run.assembly.weights.placements.slice_of(piece)
        value = piece.master().flatten()
        part = _describe_part(piece.name, lies, piece.start, value)
        yield part, value
    for name, buffer in other_state.kept_buffers(run).items():
        yield _describe_part(name, whole(buffer.shape), 0, buffer), buffer.flatten()


def _describe_part(name: str, lies: WeightSlice, start: int, value: Tensor) -> _SentPart:
    intervals = [list(ends) for ends in lies.intervals]
    return _SentPart(
        name, list(lies.shape), lies.dim, intervals, start, value.numel(), str(value.dtype).removeprefix("torch.")
    )


def _broadcast_part(run: PreparedRun, source: int, part: _SentPart, tensor: Tensor | None) -> Tensor:
    """Return on every rank the elements of a part that the rank `source` holds."""
    device = run.place.device
    flat = torch.empty(part.numel, dtype=getattr(torch, part.dtype), device=device)
    if tensor is not None:
        flat.copy_(tensor)
    if run.layout.world_size > 1 and part.numel:
        dist.broadcast(flat, src=source)
    return flat


def _put(tensors: dict[str, Tensor], part: _SentPart, flat: Tensor) -> None:
    """Copy a part to its place in the whole tensor, on the host."""
    if part.name not in tensors:
        tensors[part.name] = torch.empty(part.shape, dtype=flat.dtype)
    lies = WeightSlice(tuple(part.shape), part.dim, tuple((start, stop) for start, stop in part.intervals))
    runs = lies.runs(part.start, part.start + part.numel)
    tensors[part.name].view(-1)[runs.positions()] = flat.cpu()


def checked_state(state: Any) -> Mapping[str, Any]:
    """Return a state dict.

    Raises:
        ModelError: it is none.
    """
    if isinstance(state, Mapping):
        return state
    raise ModelError(
        "state-dict-form",
        f"run.load_state_dict was given a {type(state).__name__}. Use a dict of tensors by name, such as run.state_dict()",
    )


def copied(values: Any) -> dict[str, Any]:
    """Return a copy of a state dict, whose tensors may be written meanwhile.

    Raises:
        ModelError: it is none.
    """
    state = checked_state(values)
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def load(run: PreparedRun, given: Mapping[str, Any]) -> None:
    """Set the weights and buffers of a prepared run to those of a state dict, which rank 0 or all ranks have.

    Gradients that wait for an update go on waiting, as in torch.

    Collective over the world, see [Note: collective calls].

    Raises:
        ModelError: names are missing or unexpected, or a tensor has another shape; or ranks have different ones.
    """
    state = of_all_ranks(run, given)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    _check(run, state)
    firsts = run.assembly.model.state_names
    values = {firsts[name]: tensor for name, tensor in reversed(tensors.items())}
    checkpoint.set_weights(run, values.get)
    _set_extra_state(run, {name: value for name, value in state.items() if name not in tensors})


def _whole_shapes(run: PreparedRun) -> dict[str, torch.Size]:
    """Return the shape of each whole weight and persistent buffer, by all of its names."""
    shapes = {param.name: torch.Size(param.shape) for param in run.assembly.model.spec.params}
    shapes |= {name: buffer.shape for name, buffer in run.model.named_buffers()}
    return {name: shapes[first] for name, first in run.assembly.model.state_names.items() if first in shapes}


def of_all_ranks(run: PreparedRun, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of rank 0 where the other ranks were given an empty one, else that of this rank.

    Raises:
        ModelError: a rank has other names than rank 0.
    """
    described = [
        (name, [*value.shape], str(value.dtype).removeprefix("torch."))
        if isinstance(value, Tensor)
        else (name, None, "")
        for name, value in state.items()
    ]
    names = gather_values(digest(repr(sorted(name for name, *_ in described))) if state else 0, run.layout.world_size)
    for rank, other in enumerate(names):
        if other not in (0, names[0]):
            raise ModelError(
                "state-dict-form",
                f"run.load_state_dict: rank {rank} has other names than rank 0. Use the same dict on all ranks, or one on rank 0 "
                "and an empty one on the others",
            )
    if all(names) or not names[0]:
        return state
    received: dict[str, Any] = {}
    for name, shape, dtype in broadcast_value(0, described):
        if shape is None:
            received[name] = broadcast_value(0, state.get(name))
            continue
        sent = state.get(name)
        flat = torch.empty(shape, dtype=getattr(torch, dtype), device=run.place.device)
        if isinstance(sent, Tensor):
            flat.copy_(sent)
        if flat.numel():
            dist.broadcast(flat, src=0)
        received[name] = flat.cpu()
    return received


def _check(run: PreparedRun, state: Mapping[str, Any]) -> None:
    """Refuse a state dict of another model.

    Raises:
        ModelError: it is one.
    """
    firsts = run.assembly.model.state_names
    firsts_given = {firsts[name] for name in state if name in firsts}
    missing = [name for name, first in firsts.items() if first not in firsts_given and name == first]
    strange = [name for name, value in state.items() if name not in firsts and isinstance(value, Tensor)]
    other = [
        f"{name} {list(state[name].shape)}, here {list(shape)}"
        for name, shape in _whole_shapes(run).items()
        if name in state and state[name].shape != shape
    ]
    faults = [("lacks", missing), ("also has", strange), ("has another shape of", other)]
    texts = [f"{verb} {listed(names, _NAMED)}" for verb, names in faults if names]
    if texts:
        prefix = strange[0].partition(".")[0] + "." if strange else ""
        is_wrapped = bool(prefix) and all(name.removeprefix(prefix) in firsts for name in strange)
        works = f"Use the names without {prefix!r}" if is_wrapped else "Use the model's own state_dict()"
        raise ModelError(
            "state-dict-form", f"run.load_state_dict: the dict {', and '.join(texts)}. {works}, or run.state_dict()"
        )


def load_into(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Set the weights and buffers of a plain model to those of a state dict, with which a run is to begin.

    Raises:
        ModelError: names are missing or unexpected, or a tensor has another shape.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        faults = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ModelError(
            "state-dict-form", f"run.load_state_dict: {faults}. Use the model's own state_dict()"
        ) from None


def _set_extra_state(run: PreparedRun, values: Mapping[str, Any]) -> None:
    """Give modules what they keep besides tensors."""
    for path, module in run.model.named_modules():
        name = f"{path}._extra_state" if path else "_extra_state"
        if name in values and not other_state.runs_elsewhere(run.program, path):
            module.set_extra_state(values[name])


# -- whole weights in the model --------------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and the saved buffers of a plain model by name, without graphs."""
    return {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


class _Slot(NamedTuple):
    """The place of a weight or a buffer in a module, for the time in which the whole one stands there."""

    name: str
    owner: nn.Module
    held: dict[str, Any]
    """The parameters or the buffers of the module."""
    leaf: str
    part: Tensor
    whole: Tensor

    def put(self, tensor: Tensor) -> None:
        """Let the module have a tensor there."""
        self.held[self.leaf] = tensor
        if isinstance(self.owner, nn.RNNBase):  # has a list of its weights, which an assignment brings up to date
            setattr(self.owner, self.leaf, tensor)


@contextmanager
def gathered(run: PreparedRun) -> Iterator[nn.Module]:
    """Let a run's model have all weights and buffers inside, whole and in master precision, and keep what is written into them.

    Where the body raises, nothing is kept. Gradients that wait for an update go on waiting, as in torch.

    Collective over the world, see [Note: collective calls].

    Raises:
        ModelError: ranks have written different values.
    """
    with run.held.outer():
        state = state_dict(run, on_every_rank=True)
    with run.assembly.model.plain.worn():
        slots = _slots(run, state)
        fingerprints = {slot.name: fingerprint(slot.whole.detach()) for slot in slots}
        for slot in slots:
            slot.put(slot.whole)
        try:
            yield run.model
        finally:
            present = {
                slot.name: slot.held.get(slot.leaf) for slot in slots if slot.held.get(slot.leaf) is not slot.whole
            }
            for slot in slots:
                slot.put(slot.part)
    values = {slot.name: slot.whole.detach() for slot in slots}
    values |= {name: _in_place_of(name, values[name], other) for name, other in present.items()}
    if compare(run, values) != fingerprints:
        checkpoint.set_weights(run, values.get)


def _slots(run: PreparedRun, state: Mapping[str, Tensor]) -> list[_Slot]:
    """Return the places of the weights and the saved buffers, also of those that are another stage's, with the whole ones."""
    firsts, by_name, slots = run.assembly.model.state_names, dict[str, Tensor](), list[_Slot]()
    for path, module in run.model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for leaf, part in tensors.items():
                first = firsts.get(f"{path}.{leaf}" if path else leaf)
                if part is None or first is None or first not in state:
                    continue
                if first not in by_name:
                    value = state[first].to(run.place.device)
                    trains = part.requires_grad and value.is_floating_point()
                    by_name[first] = nn.Parameter(value, trains) if tensors is module._parameters else value
                slots.append(_Slot(first, module, tensors, leaf, part, by_name[first]))
    return slots


def _in_place_of(name: str, tensor: Tensor, other: Tensor | None) -> Tensor:
    """Return the values of a tensor that a loop has put in the place of a whole weight or buffer, as `module.mask = mask` does.

    Raises:
        ModelError: nothing stands there, or a tensor of another shape.
    """
    if other is not None and other.shape == tensor.shape:
        return other.detach().to(tensor)
    what = "nothing" if other is None else f"a tensor {list(other.shape)}"
    raise ModelError(
        "gathered-write",
        f"run.gathered(): {what} has replaced {name} {list(tensor.shape)}. Use values of the same shape, and modules that are "
        "changed (pruned, parametrized) before samestep.parallelize",
    )


def compare(run: PreparedRun, values: Mapping[str, Tensor]) -> dict[str, int]:
    """Refuse whole weights that ranks have written differently; return their fingerprints.

    Raises:
        ModelError: on every rank; it names one.
    """
    world = run.layout.world_size
    digests = {name: fingerprint(value) for name, value in values.items()}
    if len(set(gather_values(digest(repr(digests)), world))) == 1:
        return digests
    for rank, theirs in enumerate(gather_values(digests, world)):
        other = next((name for name, number in theirs.items() if number != digests[name]), None)
        if other is not None:
            raise ModelError(
                "gathered-write",
                f"run.gathered(): ranks have written different values into {other}, rank {rank}. Use a loop that "
                "writes alike on every rank",
            )
    return digests
