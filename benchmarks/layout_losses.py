"""Losses of one job in twelve layouts, and the errors of `samestep verify` in four: the rows of two pictures of the documents.

python benchmarks/layout_losses.py          trains and verifies, and writes rows/layout_losses.json; a few minutes on two cores
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import samestep

ROOT = Path(__file__).parent.parent

KEPT = Path(__file__).parent / "rows" / "layout_losses.json"
LAYOUTS = (
    "dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp_replicate=2 dp_shard=2", "tp=2", "tp=2 sequence_parallel",
    "cp=2", "pp=2 microbatch=8", "pp=2 microbatch=8 schedule=zero-bubble", "dp=2 zero=3 recompute=full microbatch=4",
)  # fmt: skip
VERIFIED = ("dp=2 zero=3", "tp=2", "pp=2 microbatch=8", "cp=2")
STEPS = 100
SETTINGS = (
    f"train.steps={STEPS}", "train.evaluate_samples=0", "train.sample_tokens=0", "checkpoint.every=0", "model.config.num_hidden_layers=2",
    "train.watch_every=0",
)  # fmt: skip


def main() -> None:
    """Train and verify, and write the rows."""
    job = samestep.load(ROOT / "jobs" / "default.toml", SETTINGS)
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, layout in enumerate(LAYOUTS):
            out = Path(folder) / str(index)
            samestep.train(job, layout=layout, out=out)
            lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses[layout] = [json.loads(line)["loss"] for line in lines]
    errors = {layout: _errors(job, layout) for layout in VERIFIED}
    KEPT.write_text(json.dumps({"losses": losses, "errors": errors}, indent=1) + "\n", encoding="utf-8")


def _errors(job: samestep.Job, layout: str) -> dict[str, float]:
    """Return the error of each check that has an allowance, in float64."""
    verdict = samestep.verify(job, layout=layout, steps=2, precision="float64")
    assert verdict.proven, verdict.to_text()
    return {check.what: check.error for check in verdict.checks}


if __name__ == "__main__":
    main()
