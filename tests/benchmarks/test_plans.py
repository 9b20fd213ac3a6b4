"""benchmarks/plans.py: the published layout beside a plan, and a row for each of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plans
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
