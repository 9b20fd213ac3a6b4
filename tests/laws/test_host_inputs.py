"""Laws of inputs on the host: which leave, in which order they leave and come back, what the device holds, and what is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.enumeration import candidates
from samestep.hardware import Hardware
from samestep.memory.memory_use import during_step
from samestep.program.ops import Op, OpKind, is_backward, is_forward
from samestep.program.program import Program
from samestep.strategies import programs_of
from samestep.wings.plan.simulation.clock import play
from tests.laws.models import MODELS, blocks, case, machine

SIZES = {
    "saved_elements": 1000,
    "saved_selective_elements": 300,
    "input_elements": 10,
    "output_elements": 10,
    "forward_flops": 10**9,
}
BYTES = 4 * 10


def copies(program: Program, kind: OpKind) -> list[list[Op]]:
    """Return the copies of each body that has any."""
    found = ([op for op in ops if op.kind is kind] for ops in program.bodies.values())
    return [ops for ops in found if ops]


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        ("dp=2 microbatch=1", [{5}]),
        ("dp=2 zero=3 microbatch=1", [{5}]),
        ("pp=2 microbatch=1", [{2}, {3, 5}]),
        ("pp=2 microbatch=1 schedule=zero-bubble", [{2}, {3, 5}]),
        ("pp=3 microbatch=1 schedule=gpipe", [{1}, {2, 3}, {4, 5}]),
    ],
)
def test_all_inputs_leave_but_received_ones_and_the_last_and_come_back_in_the_opposite_order(
    words: str, stay: list[set[int]]
) -> None:
    made = case(blocks(6, **SIZES), f"{words} recompute=offload")
    of_each = 6 // len(made.programs)
    for stage, program in enumerate(made.programs):
        moved = [index for index in range(stage * of_each, (stage + 1) * of_each) if index not in stay[stage]]
        for key, ops in program.bodies.items():
            out, back = ([op.layer for op in ops if op.kind is kind] for kind in (OpKind.OFFLOAD, OpKind.FETCH))
            has_backward = any(op.kind is OpKind.RECOMPUTE for op in ops)
            assert out == (moved if is_forward(key) else [])
            assert back == (moved[::-1] if is_backward(key) and has_backward else [])
            assert all(op.size_bytes == BYTES for op in ops if op.kind in (OpKind.OFFLOAD, OpKind.FETCH))


def test_a_copy_waits_for_what_makes_its_tensor_and_what_needs_its_memory_waits_for_it() -> None:
    program = case(blocks(4, **SIZES), "dp=2 recompute=offload").program
    (forward,) = (ops for key, ops in program.bodies.items() if is_forward(key))
    (backward,) = (ops for key, ops in program.bodies.items() if is_backward(key))
    after = {op.name: op.after for op in (*forward, *backward)}
    assert after["offload:layers.1"] == ("forward:layers.0",)
    assert after["forward:layers.2"] == ("offload:layers.1",)
    assert after["fetch:layers.1"] == ("backward:layers.3",), "while layers.2 repeats its forward"
    assert after["recompute:layers.1"] == ("fetch:layers.1",)
    order = [op.name for op in backward]
    assert order.index("fetch:layers.1") < order.index("recompute:layers.2") < order.index("backward:layers.2")


def test_the_device_holds_one_block_and_two_inputs_whatever_the_number_of_blocks() -> None:
    for count in (4, 8, 16):
        held = during_step(case(blocks(count, 1, 1, **SIZES), "dp=2 recompute=offload", global_batch=2).program)
        assert (
            held.activations == 4 * 1000 + BYTES
        )  # what a block saves, its input included, and that of the block before
        assert held.host == (count - 1) * BYTES
        full = during_step(case(blocks(count, 1, 1, **SIZES), "dp=2 recompute=full", global_batch=2).program)
        assert full.activations == 4 * 1000 + (count - 1) * BYTES
        assert full.host == 0


@pytest.mark.parametrize("words", ["dp=2 microbatch=2", "pp=2 microbatch=2", "pp=2 microbatch=2 schedule=zero-bubble"])
def test_copies_that_are_shorter_than_compute_cost_nothing(words: str) -> None:
    def seconds(recompute: str, hardware: Hardware) -> float:
        return play(case(blocks(6, **SIZES), f"{words} recompute={recompute}").programs, hardware).step_s

    quick, slow = (replace(machine(), host_bytes_per_s=rate) for rate in (1e9, 1e3))
    assert seconds("offload", quick) == pytest.approx(seconds("full", quick))
    assert seconds("offload", slow) > 2 * seconds("full", slow)


def test_where_the_link_is_slow_its_time_is_a_row_of_the_step() -> None:
    hardware = replace(machine(), host_bytes_per_s=2e3)
    made = case(blocks(6, **SIZES), "dp=2 microbatch=4 recompute=offload", global_batch=8)
    timeline = play(made.programs, hardware)
    rows = {row.axis: row.seconds for row in timeline.rows if row.name == "transfer"}
    one_s = 4 * BYTES / 2e3
    assert rows["to host"] + rows["from host"] == pytest.approx(2 * 5 * one_s, rel=0.2)
    assert {"to host", "from host"} <= {*timeline.streams(0)}


def test_an_input_that_takes_no_gradient_stays() -> None:
    model = MODELS["tiny"]
    frozen = {param.name for param in model.params if param.layer == 0}
    params = tuple(replace(param, trainable=param.name not in frozen) for param in model.params)
    first = next(index for index, layer in enumerate(model.layers) if layer.is_block)
    layers = [replace(one, has_backward=False) if index < first else one for index, one in enumerate(model.layers)]
    layers[first] = replace(layers[first], backward_reads_weights=False)
    made = case(replace(model, params=params, layers=tuple(layers)), "dp=1 recompute=offload")
    assert first not in {op.layer for ops in copies(made.program, OpKind.OFFLOAD) for op in ops}


def test_a_plan_has_the_word_for_long_samples_alone() -> None:
    for length in (candidates.LONG_SAMPLE // 2, candidates.LONG_SAMPLE):
        words = candidates.recomputations(replace(MODELS["tiny"], length=length))
        assert ("offload" in words) == (length == candidates.LONG_SAMPLE)


def test_programs_without_the_word_have_no_copies() -> None:
    for recompute in ("none", "selective", "full"):
        made = case(blocks(4, **SIZES), f"pp=2 recompute={recompute}")
        programs = programs_of(made.model, made.job, made.layout)
        assert not any(copies(program, kind) for program in programs for kind in (OpKind.OFFLOAD, OpKind.FETCH))
