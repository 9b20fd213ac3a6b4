"""`samestep calibrate`: a profile refitted to measured steps finds what was planted, pulls to one, and refuses what cannot be."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import hardware
from samestep.cli import main
from samestep.errors import InputError
from samestep.wings.plan.calibrate import FACTOR_ERROR, FACTORS, Calibration, scaled
from samestep.wings.plan.measured_steps import read_steps

_LAYOUTS = ("dp=16 zero=3", "dp=8 tp=2 zero=1 recompute=full", "dp=8")
_BATCH = 32
_JOB = samestep.Job(
    model={"source": "preset:gpt3-1.3b"}, train={"global_batch": _BATCH}, numerics={"precision": "bf16"}
)


def _row(layout: str, **more: Any) -> dict[str, Any]:
    return {"model": "preset:gpt3-1.3b", "global_batch": _BATCH, "precision": "bf16", "layout": layout, **more}


def _written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@functools.cache
def _measured(slower: str = "", factor: float = 1.0) -> tuple[Mapping[str, Any], ...]:
    """Return rows as h100x8 would take them if one part of it were slower, and no other."""
    machine = scaled(hardware.load("h100x8"), {slower: factor} if slower else {})
    return tuple(_row(one, step_s=samestep.simulate(_JOB, one, machine).step_s) for one in _LAYOUTS)


@pytest.mark.parametrize(("name", "factor"), [("products", 1.6), pytest.param("links", 3.0, marks=pytest.mark.nightly)])
def test_what_was_planted_is_found_and_the_profile_that_is_written_predicts_it(
    name: str, factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a machine with one slower part lead to predictions of these steps, and of steps that no fit has seen.

    The file can be read, says which numbers were refitted, and predicts what the table shows.
    """
    rows, out = _written(tmp_path / "rows.csv", _measured(name, factor)), tmp_path / "mine.toml"
    found = samestep.calibrate(rows, "h100x8")
    assert not found.kept
    assert found.off("after") < 0.6 * found.off("before")
    assert found.off("left_out") < found.off("before")
    assert found.factors[name] > 1.1
    assert main(["calibrate", str(rows), "--hardware", "h100x8", "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    machine = hardware.load(out)
    assert any(source.startswith("refitted: takes") for source in machine.sources.values())
    for step, layout in zip(found.steps, _LAYOUTS, strict=True):
        assert samestep.simulate(_JOB, layout, machine).step_s == pytest.approx(step.after_s, rel=1e-6)


def test_a_right_profile_stays(tmp_path: Path) -> None:
    """The prior pulls to one: steps that are predicted rightly move nothing, and nothing is written."""
    out = tmp_path / "mine.toml"
    found = samestep.calibrate(_written(tmp_path / "rows.csv", _measured()), "h100x8", out)
    assert found.kept
    assert set(found.factors) == set(FACTORS)
    assert all(value == 1.0 for value in found.factors.values())
    assert not out.exists()


def test_few_steps_move_a_factor_less_than_many(tmp_path: Path) -> None:
    """One odd step of many is not believed as much as all of them."""
    rows = _measured()
    odd = [{**rows[0], "step_s": 1.5 * rows[0]["step_s"]}, *rows[1:]]
    every = [{**row, "step_s": 1.5 * row["step_s"]} for row in rows]

    def moved(found: Calibration) -> float:
        return sum(abs(math.log(value)) for value in found.factors.values())

    few = samestep.calibrate(_written(tmp_path / "odd.csv", odd), "h100x8")
    many = samestep.calibrate(_written(tmp_path / "every.csv", every), "h100x8")
    assert moved(few) < moved(many) < 3 * FACTOR_ERROR


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (_row("dp=8", step_s="fast"), "must be a number"),
        (_row("dp=8", step_s="-3"), "must be a speed above 0"),
        (_row("dp=8", step_s="nan"), "must be a speed above 0"),
        (_row("dp=8", step_s="1e-4"), "of the peak of h100x8"),
        (_row("dp=8 tp=x", step_s="1"), "tp must be a whole number, got tp=x"),
        (_row("dp=8", devices=4, step_s="1"), "has 8 ranks"),
        (_row("", step_s="1"), "no layout"),
        (_row("dp=8", tp=2, step_s="1"), "both set the layout"),
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": ""}, "no model. Use a column `model`"),
        ({"global_batch": ""}, "no global_batch. Use a column"),
        ({"precision": ""}, "no precision. Use a column"),
        ({"step_s": 150.0}, "milliseconds"),
        ({"step_s": 9.0}, "No profile is that far off"),
        ({"layout": "dp=8 zero=2", "model": "preset:llama3-405b", "step_s": 200.0}, "states alone are"),
        ({"hardware": "a100-80x8"}, "was measured on a100-80x8"),
    ],
)
def test_a_line_that_no_machine_explains_is_named_alone(change: Mapping[str, Any], text: str, tmp_path: Path) -> None:
    """What a default would fill in, a unit, a layout that does not fit, another machine: the line is named, and the others are not."""
    rows = _measured()
    wrong = {**rows[0], "layout": "dp=8 zero=3", "step_s": 2 * rows[0]["step_s"], **change}
    whole = [{**dict.fromkeys(wrong, ""), **row} for row in (*rows, wrong)]
    with pytest.raises(InputError) as caught:
        samestep.calibrate(_written(tmp_path / "rows.csv", whole), "h100x8")
    assert text in str(caught.value)
    assert [line.partition(" ")[0].rstrip(":") for line in str(caught.value).splitlines()] == [f"{tmp_path}/rows.csv:5"]


