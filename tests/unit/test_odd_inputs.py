"""A slice of the sweep over odd and damaged inputs: each is read as its own library reads it, or refused in a line that names it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from samestep.errors import InputError
from tests import odd_inputs
from tests.odd_inputs import READERS, Odd, verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS)
def test_odd_inputs_are_read_right_or_refused_and_nearly_every_refusal_names_row_or_key(
    reader: str, tmp_path: Path
) -> None:
    sums = odd_inputs.swept(tmp_path, 0, 60, 600.0, [reader], limits=False)[reader]
    assert sums.is_good, (sums.faults, sums.unnamed)
    assert sums.refused > 10 or reader in odd_inputs.JUDGED_BY_THEMSELVES


def test_the_same_number_draws_the_same_input(tmp_path: Path) -> None:
    one, other = (READERS["profile"](tmp_path, random.Random("0 profile 3")).what for _ in range(2))
    assert one == other


def _odd(read: object, twin: object = None) -> Odd:
    def raised(error: object) -> object:
        if isinstance(error, Exception):
            raise error
        return error

    return Odd("flip", lambda: raised(read), lambda: 1, lambda: raised(twin), ("a.toml",), ("steps",))


@pytest.mark.parametrize(
    ("odd", "fault", "is_named"),
    [
        (_odd(1), "", True),
        (_odd(2), "read '2' for '1'", True),
        (_odd(KeyError("x")), "KeyError", True),
        (_odd(InputError("some-code", "a.toml: steps = 0")), "", True),
        (_odd(InputError("some-code", "a.toml: something")), "", False),
        (_odd(InputError("some-code", "a.toml: steps\nand more")), "not one line", True),
        (_odd(1, InputError("some-code", "a.toml: it is refused")), "the unharmed twin fails", True),
    ],
)
def test_what_is_wrong_is_found(odd: Odd, fault: str, is_named: bool) -> None:
    found = verdict(odd)
    assert fault in found.fault
    assert bool(found.fault) is bool(fault)
    assert found.is_named is is_named
