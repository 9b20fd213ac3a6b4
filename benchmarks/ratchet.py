"""The ratchet: figures of the source that may fall and not rise, by `make check`; `structure.json` beside this file holds them.

    python benchmarks/structure.py --check            exits 1 if a figure is above its ceiling
    python benchmarks/structure.py --write            lowers the ceilings to what the source has, and writes the counts
    python benchmarks/structure.py --raise "TEXT"     lets every figure above its ceiling rise; TEXT says what was removed for it

`ceilings` hold the raw lines of each room of `src/samestep`, and in all the files, the error codes and the modes. `counts` hold what is
published and not held: they are written by `--write` and by `--entered --write`. A line of `raises` is

    {"figure": "lines in runtime/", "to": 38800, "removed": "the closures of lanes, 310 lines in lanes/, went for it"}

The next `--write` takes the figure over and moves its line to `raised`, which is never cut. Who edits a ceiling by hand is found by the
history of the file: along the first parents of the commits no ceiling is higher than before without such a line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import error_codes  # noqa: E402

KEPT = Path(__file__).parent / "structure.json"
NEWEST = 30
"""The newest versions of the file that the history is searched in."""
HOW = 'python benchmarks/structure.py --raise "what was removed"'
_MODES = {"TorchFunctionMode", "TorchDispatchMode", "BaseTorchDispatchMode"}
_CLASS = re.compile(r"^ *class (\w+)(?:\[.*?\])?\(([^)]*)\)", re.MULTILINE)

Figures = dict[str, int]
State = dict[str, Any]


def sources(root: Path) -> dict[Path, str]:
    """Return the text of each Python file of `src/samestep` below a checkout, by its path in there."""
    folder = root / "src" / "samestep"
    return {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def figures(root: Path, texts: dict[Path, str]) -> Figures:
    """Return the figures that may only fall: files, error codes, modes, and raw lines of each room."""
    lines = Counter[str]()
    for path, text in texts.items():
        lines[f"lines in {path.parts[0] if len(path.parts) > 1 else '.'}/"] += text.count("\n")
    return {
        "files": len(texts),
        "error codes": len({site.code for site in error_codes.sites(texts)}),
        "modes": len(modes(texts)),
        **dict(sorted(lines.items())),
    }


def modes(texts: dict[Path, str]) -> set[str]:
    """Return the classes that intercept torch's functions or operations, through other classes of ours too."""
    bases = {name: set(re.findall(r"\w+", names)) for text in texts.values() for name, names in _CLASS.findall(text)}
    modes = {name for name, of_class in bases.items() if of_class & _MODES}
    while more := {name for name, of_class in bases.items() if of_class & modes} - modes:
        modes |= more
    return modes


def load() -> State:
    """Return the file, or an empty one."""
    empty: State = {"ceilings": {}, "counts": {}, "raises": [], "raised": []}
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else empty


def save(state: State) -> None:
    """Write the file: one line a figure and a raise."""
    KEPT.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def above(now: Figures, state: State) -> dict[str, tuple[int, int]]:
    """Return the figures above their ceilings: (what the source has, what it may have); a room that has no ceiling may have nothing."""
    allowed: Figures = dict(state["ceilings"])
    for line in state["raises"]:
        allowed[line["figure"]] = max(allowed.get(line["figure"], 0), line["to"])
    return {name: (number, allowed.get(name, 0)) for name, number in now.items() if number > allowed.get(name, 0)}


def complaints(now: Figures, state: State, versions: list[State]) -> Iterator[str]:
    """Yield what `make check` fails with; `versions` are those of the file, the newest first."""
    rises = above(now, state)
    yield from (f"{name}: {number:,}, and the ceiling is {allowed:,}" for name, (number, allowed) in rises.items())
    if rises:
        yield f"Make them smaller, or say in {KEPT.name} what was removed for it: {HOW}"
    for line in state["raises"] + state["raised"]:
        if len(str(line.get("removed", "")).split()) < 3:
            yield f"{KEPT.name}: the raise of {line['figure']!r} to {line['to']:,} does not say what was removed for it"
    for newer, older in zip([state, *versions], versions, strict=False):
        for name, number in newer["ceilings"].items():
            reasons = [line for line in newer["raises"] + newer["raised"] if line["figure"] == name]
            if number > older["ceilings"].get(name, 0) and not any(line["to"] >= number for line in reasons):
                yield f"{KEPT.name}: the ceiling of {name!r} rose to {number:,}, and no line of `raised` says what was removed for it"


def versions() -> list[State]:
    """Return the versions of the file in the history, the newest first; none where there is no git."""
    try:
        commits = _git("log", "--first-parent", f"-n{NEWEST}", "--format=%H", "--", str(KEPT.relative_to(ROOT)))
        return [json.loads(_git("show", f"{commit}:{KEPT.relative_to(ROOT)}")) for commit in commits.split()]
    except (OSError, subprocess.CalledProcessError):
        return []


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lowered(now: Figures, state: State) -> State:
    """Return the file with ceilings at what the source has, its first ones too; a raise that was needed is moved to `raised`.

    Raises:
        SystemExit: a figure is above its ceiling.
    """
    if state["ceilings"] and (rises := above(now, state)):
        raise SystemExit("\n".join(complaints({name: now[name] for name in rises}, state, [])))
    used = [line for line in state["raises"] if now.get(line["figure"], 0) > state["ceilings"].get(line["figure"], 0)]
    return {
        **state,
        "ceilings": now,
        "raises": [line for line in state["raises"] if line not in used],
        "raised": [*state["raised"], *({**line, "to": now[line["figure"]]} for line in used)],
    }


def let_rise(now: Figures, state: State, removed: str) -> State:
    """Return the file with a line for each figure above its ceiling, which says what was removed for it."""
    lines = [{"figure": name, "to": number, "removed": removed} for name, (number, _) in above(now, state).items()]
    return {**state, "raises": [*state["raises"], *lines]}
