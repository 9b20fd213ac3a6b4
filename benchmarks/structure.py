"""What the shape of the source costs: files that a seam touches, lines of code, docstrings that leave something out.

    python benchmarks/structure.py [FOLDER ...] [--list NAME]
    python benchmarks/structure.py --entered [--write]     what a run enters, the main path and the core: `entered.py`
    python benchmarks/structure.py --check | --write | --raise TEXT     the figures that may not rise: `ratchet.py`

Each FOLDER is a checkout with `src/samestep`; several stand side by side as columns, so that a refactoring shows itself
against the commit before it (`git worktree add ../before COMMIT`). Without a folder it is this checkout. `--list NAME`
prints the files or functions behind one row. Everything is read from the syntax tree: comments and docstrings name no axis.

    names by origin              local variables and parameters, each time one is bound, that are named by how they came to be:
                                 `BY_ORIGIN`, and `BY_ORIGIN_TOO` for words that would come instead of these
    files that name replicas, codecs, NF4    anywhere in their text, comments and docstrings too
    files that name an axis      the field of `Layout` as an attribute or keyword, outside the two twins of the axis (files or folders)
    files that list axes         two or more axes of `Layout` as strings: an axis that is added may be missed there
    files that name a schedule   its word as a string
    files that ask for a codec   of a gradient codec its field of steps, buckets and ops, or the dtype that it sends
    transformers' families       class names, configuration fields and plans of transformers as strings or attributes
    lines of code                lines with a token that is neither a comment nor part of a docstring
    no unit                      public functions that return a number, and say in neither name nor docstring of what
    no Raises                    public functions that raise an error of ours, and do not say so
    fragments                    public docstrings that begin as a genitive or a clause, without subject or verb
    words of our own             first lines of docstrings with a word of `_DIALECT`
    private names of torch       files that import `torch._...`, or name `torch._C`
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import ratchet

_TWINS = {"ep": "expert", "cp": "context", "tp": "tensor", "pp": "pipeline", "sequence_parallel": "sequence"}
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_FAMILIES = re.compile(
    r"base_model_tp_plan|base_model_pp_plan|num_attention_heads|num_key_value_heads|Conv1D|RMSNorm|rmsnorm|LlamaRotary"
    r"|_attn_implementation|_experts_implementation|gpt2|GPT2|apertus|Apertus|attention_interface|ALL_ATTENTION"
    r"|get_output_embeddings|base_model_prefix"
)
_UNITS = re.compile(
    r"byte|second|\bms\b|FLOP|element|sample|token|rank|micro-batch|microbatch|number|count|fraction|ratio|share|per cent"
    r"|index|position|factor|size|width|height|column|row|stage|layer|length|degree|head|dimension|axis|step|hop|norm|loss",
    re.IGNORECASE,
)
_UNIT_NAME = re.compile(
    r"_(s|bytes|ms|flops|numel|per_s|samples|tokens|ranks|index|size|factor|elements|rows|count)$|^num_"
)
_FRAGMENT = re.compile(r"^(Of|By|Whose|What|At|From|As|That|Where|Which|Say|Behind|Beside|How)\b")
_DIALECT = re.compile(r"\b(beside|apart|behind|told|meets?|lies|lie|made|own)\b")
BY_ORIGIN = ("one", "found", "given", "held", "mine", "made", "own", "kept", "whole", "before")
BY_ORIGIN_TOO = (
    "after", "asked", "drawn", "known", "later", "left", "meant", "named", "noted", "ours", "read", "seen", "sent", "taken", "theirs",
    "told", "wanted",
)  # fmt: skip
_WORDS = {"replicas": "replicas", "codecs": "codec", "NF4": "nf4"}
_OURS = re.compile(r"(Error|refuse|refused)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", default=[str(ratchet.ROOT)])
    parser.add_argument("--list", metavar="NAME", help="print what is behind the row of this name")
    parser.add_argument("--entered", action="store_true", help="count what a run enters and imports: some minutes")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure is above its ceiling")
    parser.add_argument("--write", action="store_true", help="lower the ceilings, and write the counts")
    parser.add_argument("--raise", dest="removed", metavar="TEXT", help="let figures rise: TEXT says what was removed")
    words = parser.parse_args()
    if words.entered:
        _print_entered(words.write)
    elif words.check or words.write or words.removed:
        _turn(words)
    else:
        _print_table(words)


def _print_entered(is_written: bool) -> None:
    import entered

    numbers = entered.counts()
    for name, number in numbers.items():
        print(f"{name:<40}{number:>8,}")
    if is_written:
        state = ratchet.load()
        ratchet.save({**state, "counts": {**state["counts"], **numbers}})


def _turn(words: argparse.Namespace) -> None:
    """Check the figures of this checkout, lower their ceilings or let them rise."""
    texts, state = ratchet.sources(ratchet.ROOT), ratchet.load()
    now = ratchet.figures(ratchet.ROOT, texts)
    if words.check:
        sys.exit("\n".join(ratchet.complaints(now, state, ratchet.versions())) or None)
    if words.removed:
        ratchet.save(ratchet.let_rise(now, state, words.removed))
        return
    state = ratchet.lowered(now, state)
    ratchet.save({**state, "counts": {**state["counts"], **static_counts(texts)}})


def _print_table(words: argparse.Namespace) -> None:
    columns = [measured(Path(folder)) for folder in words.folders]
    if words.list:
        sys.exit(
            "\n".join(columns[-1].get(words.list, [f"no row {words.list!r}: the rows are {', '.join(columns[0])}"]))
        )
    names = list(dict.fromkeys(name for column in columns for name in column))
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}", *(f"{_number(column.get(name, [])):>8,}" for column in columns))


def static_counts(texts: dict[Path, str]) -> ratchet.Figures:
    """Return the published counts that need no run."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {name: len(files) for name, files in _files_with_words(texts)}
    bound = Counter(name for tree in trees.values() for name in _bound(tree))
    return {
        "raw lines": sum(text.count("\n") for text in texts.values()),
        "bytes": sum(len(text.encode()) for text in texts.values()),
        "names by origin": sum(bound[name] for name in BY_ORIGIN),
        "names by origin too": sum(bound[name] for name in BY_ORIGIN_TOO),
        **lines,
    }


