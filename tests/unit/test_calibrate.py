"""`samestep calibrate`: a profile refitted to measured steps finds what was planted, pulls to one, and refuses what cannot be."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import hardware
from samestep.cli import main
from samestep.errors import InputError
from samestep.planning.calibration.calibrate import FACTOR_ERROR, Calibration
from samestep.planning.calibration.factors import FACTORS, scaled
from samestep.planning.calibration.measured_steps import read_steps

_LAYOUTS = ("dp=16 zero=3", "dp=8 tp=2 zero=1 recompute=full", "dp=8")
_BATCH = 32


def _row(layout: str, **more: Any) -> dict[str, Any]:
    return {"model": "preset:gpt3-1.3b", "global_batch": _BATCH, "precision": "bf16", "layout": layout, **more}


def _written(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _measured_on(machine: hardware.Hardware) -> list[Mapping[str, Any]]:
    """Return rows as this machine would take them, and no other."""
    job = samestep.Job(
        model={"source": "preset:gpt3-1.3b"}, train={"global_batch": _BATCH}, numerics={"precision": "bf16"}
    )
    return [_row(one, step_s=samestep.simulate(job, one, machine).step_s) for one in _LAYOUTS]


@pytest.mark.parametrize(("name", "factor"), [("products", 1.6), pytest.param("links", 3.0, marks=pytest.mark.nightly)])
def test_what_was_planted_is_found(name: str, factor: float, tmp_path: Path) -> None:
    """Steps of a machine with one slower part lead to predictions of these steps, and of steps that no fit has seen."""
    slower = scaled(hardware.load("h100x8"), {name: factor})
    found = samestep.calibrate(_written(tmp_path / "rows.csv", _measured_on(slower)), "h100x8")
    assert not found.kept
    assert found.off("after") < 0.6 * found.off("before")
    assert found.off("left_out") < found.off("before")
    assert found.factors[name] > 1.1


def test_a_right_profile_stays(tmp_path: Path) -> None:
    """The prior pulls to one: steps that are predicted rightly move nothing, and nothing is written."""
    out = tmp_path / "mine.toml"
    found = samestep.calibrate(_written(tmp_path / "rows.csv", _measured_on(hardware.load("h100x8"))), "h100x8", out)
    assert found.kept
    assert set(found.factors) == set(FACTORS)
    assert all(value == 1.0 for value in found.factors.values())
    assert not out.exists()


def test_few_steps_move_a_factor_less_than_many(tmp_path: Path) -> None:
    """One odd step of many is not believed as much as all of them."""
    machine = hardware.load("h100x8")
    rows = _measured_on(machine)
    odd = [{**rows[0], "step_s": 1.5 * rows[0]["step_s"]}, *rows[1:]]
    every = [{**row, "step_s": 1.5 * row["step_s"]} for row in rows]

    def moved(found: Calibration) -> float:
        return sum(abs(math.log(value)) for value in found.factors.values())

    few = samestep.calibrate(_written(tmp_path / "odd.csv", odd), machine)
    many = samestep.calibrate(_written(tmp_path / "every.csv", every), machine)
    assert moved(few) < moved(many) < 3 * FACTOR_ERROR


def test_the_profile_that_is_written_predicts_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file can be read, says which numbers were refitted, and predicts what the table shows."""
    rows, out = (
        _written(tmp_path / "rows.csv", _measured_on(scaled(hardware.load("h100x8"), {"products": 1.5}))),
        tmp_path / "mine.toml",
    )
    assert main(["calibrate", str(rows), "--hardware", "h100x8", "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    machine = hardware.load(out)
    assert any(source.startswith("refitted: takes") for source in machine.sources.values())
    job = samestep.Job(
        model={"source": "preset:gpt3-1.3b"}, train={"global_batch": _BATCH}, numerics={"precision": "bf16"}
    )
    found = samestep.calibrate(rows, "h100x8")
    for step, layout in zip(found.steps, _LAYOUTS, strict=True):
        assert samestep.simulate(job, layout, machine).step_s == pytest.approx(step.after_s, rel=1e-6)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (_row("dp=8", step_s="fast"), "is no number"),
        (_row("dp=8", step_s="-3"), "is no speed"),
        (_row("dp=8", step_s="nan"), "is no speed"),
        (_row("dp=8", step_s="1e-4"), "of the peak of h100x8"),
        (_row("dp=8 tp=x", step_s="1"), "tp=x is not a whole number"),
        (_row("dp=8", devices=4, step_s="1"), "has 8 ranks"),
        (_row("", step_s="1"), "no layout"),
        (_row("dp=8", tp=2, step_s="1"), "both say the layout"),
        (_row("dp=8", step_s="1", tokens_per_s="9"), "step_s and tokens_per_s"),
        (_row("dp=8", step_time="1"), "no column of a measured speed"),
        (_row("dp=8", step_s="1", global_batsh="9"), "did you mean 'global_batch'"),
        ({**_row("dp=8", step_s="1"), "model": "preset:nope"}, "nope"),
    ],
)
def test_what_cannot_be_a_step_is_named(row: Mapping[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        samestep.calibrate(_written(tmp_path / "rows.csv", [row, row]), "h100x8")
    assert text in str(caught.value)


def test_speeds_say_the_same(tmp_path: Path) -> None:
    """Seconds, tokens a second and TFLOP/s of one step are read as the same seconds."""
    rows = _measured_on(scaled(hardware.load("h100x8"), {"products": 1.5}))
    tokens = 2048 * _BATCH
    others = []
    for row, devices in zip(rows, (16, 16, 8), strict=True):
        seconds = row["step_s"]
        others.append({**_row(row["layout"]), "tokens_per_s_per_device": tokens / seconds / devices})
    (one, _), (other, _) = (
        read_steps([_written(tmp_path / name, some)], None) for name, some in (("one.csv", rows), ("other.csv", others))
    )
    assert [step.step_s for step in other] == pytest.approx([step.step_s for step in one])
