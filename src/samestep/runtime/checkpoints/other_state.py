"""The parts of a checkpoint other than trained weights and the optimizer's state of each weight.

    frozen weights that have changed       in the files like trained weights: in coordinates of the whole, for any layout
    buffers                                persistent ones, and others that have changed; each from the stage that runs it
    options and attributes of optimizers   those that have changed, by the names of a group's weights; rates that were set from outside
    the state of lanes                     that of each data rank's samples (`axes/lanes.py`)
    the place in a stream of data          what the stream's `state_dict` returns, from rank 0
    attributes of modules, extra state     those that have changed, and what `get_extra_state` returns
    variables that a model's code names    those that have changed, outside of modules
    what a loss keeps                      buffers, attributes and variables that have changed, from the stage that computes it

A value is kept if it is made of numbers, text, tensors, generators, lists, tuples, sets and dicts of these; the manifest
holds the structure and the files the tensors. What has changed and cannot be kept is named in the manifest: a resume is
refused, unless the job waives it.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.optimizer import class_names, members_of
from samestep.errors import CheckpointError
from samestep.program.program import Program
from samestep.runtime.optimizers.optimizer_source import GivenOptimizer
from samestep.runtime.optimizers.optimizer_step import set_options
from samestep.runtime.prepared_run import PreparedRun
from samestep.runtime.processes.messages import NotPlainError, Packer, gather_values, unpack_plain
from samestep.runtime.weights.pieces import Piece
from samestep.state.fingerprints import attributes_of, digest, fingerprint, optimizer_values, places_of
from samestep.state.named_variables import Variable
from samestep.state.snapshot import OUTSIDE, PLAIN, Slot, modules_of, put_items
from samestep.state.step_code import set_state, states_by_key
from samestep.trees import tree_map_only

_STATE = "state/"

# -- values that change ----------------------------------------------------------------------------


def changed_frozen_weights(run: PreparedRun) -> list[Piece]:
    """Return this rank's parts of the frozen weights that have changed on any rank.

    Collective over the world, see [Note: collective calls].
    """
    first, pieces = run.assembly.model.first_state.frozen, run.assembly.weights.store.frozen
    names_here = [piece.name for piece in pieces if fingerprint(piece.value) != first[piece.name]]
    changed = {name for names in gather_values(names_here, run.layout.world_size) for name in names}
    return [piece for piece in pieces if piece.name in changed]


def kept_buffers(run: PreparedRun) -> dict[str, Tensor]:
    """Return the buffers that this rank writes: those of the layers that it runs, if it is the first rank that does."""
    if not _writes(run):
        return {}
    first, persistent = run.assembly.model.first_state.buffers, set(run.model.state_dict())
    buffers = {}
    for name, buffer in run.model.named_buffers():
        changed = fingerprint(buffer) != first.get(name)
        if _is_mine(run, name, changed) and (name in persistent or changed):
            buffers[name] = buffer
    return buffers


def kept_values(run: PreparedRun) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the values that this rank writes, as plain data and the tensors in it, by name in the files."""
    writer = _Writer(run.place.rank)
    optimizer, first = run.updater.optimizer, run.updater.first_digests
    values = optimizer_values(optimizer) if optimizer else {}
    changed = {key: value for key, value in values.items() if digest(value) != first.get(key)}
    what, outside = class_names(optimizer) if optimizer else "", run.updater.rates.from_outside()
    groups = []
    for index, group in enumerate(optimizer.param_groups if optimizer else ()):
        ids = {id(param) for param in group["params"]}
        options = {key.partition("/")[2]: v for key, v in changed.items() if key.startswith(f"{index}/")}
        if options := options | outside.get(index, {}):
            names = [piece.name for piece in run.updater.pieces if id(piece.value) in ids]
            kept_options = writer.kept(options, f"the options of {what}")
            groups.append({"names": names, "index": index, "options": kept_options})
    others = {key: value for key, value in changed.items() if "/" not in key} | _nested_states(run)
    record = {"rank": run.place.rank, "groups": groups, "optimizer": writer.kept(others, f"attributes of {what}")}
    record["classes"] = sorted(_classes(optimizer))
    if _writes(run):
        attributes = run.assembly.model.first_state.attributes
        extra = {
            path: module
            for path, module in run.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state and _is_mine(run, path, True)
        }
        record["attributes"] = [
            [path, key, packed[key]]
            for (path, key), value in _changed(places_of(run.model), run.assembly.model.first_outside).items()
            if (packed := writer.kept({key: value}, "the model", is_known=True))
        ] + [
            [path, key, packed[key]]
            for path, key, value in attributes_of(run.model)
            if digest(value) != attributes.get((path, key))
            and _is_mine(run, path, True)
            and (packed := writer.kept({key: value}, f"attributes of {path or 'the model'}", path in extra))
        ]
        record["extra"] = [
            [path, packed["extra state"]]
            for path, module in extra.items()
            if (packed := writer.kept({"extra state": module.get_extra_state()}, path or "the model"))
        ]
        record["loss"] = _kept_of_loss(run, writer) if run.program.step.stage == run.layout.pp - 1 else []
    if (state := run.data.stream_state(run.steps_taken)) is not None:
        record["stream"] = writer.kept({"state": state}, "the stream of the data").get("state")
    mesh = run.assembly.parallel.mesh
    if not any(mesh.index(axis) for axis in ("cp", "model")) and (lanes := run.lanes.state()) is not None:
        record["lanes"] = writer.kept({"lanes": lanes}, "the lanes of the batch").get("lanes")
    record["unsaved"] = writer.unsaved
    if writer.unsaved:
        warnings.warn(f"a checkpoint does not hold {'; '.join(writer.unsaved)}: a resume is rejected", stacklevel=3)
    return record, writer.tensors


