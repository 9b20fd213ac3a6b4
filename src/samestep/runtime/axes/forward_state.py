"""State that a forward keeps, in a layout: put back so that it is equal to one device, or refused by name.

One device runs the forward once a step, on all samples, and every module in it once. What a forward keeps (buffers,
weights, attributes, counters; `independence/kept_state.py` lists them) is the same in a layout that does so too. It is not where

    the batch is split        over ranks or micro-batches: each part would keep something else
    the forward is repeated   for each micro-batch, by recompute, or by the chunks of a pipeline: it is kept several times
    a weight is a copy        gathered for the forward (zero=2|3), or cut (tp): what is written into it is lost

With u the state and w the weights, a forward may compute u' = f(u, w) from no samples: the vectors of a spectral norm by power iteration
(Miyato et al. 2018), a number of calls by which something is annealed. Several micro-batches with the weights of one step compute the same
u' if each of them starts from the same u, so u is put back in front of each forward but the first, and u' stays behind the last one
(`RepeatedState`). Torch's batch norm is not concerned: its running statistics have a rule of their own (`strategies/batch_norm.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from samestep.job_tables import RunTable
from samestep.layout import Layout, option_without
from samestep.models.spec import ModelSpec, StateSpec, is_below
from samestep.program.program import Program
from samestep.runtime.axes.step_part import PartOfStep, ShapesOf
from samestep.runtime.step_observer import StepBatch
from samestep.trees import noted

_ABSENT = object()


class RepeatedState(PartOfStep):
    """The buffers and attributes of this rank's modules that each micro-batch of a step computes alike.

    Tensors and containers are put back in place, whoever else holds them.
    """

    def __init__(self, slots: Sequence[tuple[nn.Module, str]]) -> None:
        self._slots, self._is_first = slots, True
        self._noted: list[tuple[dict[str, Any], str, Callable[[], Any]]] = []

    @classmethod
    def parts_of(cls, states: Sequence[StateSpec], model: nn.Module, program: Program) -> list[PartOfStep]:
        """Return it in a list, or nothing where a step has one micro-batch or the forward keeps no such state."""
        if program.step.num_microbatches < 2:
            return []
        modules = dict(model.named_modules())
        slots = [(modules[state.owner], state.name) for state in states if state.is_restorable]
        return [cls(slots)] if slots else []

    def begin_step(self, batch: StepBatch, shapes_of: ShapesOf) -> None:
        """Note the values at the beginning."""
        self._noted, self._is_first = [], True
        for module, name in self._slots:
            slots: dict[str, Any] = module._buffers if name in module._buffers else vars(module)
            self._noted.append((slots, name, noted(slots.get(name, _ABSENT))))

    def begin_forward(self) -> None:
        """Put them back, but for the first micro-batch."""
        if not self._is_first:
            self._put_back()
        self._is_first = False

    @torch.no_grad()
    def _put_back(self) -> None:
        for slots, name, put_back in self._noted:
            value = put_back()
            if value is _ABSENT:
                slots.pop(name, None)
            else:
                slots[name] = value


def check(states: tuple[StateSpec, ...], program: Program, settings: RunTable) -> list[str]:
    """Refuse state that differs between the layout and one device; return the reasons that are waived.

    Raises:
        UnprovenError: such state is not waived.
    """
    step = program.step
    reasons = (_reason(state, step.model, step.layout, step.num_microbatches, len(program.chunks)) for state in states)
    return [settings.waived("state", "forward-state", reason) for reason in reasons if reason]


def _reason(state: StateSpec, model: ModelSpec, layout: Layout, num_microbatches: int, num_chunks: int) -> str:
    """Return why the layout would keep other state, and what works; nothing if it would not."""
    no_recompute = ", with recompute=none" if layout.recompute != "none" and _is_in_block(state, model) else ""
    works = f"the whole batch in one forward (dp=1 without microbatch){no_recompute}"
    split = splits(layout, num_microbatches)
    if state.kind == "counts":
        what = (
            f"{state.owner or 'the model itself'}: scale_grad_by_freq divides gradients by the tokens of a micro-batch"
        )
        return f"{what}, and {split} splits the batch. Use a model without it, or {works}" if split else ""
    what = f"the forward keeps {state.full_name} from one micro-batch to the next"
    if state.of_samples and split:
        return f"{what}, computed from its samples, and {split} splits the batch. Use {works}, or a forward that keeps nothing"
    if state.kind == "weight":
        lost = f"zero={layout.zero}" if layout.gathers_weights else ""
        lost = lost or (f"tp={layout.tp}" if layout.tp > 1 else "")
        if lost:
            return explain_lost_write(state.full_name, lost)
    if not (state.is_read or state.of_samples):
        return ""
    repeats = _repeats(state, model, layout, num_microbatches, num_chunks)
    else_works = _WRITES_NONE if state.kind == "weight" else "a forward that keeps nothing"
    return f"{what}, and {repeats} runs it several times per step. Use {works}, or {else_works}" if repeats else ""


_WRITES_NONE = (
    "a forward that writes none: it computes with weight * mask, for example, or the weight has a parametrization "
    "(torch.nn.utils.parametrize), or a loop writes it in run.model after each step"
)


def explain_lost_write(name: str, word: str) -> str:
    """Return why a weight that a forward writes is refused under a word of the layout, such as `zero=3`."""
    return (
        f"the forward writes into the weight {name}, and under {word} into a copy or a part of it. Use "
        f"{option_without(word)}, or {_WRITES_NONE}"
    )


def splits(layout: Layout, num_microbatches: int) -> str:
    """Return the word of the layout by which a forward sees a part of the batch; nothing if it sees all."""
    words = {"dp": layout.dp, "cp": layout.cp}
    word = next((f"{name}={degree}" for name, degree in words.items() if degree > 1), "")
    word = word or ("sequence_parallel" if layout.sequence_parallel else "")
    return word or (f"microbatch={layout.microbatch}" if num_microbatches > 1 else "")


def _repeats(state: StateSpec, model: ModelSpec, layout: Layout, num_microbatches: int, num_chunks: int) -> str:
    """Return the word of the layout by which a module's forward runs several times per step; nothing if once."""
    if num_microbatches > 1 and (num_chunks > 1 or not state.is_restorable):  # else `RepeatedState`
        return f"microbatch={layout.microbatch}"
    if state.kind == "variable":  # whichever module's code changes it
        return f"recompute={layout.recompute}" if layout.recompute != "none" else f"pp={layout.pp}" * (layout.pp > 1)
    if layout.recompute != "none" and _is_in_block(state, model):
        return f"recompute={layout.recompute}"
    if layout.mlp_chunk is not None and _is_in_block(state, model):
        return f"mlp_chunk={layout.mlp_chunk}"
    if layout.pp > 1 and any(path == state.owner for layer in model.layers for path, _ in layer.entered):
        return f"pp={layout.pp}"  # several stages would keep it
    in_layer = any(is_below(state.owner, path) for layer in model.layers for path in layer.modules if path)
    if layout.pp > 1 and not in_layer and (num_chunks > 1 or state.of_samples):
        return f"pp={layout.pp}"
    return ""


def _is_in_block(state: StateSpec, model: ModelSpec) -> bool:
    return any(is_below(state.owner, path) for layer in model.layers if layer.is_block for path in layer.modules)
