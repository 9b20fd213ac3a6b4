"""What the shape of the source costs: files that a seam touches, lines of code, docstrings that leave something out.

    python benchmarks/structure.py [FOLDER ...] [--list NAME]
    python benchmarks/structure.py --entered

Each FOLDER is a checkout with `src/samestep`; several stand side by side as columns, so that a refactoring shows itself
against the commit before it (`git worktree add ../before COMMIT`). Without a folder it is this checkout. `--list NAME`
prints the files or functions behind one row. Everything is read from the syntax tree: comments and docstrings name no axis.

    the main path                the files that a person reads to follow a job to its steps: `_MAIN_PATH`
    functions entered            with `--entered`: functions of samestep that a rank of a plain `dp=2` Llama enters while it
                                 prepares, and in its second step
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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
_MAIN_PATH = re.compile(
    "(job|layout|program|step|ops|holding|ranks|examine|assembly|held_assembly|run|stepper|open_step|step_scalars|step_batch"
    "|objective|interpreter|microbatches|weight_store|replicated|data|optimizer_step|whole_optimizer|pieces|mesh)"
)
_OURS = re.compile(r"(Error|refuse|refused)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", default=[str(Path(__file__).parents[1])])
    parser.add_argument("--list", metavar="NAME", help="print what is behind the row of this name")
    parser.add_argument("--entered", action="store_true", help="count the functions that a rank enters")
    words = parser.parse_args()
    if words.entered:
        for name, functions in entered().items():
            print(f"{name}: {len(functions)} functions, {sum(functions.values()):,} lines of code")
        return
    columns = [measured(Path(folder)) for folder in words.folders]
    if words.list:
        sys.exit(
            "\n".join(columns[-1].get(words.list, [f"no row {words.list!r}: the rows are {', '.join(columns[0])}"]))
        )
    names = list(dict.fromkeys(name for column in columns for name in column))
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}", *(f"{_number(column.get(name, [])):>8,}" for column in columns))


def _number(found: list[str]) -> int:
    """Return how many there are; a single number stands for itself."""
    return int(found[0]) if len(found) == 1 and found[0].isdigit() else len(found)


def measured(folder: Path) -> dict[str, list[str]]:
    """Return what is behind each row of the table, by its name."""
    root = folder / "src" / "samestep"
    trees = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    rows = {"files": [*map(str, trees)]}
    rows["files at the top"] = [str(path) for path in trees if len(path.parts) == 1]
    rows["largest number of files in one folder"] = [str(max(_in_each_folder(trees).values()))]
    rows["names of files used twice, twins aside"] = _used_twice(trees)
    main_path = [
        path for path in trees if _MAIN_PATH.fullmatch(path.stem) and path.parts[0] not in ("datasets", "checkpoints")
    ]
    rows["files of the main path"] = [*map(str, main_path)]
    rows["lines of the main path"] = [str(sum(_num_lines(root / path) for path in main_path))]
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
    rows["files that name replicas"] = [str(path) for path, tree in trees.items() if "replicas" in _attributes(tree)]
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


def entered() -> dict[str, dict[str, int]]:
    """Return the functions of samestep that rank 0 of a plain `dp=2` Llama enters, with their lines of code, by part of its run."""
    import samestep

    found: dict[str, dict[str, int]] = samestep.launch(_entered_by_a_rank, ranks=2, device="cpu")
    return found


def _entered_by_a_rank(_: object) -> dict[str, dict[str, int]]:
    import torch

    import samestep
    from samestep.building.families import family_source

    torch.set_num_threads(1)
    job = samestep.Job(train={"global_batch": 4, "steps": 3, "watch_every": 0}, run={"device": "cpu"})
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens = torch.randint(0, 64, (32, 9), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    run = samestep.parallelize(
        family_source("llama", sizes, "causal"), "cross_entropy", torch.optim.AdamW, layout="dp=2", job=job
    )
    batches = samestep.batches(rows, job)
    first, second = next(batches), next(batches)
    with _profiled() as prepared:
        run.prepare(first.samples([0]))
    run.step(first)
    with _profiled() as step:
        run.step(second)
    return {"preparation": prepared, "step 2": step}


@contextmanager
def _profiled() -> Iterator[dict[str, int]]:
    """Note each function of samestep that is entered, with its lines of code."""
    found: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/samestep/" in code.co_filename and "<" not in code.co_name:
            lines = {line for *_, line in code.co_lines() if line}
            found[f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] = len(lines)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main()
