"""Golden programs: what a change of the strategies, the clock or the memory model does to known cases.

A change here is either meant, and then `python -m tests.golden` writes the files anew and the difference is read in
review; or it is not, and the test has caught it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.models.spec import from_json, to_json
from tests.golden.cases import FILES
from tests.golden.product import Case, expanded_text_of, text_of

FOLDER = Path(__file__).parent
LAYOUTS = [
    "dp=1 microbatch=8",
    "dp=2",
    "dp=4 microbatch=4 recompute=full",
    "dp=4 reduce=root",
    "dp=4 zero=1",
    "dp=4 zero=2 microbatch=4",
    "dp=4 zero=3 microbatch=4 accumulate=full",
    "dp=4 zero=3 recompute=selective",
    "dp_replicate=2 dp_shard=2",
    "cp=4 microbatch=16",
    "dp=2 cp=2 zero=3 recompute=full",
    "tp=2 recompute=full",
    "tp=2 sequence_parallel recompute=full",
    "dp=2 tp=2 zero=3 sequence_parallel microbatch=4",
]


def predicted() -> str:
    """Write out every op of each layout of a traced model, and what the clock and the memory model make of it."""
    model = from_json((FOLDER / "llama.json").read_text())
    return "".join(expanded_text_of(model, text) for text in LAYOUTS)


def test_predictions_are_what_they_were() -> None:
    assert predicted() == (FOLDER / "programs.txt").read_text()


@pytest.mark.parametrize("name", FILES)
def test_programs_are_what_they_were(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text().split("\n\n")
    assert [case.title for case in FILES[name]] == [text.splitlines()[0] for text in expected]
    for case, text in zip(FILES[name], expected, strict=True):
        assert _titled(case) == text.rstrip("\n")


def _titled(case: Case) -> str:
    return f"{case.title}\n{text_of(case)}"


def write() -> None:
    """Trace the default job's model, and write all programs."""
    from samestep import job_files as jobs
    from samestep.models import catalog

    spec = catalog.model_spec(jobs.load(FOLDER.parents[1] / "jobs" / "default.toml"))
    (FOLDER / "llama.json").write_text(json.dumps(json.loads(to_json(spec)), indent=1) + "\n")
    (FOLDER / "programs.txt").write_text(predicted())
    for name, cases in FILES.items():
        (FOLDER / f"{name}.txt").write_text("\n\n".join(map(_titled, cases)) + "\n")
