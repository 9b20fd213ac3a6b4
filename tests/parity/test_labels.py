"""Labels of causal models of transformers: those of the inputs are moved by one, as transformers' own loss does, in every layout.

What is held against is `model(**samples).loss` of transformers over whole batches, in a plain loop in float64.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import loss_from
from samestep.building.model_loss import moves_labels
from samestep.building.optimizer import optimizer_of
from samestep.datasets import Batch, batches, open_dataset
from samestep.datasets.labels import LabelBatch, convention_of, with_next_labels
from samestep.datasets.source import Mixture
from samestep.errors import DataError, JobError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.axes.precision import RaiseIslands
from samestep.runtime.run import Run
from tests import small
from tests.laboratory import job_of, make_run, on_ranks, run_from
from tests.models import LENGTH, MODELS, VOCABULARY, Tokens
from tests.plain import train_plainly, whole_batches

JOB = job_of("float64", 2, train={"watch_every": 0})


class Aligned(Tokens):
    """Labels that are the inputs, of which the first ones are masked, as those of a prompt are."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = self.input_ids.clone()
        for index in range(len(self)):
            self.labels[index, : index % 7] = -100


class Padded(Aligned):
    """Samples of different lengths, filled up on the right or on the left."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {name: tensor.clone() for name, tensor in super().__getitem__(index).items()}
        number = 1 + index % 5
        filled = slice(LENGTH - number, None) if index % 2 else slice(number)
        sample["input_ids"][filled], sample["labels"][filled] = 0, -100
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[filled] = 0
        return {**sample, "attention_mask": mask}


class Documents(Aligned):
    """Two documents in each sample, as a collator that flattens gives them: the first token of each is no label."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = 3 + index % 6
        positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        sample = super().__getitem__(index)
        return {**sample, "labels": sample["labels"].masked_fill(positions == 0, -100), "position_ids": positions}


KINDS: dict[str, type[Tokens]] = {"masked": Aligned, "padded": Padded, "documents": Documents}


def losses(rank: int, world: int, model: str, layout: str, job: Job, kind: str) -> list[float]:
    run = make_run(rank, world, model, layout, job, KINDS[kind])
    found = [run.step(batch).loss for batch in batches(KINDS[kind](), job)]
    return [*found, run.evaluate(next(batches(KINDS[kind](), job)))["loss"]]


@functools.cache
def plain(model: str, kind: str) -> list[float]:
    """The losses of a plain loop over transformers' own."""
    run = make_run(0, 1, model, "dp=1", JOB, KINDS[kind])
    run.prepare(next(batches(KINDS[kind](), JOB)).samples([0]))
    module = MODELS[model]().double()
    module.load_state_dict(run.state_dict(), strict=False)
    samples = [*whole_batches(KINDS[kind](), JOB), next(whole_batches(KINDS[kind](), JOB))]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with RaiseIslands():
        return train_plainly(module, samples, lambda batch: module(**batch).loss, optimizer)[0]


