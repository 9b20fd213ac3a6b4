"""Images: the job `jobs/vision.toml` gives one worker's losses and accuracy in every layout, and needs four small workers.

Samples that training changes at random are a function of (seed, step, sample): in every layout, and after any resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import samestep
from samestep.building.initial_values import blueprint
from samestep.building.loss import loss_of
from samestep.building.model import model_source
from samestep.building.optimizer import optimizer_of
from samestep.building.resnet import resnet
from samestep.datasets import Batch, Dataset, batches, open_dataset
from samestep.errors import DataError, JobError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.models.presets import preset
from samestep.tracing.trace import trace
from tests import small
from tests.laboratory import run_from
from tests.pool import pool

JOBS = Path(__file__).parents[2] / "jobs"
FEW = ["train.steps=3", "train.global_batch=12", "train.evaluate_samples=30", "schedule.warmup_steps=0"]


def trained(out: Path, *words: str) -> dict[str, float]:
    settings = [*FEW, "numerics.precision=float64", "run.device=cpu", "model.config.width=4"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert small.main("train", JOBS / "vision.toml", "--out", out, *words, *given) == 0
    return json.loads((out / "summary.json").read_text())


def test_layouts_have_the_losses_and_the_accuracy_of_one_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = trained(tmp_path / "one", "--ranks", "1")
    assert f"accuracy {one['held_out_accuracy']:.1%}" in capfd.readouterr().out
    assert one["held_out_accuracy"] * 30 == pytest.approx(round(one["held_out_accuracy"] * 30))
    found = trained(tmp_path / "four", "--layout", "dp=4 zero=1")
    assert small.losses(tmp_path / "four") == pytest.approx(small.losses(tmp_path / "one"), rel=1e-7)
    assert found["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-7)
    assert found["held_out_accuracy"] == one["held_out_accuracy"]


@pytest.mark.nightly
def test_four_workers_learn_the_digits(tmp_path: Path) -> None:
    words = ["--layout", "dp=4", "--out", tmp_path, "--set", "run.device=cpu"]
    assert small.main("train", JOBS / "vision.toml", *words) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["held_out_accuracy"] >= 0.97


def test_the_batch_fits_four_small_workers_and_no_two() -> None:
    job = samestep.load(JOBS / "vision.toml")
    fits = [samestep.simulate(job, f"dp={n}", str(JOBS / "small-worker.toml")).fits for n in (2, 4)]
    assert fits == [False, True]


def test_digits_are_held_out_without_overlap() -> None:
    job = samestep.load(JOBS / "vision.toml")
    train, held_out = open_dataset(job, "train"), open_dataset(job, "held_out")
    assert (len(train), len(held_out)) == (1438, 359)
    image, digit = train[5]
    assert image.shape == (1, 8, 8)
    assert 0.0 <= float(image.min()) <= float(image.max()) <= 1.0
    images, digits = train.read(np.array([5, 7]))
    assert (images[0] == image).all()
    assert int(digits[0]) == int(digit)
    for part in (train, held_out):  # all writers in both
        assert np.bincount(part.digits, minlength=10).min() > len(part) / 20


def test_the_preset_is_counted_as_its_module_is_traced() -> None:
    traced = trace(blueprint(resnet, 0).module, (torch.zeros(1, 3, 224, 224), torch.zeros(1)), "resnet50")
    counted = preset("resnet50")
    assert [layer.name for layer in traced.layers] == [layer.name for layer in counted.layers]
    assert [(p.name, p.shape, p.layer) for p in traced.params] == [(p.name, p.shape, p.layer) for p in counted.params]
    assert [layer.batch_norms for layer in traced.layers] == [layer.batch_norms for layer in counted.layers]
    assert [layer.forward_flops for layer in traced.layers] == [layer.forward_flops for layer in counted.layers]
    assert traced.buffer_bytes == counted.buffer_bytes
    for layer, preset_layer in zip(traced.layers, counted.layers, strict=True):
        assert preset_layer.saved_elements == pytest.approx(layer.saved_elements, rel=0.25)
        assert preset_layer.backward_reads_weights == layer.backward_reads_weights
        assert [(p.rows, p.inner, p.taps, p.channels_first) for p in preset_layer.products] == [
            (p.rows, p.inner, p.taps, p.channels_first) for p in layer.products
        ]
    saved = [sum(layer.saved_elements for layer in model.layers) for model in (counted, traced)]
    assert saved[0] == pytest.approx(saved[1], rel=0.02)


# -- samples that training changes at random ----------------------------------------------------------

SIDE = 8


class Noisy:
    """Points that training moves."""

    def __len__(self) -> int:
        return 24  # so that no step has a sample twice, which would be changed alike

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(index)), index % 3

    def sample(self, index: int, generator: torch.Generator) -> tuple[Tensor, int]:
        point, label = self[index]
        return point + torch.rand(4, generator=generator), label


def noisy() -> Noisy:
    return Noisy()


def points() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def job_with(**run: Any) -> Job:
    return Job(
        model={"source": f"{__name__}:points"},
        data={"source": f"{__name__}:noisy", "held_out": 0.0},
        train={"global_batch": 8, "steps": 3, "seed": 5, "evaluate_samples": 0},
        optimizer={"name": "sgd", "lr": 0.01},
        numerics={"precision": "float64"},
        run=run,
    )


def losses(rank: int, world: int, layout: str, job: Job, first: int = 0) -> list[float]:
    source = Source(model_source(job), loss_of(job), optimizer_of(job), "points")
    run = run_from(source, layout, job, rank, world)
    dataset = open_dataset(job)
    return [run.step(batch).loss for batch in batches(dataset, job, first_step=first)]


@pytest.mark.parametrize("layout", ["dp=2 microbatch=2 zero=3", "pp=2 microbatch=2"])
def test_every_layout_sees_the_same_changed_samples(layout: str) -> None:
    alone = losses(0, 1, "dp=1", job_with())
    for seen in pool(2).run(losses, layout, job_with()):
        assert seen == pytest.approx(alone, rel=1e-9)


def read(job: Job, first: int = 0, dataset: Dataset | None = None) -> list[Tensor]:
    found = []
    for batch in batches(dataset or open_dataset(job), job, first_step=first):
        batch.read_ahead(0, 1, 2)
        found += [batch.samples(indices)[0] for indices in batch.shares(0, 1, 2)]
    return found


def test_steps_change_samples_otherwise_and_a_resume_alike() -> None:
    whole, resumed, in_processes = read(job_with()), read(job_with(), 1), read(job_with(data_workers=1))
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], resumed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, in_processes, strict=True))
    moved = torch.cat(whole)
    again = [row - row.floor() for row in moved]
    assert len({tuple(row.tolist()) for row in again}) == len(again)  # each sample of each step has numbers of its own
    plain = Batch(0, np.arange(8), Noisy())
    assert torch.equal(plain.samples([3])[0], torch.full((1, 4), 3.0))  # what is evaluated is not changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shades")
    for number, name in enumerate(("dark", "light")):
        (root / name).mkdir()
        for index in range(6):
            pixels = np.full((12, 20, 3), 40 + 120 * number, np.uint8)
            pixels[:, :10] += np.uint8(10 * index)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


def images_job(folder: Path, **data: Any) -> Job:
    given = {"source": f"images:{folder}", "image_size": SIDE, "held_out": 0.25, **data}
    return Job(data=given, train={"global_batch": 4, "steps": 6, "seed": 1})


def test_a_folder_of_images_has_a_class_for_each_folder(folder: Path) -> None:
    job = images_job(folder, image_mean=[0.0], image_std=[1.0])
    train, held_out = open_dataset(job), open_dataset(job, "held_out")
    assert (len(train), len(held_out)) == (9, 3)
    labels = [train[index][1] for index in range(9)]
    assert set(labels) == {0, 1}
    for index, label in enumerate(labels):
        image, _ = train[index]
        assert image.shape == (3, SIDE, SIDE)
        assert image[:, :, -1].mean().item() == pytest.approx((40 + 120 * label) / 255, abs=1e-2)
    normal = open_dataset(images_job(folder, image_mean=[0.5], image_std=[0.25]))
    torch.testing.assert_close(normal[0][0], (train[0][0] - 0.5) / 0.25)


def test_images_are_cropped_and_flipped_by_the_step_and_never_where_they_are_held_out(folder: Path) -> None:
    job = images_job(folder, augment=["crop", "flip"], image_channels=1)
    first, second = read(job), read(job)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = torch.cat(read(images_job(folder, image_channels=1)))
    changed = torch.cat(first)
    assert changed.shape == plain.shape == (24, 1, SIDE, SIDE)
    is_flipped = changed[..., 0].mean((1, 2)) < changed[..., -1].mean((1, 2)) - 1e-3
    assert is_flipped.any()
    assert not is_flipped.all()
    held_out = open_dataset(job, "held_out")
    assert torch.equal(Batch(0, np.arange(3), held_out).samples([0])[0][0], held_out[0][0])


def test_settings_that_do_not_fit_and_a_folder_without_images_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"image_mean has 2 numbers, and images have 3 channels. Use 1 number, or 3"):
        images_job(folder, image_mean=[0.1, 0.2])
    with pytest.raises(JobError, match="a dataset of your own with a method sample"):
        images_job(folder, source="digits", augment=["flip"])
    with pytest.raises(DataError, match=r"has no folders. Use one folder a class"):
        open_dataset(images_job(tmp_path))
