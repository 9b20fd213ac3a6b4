"""What `samestep plan` recommends for well-known models, beside what published recipes chose: docs/plans.md.

    python benchmarks/plans.py [--rows DIR] [--only MODEL ...]     plans, and writes benchmarks/rows/plans.json
    python docs/tables.py                                          writes the table

Every model has the batch that it was trained with, in bf16, on nodes of eight H100. A recipe is the row of DIR (files of
published measurements, `foresight.py` has their form) for the same model on H100, H200 or H800 whose number of devices is nearest,
at most twice or half as many; in bf16 where there is one. Without DIR the recipes that the file has are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Row, whole
from foresight import read_rows
from published_models import preset_of

from samestep import Job, hardware
from samestep.models.published import as_published
from samestep.output.text import gib
from samestep.wings.plan.plan import KEPT_FREE, plan
from samestep.wings.plan.simulation.simulate import Prediction, simulate

ROWS = Path(__file__).parent / "rows" / "plans.json"
MACHINE = "h100x8"
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "gpt3-175b", "deepseek-v3")
DEVICES = (8, 64, 512, 4096)
RECOMPUTE = ("none", "selective", "full")
_LIKE = ("H100", "H200", "H800")


def recommended(model: str, devices: int) -> dict[str, Any]:
    """Return the best layout and the runner-up of a model, and ZeRO-3 over all devices."""
    job, _ = as_published(Job(model={"source": f"preset:{model}"}))
    found = plan(job, devices, MACHINE, top=2)
    best = [_figures(one) for one in found.best[:2]]
    sharded = _all_sharded(job, devices) if devices == max(DEVICES) else None
    return {"model": model, "devices": devices, "batch": job.train.global_batch, "best": best, "sharded": sharded}


def _all_sharded(job: Job, devices: int) -> dict[str, Any] | None:
    """Return ZeRO-3 over all devices, the fastest that fits of any micro-batch and recompute; None if none fits."""
    share = -(-job.train.global_batch // devices)
    sizes = {share, *(2**power for power in range(share.bit_length()))}
    words = [f"dp={devices} zero=3 microbatch={size} recompute={kind}" for size in sizes for kind in RECOMPUTE]
    machine = replace(hardware.load(MACHINE), kept_free=KEPT_FREE)
    found = [simulate(job, word, machine) for word in words]
    fits = [one for one in found if one.fits]
    return _figures(min(fits, key=lambda one: one.step_s)) if fits else None


def _figures(one: Prediction) -> dict[str, Any]:
    return {"layout": str(one.layout), "step_s": one.step_s, "mfu": one.mfu, "peak_bytes": one.peak.total}


def recipe(rows: Iterable[Row], model: str, devices: int) -> dict[str, str] | None:
    """Return the published layout of a model on the nearest number of like devices, and where it is printed."""
    like = [row for row in rows if preset_of(row["model"]) == model and any(name in row["gpu"] for name in _LIKE)]
    like = [row for row in like if whole(row, "tp") and whole(row, "global_batch")]
    like = [row for row in like if 0.5 <= whole(row, "n_gpus") / devices <= 2]
    if not like:
        return None
    near = min(like, key=lambda row: (abs(math.log(whole(row, "n_gpus") / devices)), "BF16" not in row["precision"]))
    about = (
        f"{whole(near, 'n_gpus')} {near['gpu'].split('-')[0]}, {near['precision']}, {near['global_batch']} sequences"
    )
    return {"layout": _layout(near), "about": about, "source": near["source"], "id": near["id"]}


def _layout(row: Row) -> str:
    """Return a row's degrees in the words of a layout; `dp` of all data ranks, as they are printed."""
    replicas, shards = whole(row, "dp_replicate", 1), whole(row, "dp_shard", 1)
    dp = f"dp_replicate={replicas} dp_shard={shards}" if min(replicas, shards) > 1 else f"dp={replicas * shards}"
    degrees = [f"{axis}={whole(row, axis)}" for axis in ("tp", "pp", "cp", "ep") if whole(row, axis) > 1]
    zero = [f"zero={whole(row, 'zero_stage')}"] * (whole(row, "zero_stage") > 0)
    virtual = [f"virtual_stages={whole(row, 'vp')}"] * (whole(row, "vp") > 1)
    return " ".join([dp, *zero, *degrees, *virtual])


def markdown(path: Path = ROWS) -> str:
    """Return the table of the rows that were written."""
    head = ("model", "sequences", "devices", "recommended", "s per step", "MFU", "GiB", "runner-up", "s", "published")
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: | --- |"]
    sources = []
    for row in json.loads(path.read_text()):
        lines.append(f"| {' | '.join(_cells(row))} |")
        if row["recipe"]:
            sources.append(row["recipe"]["source"])
    return "\n".join([*lines, "", f"Recipes: {'; '.join(dict.fromkeys(sources))}."])


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    best, recipe_of = row["best"], row["recipe"]
    published = f"`{recipe_of['layout']}` ({recipe_of['about']})" if recipe_of else ""
    first = (f"`{row['model']}`", f"{row['batch']:,}", f"{row['devices']:,}")
    if not best:
        return (*first, "nothing fits", *[""] * 5, published)
    times = [f"`{best[0]['layout']}`", f"{best[0]['step_s']:.3g}", f"{best[0]['mfu']:.0%}", gib(best[0]["peak_bytes"])]
    second = (f"`{best[1]['layout']}`", f"{best[1]['step_s']:.3g}") if len(best) > 1 else ("", "")
    return (*first, *times, *second, published)


def all_sharded(path: Path = ROWS) -> str:
    """Return the table of ZeRO-3 over all devices beside the best layout, on the largest number of devices."""
    lines = [
        "| model | devices | all sharded | s per step | the best: s per step |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for row in json.loads(path.read_text()):
        if row["best"] and row["sharded"]:
            cells = f"`{row['sharded']['layout']}` | {row['sharded']['step_s']:.3g} | {row['best'][0]['step_s']:.3g}"
            lines.append(f"| `{row['model']}` | {row['devices']:,} | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan every model on every number of devices, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, metavar="DIR", help="published measurements")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args(arguments)
    kept = {(row["model"], row["devices"]): row for row in (json.loads(ROWS.read_text()) if ROWS.exists() else [])}
    published = read_rows(given.rows)[0] if given.rows else None
    for model in given.only:
        for devices in DEVICES:
            before = kept.get((model, devices), {}).get("recipe")
            of = before if published is None else recipe(published, model, devices)
            kept[model, devices] = {**recommended(model, devices), "recipe": of}
            print(" | ".join(_cells(kept[model, devices])), flush=True)
            rows = [kept[key] for one in MODELS for count in DEVICES if (key := (one, count)) in kept]
            ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