def _files_with_words(texts: dict[Path, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the files whose text has a word, whatever its case, by the name of the row."""
    for name, word in _WORDS.items():
        yield f"files that name {name}", [str(path) for path, text in texts.items() if word in text.lower()]


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the name of a variable or parameter each time it is bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _number(found: list[str]) -> int:
    """Return how many there are; a single number stands for itself."""
    return int(found[0]) if len(found) == 1 and found[0].isdigit() else len(found)


def measured(folder: Path) -> dict[str, list[str]]:
    """Return what is behind each row of the table, by its name."""
    root = folder / "src" / "samestep"
    texts = ratchet.sources(folder)
    trees = {path: ast.parse(text) for path, text in texts.items()}
    rows = {"files": [*map(str, trees)]}
    rows["files at the top"] = [str(path) for path in trees if len(path.parts) == 1]
    rows["largest number of files in one folder"] = [str(max(_in_each_folder(trees).values()))]
    rows["names of files used twice, twins aside"] = _used_twice(trees)
    for axis, twin in _TWINS.items():
        rows[f"files that name {axis}, but its twins"] = [
            str(path)
            for path, tree in trees.items()
            if twin not in path.with_suffix("").parts and axis in _attributes(tree)
        ]
    rows["files that list axes by their names"] = [
        str(path) for path, tree in trees.items() if len(_strings(tree) & {"tp", "cp", "ep", "pp"}) > 1
    ]
    for schedule in _SCHEDULES:
        rows[f"files that name {schedule}"] = [str(path) for path, tree in trees.items() if schedule in _strings(tree)]
    rows["files that know transformers' families"] = [
        str(path) for path, tree in trees.items() if any(map(_FAMILIES.search, _strings(tree) | _attributes(tree)))
    ]
    rows["files that ask for a gradient codec"] = [
        str(path) for path, tree in trees.items() if _attributes(tree) & {"codec", "reduce_dtype"}
    ]
    rows.update(_files_with_words(texts))
    for name, words in {"names by origin": BY_ORIGIN, "names by origin too": BY_ORIGIN_TOO}.items():
        rows[name] = [f"{path} {bound}" for path, tree in trees.items() for bound in _bound(tree) if bound in words]
    rows["modes"] = sorted(ratchet.modes(texts))
    rows["files with private names of torch"] = [
        str(path) for path, tree in trees.items() if _names_private_torch(tree)
    ]
    rows["lines of code"] = [str(sum(_lines_of_code(root / path) for path in trees))]
    rows["functions over 60 lines"] = [*_functions(trees, lambda f: f.end_lineno - f.lineno > 60)]  # type: ignore[operator]
    rows["public docstrings without a unit"] = [*_functions(trees, _lacks_unit)]
    rows["public docstrings without Raises"] = [*_functions(trees, _lacks_raises)]
    rows["public docstrings that are fragments"] = [*_fragments(trees)]
    rows["docstrings with words of our own"] = [*_in_dialect(trees)]
    for room in sorted({path.parts[0] for path in trees if len(path.parts) > 1}):
        lines = sum(_num_lines(root / path) for path in trees if path.parts[0] == room and len(path.parts) > 1)
        rows[f"lines in {room}/"] = [str(lines)]
    return rows


def _in_each_folder(trees: dict[Path, ast.Module]) -> dict[Path, int]:
    folders: dict[Path, int] = {}
    for path in trees:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    return folders


def _used_twice(trees: dict[Path, ast.Module]) -> list[str]:
    homes: dict[str, list[Path]] = {}
    for path in trees:
        homes.setdefault(path.stem, []).append(path)
    twins = {path.stem for path in trees if path.parent.name == "strategies"}
    return [
        " ".join(map(str, paths))
        for stem, paths in homes.items()
        if not stem.startswith("__") and len(paths) > 1 + (stem in twins)
    ]


def _num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _names_private_torch(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\.(\w+\.)*_", node.module or ""):
            return True
        if isinstance(node, ast.Attribute) and re.match(r"torch\._[a-zA-Z]", ast.unparse(node)):
            return True
    return False


def _in_dialect(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if _DIALECT.search(first):
                    yield f"{path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', path.stem)}: {first}"


def _attributes(tree: ast.Module) -> set[str]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}


def _strings(tree: ast.Module) -> set[str]:
    """Return the strings of a file that are no docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return {node.value for node in constants if isinstance(node.value, str)}


def _lines_of_code(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(trees: dict[Path, ast.Module], condition: Callable[[Function], bool]) -> Iterator[str]:
    for path, tree in trees.items():
        within = {id(inner) for node in ast.walk(tree) if isinstance(node, Function) for inner in _inner(node)}
        for node in ast.walk(tree):
            if isinstance(node, Function) and id(node) not in within and condition(node):
                yield f"{path}:{node.lineno} {node.name}"


def _inner(function: Function) -> Iterator[Function]:
    """Yield the functions defined within one: nobody can call them from outside."""
    return (node for node in ast.walk(function) if isinstance(node, Function) and node is not function)


def _lacks_unit(function: Function) -> bool:
    returned = ast.unparse(function.returns) if function.returns else ""
    if function.name.startswith("_") or returned not in ("int", "float") or _UNIT_NAME.search(function.name):
        return False
    return not _UNITS.search(ast.get_docstring(function) or "")


def _lacks_raises(function: Function) -> bool:
    if function.name.startswith("_") or "Raises:" in (ast.get_docstring(function) or ""):
        return False
    within = [node for inner in _inner(function) for node in ast.walk(inner)]
    raised = [
        node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc and node not in within
    ]
    return any(isinstance(what, ast.Call) and _OURS.search(ast.unparse(what.func)) for what in raised)


def _fragments(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if _FRAGMENT.match(first):
                    yield f"{path}:{node.lineno} {node.name}: {first}"


if __name__ == "__main__":
    main()
