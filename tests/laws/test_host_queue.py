"""Laws of the host, which launches the ops of a step ahead of the device: a resource of its own beside it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.hardware import Hardware, load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import presets
from samestep.program.ops import OpKind
from samestep.program.program import Program
from samestep.simulation import bound_by, clock, cost
from samestep.simulation.prediction import Prediction, predict
from samestep.simulation.simulate import simulate
from samestep.simulation.spans import Line
from samestep.strategies import programs_of
from tests.laws.models import LAW

GPU = load("a100-80x8")
LAYOUTS = (
    "dp=1 microbatch=1",
    "dp=2 zero=3 microbatch=1",
    "tp=2 microbatch=1",
    "pp=2 microbatch=1",
    "dp=2 zero=1 microbatch=2",
)
MIXTRAL = {"layers": 2}


def small(
    layout: str, machine: Hardware, batch: int = 8, compile_: str = "none", mode: str = "default", **changes: int
) -> Prediction:
    """Predict a step of a small model, with short sequences unless told otherwise."""
    model = presets.preset("gpt2", 64, {"layers": 3, **changes})
    job = Job(
        train={"global_batch": batch}, numerics={"precision": "bf16"}, run={"compile": compile_, "compile_mode": mode}
    )
    return predict(model, job, Layout.parse(layout), machine)


def host_s(program: Program, machine: Hardware) -> float:
    return sum(cost.launch_s(op, program, machine) for _, op in program.ops())


def device_s(program: Program, machine: Hardware) -> float:
    return sum(cost.seconds(op, program, machine) for _, op in program.ops() if op.axis is None)


# -- lines by hand -----------------------------------------------------------------------------------------------------


def line(*ops: tuple[float, float], first_s: float = 0.0) -> Line:
    """Return a line of ops with so many seconds on the device and in the host, of the latter some for the first kernel."""
    ends = tuple(itertools.accumulate(took for took, _ in ops))
    launched = tuple(itertools.accumulate(launch for _, launch in ops))
    lead = min(
        end - (after - launch) - max(took + min(first_s, launch), launch)
        for end, after, (took, launch) in zip(ends, launched, ops, strict=True)
    )
    return Line(tuple(("compute", f"op{index}") for index in range(len(ops))), ends, {}, launched, first_s, lead)


def test_a_long_op_hides_the_launches_of_the_short_ones_behind_it() -> None:
    """The host is 8 seconds ahead after the first op, and the next four use that up."""
    one = line((10, 2), (1, 3), (1, 3), (1, 3), (1, 3))
    assert one.delayed(one.ends_s, 0.0) == (10, 11, 12, 13, 14)
    assert line((1, 3), (1, 3), (10, 2)).delayed((1, 2, 12), 0.0) == (3, 6, 16)


def test_a_host_that_is_late_by_less_than_the_lead_delays_nothing() -> None:
    one = line((10, 2), (1, 3), (1, 3))
    assert one.delayed(one.ends_s, one.lead_s) == one.ends_s
    assert one.delayed(one.ends_s, one.lead_s + 0.5)[-1] == one.ends_s[-1] + 0.5


def test_no_op_starts_before_its_first_kernel_is_launched() -> None:
    one = line((10, 6), (10, 6), first_s=2)
    assert one.delayed(one.ends_s, 0.0) == (12, 22)
    assert one.delayed(one.ends_s, 14.0) == (26, 36)
    assert one.delayed(one.ends_s, -2.0) == (10, 20)


TIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12)


@LAW
@given(TIMES, st.integers(-40, 40), st.integers(0, 3))
def test_a_line_is_never_quicker_than_either_resource_alone(ops: list[tuple[int, int]], host: int, first: int) -> None:
    one = line(*ops, first_s=first)
    ends = one.delayed(one.ends_s, float(host))
    assert ends[-1] >= max(one.ends_s[-1], host + one.launched_s[-1])
    assert ends[-1] <= one.ends_s[-1] + max(host, 0) + one.launched_s[-1]  # nor slower than one after the other
    assert all(ends >= plain for ends, plain in zip(ends, one.ends_s, strict=True))
    assert (ends == one.ends_s) == (host <= one.lead_s)


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_never_quicker_than_either_resource_alone_nor_than_with_fewer_launches(layout: str) -> None:
    taken = []
    for launch_s in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        found = small(layout, replace(GPU, kernel_launch_s=launch_s))
        for program in found.programs:
            assert found.timeline.step_s >= max(host_s(program, found.hardware), device_s(program, found.hardware)) * (
                1 - 1e-9
            )
        taken.append(found.timeline.step_s)
    assert taken == sorted(taken)
    assert taken[-1] > 5 * taken[0]


def test_a_step_without_launches_waits_for_none() -> None:
    found = small("dp=1 microbatch=1", replace(GPU, kernel_launch_s=0.0))
    assert found.launch_wait_s == 0.0
    assert bound_by.host_summary(found) == []


def test_large_kernels_hide_all_launches_but_the_first() -> None:
    def step_s(machine: Hardware) -> float:
        return simulate(
            Job(model={"source": "preset:gpt3-1.3b"}, train={"global_batch": 16}, numerics={"precision": "bf16"}),
            "dp=1 microbatch=8", machine,
        ).step_s  # fmt: skip

    quick, usual = (replace(GPU, kernel_launch_s=launch_s) for launch_s in (0.0, GPU.kernel_launch_s))
    assert step_s(quick) <= step_s(usual) < 1.002 * step_s(quick)


def test_the_device_waits_for_what_the_step_takes_longer() -> None:
    free, slow = (small("dp=1 microbatch=1", replace(GPU, kernel_launch_s=launch_s)) for launch_s in (0.0, 1e-4))
    assert slow.launch_wait_s == pytest.approx(slow.timeline.step_s - free.timeline.step_s)
    assert slow.to_record()["launch_wait_s"] == slow.launch_wait_s


def test_a_prediction_says_that_it_is_bound_by_its_host() -> None:
    slow = small("dp=1 microbatch=1", replace(GPU, kernel_launch_s=1e-4))
    (said,) = bound_by.host_summary(slow)
    assert said.startswith("host-bound: the device waits ")
    assert f"{slow.launch_wait_s / slow.step_s:.0%} of the step" in said
    assert bound_by.binds(slow).startswith("launches of small kernels")
    assert bound_by.host_summary(small("dp=1 microbatch=8", GPU, batch=64, hidden=3072, layers=2)) == []


def test_the_host_waits_for_the_device_where_rows_go_to_experts() -> None:
    """So each layer's experts are launched behind the exchange of counts, however far ahead the host was."""
    model = presets.preset("mixtral-8x7b", 4096, MIXTRAL)
    job = Job(train={"global_batch": 8}, numerics={"precision": "bf16"})
    machine = load("h100x8")
    found = predict(model, job, Layout.parse("dp=8 ep=8 zero=1 microbatch=1"), machine)
    counts = [op for _, op in found.programs[0].ops() if op.kind is OpKind.ALL_TO_ALL and op.dtype == "int64"]
    assert len(counts) == 2
    assert found.launch_wait_s >= 2 * machine.kernel_launch_s
    alone = predict(model, job, Layout.parse("dp=8 zero=1 microbatch=1"), machine)
    assert alone.launch_wait_s < found.launch_wait_s


