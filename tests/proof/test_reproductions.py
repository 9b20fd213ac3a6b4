"""Code that people write is equal to one device in every layout, or refused by name before it trains."""

from __future__ import annotations

import pytest

from tests.proof.reproductions import EITHER, EQUAL, REPRODUCTIONS, Outcome, Reproduction, outcome

EVERY = ("every layout",)
PENDING: dict[str, tuple[str, ...]] = {
    "x0 residual": EVERY,  # item 2
    "code between blocks": EVERY,  # item 2
    "conditioning by a trained embedding": EVERY,  # item 2
    "sum of all hidden states": EVERY,  # item 2
    "Zamba2": EVERY,  # item 2
    "blocks of several widths": EVERY,  # item 2
    "frozen first stage": EVERY,  # item 2
    "blocks that give tuples": EVERY,  # item 2
    "bf16 stream in float64": EVERY,  # item 2
    "fp16 stream in float64": EVERY,  # item 2
    "float32 stream in bf16": EVERY,  # item 2
    "weight used twice": ("dp=2 pp=2 zero=1 microbatch=1 schedule=zero-bubble",),  # item 3
    "linear called by keyword": ("dp=1 pp=2 microbatch=2 schedule=zero-bubble",),  # item 3
    "linear under its own autocast": EVERY,  # item 3
    "rule that starts late": EVERY,  # item 5
    "token shift": EVERY,  # item 1
    "mean over padding": EVERY,  # item 1
    "weights clamped by hand": ("dp=1 offload",),  # item 4
    "experts that weigh by themselves": EVERY,  # item 5
    "experts without rows": EVERY,  # item 5
    "counters in an optimizer's groups": EVERY,  # item 6
    "teacher that follows": EVERY,  # item 6
    "buffers of later stages": ("dp=1 pp=2 microbatch=8",),  # item 6
    "loss scale of the first sample": EVERY,  # item 6
}
"""Cases that are still wrong, with their layouts."""


def _cases() -> list[object]:
    return [
        pytest.param(case, layout, marks=_marks(case, layout), id=f"{case.name} under {layout}")
        for case in REPRODUCTIONS
        for layout in case.layouts
    ]


def _marks(case: Reproduction, layout: str) -> list[pytest.MarkDecorator]:
    pending = PENDING.get(case.name, ())
    if pending != EVERY and layout not in pending:
        return []
    return [pytest.mark.xfail(strict=True, reason=f"item {case.item}: {case.cause or 'legal code'}")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "layout"), _cases())
def test_code_of_a_user_is_equal_or_refused_by_name(case, layout):
    found = outcome(case, layout)
    assert found.fits(case), f"{found.kind}: {found.text}"


def test_a_refusal_counts_only_by_name_and_where_the_code_is_not_legal():
    wrong = REPRODUCTIONS[0]
    legal = next(case for case in REPRODUCTIONS if case.must == EQUAL)
    assert wrong.must == EITHER
    assert Outcome("refused", f"{wrong.names[0]} is read by a later stage").fits(wrong)
    assert not Outcome("refused", "something else").fits(wrong)
    assert not Outcome("refused", "blocks").fits(legal)
    assert not Outcome("different").fits(wrong)
    assert not Outcome("failed", wrong.names[0]).fits(wrong)


def test_what_is_pending_names_cases():
    layouts = {case.name: case.layouts for case in REPRODUCTIONS}
    assert PENDING.keys() <= layouts.keys()
    assert all(pending == EVERY or {*pending} <= {*layouts[name]} for name, pending in PENDING.items())
    assert len(layouts) == len(REPRODUCTIONS)