def test_what_a_line_leaves_out_is_given_by_settings_and_by_no_default_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{name: row[name] for name in ("layout", "step_s")} for row in _measured()]
    path = str(_written(tmp_path / "rows.csv", rows))
    given = ["--set", "model.source=preset:gpt3-1.3b", "--set", f"train.global_batch={_BATCH}"]
    assert main(["calibrate", path, "--hardware", "h100x8", *given]) == 2
    assert "no precision" in capsys.readouterr().err
    assert main(["calibrate", path, "--hardware", "h100x8", *given, "--set", "numerics.precision=bf16"]) == 1
    assert "no sequence_length is given for preset:gpt3-1.3b: 2,048 tokens" in capsys.readouterr().out


def test_measurements_of_one_step_are_one_step(tmp_path: Path) -> None:
    """Repeated lines weigh as one, none is fitted and tested at once, and two that disagree are named."""
    rows = [_row(layout, step_s=1.0) for layout in _LAYOUTS]
    noisy = [{**rows[0], "step_s": seconds} for seconds in (0.97, 1.01, 1.04)]
    steps, said = read_steps([_written(tmp_path / "repeated.csv", [*noisy, *rows[1:]])], None)
    assert [step.step_s for step in steps] == [1.01, 1.0, 1.0]
    assert [step.origin.endswith(":2 and 2 more") for step in steps] == [True, False, False]
    assert any("5 measurements are 3 steps" in line for line in said)
    other = {**rows[1], "step_s": 1.6}
    with pytest.raises(InputError, match=r"rows\.csv:3 and .*rows\.csv:5 are the same job and layout"):
        samestep.calibrate(_written(tmp_path / "rows.csv", [*rows, other]), "h100x8")


@pytest.mark.parametrize(
    ("separator", "head"), [(",", "\ufeff"), (";", "# of my cluster\n\n"), ("\t", "\n"), (";", "")]
)
def test_a_table_is_read_as_spreadsheets_write_it(separator: str, head: str, tmp_path: Path) -> None:
    """Separators, a mark of the byte order, comments and empty lines change nothing, and lines keep their numbers."""
    lines = ["model,global_batch,precision,layout,step_s", "", "# the first day"]
    lines += [f"preset:gpt2,8,bf16,dp=8 zero={zero},0.5" for zero in (1, 3)]
    path = tmp_path / "rows.csv"
    path.write_text(head + "\n".join(lines).replace(",", separator) + "\n", encoding="utf-8")
    steps, _ = read_steps([path], None)
    skipped = head.count("\n")
    assert [(str(one.layout), one.step_s) for one in steps] == [("dp=8 zero=1", 0.5), ("dp=8 zero=3", 0.5)]
    assert [one.origin for one in steps] == [f"{path}:{skipped + 4}", f"{path}:{skipped + 5}"]


def test_steps_of_several_machines_are_no_steps_of_one(tmp_path: Path) -> None:
    rows = [{**row, "hardware": name} for row, name in zip(_measured(), ("mine", "mine", "yours"), strict=True)]
    with pytest.raises(InputError, match="several machines: "):
        samestep.calibrate(_written(tmp_path / "rows.csv", rows), "h100x8")


def test_speeds_say_the_same(tmp_path: Path) -> None:
    """Seconds, tokens a second and TFLOP/s of one step are read as the same seconds."""
    rows = _measured("products", 1.6)
    tokens = 2048 * _BATCH
    others = []
    for row, devices in zip(rows, (16, 16, 8), strict=True):
        seconds = row["step_s"]
        others.append({**_row(row["layout"]), "tokens_per_s_per_device": tokens / seconds / devices})
    (one, _), (other, _) = (
        read_steps([_written(tmp_path / name, some)], None) for name, some in (("one.csv", rows), ("other.csv", others))
    )
    assert [step.step_s for step in other] == pytest.approx([step.step_s for step in one])
