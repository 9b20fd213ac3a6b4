"""benchmarks/plans.py and published_bests.py: the published layout beside a plan, and a row for each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plans
import published_bests
from foresight import read_rows
from plans import DEVICES, MODELS, recipe

ROW = {
    "id": "a-1", "source": "A paper", "model": "GPT-3 175B", "gpu": "H100", "precision": "FP8", "n_gpus": "512",
    "tp": "4", "pp": "8", "vp": "12", "cp": "1", "ep": "", "dp_replicate": "16", "dp_shard": "", "zero_stage": "1",
    "global_batch": "2048",
}  # fmt: skip


def test_the_recipe_is_that_of_the_nearest_number_of_like_devices() -> None:
    others = [{**ROW, "n_gpus": "384"}, {**ROW, "gpu": "A100"}, {**ROW, "model": "Llama 3 8B"}]
    found = recipe([*others, ROW], "gpt3-175b", 512)
    assert found == {
        "layout": "dp=16 zero=1 tp=4 pp=8 virtual_stages=12",
        "about": "512 H100, FP8, 2048 sequences",
        "source": "A paper",
        "id": "a-1",
    }
    assert recipe([ROW, {**ROW, "precision": "BF16", "id": "b"}], "gpt3-175b", 512) == {
        **found,
        "about": "512 H100, BF16, 2048 sequences",
        "id": "b",
    }
    assert recipe([ROW], "gpt3-175b", 64) is None


def test_every_model_has_its_rows() -> None:
    rows = json.loads(plans.ROWS.read_text())
    assert [(row["model"], row["devices"]) for row in rows] == [(one, count) for one in MODELS for count in DEVICES]
    assert len(plans.markdown().splitlines()) == len(rows) + 4


def test_of_each_source_model_and_device_the_fastest_row_is_a_best() -> None:
    rows = [one for one in read_rows(plans.ROWS.parent)[0] if one["id"] in ("bigsci-0049", "bigsci-0050")]
    slow, fast = sorted(rows, key=lambda one: float(one["metric_step_time_s"]), reverse=True)
    assert slow["model"] == fast["model"]
    assert published_bests.bests([slow, fast]) == [fast]
    assert published_bests.bests([fast, {**slow, "file": "another"}]) == [fast, {**slow, "file": "another"}]
    assert published_bests.bests([{**fast, "cp": "2"}, {**fast, "n_gpus": "1", "tp": "1", "pp": "1"}]) == []


def test_two_prices_answer_one_question() -> None:
    (row,) = [one for one in read_rows(plans.ROWS.parent)[0] if one["model"] == "MPT-760m"][:1]
    found = published_bests.priced(row)
    assert found is not None
    assert found["devices"] == 8
    assert found["theirs"]["fits"]
    assert found["best"]["step_s"] <= found["theirs"]["step_s"] * 1.001


def test_no_printed_layout_of_the_table_is_faster_than_what_is_recommended() -> None:
    rows = json.loads(published_bests.ROWS.read_text())
    assert len(published_bests.markdown().splitlines()) == len(rows) + 2 > 100
    for row in rows:
        if row["theirs"]["fits"]:
            assert row["best"]["step_s"] < row["theirs"]["step_s"] * (1 + published_bests.ALIKE), row
