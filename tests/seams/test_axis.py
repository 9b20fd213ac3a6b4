"""A new sharding axis is its two twins, one field of `Layout`, one word in the stack of strategies and one in that of twins.

The toy axis `rows` is added from here: `rows_strategy.py` says what each rank holds and sends, `rows_twin.py` does it. Its
part of `Holding` is written by the strategy. All else (groups and their order, first values, buckets, ZeRO, norm, clipping,
optimizer, ledger, clock, memory) takes it from the layout's declaration, the holdings and the ops.

What the axis would still need elsewhere to be a word of every verb: degrees to try in `enumeration/candidates.py`, its word in
the tables of `enumeration/valid_layouts.py` and `wings/plan/open_groups.py`, and, for verify to call a fault of it by its name,
in `proof/causes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from samestep import strategies
from samestep.errors import LayoutError
from samestep.hardware import load
from samestep.job import Job
from samestep.layout import Layout, model_axis
from samestep.memory import memory_use
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.program.ranks import Ranks
from samestep.runtime.axes import applied_axes
from samestep.strategies import program_of, programs_of, recompute
from samestep.wings.plan.simulation import clock
from tests.laboratory import TOLERANCE, Observed, Runs, clipped, follow, largest_error, make_run, reference, whole
from tests.models import Tokens
from tests.pool import pool
from tests.seams import rows_strategy, rows_twin


@dataclass(frozen=True, init=False)
class RowsLayout(Layout):
    """The product's words and one more."""

    rows: int = model_axis()


@contextmanager
def known() -> Iterator[None]:
    """Add one word to the stack of strategies and one to that of twins, in this process."""
    stack = strategies.STACK
    place = stack.index(recompute)  # which repeats what a forward sends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "STACK", (*stack[:place], rows_strategy, *stack[place:]))
        patch.setattr(applied_axes, "TWINS", (*applied_axes.TWINS, rows_twin))
        yield


def plain_spec() -> ModelSpec:
    run = make_run(0, 1, "plain", "dp=1", clipped())
    run.prepare({key: value[None] for key, value in Tokens()[0].items()})
    return run.assembly.model.spec


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return plain_spec()


def observe_knowing(rank: int, world: int, text: str, job: Job) -> Observed:
    """Observe a run of the axis; a rank's rows of a weight are named as where they lie in the whole."""
    with known():
        run = make_run(rank, world, "plain", RowsLayout(text), job)
        seen = follow(run, Tokens(), job, record=True)
        index = run.assembly.parallel.mesh.index("rows")
    divided = {p.name: p.numel for p in run.program.step.model.params if rows_strategy.is_divided(p)}

    def placed(runs: Runs) -> Runs:
        return [(name, *(at + index * divided.get(name, 0) for at in ends), t) for name, *ends, t in runs]

    return replace(seen, gradients=[*map(placed, seen.gradients)], weights=placed(seen.weights))


def test_its_ranks_are_those_inside_all_others() -> None:
    layout = RowsLayout("dp=2 rows=2 tp=2")
    assert str(layout) == "dp=2 tp=2 rows=2"
    assert layout.world_size == 8
    assert layout.inner_degrees == {"tp": 2, "rows": 2, "pp": 1, "cp": 1, "ep": 1}
    ranks = Ranks.of(layout)
    assert ranks.groups("rows") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert ranks.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ranks.groups("dp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(LayoutError, match="rows=0 must be from 1 to 1048576"):
        RowsLayout("rows=0")


def test_what_it_cannot_divide_is_refused_by_every_verb(model: ModelSpec) -> None:
    with known(), pytest.raises(LayoutError, match=r"rows=4 does not divide the 30 rows of blocks.0.up.weight"):
        program_of(model, clipped(), RowsLayout("rows=4"))


def test_the_clock_and_the_memory_know_it(model: ModelSpec) -> None:
    def played(layout: Layout) -> tuple[Program, float, int]:
        (program,) = programs_of(model, Job(train={"global_batch": 8}), layout)
        return program, clock.play([program], load("a100-80x8")).step_s, memory_use.at_rest(program).weights

    with known():
        program, step_s, weights = played(RowsLayout("rows=2"))
        _, alone_s, all_weights = played(RowsLayout("dp=1"))
    halved = sum(param.numel for param in model.params if rows_strategy.is_divided(param)) // 2
    assert all_weights - weights == 4 * halved
    assert step_s > alone_s  # its sums are waited for, and no work is saved
    assert {op.axis for _, op in program.ops() if op.axis} == {"rows", "world"}


@pytest.mark.parametrize(
    "layout",
    [
        "rows=2",
        "rows=2 microbatch=3",
        "rows=2 recompute=full",
        "dp=2 rows=2",
        "dp=2 zero=1 rows=2",
        "dp=2 zero=3 rows=2",
    ],
)
def test_it_computes_what_one_device_computes(layout: str) -> None:
    job = clipped()
    ranks = pool(RowsLayout(layout).world_size).run(observe_knowing, layout, job)
    for rank, seen in enumerate(ranks):
        assert seen.ledger == seen.predicted, f"rank {rank}"
    expected = reference("plain", job)
    for seen in ranks:
        assert seen.losses + seen.norms == pytest.approx(expected.losses + expected.norms, rel=TOLERANCE)
    for step, gradients in enumerate(expected.gradients):
        error, name = largest_error(whole([seen.gradients[step] for seen in ranks]), whole([gradients]))
        assert error <= TOLERANCE, f"gradient of {name} in step {step + 1}: {error:.1e}"
    error, name = largest_error(whole([seen.weights for seen in ranks]), whole([expected.weights]))
    assert error <= TOLERANCE, f"weight {name}: {error:.1e}"
