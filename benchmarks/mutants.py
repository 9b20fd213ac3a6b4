"""Do the tests notice? Small wrongs are drawn in `src/`, and each runs the tests that reach it: `make mutants [SEED=0] [COUNT=40]`.

A mutant is one changed expression or statement of one of `OPERATORS`. The draw takes rooms in turn and operators in turn, by a
seed alone, so nobody picks one. A mutant runs the tests that reach its line (`make reach`, `benchmarks/reached.py`), those of the cheapest
files by `tests/costs.json` first, up to the first failure or `LIMIT_S` of processor time. It lives in a copy of `src/` that stands first on
the path; the checkout is never changed. Outcomes stand in benchmarks/rows/mutants.json, so a run that is ended goes on where it was.
Where a mutant changes no result, write the reason under its `equivalent` there: it is struck out.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import reached

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "rows" / "mutants.json"
LIMIT_S = 150.0
"""Seconds of processor time after which a mutant that no test has failed on counts as missed."""
HANGS_S = 900.0
"""Seconds after which the tests of a file are ended; a mutant that lets ranks wait for each other fails by the tests' own limits before."""
GROUPS = ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
_REDUCES = re.compile(r"reduce|gather|broadcast|exchange|sum_over|agree")
_HOOKS = re.compile(r"hook|watch|note|observe|register")
_RENEWS = re.compile(r"clear|invalidate|forget|reset|refresh|renew|pop")

Change = Callable[[Any], ast.AST | None]
"""Returns what stands in a node's place, or None where the operator has nothing to change."""


# -- operators -------------------------------------------------------------------------------------


def _swapped(node: Any, pairs: dict[type, type]) -> Any:
    kind = pairs.get(type(node.op))
    return None if kind is None else _with(node, op=kind())


def _with(node: Any, **values: Any) -> Any:
    changed = copy.copy(node)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _sign(node: Any) -> ast.AST | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return _swapped(node, {ast.Add: ast.Sub, ast.Sub: ast.Add}) if isinstance(node, ast.BinOp | ast.AugAssign) else None


def _bound(node: Any) -> ast.AST | None:
    """Move the end of a range or of a cut by one, or take a bound in or out."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        moved = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}.get(type(node.ops[0]))
        return None if moved is None else _with(node, ops=[moved()])
    if isinstance(node, ast.Slice) and (node.upper or node.lower) is not None:
        side = "upper" if node.upper is not None else "lower"
        return _with(node, **{side: ast.BinOp(getattr(node, side), ast.Add(), ast.Constant(1))})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return _with(node, args=[*node.args[:-1], ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))])
    return None


def _term(node: Any) -> ast.AST | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        return node.left
    return _with(node, values=node.values[:-1]) if isinstance(node, ast.BoolOp) else None


def _dropped(words: re.Pattern[str]) -> Change:
    """Return the operator that leaves a statement out which calls a function of such a name."""

    def change(node: Any) -> ast.AST | None:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            return None
        return ast.Pass() if words.search(ast.unparse(node.value.func)) else None

    return change


def _group(node: Any) -> ast.AST | None:
    if isinstance(node, ast.Constant) and node.value in GROUPS:
        return ast.Constant(GROUPS[(GROUPS.index(node.value) + 1) % len(GROUPS)])
    if isinstance(node, ast.keyword) and node.arg == "group":
        return _with(node, value=ast.Constant(None))
    return None


def _cache(node: Any) -> ast.AST | None:
    """Let what is kept stay: nothing empties it, and what is there is taken without a look."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        is_emptied = isinstance(node.value, ast.Constant) and node.value.value is None
        return ast.Pass() if is_emptied else None
    return _dropped(_RENEWS)(node)


def _condition(node: Any) -> ast.AST | None:
    return _with(node, test=ast.UnaryOp(ast.Not(), node.test)) if isinstance(node, ast.If | ast.IfExp) else None


OPERATORS: dict[str, Change] = {
    "sign": _sign,
    "off by one": _bound,
    "dropped term": _term,
    "missing reduction": _dropped(_REDUCES),
    "skipped hook": _dropped(_HOOKS),
    "wrong group": _group,
    "stale cache": _cache,
    "condition": _condition,
}


class Site(NamedTuple):
    """Where an operator can act."""

    file: str
    function: str
    """Its qualified name; what stands outside of functions is no site, since every test imports it."""
    line: int
    number: int
    """The node's place in a walk of its file."""
    operator: str

    @property
    def name(self) -> str:
        """Return a name that is the same as long as the file is."""
        return f"{self.file}:{self.line}:{self.number} {self.operator}"


def _nodes(tree: ast.Module) -> Iterator[tuple[int, ast.AST, str]]:
    """Return each node below a function, with its place in the walk and the function's qualified name; annotations and asserts are left out."""
    counter = itertools.count()

    def walk(node: ast.AST, scope: str, inside: bool) -> Iterator[tuple[int, ast.AST, str]]:
        number = next(counter)
        if isinstance(node, ast.Assert | ast.Raise):
            return
        if inside:
            yield number, node, scope
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function or isinstance(node, ast.ClassDef):
            scope = f"{scope}.{node.name}" if scope else node.name  # type: ignore[attr-defined]
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(
                        child, f"{scope}.<locals>" if is_function and _opens(child) else scope, inside or is_function
                    )

    return walk(tree, "", False)


