"""A delay of known size, planted anywhere in a rank's step, moves its own row by that much, and is charged to that rank and cause."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.program.recorded import MemoryMark, RankRecord, SentOp, head_line, path_of, step_line
from samestep.wings.explain.explain import explain, read_run
from samestep.wings.explain.step_bytes import bytes_of, traffic_line
from samestep.wings.explain.step_parts import MeasuredSteps, measured_steps, parts_of
from samestep.wings.explain.step_verdict import straggler_of, verdict_of
from tests.unit.ranks_on_a_clock import Script, backward, issue, layer, records_of, region, sync, task, wait, work

MS = 1_000_000
OPS = (
    SentOp("a.out", "all_reduce", "tp", 1000, "F0"),
    SentOp("bucket.0", "all_reduce", "dp_replicate", 5000, "B0"),
    SentOp("scalars", "all_reduce", "world", 64, "U0"),
)
TRANSFER = {"a.out": 2 * MS, "bucket.0": 5 * MS, "scalars": 1 * MS}
LAYOUT = "dp=2 tp=2"
LAW = settings(max_examples=25, derandomize=True, database=None, deadline=None)


def script(delays: Mapping[str, int]) -> Script:
    """One rank's step; the delays are nanoseconds more of what they name."""

    def ns(name: str, usual: int) -> int:
        return usual + delays.get(name, 0)

    return (
        work(ns("begin", MS)),
        task(
            "F0",
            region("data", ns("data", MS)),
            layer("a", work(ns("forward:a", 10 * MS)), sync("a.out")),
            layer("b", work(ns("forward:b", 10 * MS))),
        ),
        task(
            "B0",
            work(MS),
            backward("b"),
            work(ns("backward:b", 20 * MS)),
            backward("a"),
            issue("bucket.0"),
            work(ns("backward:a", 20 * MS)),
        ),
        *([region("host:gc", delays["gc"])] if delays.get("gc") else []),
        wait("bucket.0"),
        sync("scalars"),
        task("U0", work(ns("update", 3 * MS))),
    )


def explained(delays: Mapping[int, Mapping[str, int]], **more: Any) -> MeasuredSteps:
    scripts = {rank: script(delays.get(rank, {})) for rank in range(4)}
    transfer = {**TRANSFER, **more.pop("transfer", {})}
    records = records_of(LAYOUT, OPS, transfer, scripts, **more)
    return measured_steps(records, [2, 3])


ROW_OF = {
    "data": "data", "gc": "host", "begin": "host", "forward:a": "compute", "forward:b": "compute",
    "backward:b": "compute", "backward:a": "compute", "update": "optimizer",
}  # fmt: skip


@LAW
@given(st.integers(0, 3), st.sampled_from([*ROW_OF]), st.integers(10, 300))
def test_a_planted_delay_lands_in_its_row_on_its_rank_and_its_waits_are_charged_to_it(late, where, ms):
    clean, found = explained({}), explained({late: {where: ms * MS}})
    row = ROW_OF[where]
    moved = {
        rank: {
            key: found.rows[rank].get(key, 0.0) - clean.rows[rank].get(key, 0.0)
            for key in {*found.rows[rank], *clean.rows[rank]}
        }
        for rank in range(4)
    }
    assert moved[late].pop((row, None)) == pytest.approx(ms / 1e3, rel=0.1)
    hides = 0.005  # a transfer that the delay hides: the bucket is on its way while the backward goes on
    for (name, _), seconds in moved[late].items():
        assert abs(seconds) <= hides + 1e-9, name
    for rank in {0, 1, 2, 3} - {late}:
        waited_s = sum(seconds for (name, _), seconds in moved[rank].items() if name == "wait")
        assert waited_s == pytest.approx(ms / 1e3, abs=hides + 0.1e-3 * ms)
        assert all(abs(seconds) <= hides + 1e-9 for (name, _), seconds in moved[rank].items() if name != "wait")
    first = found.charges[0]
    assert first.rank == late
    assert first.doing in (
        where,
        {"data": "data:data", "update": "update:optimizer", "gc": "host:gc", "begin": "host:begin of the step"}.get(
            where
        ),
    )
    assert_adds_up(found)


