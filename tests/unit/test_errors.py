"""The tree of errors: the drawing in the head of `errors` is the classes, and the exit status follows from them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from samestep import cli, errors
from tests import small

ROOT = Path(__file__).parents[2]

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__ and issubclass(kind, Exception)
}


def _drawn() -> dict[str, tuple[str, ...]]:
    """Each class of the drawing with its bases: the class above it that stands further left, and what is in brackets."""
    found: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").split("```")[1].strip().splitlines():
        drawn = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>\w+)(?: \((?P<base>\w+)\))?", line)
        assert drawn, line
        depth = len(drawn["branch"])
        above = [(left, name) for left, name in above if left < depth]
        found[drawn["name"]] = (*(name for _, name in above[-1:]), *filter(None, [drawn["base"]]))
        above.append((depth, drawn["name"]))
    return found


def test_the_drawn_tree_is_the_classes() -> None:
    assert _drawn() == {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in CLASSES.items()}


def test_every_error_is_public() -> None:
    assert {name for name in samestep.__all__ if name.endswith("Error")} == set(CLASSES)


def test_the_exit_status_says_whether_the_input_or_the_run_was_at_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CLASSES.keys() - {"SamestepError"}:
        kind = CLASSES[name]
        assert issubclass(kind, errors.InputError) != issubclass(kind, errors.RunError), name

        def failing(_: object, kind: type[Exception] = kind) -> int:
            raise kind("some-code", "what happened")

        monkeypatch.setattr(cli, "_env", failing)
        assert cli.main(["env"]) == (2 if issubclass(kind, ValueError) else 1), name
        assert capsys.readouterr().err == "samestep: what happened [some-code]\n"


def test_an_error_is_made_with_its_code_where_it_is_raised_or_has_that_of_the_error_behind_it() -> None:
    """No error is made of a text alone, or of a code that is written otherwise."""
    wrong = []
    for path in sorted((ROOT / "src" / "samestep").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Error(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CLASSES:
                code = node.args[0]
                is_code = isinstance(code, ast.Constant) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code.value)
                if not is_code and not isinstance(code, ast.Starred) and ast.unparse(code).rpartition(".")[2] != "code":
                    wrong.append(f"{path}:{node.lineno}")
    assert wrong == []


def test_every_code_stands_on_the_page_with_the_files_that_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    sites = importlib.import_module("error_codes").source()
    codes = {site.code for site in sites}
    assert {"tp-indivisible", "job-key-unknown", "memory-predicted"} <= codes  # each is found another way
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []
    assert all((ROOT / "src" / "samestep" / site.raised_in).is_file() for site in sites)
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        rows = dict(re.findall(r"^\| (?:<a id=.*?</a>)?`([\w-]+)` \|.*\| (.*?) \|$", section, re.MULTILINE))
        name = section.partition("\n")[0]
        expected = {
            code: {site.raised_in for site in sites if (site.error, site.code) == (name, code)} for code in rows
        }
        assert {code: set(re.findall(r"`(.*?)`", files)) for code, files in rows.items()} == expected, name


def test_an_uncaught_error_ends_a_script_with_its_line_the_text_and_the_code(tmp_path: Path) -> None:
    script, line = tmp_path / "mine.py", 'samestep.Layout("ddp=2")'
    script.write_text(f"import samestep\n\n{line}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    said = done.stderr.splitlines()
    assert [one.strip() for one in said[:3]] == [
        "Traceback (most recent call last):",
        f'File "{script}", line 3, in <module>',
        line,
    ]
    text = next(one for one in said[3:] if one.startswith("samestep"))
    assert text.startswith("samestep.errors.LayoutError: unknown layout option 'ddp': use dp=N; ")
    assert re.search(r" \[[a-z-]+\]$", text)
    assert "src/samestep" not in done.stderr


def test_an_uncaught_error_is_printed_so_beside_the_hook_of_torch(tmp_path: Path) -> None:
    """torch's hook of a process group prefixes all lines of a traceback with the rank."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import samestep, torch\n"
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
        "samestep.parallelize(torch.nn.Linear(2, 2), 'mse', torch.optim.SGD, layout='ddp=1')\n"
    )
    _, _, complaints = small.script(script, (), tmp_path / "said")
    assert complaints.startswith("Traceback (most recent call last):\n")
    assert "samestep.errors.LayoutError: unknown layout option 'ddp'" in complaints
    assert "src/samestep" not in complaints


def test_an_uncaught_error_of_other_code_is_printed_whole(tmp_path: Path) -> None:
    """Also if an error of samestep was caught before it."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import samestep\ntry:\n    samestep.Layout('ddp=2')\nexcept samestep.LayoutError as error:\n    raise KeyError(1) from error\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "KeyError: 1"
    assert "The above exception was the direct cause" in done.stderr


def test_an_error_keeps_its_code_text_and_waiver_in_another_process() -> None:
    for name, kind in CLASSES.items():
        error = kind("some-code", "what happened. Use tp=2")
        for other in (pickle.loads(pickle.dumps(error)), errors.of_words(*errors.to_words(error))):
            assert (type(other), other.code, str(other)) == (kind, "some-code", str(error)), name
            assert other.remedy == "Use tp=2"
    unproven = errors.UnprovenError("loss-not-a-sum", "the loss is a mean", "loss")
    for other in (pickle.loads(pickle.dumps(unproven)), errors.of_words(*errors.to_words(unproven))):
        assert (other.code, str(other), other.waiver) == ("loss-not-a-sum", str(unproven), "loss")


def test_an_error_of_a_class_below_is_sent_as_that_of_the_public_one() -> None:
    error = type("TheirError", (errors.DataError,), {})("some-code", "of somebody else's code")
    other = errors.of_words(*errors.to_words(error))
    assert (type(other), other.code, str(other)) == (errors.DataError, "some-code", str(error))
