"""Images: the job `jobs/vision.toml` gives one worker's losses and accuracy in every layout, and needs four small workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import samestep
from samestep.building.initial_values import blueprint
from samestep.building.resnet import resnet
from samestep.datasets import open_dataset
from samestep.models.presets import preset
from samestep.tracing.trace import trace
from tests import small

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
    for layout in ("dp=4 zero=1",):
        found = trained(tmp_path / layout, "--layout", layout)
        assert small.losses(tmp_path / layout) == pytest.approx(small.losses(tmp_path / "one"), rel=1e-7), layout
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
