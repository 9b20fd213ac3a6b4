"""Every code block of the site is run by a test, or a line `<!-- not run: REASON -->` before it says why it cannot be; that too must parse."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from samestep import Job, arguments
from samestep.cli import _parser
from tests import small
from tests.docs.test_coming_from import blocks, side
from tests.docs.test_parts_of_scripts import LOOPS, PARTS, text_of
from tests.docs.test_readme import SHOWN

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/your-first-hour.md": "test_first_hour.py",
    "docs/ports.md": "test_ports.py",
    "docs/rejected-code.md": "test_rejected_code.py",
    "docs/coming-from.md": "test_coming_from.py",
    "docs/plain-versions.md": "test_plain_examples.py",
}
"""Pages with tests of their own, which run all of their blocks; the scripts of docs/optimizers.md run in test_coming_from.py."""
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
GENERATED = re.compile(r"<!-- (table|measured): \w+ -->\n.*?<!-- end -->", re.DOTALL)
SHELLS = ("", "bash")


class Block(NamedTuple):
    """A code block with the page it is on, its number there, and the reason if no test runs it."""

    page: str
    number: int
    language: str
    text: str
    reason: str


def _blocks() -> Iterator[Block]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page = path.relative_to(ROOT).as_posix()
        text = GENERATED.sub("", path.read_text(encoding="utf-8"))
        assert text.count("```") == 2 * len([*FENCE.finditer(text)]), page
        for number, found in enumerate(FENCE.finditer(text)):
            lines = [line.removeprefix(found["indent"]) for line in found["text"].splitlines(keepends=True)]
            yield Block(page, number, found["language"], "".join(lines), found["reason"] or "")


BLOCKS = [block for block in _blocks() if block.page not in ELSEWHERE]
SCRIPTS = set(blocks("python", ROOT / "docs" / "optimizers.md"))
RUN = [block for block in BLOCKS if not block.reason and block.language in (*SHELLS, "python")]
RUN = [block for block in RUN if block.text not in SCRIPTS or "samestep.launch" not in block.text]
IN_PARTS = {text_of(part) for part in PARTS}
"""Blocks that are parts of a script; test_parts_of_scripts.py runs them."""
RUN = [block for block in RUN if block.text not in IN_PARTS]
IN_README = {line.partition("#")[0].strip() for line, _ in SHOWN}
"""Commands that test_readme.py runs, whole."""


def _name(block: Block) -> str:
    return f"{Path(block.page).stem}-{block.number}"


def test_a_block_is_run_or_says_why_not_and_parses() -> None:
    parser = _parser()
    for block in BLOCKS:
        assert block.language in (*SHELLS, "python", "diff", "toml", "json", "yaml", "text"), block
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "diff":
            assert block.reason or any(words in block.text for _, words, _ in LOOPS), "a diff on this page runs nowhere"
            for sign in "-+":
                ast.parse(textwrap.dedent(side(block.text, sign)))
        elif block.language == "toml":
            tables = tomllib.loads(block.text)
            assert block.reason or Job(**tables)
        elif block.language == "json":
            [json.loads(line) for line in block.text.splitlines()]
        elif block.language == "yaml":
            assert block.reason
            assert yaml.safe_load(block.text)
        elif block.language in SHELLS:
            assert block.reason or [*_commands(block)], (
                f"{block.page}: a block that is no command has the language `text`"
            )
            for words in _commands(block):
                assert callable(parser.parse_args(words).verb)


def _commands(block: Block) -> Iterator[list[str]]:
    """Yield the words behind `samestep` of the commands in a block."""
    for line in _lines(block):
        words = shlex.split(
            line.partition(" > ")[0].partition(" -- ")[0], comments=True
        )  # without the words of a script
        if "samestep" in words:
            yield arguments.spell_out(words[words.index("samestep") + 1 :])
        elif block.reason and words:
            continue  # the command of another program, in a block that no test runs
        else:
            assert not words, line


def _lines(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


def _smaller(words: list[str]) -> list[str]:
    """Return the words that make the job small if a command trains it; `make train` and the README's commands train it whole."""
    if words[0] not in ("train", "verify"):
        return []
    settings = small.settings(train__steps=20)
    if any(word.startswith("model.source=") for word in words):  # whose configuration has other keys
        settings = [word for word in settings if "=" in word and not word.startswith("model.config.")]
        settings = [word for setting in settings for word in ("--set", setting)]
    return [*settings, *["--set", "run.compile_backend=aot_eager"] * ("run.compile=blocks" in words)]


@pytest.mark.parametrize("block", RUN, ids=_name)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    if block.language == "python":
        (tmp_path / "my_project.py").write_text(blocks("python")[0], encoding="utf-8")
        (tmp_path / "script.py").write_text(block.text, encoding="utf-8")
        status, said, complaints = small.script(tmp_path / "script.py", (), tmp_path / "said")
        assert status == 0, said + complaints
    else:
        for line, words in zip(_lines(block), _commands(block), strict=True):
            if line.partition("#")[0].strip() in IN_README:
                continue
            status = small.status_of(small.in_background([*words, *_smaller(words)], tmp_path / "said"), 300.0)
            assert status == 0, (tmp_path / "said" / "err").read_text(encoding="utf-8")
            if target := shlex.split(line.partition(" > ")[2], comments=True):  # what a shell writes the output to
                Path(*target).write_text((tmp_path / "said" / "out").read_text(encoding="utf-8"), encoding="utf-8")
