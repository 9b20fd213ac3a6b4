"""Golden numbers: what plan, simulate and layouts write and print, through the command line.

`plans.json` holds the layouts that a plan found; how it searched is the subject of `laws/test_search.py`, which compares with all layouts.
Floats are kept to nine digits, wall-clock seconds not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.small import main

FOLDER = Path(__file__).parent
PLANS = [
    "preset:llama3-8b --devices 16 --hardware h100x8",
    "preset:llama3-70b --devices 64 --hardware h100x8",
    "preset:mixtral-8x7b --devices 16 --hardware h100x8",
    "preset:olmoe-1b-7b --devices 8 --hardware h200x8",
    "preset:deepseek-v2-lite --devices 8 --hardware h200x8",
    "preset:gpt2-xl --devices 8 --hardware a100-40x8",
    "preset:llama3.2-1b --devices 8 --hardware v100x8 --set numerics.precision=fp16",
    "preset:resnet50 --devices 8 --hardware v100x8 --set numerics.precision=float32",
    "preset:gpt3-1.3b --devices 16 --hardware b200x8 --fewest-devices",
    "preset:llama3-405b --devices 8 --hardware h100x8",
]
SLOW = [words for words in PLANS if re.match("preset:(llama3-8b|llama3-70b|mixtral|deepseek|llama3-405b)", words)]
"""Searches whose kinds of model and of machine others have too; in `make parity`."""
STEPS = [
    "preset:llama3-8b --hardware h100x8 --layout 'dp=2 tp=4 pp=4 schedule=interleaved virtual_stages=2 zero=1 "
    "microbatch=1 recompute=selective'",
    "preset:llama3-70b --hardware h100x8 --layout 'dp=4 tp=8 pp=2 schedule=zero-bubble microbatch=1'",
    "preset:mixtral-8x7b --hardware h200x8 --layout 'dp=8 ep=8 zero=1 pp=2 microbatch=1'",
    "preset:deepseek-v2-lite --hardware h100x8 --layout 'dp=8 ep=4 zero=3 microbatch=1'",
    "preset:gpt2-xl --hardware a100-40x8 --layout 'dp=4 zero=2 microbatch=4 recompute=full'",
    "preset:llama3.2-1b --hardware cpu-laptop --layout 'dp=2 pp=2 schedule=gpipe microbatch=8' "
    "--set numerics.precision=float32",
    "preset:resnet50 --hardware v100x8 --layout 'dp_replicate=2 dp_shard=4 zero=3' --set numerics.precision=fp16",
    "preset:llama3-8b --hardware gb200-nvl72 --layout 'dp=2 cp=4 zero=3 offload microbatch=1'",
]
TABLES = [
    "preset:gpt2 --devices 4",
    "preset:olmoe-1b-7b --devices 8",
    "preset:llama3.2-1b --devices 4 --switches",
    "preset:resnet50 --devices 8",
]
PRINTED = [
    "plan preset:gpt2 --devices 8 --hardware a100-40x8 --why dp=4",
    "plan preset:mixtral-8x22b --devices 16 --hardware h200x8 --days-for-tokens 2T --cost-per-hour 2.5",
    "plan preset:llama3-8b --devices 2 --hardware h100x8 --days-for-tokens 2T --cost-per-hour 2.5",
    "plan preset:llama3-8b --devices 1 --hardware h100x8",
    f"simulate {STEPS[1]}",
    "simulate preset:gpt2 --hardware h100x8 --layout 'dp=2 pp=2 schedule=zero-bubble microbatch=16' --program",
]
LONG = PRINTED[1]
"""A search that takes as long as all others printed; in `make parity`."""
KEPT_ROWS = 12
"""Of a long list, beside its count and its digest."""


def run(words: str) -> tuple[Any, str]:
    """Return what a verb writes and prints, for a preset in place of the job."""
    verb, model, *flags = shlex.split(words)
    given = {"model.source": model, "train.global_batch": "64", "numerics.precision": "bf16"}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        file = Path(folder, "record.json")
        status = main(verb, *settings, *flags, "--json", file)
        record = json.loads(file.read_text())
        if isinstance(record, dict):
            record.pop("job", None)  # what was given, and no figure
    text = re.sub(r" in [0-9.]+ s:", " in * s:", said.getvalue())
    return rounded(record), f"{text}exit status {status}\n"


def rounded(value: Any) -> Any:
    """Keep nine digits of each float."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def shortened(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Count the rows of each kind, and keep a digest and the first ones."""
    return {
        "counts": dict(sorted(Counter(str(row.get(key)) for row in rows).items())),
        "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        "first": rows[:KEPT_ROWS],
    }


def plan(words: str) -> dict[str, Any]:
    """Return the layouts that a plan found."""
    record, _ = run(f"plan {words}")
    left_out = ("considered", "rejections", "seconds")
    return {key: record[key] for key in record if key not in left_out}


def layouts(words: str) -> dict[str, Any]:
    """Return the table of layouts."""
    return shortened(run(f"layouts {words}")[0], "legal")


def printed(words: str) -> str:
    """Return a command of plan or simulate, and what it prints."""
    return f"$ samestep {words}\n{run(words)[1]}"


def known(name: str) -> Any:
    """Return what a file holds."""
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=[pytest.mark.nightly] * (words in SLOW)) for words in PLANS]
)
def test_plans_are_what_they_were(words: str) -> None:
    assert plan(words) == known("plans")[words]


@pytest.mark.parametrize("words", STEPS)
def test_simulated_steps_are_what_they_were(words: str) -> None:
    assert run(f"simulate {words}")[0] == known("steps")[words]


@pytest.mark.parametrize("words", TABLES)
def test_tables_of_layouts_are_what_they_were(words: str) -> None:
    assert layouts(words) == known("layouts")[words]


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=[pytest.mark.nightly] * (words == LONG)) for words in PRINTED]
)
def test_what_is_printed_is_what_it_was(words: str) -> None:
    parts = re.split(r"\n(?=\$ samestep )", (FOLDER / "printed.txt").read_text())
    assert printed(words) == parts[PRINTED.index(words)]
    assert len(parts) == len(PRINTED)


def write() -> None:
    """Write all numbers anew."""
    files = {
        "plans": {words: plan(words) for words in PLANS},
        "steps": {words: run(f"simulate {words}")[0] for words in STEPS},
        "layouts": {words: layouts(words) for words in TABLES},
    }
    for name, value in files.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
    (FOLDER / "printed.txt").write_text("\n".join(map(printed, PRINTED)))
