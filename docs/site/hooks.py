"""Hooks of mkdocs: pages that lie beside ``docs/``, and what the API pages need: packages and names."""

import ast
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages beside ``docs/``, and their places on the site. The first page of the site stands in for the README."""
NAMES = re.compile(r"NAMES_FROM\(([\w/.]+)\)")
"""In an API page: the names that a package hands on from other modules than those of its own folder ``interface``."""
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")


@event_priority(100)  # before mkdocstrings, which looks for the folder once
def on_config(config: MkDocsConfig) -> None:
    """Link the packages below ``build/api/fedemu``, under the names by which Python imports them."""
    root = Path(config.config_file_path).parent
    packages = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    floors = [name.removeprefix("fedemu.") for name in packages if name.count(".") == 1]
    top = root / "build" / "api" / "fedemu"
    top.mkdir(parents=True, exist_ok=True)
    for name in ["__init__.py", *floors]:
        link = top / name
        link.unlink(missing_ok=True)
        link.symlink_to(root / name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside ``docs/``."""
    root = Path(config.config_file_path).parent
    for name, place in BESIDE.items():
        if name != "README.md":
            content = (root / name).read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=_with_links_on_the_site(content, "")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to pages beside ``docs/`` lead to where these are on the site; API pages list what a package hands on."""
    if page.file.generated_by is not None:
        return markdown
    markdown = NAMES.sub(
        lambda found: str(_handed_on(Path(page.file.abs_src_path or "").parents[2] / found[1])), markdown
    )
    return _with_links_on_the_site(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def _with_links_on_the_site(markdown: str, folder: str) -> str:
    """``folder`` is where the page lies, from the root of the project."""

    def moved(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link[1]))
        if place in BESIDE:
            return "](" + posixpath.relpath(BESIDE[place], folder.removeprefix("docs").strip("/") or ".")
        return "](" + (link[1] if folder else link[1].removeprefix("docs/"))

    return LINK.sub(moved, markdown)


def _handed_on(package: Path) -> list[str]:
    """The names that type checkers see in a package, apart from its interface, which has a page of its own."""
    tree = ast.parse(package.read_text(encoding="utf-8"))
    lazy = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    return sorted(
        name.name
        for node in lazy
        if not (node.module or "").endswith((".interface", ".protocol"))
        for name in node.names
        if name.asname is not None
    )