def assert_adds_up(found: MeasuredSteps) -> None:
    for rank in found.records:
        parts, rest_s = parts_of(found, rank, None)
        assert sum(part.measured_s for part in parts) + rest_s == pytest.approx(found.lasted_s[rank])
        assert abs(rest_s) <= 1e-9


@LAW
@given(st.integers(1, 200))
def test_a_longer_transfer_is_the_link_of_its_axis_and_nobody_is_late(ms: int) -> None:
    clean, found = explained({}), explained({}, transfer={"bucket.0": (5 + ms) * MS})
    for rank in range(4):
        before, after = (one.rows[rank].get(("transfer", "dp_replicate"), 0.0) for one in (clean, found))
        assert after - before == pytest.approx(max(0, ms - 15) / 1e3)  # 20 ms of backward hide it
        assert (
            min(20, 5 + ms) / 1e3 - 1e-9 <= found.hidden[rank]["dp_replicate"] <= 0.02 + 1e-9
        )  # at most: no host saw its end
        assert not any(name == "wait" for name, _ in found.rows[rank])
    assert found.charges == ()
    parts, _ = parts_of(found, found.busiest, None)
    verdict = verdict_of(found, parts)
    assert verdict.kind == ("link" if ms > 90 else verdict.kind)
    assert verdict.kind in ("link", "compute")
    assert_adds_up(found)


def test_a_rank_that_waits_for_one_op_does_not_wait_for_another_whose_end_it_did_not_see() -> None:
    """Rank 0 has sent a bucket, and waits for rank 1 on the other axis; rank 2 finds the bucket done meanwhile."""

    def of(rank: int) -> Script:
        late_ns = 60 * MS if rank == 1 else 0
        return (
            task("F0", work(5 * MS), issue("bucket.0"), work(late_ns + MS), sync("a.out")),
            task("B0", work((40 if rank == 0 else 20) * MS)),
            wait("bucket.0"),
            sync("scalars"),
            task("U0", work(MS)),
        )

    found = measured_steps(records_of(LAYOUT, OPS, TRANSFER, {rank: of(rank) for rank in range(4)}), [2, 3])
    rows = found.rows[0]
    assert rows.get(("transfer", "dp_replicate"), 0.0) == 0.0
    assert rows["wait", "tp"] == pytest.approx(0.06)
    assert rows["transfer", "tp"] == pytest.approx(0.002)
    assert found.hidden[0]["dp_replicate"] > 0
    assert 1 in {charge.rank for charge in found.charges if charge.axis == "tp"}
    assert_adds_up(found)


@pytest.mark.parametrize("kind", ["checkpoint", "watching", "host", "input"])
def test_what_takes_long_between_steps_is_the_verdict(kind: str) -> None:
    row = "data" if kind == "input" else kind
    found = explained({}, between={rank: (region(row, 500 * MS),) for rank in range(4)})
    parts, rest_s = parts_of(found, found.busiest, None)
    assert next(part.measured_s for part in parts if part.name == row) == pytest.approx(0.5, rel=0.02)
    assert verdict_of(found, parts).kind == kind
    assert str(rest_s) == "0.0"
    assert_adds_up(found)


@pytest.mark.parametrize("late", [0, 3])
def test_a_straggler_is_named_with_its_host(late: int) -> None:
    found = explained({late: {"backward:b": 200 * MS}}, clocks={0: 0, 1: 0, 2: 50 * MS, 3: 50 * MS})
    assert straggler_of(found) == (late, pytest.approx(0.2))
    verdict = verdict_of(found, parts_of(found, found.busiest, None)[0])
    host = found.records[late].head.host
    assert verdict.kind == "straggler"
    assert verdict.line.startswith(f"straggler rank {late} on host {host}: ")
    assert "in backward:b" in verdict.reasons[0]
    assert len(verdict.reasons) <= 3