CASES = [
    ("llama", "masked", "cp=2"),
    ("llama", "padded", "pp=2 microbatch=2"),
    ("llama", "documents", "dp=2 zero=3 microbatch=1"),
    pytest.param("gpt2", "documents", "dp=1", marks=pytest.mark.nightly),
    pytest.param("llama", "masked", "tp=2 sequence_parallel loss_chunk=4", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("model", "kind", "layout"), CASES)
def test_labels_of_the_inputs_give_the_loss_of_transformers(model: str, kind: str, layout: str) -> None:
    for found in on_ranks(layout, losses, model, JOB, kind):
        assert found == pytest.approx(plain(model, kind), abs=1e-9)


class Shown(Tokens):
    """Labels that a function makes of the inputs of each sample."""

    def __init__(self, label: Any, *, batched: bool = False) -> None:
        super().__init__()
        self.label, self.batched = label, batched

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = self.input_ids[index]
        return {"input_ids": inputs[None] if self.batched else inputs, "labels": self.label(inputs, index)}


def moved(inputs: Tensor, places: int) -> Tensor:
    """The inputs moved to the left, or to the right, with -100 where none is left."""
    found = torch.full_like(inputs, -100)
    if places > 0:
        found[:-places] = inputs[places:]
    else:
        found[-places:] = inputs[:places]
    return found


OWN = Shown(lambda inputs, index: inputs)
NEXT = Shown(lambda inputs, index: moved(inputs, 1))
BEFORE = Shown(lambda inputs, index: moved(inputs, -1))
TAGS = Shown(lambda inputs, index: inputs.flip(0) // 2)
LAST_ALONE = Shown(
    lambda inputs, index: torch.where(torch.arange(LENGTH) == LENGTH - 1, (inputs + 1) % VOCABULARY, -100)
)
CONSTANT = Shown(
    lambda inputs, index: inputs.masked_fill(torch.arange(LENGTH) > 0, -100) if index else moved(inputs, 1)
)
MASKED = Shown(lambda inputs, index: torch.full_like(inputs, -100))
LATE = Shown(lambda inputs, index: inputs if index == 7 else torch.full_like(inputs, -100))


@pytest.mark.parametrize(
    ("dataset", "word", "found"),
    [
        (OWN, None, "aligned"),
        (NEXT, None, "next"),
        (TAGS, "aligned", "aligned"),
        (LAST_ALONE, None, "next"),
        (MASKED, None, "next"),
        (LATE, None, "aligned"),
        (Documents(), None, "aligned"),
    ],
)
def test_samples_show_which_token_a_label_is(dataset: Any, word: Any, found: str) -> None:
    assert convention_of(dataset, word) == found


@pytest.mark.parametrize(
    ("dataset", "word", "text"),
    [
        (TAGS, None, 'neither .* Use data.labels = "next" if'),
        (BEFORE, None, "neither"),
        (CONSTANT, None, "neither"),
        (OWN, "next", 'copy its input. Set data.labels = "aligned"'),
        (BEFORE, "aligned", "copy its input. Use labels.t. = input_ids.t."),
        (NEXT, "aligned", 'the next tokens already. Set data.labels = "next"'),
        (Mixture.of({"own": OWN, "next": NEXT}, {"own": 1.0, "next": 1.0}), None, "Use sources of one kind"),
    ],
)
def test_labels_that_show_nothing_or_would_be_copied_are_refused(dataset: Any, word: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        convention_of(dataset, word)
    assert "\n" not in str(caught.value)


def _first_own(inputs: Tensor, index: int) -> Tensor:
    """Labels of the other kind in sample 6 alone, which is none of those that are looked at first."""
    return moved(inputs, 1) if index == 6 else inputs


class Long:
    """A dataset of which few samples are looked at: labels made by a function of (inputs, index)."""

    def __init__(self, label: Any) -> None:
        self.own, self.label = Tokens(), label

    def __len__(self) -> int:
        return 8 * len(self.own)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = self.own.input_ids[index % len(self.own)]
        return {"input_ids": inputs, "labels": self.label(inputs, index)}


def _masked_first(inputs: Tensor, index: int) -> Tensor:
    return inputs if index == 6 else torch.full_like(inputs, -100)


@pytest.mark.parametrize(
    ("label", "word", "found", "text"),
    [
        (_first_own, None, "aligned", "sample 6 are the next tokens, and the labels of other samples are the input_ids at their own place"),
        (lambda inputs, index: inputs.flip(0) if index == 6 else inputs, None, "aligned", "sample 6 are neither, and the labels of other samples"),
        (_masked_first, None, "next", "sample 6 are the input_ids at their own place, and the labels of other samples are the next tokens"),
        (_first_own, "aligned", "aligned", "sample 6 are the next tokens, and data.labels is 'aligned'"),
        (lambda inputs, index: inputs if index == 6 else inputs.flip(0) // 2, "next", "next", "sample 6 are the input_ids at"),
        (lambda inputs, index: inputs.flip(0) // 2 if index == 6 else inputs, "aligned", "aligned", ""),
    ],
)  # fmt: skip
def test_a_sample_of_the_other_kind_is_named_where_it_is_read(label: Any, word: Any, found: str, text: str) -> None:
    dataset = Long(label)
    looked_at = np.unique(np.linspace(0, len(dataset) - 1, 64).astype(int))
    assert 6 not in looked_at
    assert convention_of(dataset, word) == found
    batch = LabelBatch(Batch(0, np.arange(8), dataset), found, word)  # type: ignore[arg-type]
    assert batch.samples([0, 1])["labels"].shape == (2, LENGTH)
    if not text:
        batch.samples([4, 6])
        return
    with pytest.raises(DataError, match=text) as caught:
        batch.samples([4, 6])
    assert "\n" not in str(caught.value)


def test_samples_that_are_batches_of_one_are_refused_and_narrow_labels_are_read() -> None:
    """Tokenizers that return tensors give rows [1, T], whose labels would not be moved."""
    with pytest.raises(
        DataError, match=r"a sample has input_ids \[1, \d+\], and a sample is not a batch. Use the row input_ids\[0\]"
    ):
        run_of(MODELS["llama"]).step(Batch(0, np.arange(2), Shown(lambda inputs, index: inputs[None], batched=True)))
    wide, narrow = (
        run_of(MODELS["llama"])
        .step(Batch(0, np.arange(4), Shown(lambda inputs, index, kind=kind: inputs.to(kind))))
        .loss
        for kind in (torch.int64, torch.int32)
    )
    assert wide == narrow
    run = run_of(MODELS["llama"])
    run.step(Batch(0, np.arange(2), Long(_first_own)))
    with pytest.raises(DataError, match="sample 6 are the next tokens"):  # at the step that reads a contradiction
        run.step(Batch(1, np.array([4, 6]), Long(_first_own)))
    with pytest.raises(
        JobError, match=r"labels \[\d, \d+\] are float64, and numbers of classes are whole. Use labels.long\(\)"
    ):
        run_of(MODELS["llama"]).step(Batch(0, np.arange(2), Shown(lambda inputs, index: inputs.float())))


def test_tuples_are_moved_too_and_other_samples_are_left_alone() -> None:
    inputs = torch.arange(6).view(2, 3)
    assert with_next_labels((inputs, inputs, "more"))[1].tolist() == [[1, 2, -100], [4, 5, -100]]
    assert with_next_labels((inputs, inputs, "more"))[2] == "more"
    classes = {"input_ids": inputs, "labels": torch.tensor([0, 1])}
    assert with_next_labels(classes) is classes


def test_samestep_s_own_sources_have_labels_of_the_next_token() -> None:
    dataset = open_dataset(Job(data={"source": "topics"}))
    assert convention_of(dataset, None) == "next"
    with pytest.raises(DataError, match='Use "next"'):
        convention_of(dataset, "aligned")


def _built(task: str, family: str, **fields: Any) -> nn.Module:
    from samestep.building.families import family_source

    with torch.device("meta"):
        return family_source(family, fields, task)()


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).logits


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
T5 = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 32}
LLAVA = {
    "text_config": {"model_type": "llama", **SMALL},
    "vision_config": {**SMALL, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 16},
}


@pytest.mark.parametrize(
    ("task", "family", "fields", "moves"),
    [
        ("causal", "llama", SMALL, True),
        ("vision-language", "llava", LLAVA, True),
        ("masked", "bert", SMALL, False),
        ("seq2seq", "t5", T5, False),
    ],
)
def test_models_that_move_labels_in_their_own_loss(task: str, family: str, fields: Any, moves: bool) -> None:
    model = _built(task, family, **fields)
    assert moves_labels(model) is moves
    assert moves_labels(Wrapped(model)) is moves


def run_of(build: Callable[[], nn.Module]) -> Run:
    """A run of one rank whose weights stay."""
    still = JOB.model_copy(update={"optimizer": JOB.optimizer.model_copy(update={"lr": 0.0})})
    return run_from(Source(build, loss_from("cross_entropy"), optimizer_of(still), "model"), Layout(), still)


class Copied(nn.Module):
    """An autoencoder: its targets are its inputs, and that is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids).mean(1, keepdim=True).expand(-1, LENGTH, -1))


def test_an_autoencoder_and_a_masked_model_take_labels_as_they_are() -> None:
    for build in (Copied, functools.partial(_on_host, "masked", "bert", **SMALL, max_position_embeddings=32)):
        run = run_of(build)
        batch = next(batches(Small(), JOB))
        loss = run.step(batch).loss
        samples = batch.samples(batch.indices)
        logits = run.outputs({"input_ids": samples["input_ids"]})
        logits = getattr(logits, "logits", logits)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten())
        assert loss == pytest.approx(float(expected), abs=1e-9)


class Small(Tokens):
    """Labels that are the inputs, in a small vocabulary."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = self.input_ids[index] % 32
        return {"input_ids": inputs, "labels": inputs}


def _on_host(task: str, family: str, **fields: Any) -> nn.Module:
    from samestep.building.families import family_source

    model = family_source(family, fields, task)()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Moved(Documents):
    """The samples of `Documents`, with labels that are moved already."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "labels": moved(sample["labels"], 1)}


def test_the_command_moves_labels_and_refuses_those_that_would_be_copied(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "train__steps": 2,
        "train__evaluate_samples": 4,
        "data__held_out": 0.2,
        "data__sequence_length": LENGTH,
    }
    for name in (runs := ("Documents", "Moved")):
        words = ("--ranks", "1", "--out", tmp_path / name)
        assert small.train(*words, **changes, data__source=f"{__name__}:{name}") == 0
    assert small.losses(tmp_path / "Documents") == pytest.approx(small.losses(tmp_path / "Moved"), rel=1e-6)
    found, same = (json.loads((tmp_path / name / "summary.json").read_text())["held_out_loss"] for name in runs)
    assert found == pytest.approx(same, rel=1e-6)
    capfd.readouterr()
    assert small.train("--ranks", "1", **changes, data__source=f"{__name__}:Documents", data__labels="next") == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert 'Set data.labels = "aligned"' in said


def test_a_language_model_that_is_wrapped_has_its_labels_moved_and_the_users_batch_is_not_changed() -> None:
    def build() -> nn.Module:
        return Wrapped(MODELS["llama"]())

    run = run_of(build)
    batch = next(batches(Aligned(), JOB))
    found = run.step(batch).loss
    samples = batch.samples(batch.indices)
    assert torch.equal(samples["labels"][samples["labels"] >= 0], samples["input_ids"][samples["labels"] >= 0])
    logits = run.outputs({"input_ids": samples["input_ids"]})
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), samples["labels"][:, 1:].flatten())
    assert found == pytest.approx(float(expected), abs=1e-9)
