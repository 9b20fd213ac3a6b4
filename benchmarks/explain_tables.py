"""Tables of rows/explain.json for docs/explain.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import circumstances

from samestep.wings.plan.simulation.partition import row_label

ROWS = Path(__file__).parent / "rows" / "explain.json"


def _part(name: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a part, and when they were measured."""
    kept = json.loads(ROWS.read_text(encoding="utf-8"))[name]
    return kept["rows"], circumstances.sentence([kept])


def _ms(seconds: float | None, sign: str = "") -> str:
    return "" if seconds is None else f"{seconds * 1e3:{sign}.1f}"


def _table(head: str, cells: list[list[str]]) -> str:
    names = head.split(" | ")
    lines = [f"| {' | '.join(names)} |", "| --- |" + " --- |" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _label(words: str) -> str:
    """Return words that begin with the name of a row with its label instead."""
    name, _, rest = words.partition(" ")
    return row_label(name, rest or None)


def planted() -> str:
    """Return a row for each delay: what it took, where it is found, and what else moved."""
    rows, when = _part("delays")
    cells = []
    for one in rows:
        late = one["charge"]
        # Where all ranks are late alike, or the row is a wait of its own, nobody is charged.
        charged = f"rank {late[0]}, `{late[1]}`" if late and one["waits_s"] is not None else ""
        row, moved_s, *noise = one["other"]
        other = f"{_ms(moved_s, '+')}{''.join(f' ± {_ms(noise_s)}' for noise_s in noise)} ({_label(row)})"
        cells.append(
            [
                one["name"],
                f"`{one['layout']}`",
                _ms(one["step_s"]),
                _ms(one["truth_s"]),
                _label(one["row"]),
                _ms(one["moved_s"], "+"),
                _ms(one["waits_s"], "+"),
                charged,
                other,
                one["kind"],
            ]
        )
    head = "planted | layout | step ms | it takes ms | row | moved by ms | others wait ms | charged to | other row that moved most, ms | verdict"
    wrong = [f"{one['name']} ({', '.join(one['faults'])})" for one in rows if one["faults"]]
    said = (
        f"Not as it should be: {'. '.join(name.capitalize() for name in wrong)}."
        if wrong
        else "All are as they should be."
    )
    return f"{_table(head, cells)}\n\n{said} {when}"


def clean_runs() -> str:
    """Return how many clean runs there were, under which load, and whom they blame."""
    rows, when = _part("clean")
    cells = [[str(one["load"]), _ms(one["step_s"]), one["kind"], one["verdict"]] for one in rows]
    blamed = sum(bool(one["faults"]) for one in rows)
    head = "other programs that compute | step ms | verdict | in words"
    return f"{_table(head, cells)}\n\n{blamed} of {len(rows)} runs blame a rank or a link. {when}"


def layout_rows() -> str:
    """Return the rows of the default job in each layout, in milliseconds."""
    rows, when = _part("layouts")
    names = ("compute", "transfer", "wait", "bubble", "imbalance", "optimizer", "data", "host", "rest")
    cells = []
    for one in rows:
        found = one["rows"]
        drawer = (found.get("host", 0.0) + found.get("rest", 0.0)) / one["step_s"]
        known = [_ms(found[name]) if name in found else "" for name in names]
        cells.append(
            [f"`{one['layout']}`", _ms(one["step_s"]), *known, f"{drawer:.1%}", f"{sum(one['bytes'].values()):,}"]
        )
    head = " | ".join(("layout", "step", *map(_label, names), "overhead and other", "bytes of buffers"))
    return f"{_table(head, cells)}\n\n{when}"


def recorder_cost() -> str:
    """Return what recording takes: per record, and of a step of 100 ms in each layout."""
    (each, tiny), when = _part("cost")
    layouts, _ = _part("layouts")
    shares = []
    for one in layouts:
        counts: Mapping[str, int] = one["records"]
        plain = counts.get("sent", 0) * each["collective"] + counts.get("task", 0) * each["task"]
        shares.append((each["step"] + plain + counts.get("region", 0) * each["region"]) / 0.1)
    more = (tiny["window_s"] - tiny["plain_s"]) / tiny["records"]
    plain_s = each["step"] + 3 * each["task"] + each["region"]
    return (
        f"A step takes {each['step'] * 1e6:.0f} µs, a task {each['task'] * 1e6:.1f}, a collective with its wait {each['collective'] * 1e6:.1f} and a "
        f"region {each['region'] * 1e6:.1f}, sums included. This is {min(shares):.2%} to {max(shares):.2%} of a step of 100 ms in the layouts above. Of a tiny "
        f"step of {tiny['plain_s'] * 1e3:.1f} ms on one rank it is {plain_s / tiny['plain_s']:.1%}. In a window each op takes {more * 1e6:.0f} µs "
        f"more, memory and the file included: {more * tiny['records'] * 1e3:.2f} ms in that step. {when}"
    )


def slower_with_more_machines() -> str:
    """Return the worked example: one machine and two, what `explain` says, and what int8 saved."""
    (found,), when = _part("link")
    kinds = ("one", "fast", "slow", "int8")
    rows = {kind: {(name, axis): seconds for name, axis, seconds in found[kind]["rows"]} for kind in kinds}
    cells = []
    for key in dict.fromkeys(key for kind in kinds for key in rows[kind]):
        most = max(rows[kind].get(key, 0.0) for kind in kinds)
        if most >= 1e-3:
            cells.append([row_label(*key), *(_ms(rows[kind].get(key)) for kind in kinds)])
    cells.append(["step", *(_ms(found[kind]["step_s"]) for kind in kinds)])
    cells.append(["predicted", *(_ms(found[kind]["predicted_step_s"]) for kind in kinds)])
    mbit = f"{found['mbit']:g} Mbit/s"
    head = f"category, ms | one machine | two, a fast link | two, {mbit} | two, {mbit}, int8"
    slow = found["slow"]
    said = [
        f"verdict: {slow['verdict']}",
        *(f"  why: {one}" for one in slow["reasons"]),
        *(f"  try: {one}" for one in slow["tries"]),
    ]
    carried, coded = slow["sent_bytes"]["dp_replicate"], found["int8"]
    rate = carried / rows["slow"]["transfer", "dp_replicate"]
    hoped_s = slow["predicted_step_s"] - coded["predicted_step_s"]
    after = (
        f"The link carries {rate / 1e6:.1f} MB/s, the layout sends {carried / 1e6:.2f} MB per step, which takes "
        f"{_ms(rows['slow']['transfer', 'dp_replicate'])} ms ({_ms(found['truth_s'])} at the link's rate). A step was predicted to take "
        f"{_ms(slow['predicted_step_s'])} ms and took {_ms(slow['step_s'])}. int8 was predicted to save {_ms(hoped_s)} ms, and saved "
        f"{_ms(slow['step_s'] - coded['step_s'])}. {when}"
    )
    before = f"The output of `explain` for the two machines with a link of {mbit}:"
    return "\n".join((_table(head, cells), "", before, "", "```", *said, "```", "", after))
