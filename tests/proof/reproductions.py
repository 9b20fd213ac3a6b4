"""Code that people write and that came out wrong without a word, each as a small case, beside legal code of the same kinds.

A case is a model, a loss, an optimizer and data, with layouts and what each must come to: `equal` to one device (or to a
plain loop, or to the run that was not interrupted), `refused` by an InputError whose text holds one of the case's names,
or either. `outcome` runs one of them, and `table` lists all for the documents.
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.loss import cross_entropy
from samestep.datasets import batches
from samestep.errors import InputError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.run import Run
from tests.code import state
from tests.laboratory import TOLERANCE, Observed, assert_same, follow, largest_error, seeded, whole
from tests.plain import train_plainly, whole_batches
from tests.pool import pool
from tests.proof import odd_code as odd

EQUAL, REFUSED, EITHER = "equal", "refused", "either"


@dataclass(frozen=True)
class Reproduction:
    """One piece of code, and what each layout must make of it."""

    name: str
    cause: str
    """The cause it had in the review; empty for legal code."""
    item: int
    """The item of the work that mends it."""
    build: Callable[[], Any]
    layouts: tuple[str, ...]
    must: str = EITHER
    names: tuple[str, ...] = ()
    """Words of which a refusal holds one."""
    loss: Callable[..., Any] = cross_entropy
    optimizer: Callable[[list[Tensor]], Any] = odd.sgd
    data: Callable[[], Any] = odd.Tokens
    steps: int = 2
    precision: str = "float64"
    tolerance: float = TOLERANCE
    each: Callable[[Run], None] | None = None
    against: str = "one device"
    """`one device`, `a plain loop`, or `no interruption`."""
    reference: str = "dp=1"
    stop: int = 3
    """The step after which a run is interrupted."""

    @property
    def job(self) -> Job:
        train = {"global_batch": 8, "steps": self.steps, "seed": 3}
        numerics = {"precision": self.precision}
        if self.precision == "fp16":
            numerics |= {"loss_scale": 2.0**21, "loss_scale_growth_steps": 3}
            train |= {"global_batch": 4, "seed": 1}
        return Job(train=train, numerics=numerics, run={"device": "cpu"})


def _case(name: str, cause: str, item: int, build: Any, layouts: str, **fields: Any) -> Reproduction:
    return Reproduction(name, cause, item, build, tuple(word.strip() for word in layouts.split(",")), **fields)


VECTORS: dict[str, Any] = {"data": odd.Vectors}
PP, ZERO3 = "dp=1 pp=2 microbatch=4", "dp=2 zero=3"

REPRODUCTIONS = (
    # -- what passes between the stages of a pipeline ----------------------------------------------
    _case("sum of all hidden states", "A1", 2, odd.SumOfStates, PP, names=("blocks", "pp")),
    _case("bf16 stream in float64", "D1", 2, functools.partial(odd.Streamed, torch.bfloat16), PP, names=("dtype", "bfloat16")),
    _case("weight used twice", "D2", 3, odd.of(odd.TwoUsesBlock), "dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble, dp=1 pp=2 microbatch=2 schedule=zero-bubble", names=("mix",), steps=3),
    _case("linear called by keyword", "D8", 3, odd.of(odd.KeywordBlock), "dp=1 pp=2 microbatch=2 schedule=zero-bubble, dp=2", must=EQUAL),
    _case("linear under its own autocast", "D7", 3, odd.of(odd.AutocastBlock), "dp=1 pp=2 microbatch=2 schedule=zero-bubble", names=("blocks",), precision="float32", tolerance=1e-5, reference="dp=1 microbatch=2"),
    # -- optimizers --------------------------------------------------------------------------------
    _case("LARS of matrices alone", "A2", 5, odd.net, f"{ZERO3}, dp=2 zero=1", optimizer=odd.Lars, names=("Lars",), **VECTORS),
    _case("rule that starts late", "A3", 5, odd.net, ZERO3, optimizer=odd.LateRule, names=("LateRule",), steps=8, **VECTORS),
    _case("groups by size", "A3", 5, odd.net, ZERO3, optimizer=odd.by_size, names=("SGD", "optimizer"), **VECTORS),
    _case("optimizer that draws noise", "B", 5, odd.net, "dp=2", optimizer=odd.Noisy, names=("Noisy", "random"), **VECTORS),
    _case("parameters' hooks", "A19", 5, odd.hooked, "dp=1, dp=2, dp=2 zero=3", against="a plain loop", names=("hook",), **VECTORS),
    _case("parameters' tags", "A20", 5, odd.tagged, "dp=1, dp=2", against="a plain loop", optimizer=odd.by_tag, names=("_no_weight_decay", "tag"), **VECTORS),
    _case("optimizer over other weights", "A23", 5, odd.net, "dp=1", against="a plain loop", optimizer=odd.over_others, must=REFUSED, names=("optimizer", "SGD"), **VECTORS),
    _case("unused weights under decay", "A24", 5, odd.Spare, f"dp=1, dp=2, {ZERO3}", against="a plain loop", optimizer=odd.adamw, names=("spare",)),
    _case("unused layer in bf16", "D5", 5, odd.SpareBesideRoot, ZERO3, names=("spare",), precision="bf16", tolerance=3e-6, reference="dp=1 microbatch=4"),
    _case("pruned weights", "C", 5, odd.pruned, f"dp=2, {ZERO3}, {PP}", names=("weight_orig",)),
    # -- tokens ------------------------------------------------------------------------------------
    _case("convolution over tokens", "A4", 1, odd.planned(odd.FeedForward, odd.ConvolutionBlock), "dp=1 tp=2 sequence_parallel", names=("conv", "block")),
    _case("factor by length", "A14", 1, odd.planned(odd.FeedForward, odd.LengthBlock), "dp=1 cp=2", names=("block", "length", "tokens")),
    # -- features ----------------------------------------------------------------------------------
    _case("heads counted by another name", "A5", 2, functools.partial(odd.OwnHeads, odd.OwnAttention), "dp=1 tp=2", names=("q", "heads", "block")),
    _case("norm of hidden neurons", "A6", 2, odd.planned(odd.NormalisedFeedForward), "dp=1 tp=2", names=("up", "down", "block")),
    _case("log_softmax behind a cut head", "A7", 2, functools.partial(odd.LogProbabilities, odd.FeedForward), "dp=1 tp=2", names=("head",)),
    # -- samples, the loss -------------------------------------------------------------------------
    _case("contrastive loss", "B", 4, odd.net, "dp=2, dp=1 microbatch=4", loss=odd.contrastive, must=REFUSED, names=("loss",), **VECTORS),
    _case("expert capacity", "B", 1, odd.Capacity, "dp=2", must=REFUSED, names=("samples",), **VECTORS),
    _case("packed sequences", "C", 1, odd.Packed, "dp=2, dp=1 microbatch=2", must=EQUAL),
    _case("samples sorted and put back", "", 1, odd.Sorted, "dp=2", must=EQUAL, **VECTORS),
    _case("weights of samples in the loss", "", 4, odd.net, "dp=2, dp=1 microbatch=2", loss=odd.weighted_loss, must=EQUAL, **VECTORS),
    # -- random numbers ----------------------------------------------------------------------------
    _case("dropout on two views", "A8", 4, odd.DropoutOnTwoViews, "dp=2, dp=1 microbatch=2", names=("drop", "dropout"), **VECTORS),
    _case("numpy's random numbers", "A10", 4, odd.NumpyNoise, "dp=2", names=("random",), **VECTORS),
    _case("augmentation in __getitem__", "B", 4, odd.net, "dp=2", data=odd.Augmented, must=EQUAL),
    _case("reentrant checkpointing", "A11", 4, odd.Reentrant, "dp=2", names=("checkpoint",)),
    # -- state -------------------------------------------------------------------------------------
    _case("running mean of its own", "A12", 4, state.OwnMean, "dp=2", names=("mean",), **VECTORS),
    _case("weights normalised in the forward", "A13", 4, odd.forced, "dp=2 zero=1, dp=2 zero=3", names=("weight", "0"), **VECTORS),
    _case("queue that only later steps read", "", 4, odd.Unread, "dp=1, dp=1 tp=2", must=EQUAL, **VECTORS),
    # -- experts -----------------------------------------------------------------------------------
    _case("experts that weigh by themselves", "D3", 5, odd.OwnWeighing, "dp=2 ep=2", names=("experts",)),
    _case("experts without rows", "D6", 5, odd.NoRows, "dp=2 ep=2", must=EQUAL),
    _case("arguments in another order", "D9", 5, odd.OtherOrder, "dp=2 ep=2", names=("experts",)),
    # -- what a model is given, what is resumed ----------------------------------------------------
    _case("forward(**batch)", "A21", 6, odd.KeywordBatch, "dp=1, dp=2", against="a plain loop", names=("mask",), data=odd.MaskedTokens),
    _case("third part of a tuple", "A22", 6, odd.ThirdPart, "dp=1, dp=2", against="a plain loop", names=("part",), data=odd.Triples),
    _case("counters in an optimizer's groups", "A15", 6, odd.net, "dp=1, dp=2 zero=1", against="no interruption", optimizer=odd.ScheduleFree, names=("ScheduleFree",), steps=6, **VECTORS),
    _case("rate that a loop lowers", "R1", 1, odd.net, "dp=1, dp=2 zero=1", must=EQUAL, against="no interruption", optimizer=odd.adamw, each=odd.lower_rate, steps=6, **VECTORS),
    _case("stream whose state lacks its buffer", "R5", 1, odd.net, "dp=1", must=EQUAL, against="no interruption", data=odd.ShuffledStream, steps=6),
    _case("teacher that follows", "A16", 6, odd.Teacher, "dp=1", against="no interruption", each=odd.follow_student, names=("teacher",), steps=6, **VECTORS),
    _case("buffers of later stages", "A17", 6, odd.of(odd.CountBlock), "dp=1 pp=2 microbatch=8, dp=1", against="no interruption", names=("blocks", "k"), steps=6),
    _case("loss scale of the first sample", "D4", 6, odd.Blockless, "dp=1", against="no interruption", names=("loss_scale",), optimizer=odd.fast_sgd, steps=12, stop=4, precision="fp16", data=odd.Lengths),
)  # fmt: skip
CASES = {case.name: case for case in REPRODUCTIONS}


# -- running one -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    kind: str
    """`equal`, `refused`, `different`, or `failed` with another error than a refusal."""
    text: str = ""

    def fits(self, case: Reproduction) -> bool:
        """Return whether it is right or refused by name, as the case asks."""
        if self.kind == REFUSED:
            return case.must != EQUAL and any(name in self.text for name in case.names)
        return self.kind == EQUAL and case.must != REFUSED


def outcome(case: Reproduction, layout: str) -> Outcome:
    """Return what a layout makes of a case."""
    world = Layout(layout).world_size
    try:
        expected = _expected(case)
        found = pool(world).run(carry_out, case.name, layout) if world > 1 else [carry_out(0, 1, case.name, layout)]
    except InputError as error:
        if world > 1:
            pool(world).close()  # what a refused run has changed in a user's code is no start for another case
        return Outcome(REFUSED, str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    try:
        if case.against == "one device":
            assert_same(found, expected, case.tolerance)
        else:
            theirs = expected.losses or [0.0] * len(found[0].losses)
            worst = max(abs(a - b) for a, b in zip(found[0].losses, theirs, strict=True))
            assert worst <= case.tolerance * max(1.0, *map(abs, theirs)), (found[0].losses, theirs)
            if expected.weights:
                weights = whole([expected.weights])
                unmoved = {name: weights[name] for name in expected.notes}  # a run need not hold them
                ours = {**unmoved, **whole([seen.weights for seen in found])}
                error, name = largest_error(ours, weights)
                assert error <= case.tolerance, f"weight {name}: {error:.1e}"
    except AssertionError as error:
        return Outcome("different", str(error).splitlines()[0])
    return Outcome(EQUAL)


def _expected(case: Reproduction) -> Observed:
    """Return what the case is held against; a refusal there is a refusal of the case."""
    if case.against == "a plain loop":
        return _plain_loop(case.name)
    if case.against == "no interruption":
        return Observed()  # each rank makes both runs
    return _one_device(case.name)


@functools.cache
def _one_device(name: str) -> Observed:
    return carry_out(0, 1, name, CASES[name].reference)


def carry_out(rank: int, world: int, name: str, layout: str) -> Observed:
    """Take the steps of a case in a layout; a case of resuming returns how far the resumed losses are from the others."""
    case = CASES[name]
    with seeded(rank):
        if case.against == "no interruption":
            return _resumed(rank, world, case, layout)
        return follow(_run(rank, world, case, layout), case.data(), case.job, each=case.each)


def _run(rank: int, world: int, case: Reproduction, layout: str) -> Run:
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    source = Source(case.build, case.loss, optimizer_source(case.optimizer), case.name)
    return Run(source, Layout(layout), case.job, place)


@functools.cache
def _plain_loop(name: str) -> Observed:
    """Train the case's own model with its own optimizer in a loop of torch, from the run's first weights."""
    case = CASES[name]
    data, job = case.data(), case.job
    run = _run(0, 1, replace(case, optimizer=odd.sgd), "dp=1")
    run.prepare(next(batches(data, job)).samples([0]))
    first = {
        piece.name: piece.master().clone().view_as(run.model.get_parameter(piece.name)) for piece in run.updater.pieces
    }
    model = case.build().double()
    model.load_state_dict(first, strict=False)
    optimizer = case.optimizer(list(model.parameters()))
    losses, weights = train_plainly(
        model, whole_batches(data, job), lambda batch: case.loss(_called(model, batch), batch), optimizer
    )
    seen = Observed(losses=losses, weights=[(name, 0, value.numel(), value) for name, value in weights.items()])
    seen.notes = [name for name, param in model.named_parameters() if param.grad is None]
    return seen


def _called(model: nn.Module, samples: Any) -> Tensor:
    if isinstance(samples, dict):
        return model(**{name: value for name, value in samples.items() if name != "labels"})
    return model(*(value.double() for value in (samples[0], *samples[2:])))


def _resumed(rank: int, world: int, case: Reproduction, layout: str) -> Observed:
    """Take the steps, and again with an interruption after some of them; return by how much the losses differ."""
    job, stop = case.job, case.stop
    mine = tempfile.mkdtemp() if rank == 0 else ""
    folder = Path(gather_values(mine, world)[0])

    def taken(run: Run, first: int, last: int) -> list[float]:
        found = []
        for batch in batches(case.data(), job, first_step=first):
            report = run.step(batch)
            found.append(report.loss + report.skipped)
            if case.each is not None:
                case.each(run)
            if run.steps_taken == last:
                break
        return found

    whole = taken(_run(rank, world, case, layout), 0, case.steps)
    begun = _run(rank, world, case, layout)
    taken(begun, 0, stop)
    checkpoint.save(begun, folder, keep=1)
    resumed = _run(rank, world, case, layout)
    later = next(batches(case.data(), job, first_step=stop))
    resumed.prepare(later.samples(later.indices[:1]))
    resumed.load(folder)
    assert resumed.steps_taken == stop
    return Observed(losses=[a - b for a, b in zip(taken(resumed, stop, case.steps), whole[stop:], strict=True)])


# -- for the documents -----------------------------------------------------------------------------


OUTCOMES = Path(__file__).parent / "reproductions.json"
"""What each layout makes of each case, as the tests assert it; `python -m tests.proof.reproductions` writes it anew."""


def _shown(outcome: str) -> str:
    return "rejected" if outcome == REFUSED else outcome


def table() -> str:
    """Return every case with its cause and what each layout makes of it, as a table of Markdown."""
    known = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    lines = ["| code | before | layout | outcome |", "| --- | --- | --- | --- |"]
    for case in REPRODUCTIONS:
        kind = "was wrong" if case.cause else "legal"
        lines += [
            f"| {case.name} | {kind} | `{layout}` | {_shown(known[case.name][layout])} |" for layout in case.layouts
        ]
    return "\n".join(lines)


def write() -> None:
    """Run all cases and write their outcomes."""
    found = {case.name: {layout: outcome(case, layout).kind for layout in case.layouts} for case in REPRODUCTIONS}
    OUTCOMES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write()