def _opens(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def sites(text: str, file: str = "") -> list[Site]:
    """Return every place of a file where an operator can act, in order."""
    return [
        Site(file, scope, getattr(node, "lineno", 0), number, name)
        for number, node, scope in _nodes(ast.parse(text))
        for name, change in OPERATORS.items()
        if change(node) is not None
    ]


def mutated(text: str, site: Site) -> tuple[str, str, str]:
    """Return a file's text with the wrong of a site in it, and what stood there before and stands there after."""
    tree = ast.parse(text)
    node = next(node for number, node, _ in _nodes(tree) if number == site.number)
    changed = OPERATORS[site.operator](node)
    assert changed is not None
    before, after = ast.unparse(node), ast.unparse(changed)
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, changed)
            elif isinstance(value, list):
                setattr(parent, field, [changed if child is node else child for child in value])
    return ast.unparse(ast.fix_missing_locations(tree)), before, after


# -- the draw --------------------------------------------------------------------------------------


def room_of(file: str) -> str:
    """Return the room of a file below src/samestep: its folder, and of runtime and wings the folder within."""
    parts = Path(file).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] in (("runtime",), ("wings",)) else 1])


def drawn(seed: int, count: int, root: Path = ROOT) -> list[Site]:
    """Return mutants, evenly over rooms and operators, as a function of the seed and the source."""
    draw = random.Random(seed)
    of_rooms: dict[str, dict[str, list[Site]]] = {}
    for path in sorted((root / "src" / "samestep").rglob("*.py")):
        file = str(path.relative_to(root / "src" / "samestep"))
        for site in sites(path.read_text(encoding="utf-8"), file):
            of_rooms.setdefault(room_of(file), {}).setdefault(site.operator, []).append(site)
    rooms, operators = sorted(of_rooms), list(OPERATORS)
    draw.shuffle(rooms)
    draw.shuffle(operators)
    chosen: list[Site] = []
    times = Counter[str]()
    for room in itertools.cycle(rooms):
        left = of_rooms[room]
        if len(chosen) >= count or not any(itertools.chain(*(some.values() for some in of_rooms.values()))):
            break
        if able := [operator for operator in operators if left.get(operator)]:
            operator = min(able, key=times.__getitem__)
            times[operator] += 1
            chosen.append(left[operator].pop(draw.randrange(len(left[operator]))))
    return chosen


# -- running one ----------------------------------------------------------------------------------


def by_files(rows: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the rows of each test file, the cheapest file first, by its usual seconds of a test."""
    costs = json.loads((ROOT / "tests" / "costs.json").read_text(encoding="utf-8"))
    of_files: dict[str, list[str]] = {}
    for row in sorted(rows):
        of_files.setdefault(row.partition("::")[0], []).append(row)

    def seconds(file: str) -> float:
        cost = costs.get(file, {"processor_s": 1.0, "tests": 1})
        return float(cost["processor_s"]) / max(1, cost["tests"])

    return sorted(of_files.items(), key=lambda item: seconds(item[0]))


def outcome(site: Site, rows: Iterable[str], root: Path = ROOT, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return what came of a mutant: the first of the rows that failed, or how long none did."""
    files = by_files(rows)
    with tempfile.TemporaryDirectory(prefix="samestep-mutant-") as folder:
        source = Path(folder, "src")
        shutil.copytree(root / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        target = source / "samestep" / site.file
        text, before, after = mutated(target.read_text(encoding="utf-8"), site)
        target.write_text(text, encoding="utf-8")
        row = {
            "before": before,
            "after": after,
            "killed_by": "",
            "processor_s": 0.0,
            "files": 0,
            "reached_by": len(files),
        }
        begin_s = _used_s()
        for _, of_file in files:
            if (used_s := _used_s() - begin_s) >= limit_s:
                break
            row["files"] += 1
            if (failed := _first_failure(of_file, source, root)) != "":
                row["killed_by"] = failed
                break
        used_s = _used_s() - begin_s
    return {**row, "processor_s": round(used_s, 1)}


def _first_failure(rows: list[str], source: Path, root: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": f"{source}:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *rows]
    try:
        done = subprocess.run(
            command, cwd=root, env=environ, capture_output=True, text=True, timeout=HANGS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{rows[0]}: no end"
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?:, after \d+ s| - .*)?$", done.stdout, re.MULTILINE)
    return "" if done.returncode in (0, 5) else named[1] if named else f"{rows[0]}: exit status {done.returncode}"


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(seed: int, count: int) -> None:
    """Run the drawn mutants that have no outcome yet, and print all."""
    known = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}
    sites = drawn(seed, count)
    rows = reached.rows_of((site.file, site.line) for site in sites)
    for site in sites:
        if site.name not in known:
            known[site.name] = {"seed": seed, **outcome(site, rows[site.file, site.line]), "equivalent": ""}
            ROWS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(f"{site.name}: {known[site.name]['killed_by'] or 'MISSED'}", flush=True)
    print(table(known))


def table(known: dict[str, dict[str, Any]]) -> str:
    """Return how many mutants of each operator were killed, missed and struck out."""
    lines = []
    for operator in OPERATORS:
        rows = [row for name, row in known.items() if name.endswith(f" {operator}")]
        struck = sum(bool(row["equivalent"]) for row in rows)
        killed = sum(bool(row["killed_by"]) for row in rows)
        lines.append(f"{operator:<20}{killed:4} killed{len(rows) - killed - struck:4} missed{struck:4} equivalent")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    words = parser.parse_args()
    if not any(reached.FOLDER.glob("*.txt")):
        parser.error("no test is known to reach a line: first `make reach`")
    run(words.seed, words.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