def test_under_other_load_neither_a_link_nor_a_rank_is_blamed() -> None:
    found = explained({2: {"backward:b": 200 * MS}}, transfer={"bucket.0": 900 * MS})
    parts = parts_of(found, found.busiest, None)[0]
    assert verdict_of(found, parts).kind in ("link", "straggler")
    half = replace(found, cpu_s={rank: tuple(seconds / 2 for seconds in times) for rank, times in found.cpu_s.items()})
    verdict = verdict_of(half, parts)
    assert verdict.kind == "load"
    assert "had a CPU for" in verdict.reasons[0]
    assert not any("link" in reason or "peers" in reason for reason in verdict.reasons)


def seen(found: MeasuredSteps, had: float, queued_s: float | None) -> MeasuredSteps:
    """Return steps in which each rank had the processor for a part of its work, and was queued for some seconds."""
    cpu_s = {rank: tuple(had * seconds for seconds in times) for rank, times in found.cpu_s.items()}
    return replace(found, cpu_s=cpu_s, queued_s={rank: (queued_s,) * len(times) for rank, times in cpu_s.items()})


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.integers(0, 3), st.floats(0, 0.6), st.floats(0, 1))
def test_time_without_a_processor_is_load_where_a_rank_was_queued_and_else_its_own_sleep(rank, had, part):
    found = explained({rank: {"backward:b": 200 * MS}})
    parts = parts_of(found, found.busiest, None)[0]
    own_s = sum(part.measured_s for part in parts if part.name in ("compute", "recompute", "optimizer"))
    had_s = had * found.cpu_s[found.busiest][0]
    verdict = verdict_of(seen(found, had, part * (own_s - had_s)), parts)
    if part >= 0.5:
        assert verdict.kind == "load" or (verdict.kind == "straggler" and had * 0.2 > own_s - had_s)
    else:
        assert verdict.kind in ("host", "straggler")
        assert any("sleeps or reads for" in reason and "although a CPU is free" in reason for reason in verdict.reasons)


def test_a_link_is_named_under_load_only_where_it_takes_much_longer_than_ranks_were_queued() -> None:
    found = explained({}, transfer={"bucket.0": 900 * MS})
    parts = parts_of(found, found.busiest, None)[0]
    away_s = 0.5 * found.cpu_s[0][0]
    assert verdict_of(seen(found, 0.5, away_s), parts).kind == "link"
    assert verdict_of(seen(found, 0.5, 0.88), parts).kind == "load"  # which explains most of it
    assert verdict_of(seen(found, 0.5, None), parts).kind == "load"
    slow = explained({}, transfer={"bucket.0": 120 * MS})
    parts = parts_of(slow, slow.busiest, None)[0]
    assert verdict_of(seen(slow, 1.0, 0.0), parts).kind == "link"
    assert verdict_of(seen(slow, 1.0, 0.1), parts).kind == "compute"
    line = next(one for one in verdict_of(seen(slow, 1.0, 0.0), parts).reasons if "dp_replicate sends" in one)
    assert "; the link carries 41.7 KB/s or more" in line.replace("KiB", "KB") or "the link carries" in line


def test_a_transfer_that_is_predicted_and_was_not_seen_is_no_link(tmp_path: Path) -> None:
    found = explained({})
    parts = [replace(part, predicted_s=0.02) for part in parts_of(found, found.busiest, None)[0]]
    unseen = [replace(part, measured_s=0.0) if part.name == "transfer" else part for part in parts]
    hidden = {rank: dict.fromkeys(axes, 0.0) for rank, axes in found.hidden.items()}
    assert verdict_of(replace(found, hidden=hidden), unseen).kind == "compute"