def _kept_of_loss(run: PreparedRun, writer: _Writer) -> list[list[Any]]:
    """Return the path, the name and the value of what the loss keeps, if it has changed; of libraries' objects, what can be kept."""
    loss = run._own.source.loss
    changed = _changed(places_of(loss, modules_of(loss)), run.assembly.model.first_of_loss)
    return [
        [path, key, packed[key]]
        for (path, key), value in changed.items()
        if (packed := writer.kept({key: value}, "the loss", is_known=not isinstance(value, PLAIN)))
    ]


def _changed(places: Mapping[Slot, Variable], first: Mapping[Slot, int]) -> dict[Slot, Any]:
    """Return the values that are others than when their digests were taken first."""
    return {slot: place.value for slot, place in places.items() if digest(place.value) != first.get(slot)}


def _nested_states(run: PreparedRun) -> dict[str, Any]:
    """Return the states of weights that are lists or dicts, as L-BFGS keeps the steps before, as `state/WEIGHT/KEY`."""
    if run.held.is_apart:
        return {}
    optimizers = run.updater.with_states
    return {
        f"{_STATE}{piece.name}/{key}": value
        for piece in run.updater.pieces
        for key, value in states_by_key(optimizers, piece.value).items()
        if isinstance(value, list | tuple | dict)
    }


def _writes(run: PreparedRun) -> bool:
    """Return whether this rank is the first of its pipeline stage, which writes the values that are equal on all of
    them."""
    mesh = run.assembly.parallel.mesh
    return not any(mesh.index(axis) for axis in ("dp", "cp", "model"))


def _is_mine(run: PreparedRun, name: str, changed: bool) -> bool:
    """Return whether this rank's stage runs the module of a name; for names outside of all layers, whether it is the
    first stage."""
    if runs_elsewhere(run.program, name):
        return False
    step = run.program.step
    return (
        changed
        or step.stage == 0
        or any(_is_within(name, path) for layer in step.model.layers for path in layer.modules)
    )


def runs_elsewhere(program: Program, name: str) -> bool:
    """Return whether a module, or the one around a name, belongs to a layer that another pipeline stage runs."""
    layers = program.step.model.layers
    indices = {index for chunk in program.chunks for index in chunk} or set(range(len(layers)))
    here = {path for index in indices for path in layers[index].called}
    others = {path for index, layer in enumerate(layers) if index not in indices for path in layer.called}
    return any(_is_within(name, path) for path in others - here)


