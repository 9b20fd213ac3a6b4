"""What samestep reaches of FSDP2's objects, held to the sources of any torch: `python -m tests.fsdp_sources FOLDER ...`.

A FOLDER is what a wheel of torch holds, unpacked, of any system: no torch is imported, so the oldest and the newest that samestep
supports are read on one machine.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = Path(__file__).parents[1] / "src" / "samestep" / "runtime" / "weights"
HOLDERS = {"fsdp": "FSDPModule", "state": "FSDPState", "group": "FSDPParamGroup", "weight": "FSDPParam"}
"""The classes of FSDP2 by the names under which `runtime/weights` holds their objects."""


def reached() -> dict[tuple[str, str], list[ast.Call]]:
    """Return every attribute of an object of FSDP2 that `runtime/weights` names, by class and name, with its calls."""
    found: dict[tuple[str, str], list[ast.Call]] = {}
    for path in WEIGHTS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if "import FSDPParamGroup" in text else "")):
            called = node.func if isinstance(node, ast.Call) else node
            if isinstance(called, ast.Attribute) and (home := _class_of(called.value)):
                calls = found.setdefault((home, called.attr), [])
                calls += [node] if isinstance(node, ast.Call) else []
    return found


def _class_of(value: ast.expr) -> str:
    """Return the class of FSDP2 of an expression in `runtime/weights`; empty for any other."""
    if isinstance(value, ast.Call):
        return "FSDPState" if getattr(value.func, "attr", "") == "_get_fsdp_state" else ""
    return HOLDERS.get(getattr(value, "id", getattr(value, "attr", "")), "")


def faults(folder: Path) -> list[str]:
    """Return what is reached and is not in the sources of the torch at `folder`, or is called otherwise than they define it."""
    classes = {
        node.name: node
        for path in sorted((folder / "torch/distributed/fsdp/_fully_shard").glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    found = [f"no class {home}" for home in HOLDERS.values() if home not in classes]
    for (home, name), calls in sorted(reached().items()) if not found else ():
        parts = [*_parts(home, classes)]
        if name not in (given for given, _ in parts):
            found.append(f"{home} has no {name}")
        function = next((node for given, node in parts if given == name and isinstance(node, ast.FunctionDef)), None)
        if function is not None:
            found += [f"{home}.{name} {fault}" for call in calls for fault in _misfits(call, function.args)]
    return found


def _parts(home: str, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that a class or one of its bases gives its objects, with what gives it."""
    for node in ast.walk(classes[home]):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            yield node.attr, node
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign):
            yield getattr(node.target, "id", ""), node
    for base in classes[home].bases:
        if getattr(base, "id", "") in classes:
            yield from _parts(base.id, classes)  # type: ignore[attr-defined]


def _misfits(call: ast.Call, takes: ast.arguments) -> Iterator[str]:
    """Yield why a call of a method does not fit what it takes."""
    names = [one.arg for one in (*takes.posonlyargs, *takes.args)][1:]
    given = {str(one.arg) for one in call.keywords}
    needed = names[len(call.args) : len(names) - len(takes.defaults)]
    if len(call.args) > len(names) and not takes.vararg:
        yield f"takes {len(names)} arguments, and is given {len(call.args)}"
    unknown = given - {*names, *(one.arg for one in takes.kwonlyargs)}
    if unknown and not takes.kwarg:
        yield f"has no argument {unknown}"
    if missing := {*needed} - given:
        yield f"needs {missing}"


def main() -> None:
    lines = [f"{folder}: {fault}" for folder in sys.argv[1:] for fault in faults(Path(folder))]
    print(
        *lines
        or [f"{len(reached())} names of FSDP2 are in {', '.join(sys.argv[1:])}, and are called as they are defined"],
        sep="\n",
    )
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
