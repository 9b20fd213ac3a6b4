"""A loss over all samples of a step is that of a plain loop in every layout, with one micro-batch a rank or several."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep import Job, after_step, batch_cat, batch_mean, batch_sum
from samestep.datasets import batches
from samestep.errors import JobError, LayoutError, ModelError
from samestep.layout import Layout
from samestep.memory.live_bytes import saved_bytes
from samestep.runtime.ledger import Ledger
from tests.laboratory import TOLERANCE, in_loop, job_of
from tests.models import MODELS, Tokens
from tests.parity.whole_batch import BATCH, CASES, VALUES, WHOLE, Views, job, observe, prove, run_of
from tests.plain import Trained, assert_as_on_one_device, assert_trained, on_one_device
from tests.pool import pool

LAYOUTS = (
    "dp=1 microbatch=4",
    "dp=2",
    "dp=2 zero=1 microbatch=2",
    "dp=2 zero=3 microbatch=2",
    "dp=2 microbatch=2 recompute=full",
    "tp=2 microbatch=4",
    "pp=2 microbatch=2",
    "dp=2 pp=2 zero=3 microbatch=2",
    "pp=2 microbatch=2 schedule=zero-bubble",
    "pp=2 microbatch=2 schedule=interleaved",
)
ROWS = [(name, layout, batch) for layout in LAYOUTS for name in WHOLE for batch in (8, 5)]
DAILY = {(sorted(WHOLE)[index % len(WHOLE)], layout, (8, 5)[index % 2]) for index, layout in enumerate(LAYOUTS)}


@pytest.mark.parametrize(
    ("name", "layout", "batch"), [pytest.param(*row, marks=() if row in DAILY else pytest.mark.nightly) for row in ROWS]
)
def test_a_layout_is_equal_to_a_plain_loop(name: str, layout: str, batch: int) -> None:
    """Of five samples ranks and micro-batches have unequal numbers, or none."""
    held_out = prove(name, layout, batch)
    assert held_out == [held_out[0]] * len(held_out)


class Named:
    """Samples with a word each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(3, generator=torch.Generator().manual_seed(index)), "word": "ab"[index % 2]}


class OfX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, word: list[str]) -> Tensor:
        return self.linear(x)


