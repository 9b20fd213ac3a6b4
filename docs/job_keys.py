"""Writes `src/samestep/job_keys.pyi`, the types of a job's tables for editors and type checkers, from the tables themselves.

python docs/job_keys.py           rewrites it
python docs/job_keys.py --check   exits 1 where it is not what the tables say
"""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from samestep import Job, Layout
from samestep.job_tables import LoraTable, Table
from samestep.optimizer_tables import GroupTable
from samestep.schedules import SCHEDULES

FILE = Path(__file__).parent.parent / "src" / "samestep" / "job_keys.pyi"
HEAD = '''"""The tables of a job as an editor and a type checker know them: `Job(train={"steps": 3})` is completed key by key.

Written by `python docs/job_keys.py` from `job_tables.py` and `optimizer_tables.py`, which check the values and say what each key means.
A type checker reads this stub; nothing imports it at run time.
"""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict

from samestep.job_tables import CheckpointTable, DataTable, LoraTable, ModelTable, NumericsTable, RunTable, TrainTable
from samestep.layout import Layout
from samestep.optimizer_tables import GroupTable, OptimizerTable, ScheduleTable
'''
ALSO = {"record": " | int", "report": " | str"}
"""What a validator of a key takes besides its type."""


def text() -> str:
    """Return the file."""
    tables = [field.annotation for field in Job.model_fields.values() if _is_table(field.annotation)]
    return "\n\n".join([HEAD, *(_keys(table) for table in (LoraTable, GroupTable, *tables)), _layout(), _job()])


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Table)


def _keys(table: type[Table]) -> str:
    """Return the class of one table, with the sentence of each key."""
    hints = get_type_hints(table, include_extras=True)
    lines = [f"class {_name(table)}(TypedDict, total=False):", f'    """Keys of `{table.__name__}`."""\n']
    for key, field in table.model_fields.items():
        kind = _type(hints[key]) + ALSO.get(key, "")
        lines.append(f"    {key}: {f'Required[{kind}]' if field.is_required() else kind}")
        described = (field.description or "").replace("\n", "\n    ")
        lines.append(f'    """{described}"""')
    return "\n".join(lines) + "\n"


def _layout() -> str:
    """Return the class of the words of a layout; `dp` stands for two of them."""
    words = {"dp": "int"} | {name: _type(kind) for name, kind in get_type_hints(Layout).items()}
    words["zero"], words["schedule"] = "Literal[0, 1, 2, 3]", f"Literal[{', '.join(map(repr, SCHEDULES))}]"
    lines = ["class LayoutKeys(TypedDict, total=False):", '    """Words of a `Layout`."""\n']
    return "\n".join([*lines, *(f"    {name}: {kind}" for name, kind in words.items())]) + "\n"


def _job() -> str:
    lines = ["class JobKeys(TypedDict, total=False):", '    """Tables of `Job`."""\n']
    for key, field in Job.model_fields.items():
        kind = field.annotation
        named = "LayoutKeys | Layout | str" if key == "layout" else _type(kind)
        lines.append(f"    {key}: {f'{_name(kind)} | {kind.__name__}' if _is_table(kind) else named}")
    return "\n".join(lines) + "\n"


def _name(table: Any) -> str:
    return table.__name__.removesuffix("Table") + "Keys"


def _type(kind: Any) -> str:
    """Return the type of what is given for a key, without its range; lists stand for tuples in files."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(parts[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is tuple:
        return f"list[{_type(parts[0])}] | tuple[{_type(parts[0])}, ...]"
    if origin is dict:
        return f"dict[{_type(parts[0])}, {_type(parts[1])}]"
    if _is_table(kind):
        return f"{_name(kind)} | {kind.__name__}"
    return "None" if kind is type(None) else "Any" if kind is Any else str(kind.__name__)


def main() -> int:
    """Write the file, or check it: the formatter may break its lines."""
    if "--check" in sys.argv[1:]:
        is_new = ast.dump(ast.parse(text())) != ast.dump(ast.parse(FILE.read_text(encoding="utf-8")))
        print("src/samestep/job_keys.pyi is not what the tables say: python docs/job_keys.py" if is_new else "", end="")
        return int(is_new)
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