def _is_within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


# -- giving it back --------------------------------------------------------------------------------


def refuse_unsaved(run: PreparedRun, manifest: Mapping[str, Any], folder: object) -> None:
    """Refuse to resume where something that had changed is not in the checkpoint.

    Raises:
        UnprovenError: there is such a thing, and the job does not waive it.
    """
    if unsaved := [text for record in manifest.get("ranks", ()) for text in record["unsaved"]]:
        run.job.run.waived(
            "resume",
            "checkpoint-state",
            f"{folder} does not hold {unsaved[0]}. Use numbers, text, tensors and lists of them",
        )


def check_optimizer(run: PreparedRun, manifest: Mapping[str, Any], folder: object) -> None:
    """Refuse to continue with an optimizer of a class that the run which wrote a checkpoint did not have.

    Raises:
        CheckpointError: it is of another class.
    """
    saved = {name for record in manifest.get("ranks", ()) for name in record.get("classes", ())}
    if saved and (others := sorted(_classes(run.updater.optimizer) - saved)):
        raise CheckpointError(
            "checkpoint-other-job",
            f"{folder} was written with the optimizer {', '.join(sorted(saved))}, and this run has {', '.join(others)}. Use the one that wrote it, "
            "or set the weights alone by run.load_state_dict",
        )


def _classes(optimizer: Optimizer | None) -> set[str]:
    return set() if optimizer is None else {type(member).__name__ for member in members_of(optimizer)}


def stream_state(manifest: Mapping[str, Any], read: Callable[[str], Tensor]) -> Any:
    """Return the state of the stream of the data in a checkpoint; None if it holds none."""
    state = next((record["stream"] for record in manifest.get("ranks", ()) if record.get("stream") is not None), None)
    return None if state is None else unpack_plain(state, read)


