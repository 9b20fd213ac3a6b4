"""Golden verdicts: what `verify` compares, allows and says, of clean layouts and of planted bugs.

What is within its allowance is the order of sums, which depends on the machine, and is not kept; nor are limits that
were measured. Errors of a planted bug are kept to two digits.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests import pool
from tests.proof.faults import FAULTS, prove
from tests.small import main, settings

FILE = Path(__file__).parent / "verdicts.json"
CLEAN = [("qwen3", "dp=2 tp=2"), ("qwen3_moe", "dp=2 ep=2 zero=1")]
PLANTED = ["the_norm_is_that_of_the_shard", "tied_weights_are_counted_twice", "split_off_weight_gradients_are_lost"]
COMMANDS = ["pp=2 schedule=zero-bubble microbatch=4"]


def verdicts() -> dict[str, Any]:
    """Return the records of all proofs, without what is noise."""
    found = {f"{model}, {layout}": prove(model, layout).to_record() for model, layout in CLEAN}
    for name in PLANTED:
        fault = FAULTS[name]
        found[name] = prove(fault.code, fault.layout, name, fault.own_precision, **fault.job).to_record()
    with tempfile.TemporaryDirectory() as folder:
        for layout in COMMANDS:
            file = Path(folder, "verdict.json")
            assert main("verify", *settings(), "--layout", layout, "--json", file) == 0
            found[f"samestep verify --layout {layout!r}"] = json.loads(file.read_text())
    return {name: _without_noise(record) for name, record in found.items()}


def _without_noise(record: dict[str, Any]) -> dict[str, Any]:
    record["seconds"] = "*"
    record["explanation"] = _of_some_rank(record["explanation"])
    for check in record["checks"]:
        check["where"] = _of_some_rank(check["where"])
        check["error"] = "within" if check["passed"] else f"{check['error']:.1e}"
        if " in " in check["what"]:
            check["allowance"] = "measured"
    return json.loads(json.dumps(record))


def _of_some_rank(words: str) -> str:
    """Return a text without the numbers of ranks: where several are equally wrong, roundings decide which is named."""
    return re.sub(r"rank \d+", "rank *", words)


def test_verdicts_are_what_they_were() -> None:
    assert verdicts() == json.loads(FILE.read_text())


def write() -> None:
    """Prove all anew."""
    FILE.write_text(json.dumps(verdicts(), indent=1) + "\n")
    pool.close_all()
