"""Parts of blocks that act on each token by itself, in chunks of tokens (twin of `strategies/chunked_mlp.py`, which has the mathematics).

The forward of such a module is replaced by one node of autograd, which keeps the module's input:

```
forward    for each chunk     module(chunk), whose result is written into the output
backward   for each chunk     module(chunk) again, its gradients; those of weights are added up in master precision
```
A part whose forward leaves something behind, or writes into its input, would do so chunk by chunk: it is refused by name. The repeated
forward of a chunk runs in the contexts in which checkpoints repeat theirs (float32 islands, slices of the sequence). A module that is
called otherwise than in the trace runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samestep.building.named_tensors import set_attributes
from samestep.building.torch_seams import disable_current_modes, is_transformed
from samestep.errors import LayoutError, ModelError
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES
from samestep.state.writes import version_of
from samestep.strategies.chunked_mlp import chunked_owners
from samestep.tracing.checkpointed import ContextFn

_DIMS, _TOKENS = 3, 1
num_chunks = 0
"""Chunks computed by forwards of this process, which tests count."""


def apply(model: nn.Module, program: Program, contexts: ContextFn) -> None:
    """Let the parts of blocks that this rank has be computed in chunks, where the layout says so.

    Raises:
        LayoutError: a module within such a part is gathered by itself.
    """
    chunk, sums = program.step.layout.mlp_chunk, DTYPES[program.step.master_dtype]
    if chunk is None:
        return
    gathers = program.step.layout.gathers_weights
    units = [path for unit in program.units for path in unit.modules] if gathers else []
    for path in sorted(chunked_owners(program.step.model)):
        within = next((unit for unit in units if unit != path and is_below(unit, path)), None)
        if within is not None:
            raise LayoutError(
                "mlp-chunk-unsupported",
                f"mlp_chunk={chunk} takes the weights of {path} once for all chunks, and {within} in it is gathered by itself. Use "
                "zero=1, or a layout without mlp_chunk",
            )
        module = model.get_submodule(path)
        module.forward = _Part(path, module, chunk, sums, contexts).call


class _Part:
    """One module that is computed in chunks."""

    def __init__(self, path: str, module: nn.Module, tokens: int, sums: torch.dtype, contexts: ContextFn) -> None:
        self.module, self.forward, self.contexts = module, module.forward, contexts
        self._path, self._tokens, self.sums = path, tokens, sums
        self._is_tried = False
        """Whether a call has shown that the module leaves nothing behind."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, in chunks where there is more than one."""
        arguments = (*args, *kwargs.values())
        is_usual = len(arguments) == 1 and isinstance(arguments[0], Tensor) and arguments[0].dim() == _DIMS
        if not is_usual or self._size(arguments[0]) >= arguments[0].shape[_TOKENS] or is_transformed():
            return self.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.computed(arguments[0])
        return _InChunks.apply(arguments[0], self, *self.weights())

    def weights(self) -> list[nn.Parameter]:
        """Return the weights that take a gradient, as the module has them now."""
        return [param for param in self.module.parameters() if param.requires_grad]

    def computed(self, x: Tensor) -> Tensor:
        """Return the module's output, chunk by chunk.

        Raises:
            ModelError: the module leaves something behind, or writes into its input.
        """
        global num_chunks
        output: Tensor | None = None
        tensors_before = None if self._is_tried else dict(self._held())
        for place in self.places(x):
            num_chunks += 1
            rows = x[place].contiguous()  # which code may view otherwise
            version = version_of(rows)
            part = self.forward(rows)
            if version_of(rows) != version:
                raise ModelError(
                    "mlp-chunk-unsupported",
                    f"{self._path} writes into its own input, and mlp_chunk gives it a part of it. Use a layout without mlp_chunk, "
                    "or a forward that writes nowhere (x = x.relu() for x.relu_())",
                )
            output = part.new_empty(*x.shape[:-1], part.shape[-1]) if output is None else output
            output[place] = part
        if tensors_before is not None:
            self._refuse_what_stays(tensors_before)
        assert output is not None
        return output

    def _held(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each attribute and buffer of the module and of those in it, with marks that a write changes."""
        for path, module in self.module.named_modules():
            for name, value in (*set_attributes(module).items(), *module._buffers.items()):
                version = version_of(value) if isinstance(value, Tensor) else 0
                yield f"{self._path}.{path}.{name}".replace("..", "."), (id(value), version)

    def _refuse_what_stays(self, tensors_before: Mapping[str, tuple[int, int]]) -> None:
        """Refuse a module whose forward has written an attribute or a buffer."""
        written = [name for name, marks in self._held() if tensors_before.get(name) != marks]
        if written:
            raise ModelError(
                "mlp-chunk-unsupported",
                f"the forward of {self._path} writes {written[0]}, and mlp_chunk runs it once a chunk of tokens. Use a layout without "
                "mlp_chunk, or a forward that keeps nothing",
            )
        self._is_tried = True

    def places(self, x: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield the place of each chunk in a tensor [samples, tokens, features]."""
        size = self._size(x)
        for start in range(0, x.shape[_TOKENS], size):
            yield slice(None), slice(start, start + size)

    def _size(self, x: Tensor) -> int:
        """Return the tokens of each sample in a chunk."""
        return max(1, self._tokens // max(1, x.shape[0]))


class _InChunks(torch.autograd.Function):
    """A module's forward in chunks, whose backward computes each chunk again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: _Part, *weights: Tensor) -> Tensor:
        first, ctx.repeated = part.contexts()
        ctx.part = part
        ctx.save_for_backward(x)
        with first, disable_current_modes():  # selective recompute would keep the products of all chunks
            return part.computed(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), part = ctx.saved_tensors, ctx.part
        weights = part.weights()
        of_input = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(weights)
        for place in part.places(x):
            with torch.enable_grad(), ctx.repeated:
                rows = x[place].detach().contiguous().requires_grad_(of_input is not None)
                output = part.forward(rows)
            wanted = [*([rows] if of_input is not None else []), *weights]
            gradients = list(torch.autograd.grad(output, wanted, gradient[place].contiguous(), allow_unused=True))
            del output
            if of_input is not None:
                of_input[place] = gradients.pop(0)
            sums = [_added(total, more, part.sums) for total, more in zip(sums, gradients, strict=True)]
        of_weights = (t if t is None else t.to(weight.dtype) for t, weight in zip(sums, weights, strict=True))
        return of_input, None, *of_weights


def _added(total: Tensor | None, more: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of the gradients of a weight, in the dtype of sums."""
    if total is None or more is None:
        return total if more is None else more.to(dtype, copy=True)
    return total.add_(more)
