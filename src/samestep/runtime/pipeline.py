"""One pipeline stage of any decoder, without a port (twin of `strategies/pipeline.py`).

Every stage runs the model's own forward, in which the layers of other stages are stood in for: a block hands on what it
is given, an embedding gives nothing of the right shape. So masks, positions and rotary angles are made on each stage by
the model's own code. At the first block of its run a stage puts the received activation in the place of that nothing,
behind whatever the model does to embeddings; at the last it takes the result out.

```
model.forward:   embed     block 0   block 1   block 2   block 3   norm, head
stage 1 of 2     (shape)   (pass)    (pass)    recv ►    ► out     own
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.model import ModelSpec, is_below
from samestep.program import Program
from samestep.runtime.mesh import Mesh
from samestep.runtime.precision import DTYPES
from samestep.runtime.record import owned

_FIRST_TAG = 2**29


class Stage:
    """The runs of layers of this rank, and what passes between them and other ranks."""

    def __init__(self, model: nn.Module, program: Program, mesh: Mesh) -> None:
        self._program, self._mesh = program, mesh
        self._model = model
        layers = program.step.model.layers
        self._slots = [(index, path) for index, layer in enumerate(layers) for path in layer.modules if path]
        self._stand_ins = {path: _StandIn(model.get_submodule(path), layers[i].is_block) for i, path in self._slots}
        self._real = {path: model.get_submodule(path) for _, path in self._slots}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def is_last(self, chunk: int) -> bool:
        """Whether a run ends the model, and so has the loss."""
        return self._program.chunks[chunk].stop == len(self._program.step.model.layers)

    def forward(self, microbatch: int, chunk: int, call: Callable[[nn.Module], Any]) -> Any:
        """Run the layers of one run on a micro-batch; return the model's outputs where the run ends the model."""
        layers = self._program.chunks[chunk]
        taken: list[Tensor] = []
        handles = []
        if layers.start > 0:
            first = self._real[self._first_block(layers)]
            # In front of all other hooks: what cuts, casts or gathers for the block sees what it is really given.
            hook = self._receive(microbatch, chunk)
            handles.append(first.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        if not self.is_last(chunk):
            last = self._real[self._program.step.model.layers[layers.stop - 1].modules[-1]]
            handles.append(last.register_forward_hook(lambda _, args, output: taken.append(_hidden(output))))
        try:
            with self._standing_in(layers):
                outputs = call(self._model)
        finally:
            for handle in handles:
                handle.remove()
        if self.is_last(chunk):
            return outputs
        self._outputs[microbatch, chunk] = taken[0]
        self._send(taken[0].detach(), layers.stop, 1, microbatch)
        return None

    def backward(self, microbatch: int, chunk: int, loss: Tensor | None) -> None:
        """Run the backward of one run: from the loss, or from the gradient that the next run sends."""
        layers = self._program.chunks[chunk]
        if loss is not None:
            loss.backward()
        else:
            output = self._outputs.pop((microbatch, chunk))
            gradient = torch.empty_like(output)
            self._wait_for(gradient, layers.stop, 1, microbatch, backward=True)
            output.backward(gradient)
        given = self._inputs.pop((microbatch, chunk), None)
        if given is not None:
            assert given.grad is not None, "no gradient reached the activation that was received"
            self._send(given.grad, layers.start, -1, microbatch)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def finish_forward(self) -> None:
        """End a forward that no backward follows."""
        self.finish()
        self._inputs.clear()
        self._outputs.clear()

    def from_last(self, outputs: Any) -> Any:
        """Hand the outputs of the last stage to all stages."""
        held = [outputs]
        ranks = self._mesh.ranks["pp"]
        dist.broadcast_object_list(held, src=ranks[-1], group=self._mesh.groups["pp"])
        return held[0]

    def _first_block(self, layers: range) -> str:
        return self._program.step.model.layers[layers.start].modules[0]

    def _receive(self, microbatch: int, chunk: int) -> Callable[..., Any]:
        """Make the hook that puts the received activation in the place of what a stand-in gave."""
        border = self._program.chunks[chunk].start

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = args[0] if args else kwargs["hidden_states"]
            dtype = DTYPES[self._program.step.compute_dtype]
            received = torch.empty(self._passed_shape(place.shape), dtype=dtype, device=place.device)
            self._wait_for(received, border, -1, microbatch, backward=False)
            received.requires_grad_(torch.is_grad_enabled())
            if torch.is_grad_enabled():
                self._inputs[microbatch, chunk] = received
            return ((received, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": received})

        return hook

    def _passed_shape(self, whole: torch.Size) -> tuple[int, ...]:
        """Shape of what blocks hand on, given that of one device."""
        layout = self._program.step.layout
        return (whole[0], whole[1] // layout.tp, *whole[2:]) if layout.sequence_parallel else tuple(whole)

    def _peer(self, step: int) -> int:
        """Global rank of the next or previous rank on the axis, around its end."""
        ranks = self._mesh.ranks["pp"]
        return ranks[(ranks.index(self._mesh.rank) + step) % len(ranks)]

    def _send(self, tensor: Tensor, border: int, step: int, microbatch: int) -> None:
        kept = tensor.contiguous()
        tag = self._tag(border, microbatch, step < 0)
        with owned(self._program.step.model.layers[border - 1].name):
            work = dist.isend(kept, self._peer(step), group=self._mesh.groups["pp"], tag=tag)
        assert work is not None
        self._sent.append((work, kept))

    def _wait_for(self, into: Tensor, border: int, step: int, microbatch: int, *, backward: bool) -> None:
        tag = self._tag(border, microbatch, backward)
        with owned(self._program.step.model.layers[border - 1].name):
            work = dist.irecv(into, self._peer(step), group=self._mesh.groups["pp"], tag=tag)
        assert work is not None
        work.wait()

    def _tag(self, border: int, microbatch: int, backward: bool) -> int:
        # gloo counts its collectives by the same tags, from 0: kept apart, or a send would be taken for one of them.
        return _FIRST_TAG + (microbatch * len(self._program.step.model.layers) + border) * 2 + backward

    @contextmanager
    def _standing_in(self, layers: range) -> Iterator[None]:
        """Let stand-ins take the places of all layers but those of one run."""
        for index, path in self._slots:
            _put(self._model, path, self._real[path] if index in layers else self._stand_ins[path])
        try:
            yield
        finally:
            for path, real in self._real.items():
                _put(self._model, path, real)


class _StandIn(nn.Module):
    """Takes the place of a layer that another stage runs. What the model's code asks of it, it asks of the layer."""

    def __init__(self, real: nn.Module, is_block: bool) -> None:
        super().__init__()
        object.__setattr__(self, "_real", real)
        self._is_block = is_block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_real"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand on what is given; an embedding gives zeros that take no memory."""
        real = object.__getattribute__(self, "_real")
        given = args[0] if args else next(iter(kwargs.values()))
        if not any(True for _ in real.parameters()):
            return real(*args, **kwargs)  # rotary angles and the like, which every stage makes for itself
        if isinstance(real, nn.Embedding):
            dtype = next(real.parameters()).dtype
            return torch.zeros((), dtype=dtype, device=given.device).expand(*given.shape, real.embedding_dim)
        return given


def check(model: nn.Module, program: Program) -> None:
    """Refuse a model that is not embeddings, then blocks, then a head.

    Raises:
        LayoutError: names the module that cannot be stood in for.
    """
    layers = program.step.model.layers
    first = next(index for index, layer in enumerate(layers) if layer.is_block)
    for layer in layers[:first]:
        for path in layer.modules:
            module = model.get_submodule(path)
            if any(True for _ in module.parameters()) and not isinstance(module, nn.Embedding):
                raise LayoutError(
                    f"{path} before the blocks is a {type(module).__name__}, not an Embedding: pp=1 works"
                )
    _check_masks(model, program.step.model)


def _check_masks(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse a module with dropout that several layers call: a stage cannot know how often the others did."""
    drawing = {mask.owner for mask in spec.masks}
    layers_of: dict[nn.Module, set[int]] = {}
    names: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, path)
        layers = {index for index, layer in enumerate(spec.layers) for root in layer.modules if is_below(path, root)}
        layers_of.setdefault(module, set()).update(layers)
    for module, layers in layers_of.items():
        if len(layers) > 1 and names[module] in drawing:
            raise LayoutError(
                f"{names[module]} draws the dropout masks of several layers: pp=1 works, and so does a module for each"
            )


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
