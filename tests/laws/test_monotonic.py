"""Laws of predictions that physics gives without a formula: siblings of one step on presets and machines keep their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep import job_files as jobs
from samestep.errors import InputError
from samestep.hardware import Hardware, Link, resolve_hardware
from samestep.wings.plan.simulation.simulate import Prediction

_PRESETS = (
    "llama3-8b",
    "gpt2",
    "gpt3-13b",
    "qwen2.5-0.5b",
    "gemma2-9b",
    "olmoe-1b-7b",
    "deepseek-v2-lite",
    "llama2-70b",
)
_MACHINES = ("h100x8", "a100-80x8", "v100x8", "rtx4090x8", "b200x8", "mi300x8", "gb200-nvl72", "l40sx8", "t4x8")
_EXAMPLES = settings(max_examples=5, deadline=None)
_ROUNDING = 1.0001


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """A step of which one word is changed at a time."""

    preset: str
    machine: str
    words: str
    precision: str
    attention: str
    samples: int

    def predicted(
        self, *, more: str = "", samples: int = 1, hardware: Hardware | None = None, length: int = 1024
    ) -> Prediction | None:
        """Return the prediction with so many times the samples; None where a word of it is refused."""
        given_settings = [
            f"model.source=preset:{self.preset}",
            f"train.global_batch={self.samples * samples}",
            f"numerics.precision={self.precision}",
            f"run.attention={self.attention}",
            f"data.sequence_length={length}",
        ]
        try:
            return samestep.simulate(
                jobs.default(given_settings), f"{self.words} {more}", hardware or resolve_hardware(self.machine)
            )
        except InputError:
            return None


@st.composite
def _siblings(draw: Callable[..., Any]) -> Sibling:
    """Draw a layout in which all words divide what they cut, with several micro-batches on each data rank."""
    tp, pp, cp, dp, times = (
        draw(st.sampled_from(some)) for some in ((1, 1, 2, 4), (1, 1, 2), (1, 1, 2), (1, 2, 8), (1, 4))
    )
    words = f"dp={dp} tp={tp} pp={pp} cp={cp} microbatch=1"
    if tp > 1 and draw(st.booleans()):
        words += " sequence_parallel"
    if pp > 1:
        words += draw(st.sampled_from(["", " schedule=gpipe", " schedule=zero-bubble"]))
    return Sibling(
        preset=draw(st.sampled_from(_PRESETS)),
        machine=draw(st.sampled_from(_MACHINES)),
        words=words,
        precision=draw(st.sampled_from(["fp16", "float32"])),
        attention=draw(st.sampled_from(["auto", "math", "cudnn", "efficient"])),
        samples=dp * pp * times,
    )


def _faster(link: Link) -> Link:
    whole = link.all_reduce_bytes_per_s
    return replace(link, bytes_per_s=2 * link.bytes_per_s, all_reduce_bytes_per_s=whole and 2 * whole)


@_EXAMPLES
@given(_siblings(), st.sampled_from([0, 3]))
def test_a_better_machine_is_never_slower(one: Sibling, zero: int) -> None:
    """Links of twice the bytes, memory of twice the rate and units of twice the FLOP/s are no slower each."""
    machine = resolve_hardware(one.machine)
    if (plain := one.predicted(more=f"zero={zero}")) is None:
        return
    better = (
        replace(machine, name="links", intra=_faster(machine.intra), inter=_faster(machine.inter)),
        replace(machine, name="memory", memory_bytes_per_s=2 * machine.memory_bytes_per_s),
        replace(machine, name="units", flops_per_s={dtype: 2 * rate for dtype, rate in machine.flops_per_s.items()}),
    )
    for other in better:
        found = one.predicted(more=f"zero={zero}", hardware=other)
        assert found is not None
        # orders of a list change where ops do, by less than one op
        assert found.step_s <= 1.01 * plain.step_s, other.name


@_EXAMPLES
@given(_siblings())
def test_recompute_trades_time_for_memory(one: Sibling) -> None:
    """A repeated forward takes time and frees memory, and no less of either the more is repeated."""
    least, *others = [one.predicted(more=f"recompute={word}") for word in ("none", "selective", "full")]
    for more in others:
        if least is not None and more is not None:
            assert least.step_s <= _ROUNDING * more.step_s
            assert (more.allocated_bytes or 0) <= _ROUNDING * (least.allocated_bytes or 0)


@_EXAMPLES
@given(_siblings())
def test_more_work_takes_longer_and_more_memory(one: Sibling) -> None:
    """Sequences of twice the tokens take more time and memory; twice the samples, in micro-batches as large, no more time for each."""
    plain, longer, more = one.predicted(), one.predicted(length=2048), one.predicted(samples=2)
    if plain is None:
        return
    if longer is not None:
        assert longer.step_s > plain.step_s
        assert (longer.allocated_bytes or 0) >= (plain.allocated_bytes or 0)
    assert more is not None
    assert plain.step_s <= _ROUNDING * more.step_s <= 2 * _ROUNDING**2 * plain.step_s


@_EXAMPLES
@given(_siblings())
def test_no_zero_stage_holds_more_states(one: Sibling) -> None:
    """Each stage of ZeRO holds at most the states of the one before, but for experts, which FSDP2 cuts by rows."""
    found = [one.predicted(more=f"zero={stage}") for stage in range(4)]
    held = [max(use.optimizer for use in row.memory) for row in found if row is not None]
    if one.preset not in ("olmoe-1b-7b", "deepseek-v2-lite"):  # but for the padding of a weight's last rows
        assert all(later <= 1.001 * earlier for earlier, later in itertools.pairwise(held))
    for row in found:
        if row is not None and row.reserved_bytes is not None:
            assert row.reserved_bytes >= (row.allocated_bytes or 0)
            assert row.mfu is None or 0 < row.mfu < 1


@pytest.mark.parametrize("machine", _MACHINES)
def test_a_large_step_takes_what_first_principles_say(machine: str) -> None:
    """6 N D FLOPs at 25 to 80 % of the peak: no machine is off by an order of magnitude on a model that fills it."""
    job = jobs.default(["model.source=preset:llama2-7b", "train.global_batch=8", "numerics.precision=fp16"])
    hardware = resolve_hardware(machine)
    found = samestep.simulate(job, "dp=1 microbatch=1", hardware)
    bound_s = 6 * 6.74e9 * 8 * 4096 / hardware.flops_per_s["float16"]
    assert 1.2 * bound_s < found.step_s < 5 * bound_s
