"""Rows take turns in `make test`: a commit runs an eighth of the rows of a function, the next one perhaps another eighth.

The rows of one test function hold the same claim of other cases: other code, another optimizer, another spelling. Every commit runs each
function, each value of a parameter that has few, and each setting of a layout that `test_products.py` lacks; of the rows that hold
nothing else it runs those whose turn it is. Eight turns run every row, `make parity` runs all, and so does whoever runs a file by itself.
The rows of `DEAR` take turns; a test that is marked `every_turn` takes none.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

from tests import covering

TURNS = 8
FEW = 2
"""How many values a parameter has at most of which every turn runs each."""
DEAR = (
    "parity", "code", "docs/test_ports.py", "docs/test_port_examples.py", "docs/test_rejected_code.py",
    "benchmarks/test_foresight.py", "benchmarks/test_host.py",
    "crashes/test_canary.py", "crashes/test_hangs.py", "crashes/test_other_data.py", "crashes/test_watch.py",
    "device/test_layouts.py", "device/test_waits.py",
    "launchers/test_variables.py",
    "laws/test_candidates.py", "laws/test_codecs.py", "laws/test_program.py", "laws/test_search.py",
    "ledger/test_data_axis.py", "ledger/test_peaks.py", "ledger/test_repeated_products.py",
    "proof/test_plain_loop.py", "proof/test_replicas_apart.py", "proof/test_verify.py",
    "security/test_foreign_models.py", "security/test_strangers_at_the_rendezvous.py",
    "unit/test_calibrate.py", "unit/test_chat.py", "unit/test_cli.py", "unit/test_compiled_blocks.py", "unit/test_compiled_loss.py", "unit/test_doctor.py",
    "unit/test_door.py", "unit/test_errors.py", "unit/test_evaluations.py", "unit/test_foreign_traces.py", "unit/test_fuzz.py", "unit/test_graph_trial.py",
    "unit/test_json.py", "unit/test_launch.py", "unit/test_lengths.py", "unit/test_loading.py", "unit/test_locality.py", "unit/test_measure.py",
    "unit/test_packed_states.py", "unit/test_plan.py", "unit/test_presets.py", "unit/test_pretrained.py", "unit/test_recorder.py", "unit/test_rows.py",
    "unit/test_owned_models.py", "unit/test_split_masters.py", "unit/test_token_moves.py", "unit/test_trace.py", "unit/test_traced_model.py",
    "unit/test_update.py", "unit/test_verbs.py",
)  # fmt: skip
"""The two folders where a row is a run of several ranks, and files that use 7 s of processor time or more where every row runs.

Planted faults, reverted mends, reproductions, goldens, seams and documents run in every turn, whatever they cost, but for the long
galleries: ports and rejected code.
"""


def out_of_turn(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Return the tests that wait for another turn than that of a number, such as a commit's; nightly tests take none."""
    of_files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _takes_turns(item):
            of_files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    return [item for of_file in of_files.values() for item in _waiting(of_file, number % TURNS)]


def _takes_turns(item: pytest.Item) -> bool:
    if not covering.values_of(item) or any(map(item.get_closest_marker, ("nightly", "every_turn"))):
        return False
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    return path in DEAR or path.partition("/")[0] in DEAR


def _waiting(of_file: list[pytest.Item], turn: int) -> list[pytest.Item]:
    rows = Counter[str]()
    values_of: dict[tuple[str, str], set[Hashable]] = {}
    words: dict[int, set[Hashable]] = {}
    for item in of_file:
        for name, value in covering.cases_of(item):
            values_of.setdefault(name, set()).add(value)
    for index, item in enumerate(of_file):
        function = covering.function_of(item)
        words[index] = {function, *covering.settings_beyond_products(item)}
        words[index] |= {(name, value) for name, value in covering.cases_of(item) if len(values_of[name]) <= FEW}
        if (rows[function] + zlib.crc32(function.encode())) % TURNS == turn:
            words[index].add(item.nodeid)
        rows[function] += 1
    layouts = {index: covering.layouts_in(covering.values_of(item).values()) for index, item in enumerate(of_file)}
    kept = set(covering.fewest(words, layouts))
    return [item for index, item in enumerate(of_file) if index not in kept]