def give_back(run: PreparedRun, manifest: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    """Set the options and attributes of the optimizer, attributes of modules and their extra state.

    Raises:
        CheckpointError: an optimizer's values differ between ranks, and the layout is another one.
    """
    records: Sequence[Mapping[str, Any]] = manifest.get("ranks", ())
    if run.updater.optimizer is not None:
        _give_back_options(run, manifest, read)
        _give_back_own(run, manifest, records, read)
    lanes = [unpack_plain(record["lanes"], read) for record in records if record.get("lanes") is not None]
    run.lanes.resume(lanes, run.place.device)
    modules = dict(run.model.named_modules())
    loss = run._own.source.loss
    outside, of_loss = places_of(run.model), places_of(loss, modules_of(loss))
    for record in records:
        for path, key, value in record.get("attributes", ()):
            if path == OUTSIDE:
                _give_back_at(outside.get((path, key)), unpack_plain(value, read))
                continue
            present, stored = vars(modules[path]).get(key), unpack_plain(value, read)
            if isinstance(present, torch.Generator):
                present.set_state(stored)
            else:
                setattr(modules[path], key, _like(present, stored))
        for path, key, value in record.get("loss", ()):
            _give_back_at(of_loss.get((path, key)), unpack_plain(value, read))
        for path, value in record.get("extra", ()):
            modules[path].set_extra_state(unpack_plain(value, read))


def _give_back_at(place: Variable | None, value: Any) -> None:
    """Give a place a value, unless the code has none like it any more; a tensor or a container that stands there, which other code may hold
    too, gets its content."""
    if place is None:
        return
    present = place.value
    if isinstance(present, torch.Generator):
        present.set_state(value)
    elif isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
        present.detach().copy_(value)
    elif isinstance(present, list | dict | set | collections.deque) and type(present) is type(value):
        put_items(present, value)
    else:
        place.put(_like(present, value))


def _give_back_options(run: PreparedRun, manifest: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    of_weight, of_index = _options_in(manifest, read)
    updater = run.assembly.weights.updater
    assert updater.optimizer is not None
    for index, group in enumerate(updater.optimizer.param_groups):
        ids = {id(param) for param in group["params"]}
        names = [piece.name for piece in updater.pieces if id(piece.value) in ids]
        options: dict[str, Any] = next((of_weight[name] for name in names if name in of_weight), {})
        updater.rates.resume(index, options if names else of_index.get(index, {}))
        for key in options:  # an instance may have had them from the start, and the next checkpoint holds them too
            updater.first_digests.pop(f"{index}/{key}", None)


def give_back_to_instances(
    instances: Sequence[GivenOptimizer], manifest: Mapping[str, Any], read: Callable[[str], Tensor]
) -> None:
    """Set the options in the groups of the optimizer instances that a user gave."""
    of_weight, _ = _options_in(manifest, read)
    for optimizer in instances:
        for group, names in zip(optimizer.instance.param_groups, optimizer.names_in_groups, strict=True):
            set_options(group, next((of_weight[name] for name in names if name in of_weight), {}))


def _options_in(manifest: Mapping[str, Any], read: Callable[[str], Tensor]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the options of groups in a checkpoint, by the names of their weights and by their indices."""
    groups = [group for record in manifest.get("ranks", ()) for group in record["groups"]]
    options = [{key: unpack_plain(value, read) for key, value in group["options"].items()} for group in groups]
    both = [*zip(groups, options, strict=True)]
    return {name: stored for group, stored in both for name in group["names"]}, {g.get("index"): o for g, o in both}


def _give_back_own(
    run: PreparedRun, manifest: Mapping[str, Any], records: Sequence[Mapping[str, Any]], read: Callable[[str], Tensor]
) -> None:
    of_ranks = {record["rank"]: record["optimizer"] for record in records if record["optimizer"]}
    decoded = {rank: {key: unpack_plain(v, read) for key, v in record.items()} for rank, record in of_ranks.items()}
    attributes = (
        decoded.get(run.place.rank) if manifest["layout"] == str(run.layout) else next(iter(decoded.values()), {})
    )
    if manifest["layout"] != str(run.layout) and len({digest(values) for values in decoded.values()}) > 1:
        names = ", ".join(next(iter(decoded.values())))
        raise CheckpointError(
            "checkpoint-state",
            f"{type(run.updater.optimizer).__name__} keeps {names}, which differs between the ranks of layout "
            f"{manifest['layout']!r}: that layout resumes",
        )
    for key, value in (attributes or {}).items():
        if key.startswith(_STATE):
            name, _, inner = key.removeprefix(_STATE).partition("/")
            _give_back_state(run, name, inner, value)
            continue
        setattr(run.updater.optimizer, key, _like(getattr(run.updater.optimizer, key, None), value))


def _give_back_state(run: PreparedRun, name: str, key: str, value: Any) -> None:
    piece = next((piece for piece in run.updater.pieces if piece.name == name), None)
    if piece is not None:
        value = tree_map_only(Tensor, lambda leaf: leaf.to(piece.value.device), value)
        set_state(run.updater.with_states, piece.value, key, value)


def _like(present: Any, stored: Any) -> Any:
    """Return a value on the device of the tensor in whose place it is set."""
    return stored.to(present.device) if isinstance(present, Tensor) and isinstance(stored, Tensor) else stored


# -- writing it ------------------------------------------------------------------------------------


class _Writer:
    """The values of one rank, as plain data that names the tensors in it."""

    def __init__(self, rank: int) -> None:
        self._packer = Packer(f"kept/{rank}/")
        self.unsaved: list[str] = []
        """Texts about values that cannot be kept."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors on the host, by name."""
        return {name: tensor.cpu().clone().contiguous() for name, tensor in self._packer.tensors.items()}

    def kept(self, values: Mapping[str, Any], whose: str, is_known: bool = False) -> dict[str, Any]:
        """Return those values that can be kept; note the others, unless it `is_known` that extra state holds them."""
        packed = {}
        for key, value in values.items():
            try:
                packed[key] = self._packer.packed(value)
            except NotPlainError as error:
                if is_known:
                    continue
                self.unsaved.append(f"{key} ({error}), which has changed, of {whose}")
        return packed