@pytest.mark.parametrize("more", [0, 8])
def test_bytes_of_experts_agree_over_the_ranks_of_their_axis(more: int) -> None:
    made = records()
    for rank, one in made.items():
        for event in one.steps[1].events:
            if event[0] == "sent":
                size = {op.owner: op.size_bytes for op in OPS}[event[1]]
                event.append(size + (more + (100 if rank % 2 else -100)) * (event[1] == "a.out"))  # type: ignore[attr-defined]
    sent = bytes_of(made, 0)
    assert [(one.axis, one.predicted == one.measured, one.is_routed) for one in sent] == [
        ("tp", False, not more),
        ("dp_replicate", True, False),
        ("world", True, False),
    ]
    line = traffic_line(0, sent)
    assert ("listed and sent: tp 900 B as tokens are routed" in line) == (not more)
    assert (f"sent: tp {900 + more} B, where the program lists 1,000 B" in line) == bool(more)


def test_exchanges_that_were_not_in_a_step_are_neither_missing_nor_listed() -> None:
    bucket = SentOp("exchange.0", "all_reduce", "dp_replicate", 7000, "U0")
    made = records()
    for one in made.values():
        one.head = replace(one.head, ops=(*OPS, bucket), num_exchanged=1)
    assert measured_steps(made, [2, 3]).missing == ()
    assert [one.predicted for one in bytes_of(made, 0)] == [op.size_bytes for op in OPS]


def test_a_link_is_not_blamed_where_a_thread_that_sends_had_no_processor() -> None:
    slow = explained({}, transfer={"bucket.0": 120 * MS})
    parts = parts_of(slow, slow.busiest, None)[0]
    (sent_s,) = (part.measured_s for part in parts if part.label == "exposed communication dp_replicate")
    for queued_s, kind in ((0.0, "link"), (0.1 * sent_s, "link"), (0.5 * sent_s, "load"), (2 * sent_s, "load")):
        one = replace(slow, others_queued_s={**slow.others_queued_s, 3: (queued_s,) * 2})
        verdict = verdict_of(one, parts)
        assert any("threads that send waited for a CPU" in reason for reason in verdict.reasons) == (kind == "load")
        assert any("dp_replicate sends buffers" in reason for reason in verdict.reasons) == (kind == "link")
        assert verdict.kind != "link" or kind == "link"


@pytest.mark.parametrize("late", [0, 1])
def test_the_stage_that_works_longest_is_an_imbalance(late: int) -> None:
    ops = (SentOp("a.out", "send", "pp", 1000, "F0"), SentOp("scalars", "all_reduce", "world", 64, "U0"))

    def of(rank: int) -> Script:
        own = work((90 if rank == late else 30) * MS)
        return (task("F0", own), task("B0", work(20 * MS)), sync("scalars"), task("U0", work(MS)))

    found = measured_steps(records_of("pp=2", ops[1:], {"scalars": MS}, {rank: of(rank) for rank in range(2)}), [2, 3])
    verdict = verdict_of(found, parts_of(found, found.busiest, None)[0])
    assert verdict.kind == "imbalance"
    assert verdict.line.startswith(f"imbalance, stage {late} works longest: 27% of a step")


def test_equal_ranks_have_no_straggler() -> None:
    assert straggler_of(explained({})) is None
    assert straggler_of(explained({0: {"begin": MS}, 3: {"forward:a": 2 * MS}})) is None


@LAW
@given(st.integers(-(10**12), 10**12))
def test_clocks_of_two_hosts_are_aligned_by_collectives(off: int) -> None:
    clocks = {2: off, 3: off} if off else {}
    found = explained({1: {"forward:b": 30 * MS}, 2: {"forward:a": 20 * MS}}, clocks=clocks)
    if off:
        other = found.clocks[str(off)]
        assert other.low_ns <= off <= other.high_ns
        assert 0 <= other.width_s < 0.05
        assert "known within" in other.to_line()
    assert found.clocks["0"].offset_ns == 0
    assert_adds_up(found)


