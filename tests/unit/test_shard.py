"""Shards of the nightly combinations: each belongs to one, a commit always has the same, and time that is over skips the rest."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import shard

NODES = [f"tests/parity/test_{file}.py::test_a_case[{case}]" for file in "abcdefg" for case in range(30)]


def test_every_combination_belongs_to_one_shard_of_its_share() -> None:
    shards = [shard.selected(NODES, number) for number in range(shard.NUM_SHARDS)]
    assert sorted(index for one in shards for index in one) == [*range(len(NODES))]
    assert max(map(len, shards)) < 2 * len(NODES) / shard.NUM_SHARDS


def test_other_commits_of_a_shard_begin_with_other_files_and_run_each_at_once() -> None:
    orders = [shard.selected(NODES, 5 + turn * shard.NUM_SHARDS) for turn in range(7)]
    files = [list(dict.fromkeys(NODES[index].partition("::")[0] for index in order)) for order in orders]
    assert len({order[0] for order in files}) == 7
    assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
    for order, names in zip(orders, files, strict=True):
        assert [NODES[index].partition("::")[0] for index in order] == sorted(
            (NODES[index].partition("::")[0] for index in order), key=names.index
        )


def test_the_commit_chooses_and_without_history_it_is_always_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"said": "00ff\n"}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if answers["said"] is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, answers["said"], "")

    monkeypatch.setattr(subprocess, "run", run)
    assert (shard.commit(), shard.number_of(""), shard.number_of("3")) == (255, 255, 3)
    for answers["said"] in ("", None):  # a folder without history, and a machine without git
        assert shard.commit() == 0


def test_what_has_not_begun_in_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "WITHIN_S", 600.0)
    shard.Limit().pytest_runtest_setup()
    monkeypatch.setattr(shard, "WITHIN_S", -1.0)
    with pytest.raises(pytest.skip.Exception, match="make parity"):
        shard.Limit().pytest_runtest_setup()
