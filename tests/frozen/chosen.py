"""What a gate runs: families and kinds that a commit's hash chooses, and the tests of the rooms that have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from tests.frozen import table

FAMILIES, KINDS, LAYOUTS = 24, 40, 2
"""How many families and kinds of scripts a gate runs, and in how many layouts each."""
TESTS_OF: dict[str, tuple[str, ...]] = {
    "strategies": ("parity/test_products.py", "code"),
    "program": ("parity/test_products.py", "code"),
    "runtime/weights": ("parity/test_axes.py", "parity/test_between_steps", "parity/test_replaced", "parity/test_loaded", "parity/test_late", "code"),
    "runtime/axes": ("parity/test_axes.py", "parity/test_whole_batch.py", "code"),
    "runtime/optimizers": ("parity/test_update_rules.py", "parity/test_combined_optimizers.py"),
    "runtime/checkpoints": ("parity/test_checkpoint.py", "parity/test_torch_checkpoint.py", "parity/test_own_checkpoints.py", "parity/test_resume_any_state.py"),
    "runtime/guards": ("code", "proof/test_reproductions.py", "parity/test_torch_losses.py", "parity/test_silent_errors.py", "parity/test_training_code.py"),
    "runtime/own_steps": ("parity/test_steps_in_parts.py",),
    "runtime/codecs": ("parity/test_compression.py",),
    "runtime/processes": ("parity/test_ranks_agree.py",),
    "runtime": ("code", "parity/test_products.py"),
    "state": ("code", "parity/test_every_pair.py", "parity/test_buffers_of_losses.py", "parity/test_update_rules.py", "proof/test_reproductions.py"),
    "randomness": ("code", "parity/test_random", "parity/test_dropout"),
    "independence": ("proof", "code", "parity/test_axes.py", "parity/test_plans_from_data_flow.py"),
    "tracing": ("proof", "code", "parity/test_axes.py", "parity/test_axes.py"),
    "examination": ("proof", "code"),
    "building": ("code", "parity/test_model_loss.py", "parity/test_lora.py", "parity/test_qlora.py", "parity/test_save_pretrained.py"),
    "proof": ("proof",),
    "training": ("parity/test_training.py", "parity/test_checkpoint.py"),
    "datasets": ("parity/test_loaders.py", "parity/test_given_batches.py", "parity/test_labels.py"),
}  # fmt: skip
"""The tests, below `tests/`, whose rows a change of a room may move: the table of AGENTS.md, for the three frozen folders."""
_ROOMS = tuple(sorted(TESTS_OF, key=len, reverse=True))


def by_hash(names: Iterable[str], seed: str, count: int) -> list[str]:
    """Return so many of some names, chosen by a commit."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:count]


def of_gate(names: Mapping[str, list[str]], seed: str, count: int) -> dict[str, list[str]]:
    """Return the families or kinds that a gate runs, with the layouts of each."""
    chosen = by_hash(names, seed, count)
    return {name: by_hash(names[name], f"{seed} {name}", LAYOUTS) for name in chosen}


def rooms_since(commit: str) -> list[str]:
    """Return the rooms of `src/samestep` of which a file differs from a commit, as `TESTS_OF` names them."""
    files = table.git("diff", "--name-only", commit, "--", "src/samestep").splitlines()
    inside = [file.removeprefix("src/samestep/") for file in files]
    return list(dict.fromkeys(next((room for room in _ROOMS if file.startswith(f"{room}/")), "") for file in inside))


def rows_of(rooms: Iterable[str], rows: Iterable[str]) -> list[str]:
    """Return the files of tests that have rows of rooms, in the order of the rows."""
    begins = tuple(f"tests/{begin}" for room in rooms for begin in TESTS_OF.get(room, ()))
    return list(dict.fromkeys(row.partition("::")[0] for row in rows if row.startswith(begins))) if begins else []
