"""The command `python -m tests.frozen`: see the head of this package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.frozen import benched, chosen, table

FOLDERS = ("tests/proof", "tests/code", "tests/parity")
PARTS = ("rows", "families", "scripts", "specs", "calls", "golden")


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0, or 1 where something differs, or 2 where the time of a gate has ended before."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("freeze", "compare"):
        part = verbs.add_parser(verb)
        part.add_argument("part", choices=PARTS)
        part.add_argument("names", nargs="*", help="paths and options of pytest, or names of families, kinds or rows")
        part.add_argument("--since", metavar="COMMIT", help="of rows: those of the rooms that have changed since")
    gate = verbs.add_parser("gate")
    gate.add_argument("--seed", default="", metavar="COMMIT", help="chooses the families and kinds; by default HEAD")
    gate.add_argument("--minutes", type=float, default=10.0)
    gate.add_argument("--since", metavar="COMMIT", help="then the rows of the rooms that have changed since")
    given, more = parser.parse_known_args(words)
    os.nice(19 - os.nice(0))
    if given.verb == "gate":
        return _gate(given.seed or table.commit(), 60.0 * given.minutes, given.since)
    names = [*given.names, *more]
    if given.verb == "freeze":
        return _freeze(given.part, names)
    if given.since:
        names = chosen.rows_of(chosen.rooms_since(given.since), table.load(table.ROWS))
        if not names:
            return _end([f"no frozen row is of a room that has changed since {given.since}"], status=0)
    return _end(_compared(given.part, names))


def _end(lines: list[str], status: int = 1) -> int:
    print("\n".join(lines) if lines else "no difference")
    return status if lines else 0


def _freeze(part: str, names: list[str]) -> int:
    if part == "rows":
        return _pytest(table.ROWS, names or FOLDERS, "--go-on")
    if part in ("families", "scripts"):
        table.merge(benched.kept_families() if part == "families" else benched.kept_scripts(), table.TABLES)
    elif part == "golden":
        print("tests/golden is frozen as it stands in the history: `python -m tests.golden` writes it anew")
    elif part == "calls":
        for name, counted in benched.calls().items():
            if not names or name in names:
                table.merge(counted(), table.TABLES)
    else:
        frozen = table.load(table.TABLES)
        families = names or [name for name in _families() if f"spec {name}" not in frozen]
        for family, text in benched.examined(families):
            benched.keep_specs({family: text})
            table.merge(benched.spec_row(family, text), table.TABLES)
            print(family, len(text), flush=True)
    return 0


def _families() -> list[str]:
    import families

    return families.families()


def _pytest(into: Path, words: Sequence[str], *options: str) -> int:
    """Run tests, and record what comes of each row."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.frozen.recorder", "--rows-into", str(into), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the plugin imports torch before conftest.py says so
    return subprocess.run([*command, *words], cwd=table.ROOT, env=env, check=False).returncode


def _compared(part: str, names: list[str]) -> list[str]:
    if part == "rows":
        return _compared_rows(names or list(FOLDERS))
    if part == "golden":
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/golden", *names], cwd=table.ROOT
        ).returncode
        return ["tests/golden differs"] if status else []
    frozen, changed = table.load(table.TABLES), table.changes()
    lines: list[str] = []
    for rows, remarks in _run_anew(part, names, frozen):
        differences = table.differences(frozen, rows, changed)
        lines += [*differences, *(remarks if differences else ())]
    return lines


def _compared_rows(words: list[str]) -> list[str]:
    frozen = table.load(table.ROWS)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "rows.json"
        _pytest(into, words)
        now, names = table.load(into), into.with_suffix(".names")
        if not now:
            return [f"no row ran of {' '.join(words)}"]
        there = set(names.read_text(encoding="utf-8").splitlines())
    files = {name.partition("::")[0] for name in there}
    chooses = any("::" in word or word.startswith("-") for word in words)
    print(f"{len(now)} rows ran, of {sum(name.partition('::')[0] in files for name in frozen)} frozen in their files")
    whole = set() if chooses else files
    return table.differences(
        frozen, now, table.changes(), lambda name: name.partition("::")[0] in whole and name not in there
    )


def _run_anew(part: str, names: list[str], frozen: table.Rows) -> Iterator[tuple[table.Rows, list[str]]]:
    """Yield rows that are run again, and what to print with those that differ."""
    if part == "calls":
        for name, counted in benched.calls().items():
            if not names or name in names:
                yield counted(), []
    elif part == "specs":
        families = names or [name.removeprefix("spec ") for name in frozen if name.startswith("spec ")]
        for family, text in benched.examined(families):
            yield benched.spec_row(family, text), benched.spec_differences(family, text)
    else:
        word, run = ("family", benched.proven) if part == "families" else ("script", benched.ported)
        for name, layouts in benched.names_of(frozen, word).items():
            if not names or name in names:
                yield run(name, layouts), []


def _gate(seed: str, limit_s: float, since: str | None) -> int:
    """Run what a commit chooses, a family and two kinds at a time, until the time ends; then the rows of rooms that have changed."""
    end_s = time.monotonic() + limit_s
    frozen, changed = table.load(table.TABLES), table.changes()
    applies = [name for name, row in frozen.items() if row.outcome not in ("absent", "unbuilt")]
    families = chosen.of_gate(benched.names_of(applies, "family"), seed, chosen.FAMILIES)
    kinds = chosen.of_gate(benched.names_of(applies, "script"), seed, chosen.KINDS)
    waiting = [(benched.proven, *of_family) for of_family in families.items()]
    for index, of_kind in enumerate(kinds.items()):
        waiting.insert(min(len(waiting), index * 8 // 5), (benched.ported, *of_kind))
    lines, num_rows = list[str](), 0
    while waiting and time.monotonic() < end_s:
        run, name, layouts = waiting.pop(0)
        rows = run(name, layouts)
        differences = table.differences(frozen, rows, changed)
        num_rows += len(rows)
        print(f"{name}, {', '.join(layouts)}: {'; '.join(differences) or 'as frozen'}", flush=True)
        lines += differences
    if since and (files := chosen.rows_of(chosen.rooms_since(since), table.load(table.ROWS))):
        lines += _compared_rows(files)
    print(
        f"{num_rows} rows of {len(families)} families and {len(kinds)} kinds that {seed} chooses, {len(lines)} differences"
    )
    if waiting:
        print(f"the time has ended before {', '.join(name for _, name, _ in waiting)}")
    return 1 if lines else 2 * bool(waiting)


if __name__ == "__main__":
    sys.exit(main())