def reads_words(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    is_a = torch.tensor([word == "a" for word in batch["word"]])
    return outputs[is_a].mean() - outputs.mean()


def counts_words(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    return outputs.square().mean() * len(batch["word"])


def ignores_words(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    return outputs.square().mean() + 0 * batch["x"].sum()


@pytest.mark.parametrize("loss", [reads_words, counts_words, ignores_words])
def test_words_of_other_samples_are_refused_where_the_loss_reads_them(loss: Any) -> None:
    job = Job(train={"global_batch": 4, "steps": 2}, run={"device": "cpu"})
    for layout in ("dp=1", "dp=1 microbatch=2"):
        run = samestep.parallelize(
            OfX, samestep.whole_batch(loss), lambda p: torch.optim.SGD(p, 0.1), layout=layout, job=in_loop(job)
        )
        is_refused = layout != "dp=1" and loss is not ignores_words
        with pytest.raises(JobError, match="reads strings of the batch") if is_refused else nullcontext():
            for batch in samestep.batches(Named(), job):
                run.step(batch)
        assert run.steps_taken == (0 if is_refused else 2)


class WithZeros(OfX):
    def forward(self, x: Tensor, word: list[str]) -> dict[str, Tensor]:  # type: ignore[override]
        z = super().forward(x, word)
        return {"z": z, "zeros": torch.zeros_like(z)}


def test_an_output_of_no_sample_with_sizes_of_samples_is_refused_where_these_differ() -> None:
    def loss(outputs: dict[str, Tensor], batch: Any) -> Tensor:
        return (outputs["z"] - outputs["zeros"]).square().mean()

    job = in_loop(Job(train={"global_batch": 3}, run={"device": "cpu"}))
    run = samestep.parallelize(
        WithZeros, samestep.whole_batch(loss), lambda p: torch.optim.SGD(p, 0.1), layout="dp=1 microbatch=2", job=job
    )
    with pytest.raises(JobError, match="depends on no sample, and has other sizes in micro-batches of other sizes"):
        run.step(next(samestep.batches(Named(), job)))


# -- slices of sequences ---------------------------------------------------------------------------

LONG = job_of("float64", 3, optimizer={"clip_norm": 0.5}, train={"watch_every": 0, "global_batch": 6})


def of_sequences(outputs: Any, batch: dict[str, Tensor]) -> Any:
    """A loss that compares samples, and for which the order of tokens matters."""
    logits = getattr(outputs, "logits", outputs)
    weights = torch.linspace(0.5, 2.0, logits.shape[1], dtype=logits.dtype)
    features = F.normalize((logits * weights[:, None]).mean(1), dim=-1)
    own = torch.arange(len(features))
    tokens = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").sum()
    contrast = F.cross_entropy(5 * features @ features.T, own)
    return {"contrast": (contrast, 1), "tokens": (tokens, len(own))}, {"spread": (logits.std(), 1)}


def rows_of_sequences(outputs: Any, batch: dict[str, Tensor], rows: Tensor) -> Any:
    """The same as a sum over rows."""
    logits = getattr(outputs, "logits", outputs)
    weights = torch.linspace(0.5, 2.0, logits.shape[1], dtype=logits.dtype)
    features = F.normalize((logits * weights[:, None]).mean(1), dim=-1)
    contrast = F.cross_entropy(5 * features[rows] @ features.T, rows, reduction="sum")
    return contrast, len(rows), {"spread": (features[rows].std(1).sum(), len(rows))}


def sequences(
    rank: int, world: int, layout: str, model: str, by_rows: bool = False
) -> tuple[list[float], dict[str, Tensor], float, float]:
    """Take three steps, of which the last one sends what the program lists."""
    loss = samestep.whole_batch(rows_of_sequences if by_rows else of_sequences, rows=by_rows)
    run = samestep.parallelize(
        MODELS[model], loss, lambda p: torch.optim.Adam(p, 0.01), layout=layout, job=in_loop(LONG)
    )
    losses = []
    for batch in batches(Tokens(), LONG):
        with Ledger() as ledger:
            report = run.step(batch)
        losses.append(report.loss)
    assert ledger.rows == run.program.ledger(group_of=run.assembly.parallel.mesh.group_of)
    held_out = run.evaluate(next(batches(Tokens(), LONG)))["loss"]
    return losses, run.state_dict(on_every_rank=True), held_out, report.values["spread"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("cp=2", "attentive"),
        ("cp=2 exchange=ring microbatch=2", "attentive"),
        pytest.param("dp=2 cp=2 exchange=ring zero=3 microbatch=2", "llama", marks=pytest.mark.nightly),
        pytest.param("dp=2 cp=2 microbatch=1 recompute=full", "llama", marks=pytest.mark.nightly),
        pytest.param("pp=2 cp=2 microbatch=3", "llama", marks=pytest.mark.nightly),
        pytest.param("tp=2 cp=2", "llama", marks=pytest.mark.nightly),
        pytest.param("cp=4 exchange=hybrid", "llama", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("by_rows", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_loss_is_given_whole_sequences(layout: str, model: str, by_rows: bool) -> None:
    losses, weights, *means = on_one_device(sequences, model, by_rows)
    ranks = pool(Layout(layout).world_size).run(sequences, layout, model, by_rows)
    assert_trained(ranks, (losses, weights), 1e-7, 1e-9)
    assert all(others == pytest.approx(means, rel=TOLERANCE) for _, _, *others in ranks)


# -- an output that the loss does not read ---------------------------------------------------------


class TwoHeads(nn.Module):
    """A head whose output the loss reads, and one that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, one: Tensor, two: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(one))
        return {"one": self.one(h), "two": self.two(h)}


def _spread(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    return outputs["one"].square().std(0).sum()


def _of_one_head(rank: int, world: int, layout: str) -> Trained:
    torch.manual_seed(0)
    settings = job(8)
    run = samestep.parallelize(
        TwoHeads().double(), samestep.whole_batch(_spread), lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
        layout=layout, job=in_loop(settings),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(2)
    points = [torch.randn(8, 6, generator=draw, dtype=torch.float64) for _ in range(3)]
    return [run.step({"one": x, "two": x}).loss for x in points], run.state_dict(on_every_rank=True)


@pytest.mark.parametrize("layout", ["dp=1 microbatch=4", "dp=2 zero=3 microbatch=2"])
def test_an_output_that_the_loss_does_not_read_gives_no_gradient(layout: str) -> None:
    _, wanted = on_one_device(_of_one_head)
    torch.manual_seed(0)
    assert torch.equal(wanted["two.weight"], TwoHeads().double().two.weight), "it decays no weight"
    assert_as_on_one_device(_of_one_head, layout)


# -- sums over rows --------------------------------------------------------------------------------


def by_rows(outputs: Any, batch: Any, rows: Tensor) -> Any:
    """SigLIP's kind of loss, with a temperature; its values are of rows too."""
    image, text, scale = outputs
    products = scale * image[rows] @ text.T
    own = F.one_hot(rows, len(image)).to(products) * 2 - 1
    right = products.argmax(1) == rows
    return -F.logsigmoid(own * products).sum(), len(rows), {"right": (right.sum(), len(rows))}


def of_pairs(outputs: Any, batch: Any) -> Any:
    total, count, values = by_rows(outputs, batch, torch.arange(len(outputs[0]), device=outputs[0].device))
    return (total, count, values)


CASES["pairs"] = replace(CASES["clip"], loss=samestep.whole_batch(of_pairs))
CASES["by rows"] = replace(CASES["clip"], loss=samestep.whole_batch(by_rows, rows=True))


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ("dp=2 microbatch=2", 8),
        ("dp=2 zero=3", 5),
        ("dp=1 microbatch=4", 5),
        pytest.param("dp=2 pp=2 microbatch=1", 5, marks=pytest.mark.nightly),
        pytest.param("tp=2 microbatch=2", 8, marks=pytest.mark.nightly),
    ],
)
def test_ranks_compute_the_rows_of_their_samples(layout: str, batch: int) -> None:
    held_out = prove("by rows", layout, batch, like="pairs")
    assert all(means == pytest.approx(held_out[0], rel=TOLERANCE) for means in held_out)


def test_what_is_no_sum_over_rows_is_refused() -> None:
    def ignores(outputs: Any, batch: Any, rows: Tensor) -> Any:
        return (outputs[0] @ outputs[1].T).sum(), len(rows)

    CASES["ignores rows"] = replace(CASES["clip"], loss=samestep.whole_batch(ignores, rows=True))
    with pytest.raises(JobError, match=r"the sum of 8 rows is .*, and of their halves .*Use .*\(sum over the rows "):
        observe(0, 1, "ignores rows", "dp=1 microbatch=4")


def test_the_memory_of_pairs_is_predicted() -> None:
    pairs, rows = (run_of(0, 1, name, "dp=1 microbatch=4") for name in ("pairs", "by rows"))
    for run in (pairs, rows):
        run.prepare(next(batches(Views(), run.job)).samples([0]))
    each = pairs.program.step.model.loss_pairs
    assert each == rows.program.step.model.loss_pairs > 0
    made = [saved_bytes(run.program.step, run.program.step.model.layers[-1]).loss_made for run in (pairs, rows)]
    assert made[0] - made[1] == each * (BATCH - 4) * BATCH * 8


# -- values of all samples, by name ----------------------------------------------------------------

LAYOUTS_OF_VALUES = ("dp=2", "dp=2 zero=3", "dp=2 recompute=full", "tp=2", "pp=2", "dp=3")
NOW = [name for name in VALUES if not name.startswith("later")]
LATER = [name for name in VALUES if name.startswith("later")]
CHOICES = [(layout, names) for names in (NOW, LATER) for layout in LAYOUTS_OF_VALUES]
ROWS_OF_VALUES = [(name, layout, batch) for layout, names in CHOICES for name in names for batch in (8, 5, 2)]
DAILY_VALUES = {
    (names[index % len(names)], layout, (8, 5, 2)[index % 3]) for index, (layout, names) in enumerate(CHOICES)
}


@pytest.mark.parametrize(
    ("name", "layout", "batch"),
    [pytest.param(*row, marks=() if row in DAILY_VALUES else pytest.mark.nightly) for row in ROWS_OF_VALUES],
)
def test_values_are_those_of_a_plain_loop(name: str, layout: str, batch: int) -> None:
    """Of five samples ranks have unequal numbers; of two a third rank has none."""
    assert_proven(name, layout, batch)


@pytest.mark.usefixtures("ranks_inherit_the_compiler")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("later blocks", "dp=2"),
        pytest.param("whitened", "dp=2 zero=1 recompute=selective", marks=pytest.mark.nightly),
        pytest.param("later seen", "dp=2 recompute=full", marks=pytest.mark.nightly),
    ],
)
def test_code_that_takes_them_stays_outside_of_graphs(name: str, layout: str) -> None:
    assert_proven(name, layout, 8, "blocks")


def test_outside_of_a_run_they_are_those_of_torch() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(batch_sum(x), x.sum(0))
    assert torch.equal(batch_mean(x), x.mean(0))
    assert batch_cat(x) is x
    with pytest.raises(ModelError, match="takes a tensor with a row for each sample, and was given a tensor"):
        batch_sum(torch.zeros(()))


def test_outside_of_a_run_a_buffer_follows_when_an_optimizer_has_stepped() -> None:
    buffer, weight = torch.zeros(2), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    after_step(buffer, torch.ones(2))
    after_step(buffer, buffer + 3.0)
    assert torch.equal(buffer, torch.zeros(2))
    optimizer.step()
    assert torch.equal(buffer, torch.full((2,), 3.0))
    buffer.zero_()
    optimizer.step()
    assert torch.equal(buffer, torch.zeros(2))
    with pytest.raises(ModelError, match=r"was given a value .* for a buffer .*. Use a tensor of the buffer's shape"):
        after_step(buffer, torch.ones(3))


def assert_proven(name: str, layout: str, batch: int, part: str = "") -> None:
    held_out = prove(name, layout, batch, part)
    assert held_out == [held_out[0]] * len(held_out)


def prepared(rank: int, world: int, name: str, layout: str) -> None:
    run_of(rank, world, name, layout).prepare(next(batches(Views(), job())).samples([0]))


@pytest.mark.parametrize(
    ("name", "layout", "works"), [("whitened", "dp=2 microbatch=2", 4), ("later queue", "pp=2 microbatch=2", 8)]
)
def test_several_micro_batches_are_refused_with_what_works(name: str, layout: str, works: int) -> None:
    with pytest.raises(
        LayoutError, match=rf"takes values of all samples of the step within one .*. Use microbatch={works}"
    ):
        pool(Layout(layout).world_size).run(prepared, name, layout)
