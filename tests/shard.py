"""`make shard`: a twelfth of what `make parity` runs beyond `make test`, another one for each commit; `make shard SHARD=3` is the fourth.

A commit's hash chooses the shard, and a combination belongs to the shard that the checksum of its name gives; so one commit always runs
the same ones, and a few dozen commits run all. Files begin in another order for each commit too: where the time
ends before the shard does, it is not always the same ones that are left out.
"""

from __future__ import annotations

import subprocess
import time
import zlib
from pathlib import Path

import pytest

NUM_SHARDS = 12
WITHIN_S = 600.0
"""Seconds after which no more tests begin: what runs then ends well within 15 minutes."""


def commit() -> int:
    """Return the hash of the commit that is checked out as a number; 0 where there is no history."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return int(said, 16)
    except (OSError, ValueError):  # no git, or no history
        return 0


def number_of(given: str) -> int:
    """Return the number of a shard as `--shard` has it: the commit's where it is empty."""
    return int(given) if given else commit()


def selected(nodeids: list[str], number: int) -> list[int]:
    """Return the positions of a shard's tests in the order in which the commit of that number runs them, whole files at a time."""
    mine = [
        index for index, nodeid in enumerate(nodeids) if zlib.crc32(nodeid.encode()) % NUM_SHARDS == number % NUM_SHARDS
    ]
    files = list(dict.fromkeys(nodeids[index].partition("::")[0] for index in mine))
    first = number // NUM_SHARDS % max(1, len(files))
    turn = {file: place for place, file in enumerate(files[first:] + files[:first])}
    return sorted(mine, key=lambda index: turn[nodeids[index].partition("::")[0]])


class Limit:
    """Skips what has not begun in time, and says so."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + WITHIN_S

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._end_s:
            pytest.skip(f"the {WITHIN_S:.0f} s of a shard are over; `make parity` runs all of them")
