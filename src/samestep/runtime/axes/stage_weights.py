"""Weights that the model's own code reads, in the forward of one chunk of a pipeline.

Such a weight is a value of the recorded flow (`tracing/flow.py`), which every stage that reads it holds. While a forward
runs, the modules hold in place of these weights:

    read in this chunk     the weight itself; under zero=2|3 a copy, because the gathered weight is freed too soon
    read in others alone   a tensor that nothing reads
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.program.program import Program
from samestep.runtime.axes.stage_flow import StageForward, placeholder
from samestep.tracing.flow import Flow
from samestep.tracing.traced_model import TracedModel

_Slots = list[tuple[nn.Module, str]]
"""The modules that hold a weight, each with its name in it."""


class ReadWeights:
    """Puts what a chunk reads in place of the weights that the model's own code reads."""

    def __init__(self, traced: TracedModel, program: Program, device: torch.device) -> None:
        self._model, self._device = traced.module, device
        self._slots: dict[str, _Slots] = {}
        for param in traced.spec.params:
            names = [name.rpartition(".") for name in (param.name, *param.aliases)]
            self._slots[param.name] = [(traced.module.get_submodule(path), leaf) for path, _, leaf in names]
        self._copied = {name for unit in program.units if unit.modules == ("",) for name in unit.params}

    @contextmanager
    def placed(self, flow: Flow, mode: StageForward) -> Iterator[None]:
        """Put the weights in place while a forward of the model runs inside."""
        before: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        values = dict(flow.weights)

        def enter(*_: Any) -> None:
            # After the hooks of FSDP2, which gather the weights.
            for name in {**values, **dict.fromkeys(self._copied)}:
                value = values.get(name)
                stands = self._stands(name, flow, mode, is_value=value is not None)
                for module, leaf in self._slots[name]:
                    before.append((module, leaf, module._parameters[leaf]))
                    module._parameters[leaf] = stands  # type: ignore[assignment]
                if value is not None:
                    mode.holds(stands, value)

        def leave(*_: Any) -> None:
            while before:
                module, leaf, param = before.pop()
                module._parameters[leaf] = param

        handles = (
            self._model.register_forward_pre_hook(enter),
            self._model.register_forward_hook(leave, prepend=True, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _stands(self, name: str, flow: Flow, mode: StageForward, *, is_value: bool) -> Tensor:
        """Return what the modules hold in place of a weight."""
        module, leaf = self._slots[name][0]
        weight = module._parameters[leaf]
        assert weight is not None
        if is_value and not mode.reads(name):
            found = flow.values[dict(flow.weights)[name]]
            return nn.Parameter(placeholder(found.shape, found.dtype, self._device), requires_grad=False)
        return weight.clone() if name in self._copied else weight