def test_a_wait_below_the_interval_of_the_clocks_is_charged_to_nobody() -> None:
    (one,) = [charge for charge in explained({2: {"backward:a": MS}}).charges if charge.axis == "world"]
    assert (one.rank, one.doing, one.waiting) == (2, "backward:a", 3)
    two = explained({2: {"backward:a": MS}}, clocks={2: 5 * MS, 3: 5 * MS})
    assert two.clocks[str(5 * MS)].width_s > 0.001
    assert [(charge.rank, charge.waiting) for charge in two.charges] == [(2, 1)]  # only rank 3 shares its clock


def write(records: Mapping[int, RankRecord], folder: Path) -> None:
    (folder / "record").mkdir(parents=True, exist_ok=True)
    for rank, record in records.items():
        text = head_line(record.head) + "".join(map(step_line, record.steps.values()))
        (folder / "record" / f"steps-1-3.rank{rank}.jsonl").write_text(text)


def records(**more: Any) -> dict[int, RankRecord]:
    return records_of(LAYOUT, OPS, TRANSFER, {rank: script({}) for rank in range(4)}, **more)


def test_the_verb_reads_a_folder(tmp_path: Path) -> None:
    write(records(), tmp_path)
    found = explain(tmp_path)
    assert found.found.steps == (2, 3)  # the first one is left out
    assert explain(tmp_path, step=1).found.steps == (1,)
    assert explain(tmp_path / "record", step="1:2").found.steps == (1, 2)
    record = json.loads(json.dumps(found.to_record()))
    assert sum(part["measured_s"] for part in record["parts"]) + record["rest_s"] == pytest.approx(record["step_s"])
    assert record["verdict"] == found.verdict.line
    assert len(record["ranks"]) == 4
    assert record["missing"] == []
    listed = [{"axis": op.axis, "predicted_bytes": op.size_bytes, "measured_bytes": None} for op in OPS]
    assert record["bytes"] == listed  # nobody has counted what torch was given
    text = found.to_text()
    assert "in a step, listed: tp 1000 B; dp_replicate 4.88 KiB; world 64 B" in text
    assert text.startswith("verdict: compute: ")
    assert "nothing is predicted, since " in text
    events = found.to_chrome_trace()["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"measured"}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads >= {f"rank {rank} compute" for rank in range(4)}


@pytest.mark.parametrize("late", [0, 3])
def test_arrows_of_a_trace_go_from_the_rank_that_entered_last_to_those_that_waited(late: int, tmp_path: Path) -> None:
    scripts = {rank: script({"backward:b": 50 * MS} if rank == late else {}) for rank in range(4)}
    write(records_of(LAYOUT, OPS, TRANSFER, scripts), tmp_path)
    events = explain(tmp_path).to_chrome_trace()["traceEvents"]
    slices = {(one["tid"], one["ts"]): one["name"] for one in events if one["ph"] == "X"}
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    arrows: dict[int, list[dict[str, Any]]] = {}
    for one in events:
        if one["ph"] in "sf":
            arrows.setdefault(one["id"], []).append(one)
            assert (one["tid"], one["ts"]) in slices  # an arrow begins and ends at a slice
    between = {}
    for first, *others in arrows.values():
        assert first["ph"] == "s"
        assert all(one["ph"] == "f" for one in others)
        names = {slices[one["tid"], one["ts"]] for one in (first, *others)}
        assert len(names) == 1  # all are slices of one collective
        between[names.pop(), threads[first["tid"]]] = {threads[one["tid"]] for one in others}
    found = {first: others for (name, first), others in between.items() if name == "all_reduce:bucket.0"}
    mine = next(first for first in found if first.startswith(f"rank {late} "))
    assert found[mine] == {f"rank {(late + 2) % 4} dp_replicate"}


def test_a_resumed_run_has_records_before_and_after(tmp_path: Path) -> None:
    write(records(), tmp_path)
    folder = tmp_path / "record"
    for rank, record in records().items():
        later = {number + 10: replace(step, step=number + 10) for number, step in record.steps.items()}
        text = head_line(record.head) + "".join(map(step_line, later.values()))
        path_of(folder, range(11, 14), rank).write_text(text)
        os.utime(path_of(folder, range(1, 4), rank), (0, 0))
    assert explain(tmp_path).found.steps == (12, 13)
    assert "also recorded: --step 1:3" in explain(tmp_path).to_text()
    assert explain(tmp_path, step=2).found.steps == (2,)
    assert explain(tmp_path, step="2:3").found.steps == (2, 3)
    assert "also recorded: --step 11:13" in explain(tmp_path, step=2).to_text()
    assert explain(path_of(folder, range(1, 4), 2)).found.steps == (2, 3)
    with pytest.raises(RecordError, match="has no step 7:9: steps 1 to 3, 11 to 13 are recorded"):
        explain(tmp_path, step="7:9")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    some = records()
    write({rank: record for rank, record in some.items() if rank != 3}, tmp_path)
    found = explain(tmp_path)
    assert "no record of rank 3" in found.to_text()


def test_folders_without_records_say_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(
        RecordError, match="has no recorded steps, and no traces: samestep train --record 5 records some"
    ):
        explain(tmp_path)
    write(records(), tmp_path)
    path = tmp_path / "record" / "steps-1-3.rank1.jsonl"
    path.write_text(path.read_text().replace('"rank": 1', '"rank": 0', 1))
    with pytest.raises(RecordError, match="are both of rank 0"):
        read_run(tmp_path)
    path.write_text(
        path.read_text()
        .replace('"rank": 0', '"rank": 1', 1)
        .replace("dp_replicate=2 tp=2", "dp=4")
        .replace("dp=2 tp=2", "dp=4")
    )
    with pytest.raises(RecordError, match="records of several layouts"):
        read_run(tmp_path)


def with_memory(record: RankRecord, marks: Sequence[MemoryMark], device: str = "GPU") -> RankRecord:
    steps = {
        number: replace(step, memory=marks, held={"weights": 100, "gradients": 50, "optimizer": 200})
        for number, step in record.steps.items()
    }
    return replace(record, head=replace(record.head, device=device), steps=steps)


def test_the_peak_of_memory_has_its_op_its_parts_and_what_is_reserved(tmp_path: Path) -> None:
    marks = [
        MemoryMark(MS, 400, 900, 420, "forward:a"),
        MemoryMark(2 * MS, 600, 900, 700, "forward:b"),
        MemoryMark(3 * MS, 500, 1000, 700, "backward:b"),
        MemoryMark(4 * MS, 350, 1000, 700, "update:optimizer"),
    ]
    write({rank: with_memory(record, marks) for rank, record in records().items()}, tmp_path)
    found = explain(tmp_path, hardware="cpu-laptop")
    memory = found.memory_of(1)
    assert memory is not None
    assert (memory.peak_bytes, memory.peak_at, memory.reserved_bytes) == (700, "forward:b", 1000)
    assert memory.parts == {"weights": 100, "gradients": 50, "optimizer": 200, "the rest": 350}
    assert memory.over_step()["the rest"] == [50, 250, 150, 0]
    record = json.loads(json.dumps(found.to_record()))["ranks"][1]
    assert record["memory_bytes"] == record["memory"]["peak_bytes"] == 700
    assert record["memory"]["of"] == "allocator"
    assert "700 B allocated in all, 1000 B reserved, at forward:b" in found.to_text().replace("1,000 B", "1000 B")


def test_on_a_cpu_the_memory_is_that_of_the_process(tmp_path: Path) -> None:
    marks = [MemoryMark(MS, 400, 0, 0, "forward:a"), MemoryMark(2 * MS, 380, 0, 0, "backward:a")]
    write({rank: with_memory(record, marks, "cpu") for rank, record in records().items()}, tmp_path)
    memory = explain(tmp_path).memory_of(0)
    assert memory is not None
    assert (memory.peak_bytes, memory.peak_at, memory.reserved_bytes) == (400, "forward:a", None)
    assert "on a CPU the rest has the libraries of the process" in "\n".join(memory.to_lines())


def test_a_record_of_the_first_version_is_read(tmp_path: Path) -> None:
    write(records(), tmp_path)
    for path in (tmp_path / "record").glob("*.jsonl"):
        text = path.read_text().replace('"version": 4', '"version": 1').replace('"queued_ns":null,', "")
        path.write_text(text.replace('"memory":[]', '"memory":[[5,100],[9,120]]').replace(',"held":{}', ""))
    memory = explain(tmp_path).memory_of(0)
    assert memory is not None
    assert memory.peak_bytes == 120


def test_a_place_that_is_no_run_says_what_works(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nothing does not exist. Use the folder of a run"):
        read_run(tmp_path / "nothing")
    for name in ("a", "b"):
        write(records(), tmp_path / name)
    with pytest.raises(RecordError, match=r"is a folder of runs \(a, b\). Use samestep explain .*b"):
        read_run(tmp_path)
    folder, found, _ = read_run(tmp_path / "a" / "record" / "steps-1-3.rank2.jsonl")
    assert (folder, [*found]) == (tmp_path / "a" / "record", [0, 1, 2, 3])


def test_a_killed_rank_and_ranks_of_an_earlier_layout_are_told_apart(tmp_path: Path) -> None:
    write(records(), tmp_path)
    folder = tmp_path / "record"
    short = folder / "steps-1-3.rank2.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:3]))
    assert "steps 3 to 3 of rank 2: its record ends before" in explain(tmp_path).missing
    short.write_text("")
    with pytest.raises(RecordError, match="is empty: its rank was ended before it could write"):
        explain(tmp_path)
    # a run that was resumed on two ranks records the same window again
    for rank in (0, 1, 2, 3):
        path = folder / f"steps-1-3.rank{rank}.jsonl"
        write(records(), tmp_path)
        if rank > 1:
            os.utime(path, (0, 0))
    for rank in (0, 1):
        path = folder / f"steps-1-3.rank{rank}.jsonl"
        text = path.read_text().replace(LAYOUT, "dp=2").replace('"world_size": 4', '"world_size": 2')
        path.write_text(text)
    _, found, _ = read_run(tmp_path)
    assert [*found] == [0, 1]


@pytest.mark.parametrize("waits_ms", [0, 5])
def test_copies_of_inputs_are_hidden_but_for_the_waits_of_the_device(waits_ms: int) -> None:
    """A copy of 8 ms beside 10 ms of a layer's forward, for whose end the device waits, or does not."""
    plain, found = records(), records()
    for one in found.values():
        for number, step in one.steps.items():
            begin = next(event[2] for event in step.events if event[:2] == ["layer", "b"])
            end = begin + 8 * MS
            more = [["copy", "b", begin, end, "to host"], ["awaited", "b", end - waits_ms * MS, end, "to host"]]
            one.steps[number] = replace(step, events=[*step.events, *more])
    before, seen = measured_steps(plain, [2]), measured_steps(found, [2])
    assert_adds_up(seen)
    for rank in found:
        rows, others = seen.rows[rank], before.rows[rank]
        assert rows.get(("transfer", "to host"), 0.0) * 1e3 == pytest.approx(waits_ms, abs=0.01)
        assert (others["compute", None] - rows["compute", None]) * 1e3 == pytest.approx(waits_ms, abs=0.01)
        assert seen.hidden[rank]["to host"] * 1e3 == pytest.approx(8 - waits_ms, abs=0.01)
    verdict = verdict_of(seen, parts_of(seen, seen.busiest, None)[0])
    assert any("inputs of blocks to host" in reason for reason in verdict.reasons) is bool(waits_ms)
