"""Mutants are small wrongs that a seed draws: each is one change, every room has its share, and a test that notices one is named."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import mutants

SAMPLE = textwrap.dedent(
    '''
    """A file of samestep."""
    import torch.distributed as dist

    CONSTANT = 1 + 2


    class Store:
        def send(self, parts, mesh):
            total = parts[0] + parts[1:self.count]
            for index in range(len(parts)):
                if index < 3 and total:
                    dist.all_reduce(total, group=mesh.groups["dp"])
            self.register_hook(self.send)
            self.known = None
            self.cache.clear()
            return -total
    '''
)
CHANGES = {
    "sign": {"parts[0] - parts[1:self.count]", "return total"},
    "off by one": {"parts[1:self.count + 1]", "range(len(parts) - 1)", "index <= 3"},
    "dropped term": {"total = parts[0]", "if index < 3:"},
    "missing reduction": {"pass"},
    "skipped hook": {"pass"},
    "wrong group": {"group=None", "mesh.groups['dp_replicate']"},
    "stale cache": {"pass"},
    "condition": {"if not (index < 3 and total):"},
}


@pytest.mark.parametrize("operator", mutants.OPERATORS)
def test_an_operator_changes_one_place_and_nothing_outside_of_functions(operator: str) -> None:
    whole = ast.unparse(ast.parse(SAMPLE)).splitlines()
    changes = []
    for site in (place for place in mutants.sites(SAMPLE) if place.operator == operator):
        text, before, after = mutants.mutated(SAMPLE, site)
        assert before != after
        assert site.function == "Store.send"
        changed = [line for line in difflib.ndiff(whole, text.splitlines()) if line[0] in "+-"]
        assert [line[0] for line in changed] == ["-", "+"], changed
        changes.append(changed[1])
    assert len(changes) == len(CHANGES[operator]) + (operator == "stale cache")
    assert all(any(words in line for line in changes) for words in CHANGES[operator])


def test_a_draw_is_that_of_its_seed_and_even_over_rooms_and_operators(tmp_path: Path) -> None:
    rooms = ("program", "runtime", "runtime/axes", "wings/plan")
    for room in rooms:
        (tmp_path / "src" / "samestep" / room).mkdir(parents=True)
        (tmp_path / "src" / "samestep" / room / "some.py").write_text(SAMPLE * (1 + 9 * (room == "program")))
    drawn = mutants.drawn(0, 24, tmp_path)
    assert drawn[:8] == mutants.drawn(0, 8, tmp_path)
    assert drawn != mutants.drawn(1, 24, tmp_path)
    assert len({site.name for site in drawn}) == 24
    assert Counter(mutants.room_of(site.file) for site in drawn) == dict.fromkeys(rooms, 6)
    times = Counter(site.operator for site in drawn)
    assert times.keys() == mutants.OPERATORS.keys()
    assert max(times.values()) - min(times.values()) <= 2
    assert len(mutants.drawn(0, 1000, tmp_path)) == 13 * len(mutants.sites(SAMPLE)), "each place once"


def test_the_first_test_that_notices_a_mutant_is_named(tmp_path: Path) -> None:
    source, tests = tmp_path / "src" / "samestep", tmp_path / "tests"
    source.mkdir(parents=True)
    tests.mkdir()
    (source / "__init__.py").write_text("")
    text = "def total(a, b):\n    return a + b\n"
    (source / "sums.py").write_text(text)
    (tests / "test_blind.py").write_text(
        "from samestep.sums import total\ndef test_nothing():\n    assert total(0, 0) == 0\n"
    )
    (tests / "test_sharp.py").write_text(
        "from samestep.sums import total\ndef test_sum():\n    assert total(1, 2) == 3\n"
    )
    (site,) = (place for place in mutants.sites(text, "sums.py") if place.operator == "sign")
    missed = mutants.outcome(site, ["tests/test_blind.py::test_nothing"], tmp_path)
    killed = mutants.outcome(site, ["tests/test_blind.py::test_nothing", "tests/test_sharp.py::test_sum"], tmp_path)
    late = mutants.outcome(site, ["tests/test_sharp.py::test_sum"], tmp_path, limit_s=0.0)
    assert (missed["killed_by"], missed["files"]) == ("", 1)
    assert killed["killed_by"] == "tests/test_sharp.py::test_sum"
    assert (killed["before"], killed["after"]) == ("a + b", "a - b")
    assert late["files"] == 0
    assert (source / "sums.py").read_text() == text, "the checkout is never changed"