def test_a_host_that_waits_in_microbatches_is_never_far_ahead() -> None:
    """Else it launches while its device waits for other stages, and the bubbles of a pipeline hide launches; so does a large head."""
    ahead = replace(GPU, kernel_launch_s=2e-5)
    behind = replace(ahead, waits_in_microbatches=True)
    for layout, batch, vocab, factor in (("pp=2 microbatch=1", 4, 512, 1.1), ("dp=1 microbatch=32", 64, 50257, 1.001)):
        took = [small(layout, one, layers=8, batch=batch, vocab=vocab).timeline.step_s for one in (ahead, behind)]
        assert took[1] > factor * took[0], layout


@pytest.mark.parametrize("where", ["blocks", "model"])
def test_compiled_blocks_are_launched_in_fewer_kernels(where: str) -> None:
    machine = replace(GPU, kernel_launch_s=1e-4)
    plain, compiled = small("dp=1 microbatch=1", machine), small("dp=1 microbatch=1", machine, compile_=where)
    assert host_s(compiled.programs[0], machine) < 0.9 * host_s(plain.programs[0], machine)
    assert compiled.step_s < plain.step_s
    assert "run.compile" in bound_by.host_summary(plain)[0]
    assert "run.compile" not in "".join(bound_by.host_summary(compiled))


def test_cuda_graphs_are_one_launch_a_layer_and_direction() -> None:
    machine = replace(GPU, kernel_launch_s=1e-4)
    compiled, captured = (
        small("dp=1 microbatch=1", machine, compile_="model", mode=mode) for mode in ("default", "reduce-overhead")
    )
    assert host_s(captured.programs[0], machine) == pytest.approx(8 * 2 * 5 * 1e-4)  # micro-batches, directions, layers
    assert captured.step_s < compiled.step_s
    plain = small("dp=1 microbatch=1", machine, mode="reduce-overhead")
    assert host_s(plain.programs[0], machine) > 2 * host_s(captured.programs[0], machine)


def test_a_cpu_is_its_own_host() -> None:
    cpu = replace(load("cpu-laptop"), kernel_launch_s=1e-4)
    model = presets.preset("gpt2", 64, {"layers": 3})
    job = Job(train={"global_batch": 8})
    (program,) = programs_of(model, job, Layout.parse("dp=1 microbatch=1"), 1)
    assert host_s(program, cpu) == 0.0
    assert clock.play([program], cpu).launch_waits_s == (0.0,)
    assert clock.play([program], cpu).step_s > clock.play([program], replace(cpu, kernel_launch_s=0.0)).step_s
