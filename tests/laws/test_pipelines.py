"""Laws of whole pipelines: the textbook bubbles come out of what the clock plays, and no work is lost between stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.memory import memory_use
from samestep.models.layer_parts import Product
from samestep.models.spec import ModelSpec
from samestep.program.ops import OpKind, is_forward
from samestep.program.program import Program
from samestep.schedules import TaskKind
from samestep.strategies import program_of
from samestep.strategies.pipeline import balance_chunks, chunks_of
from samestep.wings.plan.simulation import clock
from samestep.wings.plan.simulation.partition import COMPUTE
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import LAW, blocks, case, machine

FLOPS = 10**9
COSTLY = {"forward_flops": FLOPS, "output_elements": 64, "saved_elements": 100, "input_elements": 10}


def programs(model: ModelSpec, layout: str, global_batch: int) -> list[Program]:
    made = case(model, f"dp={Layout(layout).dp}", global_batch=global_batch).job
    parsed = Layout(layout)
    return [program_of(model, made, parsed, stage=stage) for stage in range(parsed.pp)]


def bubble(model: ModelSpec, layout: str, microbatches: int) -> float:
    """Idle time of a stage over its busy time, of one sample a micro-batch and free communication."""
    timeline = clock.play(programs(model, f"{layout} microbatch=1", microbatches), machine())
    busy = timeline.busy_s(0, COMPUTE)
    assert all(timeline.busy_s(stage, COMPUTE) == pytest.approx(busy) for stage in timeline.stages)
    return (timeline.step_s - busy) / busy


@LAW
@given(st.integers(2, 6), st.integers(0, 12), st.sampled_from(["gpipe", "1f1b"]))
def test_gpipe_and_1f1b_idle_p_minus_1_over_m(p: int, more: int, schedule: str) -> None:
    m = p + more
    assert bubble(blocks(p, **COSTLY), f"pp={p} schedule={schedule}", m) == pytest.approx((p - 1) / m)


@LAW
@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble(p: int, v: int, rounds: int) -> None:
    m = p * rounds
    layout = f"pp={p} schedule=interleaved virtual_stages={v}"
    assert bubble(blocks(p * v, **COSTLY), layout, m) == pytest.approx((p - 1) / (v * m))


@LAW
@given(st.integers(2, 5), st.integers(0, 8))
def test_zero_bubble_idles_less_than_1f1b(p: int, more: int) -> None:
    m = p + more
    linear = Product(rows=1000, inner=1000, columns=500)  # all of a layer's work: its backward is twice its forward
    model = blocks(p, **{**COSTLY, "products": (linear,), "forward_flops": linear.flops})
    without, split = (bubble(model, f"pp={p} schedule={schedule}", m) for schedule in ("1f1b", "zero-bubble"))
    assert 0 < split < without
    # Of F = B = W the paper's third of it remains; the weight's gradient is also added up, which takes a little longer.
    assert split == pytest.approx((p - 1) / (3 * m), rel=0.2)


@LAW
@given(st.integers(2, 4), st.integers(1, 6), st.sampled_from([0, 1]), st.floats(1e4, 1e9), st.sampled_from([
    ("1f1b", False), ("1f1b", True), ("gpipe", False), ("gpipe", True), ("interleaved virtual_stages=2", True),
]))  # fmt: skip
def test_reductions_delay_no_other_stage(
    p: int, rounds: int, zero: int, bytes_per_s: float, how: tuple[str, bool]
) -> None:
    """The more there is to reduce the later a step ends, but no backward begins later than where there is nothing.

    Also where nothing overlaps: each stage sends the gradient of its input first, and then all reduce at the same time.
    """
    schedule, overlap = how
    slow = replace(machine(bytes_per_s=bytes_per_s), overlap=overlap)
    begins, ends = set(), []
    for rows in (8, 256):
        model = blocks(2 * p, rows=rows, cols=rows, **COSTLY)
        parts = programs(model, f"dp=2 pp={p} zero={zero} schedule={schedule} microbatch=1", 2 * p * rounds)
        # What zero=1 gathers is no reduction, and the next step's first forwards do wait for it.
        parts = [
            part.with_bodies(lambda _, ops: tuple(op for op in ops if op.kind is not OpKind.ALL_GATHER))
            for part in parts
        ]
        timeline = clock.play(parts, slow)
        last = [span for span in timeline.spans if span.task == f"B{p * rounds - 1}" and span.stream == COMPUTE]
        begins.add(tuple(round(min(span.start_s for span in last if span.stage == stage), 9) for stage in range(p)))
        ends.append(timeline.step_s)
    assert len(begins) == 1
    assert ends[0] < ends[1]


LAYOUTS = [
    "pp=2",
    "pp=3 schedule=zero-bubble",
    "pp=3 schedule=gpipe",
    "pp=2 schedule=interleaved virtual_stages=2",
    "dp=2 pp=2",
    "pp=4 recompute=full",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_work_is_conserved_and_every_forward_stands_before_its_backward(layout: str, microbatches: int) -> None:
    model = blocks(6, **COSTLY)
    dp = Layout(layout).dp
    found = programs(model, f"{layout} microbatch=1", microbatches * dp)
    forward = sum(op.flops for one in found for task, op in one.ops() if is_forward(task.body))
    assert forward == 6 * FLOPS * microbatches
    backward = sum(op.flops for one in found for _, op in one.ops() if op.kind in (OpKind.BACKWARD, OpKind.WEIGHT))
    assert backward == 2 * forward
    timeline = clock.play(found, machine(bytes_per_s=1e9, latency_s=1e-6))
    ends: dict[tuple[str, str], float] = {}
    for span in timeline.spans:
        kind, _, owner = span.name.partition(":")
        if kind == OpKind.FORWARD:
            ends[owner, span.task[1:]] = span.end_s
    for span in timeline.spans:
        kind, _, owner = span.name.partition(":")
        if kind == OpKind.BACKWARD:
            assert span.start_s >= ends[owner, span.task[1:]] - 1e-12


@LAW
@given(st.lists(st.integers(1, 50), min_size=3, max_size=9), st.integers(1, 4))
def test_runs_of_layers_are_the_best_there_are(costs: list[int], count: int) -> None:
    count = min(count, len(costs))
    model = blocks(len(costs))
    model = replace(
        model, layers=tuple(replace(la, forward_flops=c) for la, c in zip(model.layers, costs, strict=True))
    )
    runs = chunks_of(model, count)
    assert [index for run in runs for index in run] == list(range(len(costs)))
    best = min(
        max(sum(costs[a:b]) + b - a for a, b in itertools.pairwise((0, *boundaries, len(costs))))
        for boundaries in itertools.combinations(range(1, len(costs)), count - 1)
    )
    assert max(sum(costs[index] + 1 for index in run) for run in runs) == best


@given(st.integers(1, 40), st.integers(0, 300), st.integers(1, 12))
def test_stages_of_equal_blocks_have_equal_numbers_but_the_one_with_the_head(
    count: int, head: int, stages: int
) -> None:
    stages = min(stages, count)
    costs, is_block = (100,) * count + (head,), (True,) * count + (False,)
    *others, last = [len(run) for run in balance_chunks(costs, is_block, stages)]
    assert all(later - sooner in (0, 1) for sooner, later in itertools.pairwise(others))
    assert not others or others[-1] - others[0] <= 1
    assert last - 1 <= min(others, default=count) + 1


def test_of_equal_stages_those_are_chosen_between_which_little_is_sent() -> None:
    costs, begins = (1, *(10,) * 8, 1), (False, *(True,) * 8, False)
    assert [run.start for run in balance_chunks(costs, begins, 3)] == [0, 3, 6]
    assert [run.start for run in balance_chunks(costs, begins, 3, (0, 9, 9, 9, 2, 9, 2, 9, 9, 0))] == [0, 4, 6]
    assert [run.start for run in balance_chunks(costs, begins, 3, (0, 9, 9, 2, 9, 9, 2, 9, 9, 0))] == [0, 3, 6]


@pytest.mark.parametrize(
    ("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1]), ("zero-bubble", [4, 4, 4, 4])]
)
def test_activations_in_flight_are_those_of_the_papers(schedule: str, held: list[int]) -> None:
    model = blocks(4, **{**COSTLY, "output_elements": 1})  # outputs are kept too, and are little
    found = programs(model, f"dp=2 pp=4 schedule={schedule} microbatch=1", 16)
    assert [memory_use.during_step(one).activations // 400 for one in found] == held


def test_stages_that_wait_for_each_other_for_ever_are_named() -> None:
    first, last = programs(blocks(2, **COSTLY), "pp=2 microbatch=1", 2)
    # Stage 0 wants its first backward before the forward of the micro-batch that it follows.
    tasks = first.tasks
    order = sorted(tasks, key=lambda task: (task.kind is not TaskKind.BACKWARD, task.microbatch))
    with pytest.raises(
        LayoutError, match=r"forever: stage 0 at recv:layers.0 of task B0; stage 1 at recv:layers.0 of task F0"
    ):
        clock.play([replace(first, tasks=tuple(order)), last], machine())


def test_sends_run_beside_compute() -> None:
    model = blocks(2, **COSTLY)
    slow = machine(bytes_per_s=64 * 4 / 1e-3)  # a send takes as long as a forward of 1e9 FLOPs at 1 TFLOP/s
    timeline = clock.play(programs(model, "pp=2 schedule=gpipe microbatch=1", 8), slow)
    sends = [span for span in timeline.spans if span.stage == 0 and span.name.startswith("send")]
    computes = [span for span in timeline.spans if span.stage == 0 and span.name.startswith("forward")]
    assert any(s.start_s < c.end_s and c.start_s < s.end_s for s in sends for c in computes)


def test_a_pipeline_of_thousands_of_devices_has_the_bubble_of_its_stages() -> None:
    job = case(blocks(96, **COSTLY), "dp=1", global_batch=64 * 512).job
    found = predict(blocks(96, **COSTLY), job, Layout("dp=512 pp=8 microbatch=1"), machine())
    assert found.devices == 4096
    assert found.bubble_fraction == pytest.approx(7 / 71, rel=0.05)
