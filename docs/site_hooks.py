"""Hooks of the documentation site: pages from outside of docs/, one page for each public function, and links between all of them.

mkdocs calls these functions; they import neither torch nor samestep.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "AGENTS.md": "project/agents.md",
    "SECURITY.md": "project/security.md",
    "tests/README.md": "project/tests.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Files outside of docs/, and the pages that they become."""
NOTEBOOK = "examples/quickstart.ipynb"
API = "reference/api"
NOT_RUN = re.compile(r"^<!-- not run: ([^\n]+) -->\n+( *```.*?^ *```)$", re.DOTALL | re.MULTILINE)
"""A code block that no test runs, with the reason, which the page shows."""


def public_names() -> dict[str, str]:
    """Return the path of each public function and class of samestep, errors included, by its name."""
    tree = ast.parse((ROOT / "src" / "samestep" / "__init__.py").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep."):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    return {name: found[name] for name in sorted(names)}


def on_config(config: Any) -> Any:
    """Add the pages of functions and of errors to the reference."""
    names = public_names()
    functions = [{name: f"{API}/{name}.md"} for name in names if not name.endswith("Error")]
    (section,) = (one for one in config["nav"] if "Reference" in one)
    section["Reference"].insert(3, {"Functions and classes": [*functions, {"Errors": f"{API}/errors.md"}]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "notebook.md", content=_notebook()))
    names = public_names()
    for name, path in names.items():
        if not name.endswith("Error"):
            files.append(File.generated(config, f"{API}/{name}.md", content=f"::: {path}\n"))
    errors = "".join(f"::: {path}\n\n" for name, path in names.items() if name.endswith("Error"))
    files.append(File.generated(config, f"{API}/errors.md", content=f"# Errors\n\n{errors}"))
    return files


def _notebook() -> str:
    """Return the notebook of the quickstart as a page."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    return "\n\n".join(
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    )


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; a link to a file outside of it becomes its path."""
    markdown = NOT_RUN.sub(r"\2\n\n<small>No test runs this block: \1.</small>\n", markdown)
    uri = page.file.src_uri
    source = next((path for path, of_site in OUTSIDE.items() if of_site == uri), f"docs/{uri}")

    def linked(match: re.Match[str]) -> str:
        mark, text, link, anchor = match["mark"], match["text"], match["link"], match["anchor"] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        of_site = OUTSIDE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not of_site:
            return f"{text} (`{target}`)"
        return f"{mark}[{text}]({posixpath.relpath(of_site, posixpath.dirname(uri) or '.')}{anchor})"

    return re.sub(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<link>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)", linked, markdown)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads something from another host."""
    for page in Path(config["site_dir"]).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]+(?:stylesheet|preload)[^>]+href=\"?(https?:[^\s\">]+)", text)
        if loaded:
            raise SystemExit(f"{page} loads {loaded[0]}")
