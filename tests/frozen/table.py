"""Tables of frozen rows: read, merged, written one line a row, and compared."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
ROWS, TABLES = TESTS / "frozen_rows.json", TESTS / "frozen_tables.json"
EQUAL, REJECTED, FAILED, SKIPPED, CALLS = "equal", "rejected: ", "failed", "skipped", "calls: "


class Row(NamedTuple):
    """What comes of a row: the layout, the outcome, and the commit at which it ran, or the digest of the code (`families.code_state`)."""

    layout: str
    outcome: str
    commit: str


Rows = dict[str, Row]


class Changes(NamedTuple):
    """What a move changes on purpose."""

    given_up: list[dict[str, str]]
    renamed: dict[str, str]

    def move_of(self, name: str) -> str:
        """Return the move that gives a row up; nothing if none does."""
        return next((line["move"] for line in self.given_up if _is_of(name, line["rows"])), "")

    def name_now(self, name: str) -> str:
        """Return the name that a frozen row has now."""
        for before, after in self.renamed.items():
            if _is_of(name, before):
                return (
                    after.removesuffix("*") + name[len(before.removesuffix("*")) :] if before.endswith("*") else after
                )
        return name

    def outcome_now(self, outcome: str) -> str:
        """Return an outcome with the codes that errors have now; codes that have become one are named once."""
        if not outcome.startswith(REJECTED):
            return outcome
        codes = {self.name_now(f"code {code}").removeprefix("code ") for code in codes_of(outcome)}
        return rejected(codes)


def _is_of(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def rejected(codes: set[str]) -> str:
    """Return the outcome of a row that is rejected by these codes."""
    return REJECTED + ", ".join(sorted(codes))


def codes_of(outcome: str) -> list[str]:
    """Return the codes of an outcome."""
    return outcome.removeprefix(REJECTED).split(", ") if outcome.startswith(REJECTED) else []


def _fits(outcome: str, expected: str) -> bool:
    """Return whether an outcome is the expected one; the code `*` is any code, and counts of calls may be smaller."""
    if expected.startswith(CALLS) and outcome.startswith(CALLS):
        counts = zip(re.findall(r"\d+", outcome), re.findall(r"\d+", expected), strict=True)
        return all(int(now) <= int(frozen) for now, frozen in counts)
    return outcome == expected or ("*" in codes_of(expected) and outcome.startswith(REJECTED))


def load(path: Path) -> Rows:
    """Return the rows of a file; none where there is no file."""
    return {name: Row(*row) for name, row in _read(path)["rows"].items()}


def changes() -> Changes:
    """Return what moves change on purpose."""
    state = _read(ROWS)
    return Changes(state.get("given_up", []), state.get("renamed", {}))


def merge(rows: Mapping[str, Row], path: Path) -> None:
    """Write rows into a file, in place of those of their names; the others stay. Sessions beside each other wait for their turn."""
    with locked(path):
        state = _read(path)
        state["rows"] = dict(sorted({**state["rows"], **rows}.items()))
        heads = [f"{json.dumps(key)}: {json.dumps(value, indent=1)}" for key, value in state.items() if key != "rows"]
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in state["rows"].items()]
        text = ",\n".join([*heads, '"rows": {\n' + ",\n".join(lines) + "\n}"])
        part = path.with_suffix(".part")
        part.write_text("{\n" + text + "\n}\n", encoding="utf-8")
        os.replace(part, path)


def _read(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"given_up": [], "renamed": {}, "rows": {}} if path.name == ROWS.name else {"rows": {}}
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else empty


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder of a file for this process alone."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def git(*words: str) -> str:
    """Return what git says in this checkout; nothing where there is no history."""
    try:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """Return the commit that is checked out, in eight digits."""
    return git("rev-parse", "HEAD")[:8]


def differences(
    frozen: Rows, now: Rows, changed: Changes, is_gone: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """Return a line for each frozen row that comes to something else now, or of whose name now `is_gone` says that it is no more.

    Rows that did not run, rows that a move gives up, and rows that are new make no difference.
    """
    lines = []
    for name, row in frozen.items():
        if changed.move_of(name):
            continue
        today, expected = changed.name_now(name), changed.outcome_now(row.outcome)
        if today in now and not _fits(now[today].outcome, expected):
            lines.append(f"{today}: {now[today].outcome}; frozen at {row.commit}: {expected}")
        elif today not in now and is_gone(today):
            lines.append(f"{today}: there is no such row; frozen at {row.commit}: {expected}")
    return lines
