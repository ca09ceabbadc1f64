"""A page of the documentation in parts: fenced blocks, links, headings, and names of files and modules in backquotes.

The form of a block is the same on all pages. Its first line names its language. A comment may stand before a block:
``<!-- not run: REASON -->`` leaves it out, and ``<!-- run with: NAME=VALUE ... -->`` sets variables of the environment.
The reader saves a block if the line before it ends in "as `NAME`:".
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("console", "python", "toml", "json", "text")
PARTS = ("protocol", "algorithms", "device", "coordinator", "ops", "docs", "tests", ".ci")
FENCE = re.compile(r"^( *)```+ *([^`\n]*)\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- *(.*?) *-->", re.DOTALL)
FILE = re.compile(r"\bas `([\w./-]+)`:$")
LINK = re.compile(r"(?<!`)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LIST_IN_PARAGRAPH = re.compile(r"^(?![-*\d|#>< ]|$).*\n(?:- |\* |1\. )", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` counts from 1, ``file`` is the name under which the reader saves the text."""

    line: int
    language: str
    text: str
    not_run: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    file: str | None = None

    def commands(self) -> str:
        """The script of a console block: the lines after ``$``, with those after ``>`` that continue them."""
        lines = self.text.splitlines()
        return "\n".join(line[2:] for line in lines if line.startswith(("$ ", "> ")))


@dataclass(frozen=True)
class Page:
    """A page of Markdown and where it lies."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    def blocks(self) -> list[Block]:
        return [self._block(found) for found in FENCE.finditer(self.text)]

    def prose(self) -> str:
        """The page with blank lines in place of its blocks and comments."""

        def blank(found: re.Match[str]) -> str:
            return "\n" * found[0].count("\n")

        return COMMENT.sub(blank, FENCE.sub(blank, self.text))

    def _block(self, found: re.Match[str]) -> Block:
        before = self.text[: found.start()]
        line = before.count("\n") + 1
        words, variables = None, {}
        for comment in self._comments_before(before):
            kind, _, value = comment.partition(":")
            if kind == "not run":
                words = value.strip()
            elif kind == "run with":
                variables = dict(setting.split("=", 1) for setting in value.split())
        paragraph = COMMENT.sub("", before).rstrip()
        named = FILE.search(paragraph)
        return Block(line, found[2].strip(), found[3], words, variables, named[1] if named else None)

    def _comments_before(self, before: str) -> Iterator[str]:
        while (before := before.rstrip()).endswith("-->"):
            start = before.rindex("<!--")
            found = COMMENT.fullmatch(before[start:])
            yield found[1] if found else ""
            before = before[:start]


def mistakes(page: Page) -> list[str]:
    """What is wrong with a page, without running anything; every sentence begins with the line."""
    found = [*_blocks(page), *dead_links(page), *_names(page), *_lists(page)]
    return [f"{page.path.name}:{line}: {what}" for line, what in sorted(found)]


def _blocks(page: Page) -> Iterator[tuple[int, str]]:
    for block in page.blocks():
        if block.language not in LANGUAGES:
            yield block.line, f"the block is of no known language ({block.language!r}); use one of {LANGUAGES}"
        elif block.not_run == "":
            yield block.line, "the block is not run, but no reason is given"
        elif block.language == "console" and block.not_run is None and not block.text.startswith("$ "):
            yield block.line, "a console block begins with a command after '$ '"
        elif check := CHECKS.get(block.language):
            try:
                check(block.text)
            except Exception as error:
                yield block.line, f"the {block.language} block is not valid: {error}"


def _json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        for line in text.splitlines():
            json.loads(line)


def _toml(text: str) -> None:
    """A whole experiment or a part of one; what it leaves out has its default."""
    from fedemu.ops.experiment.sources import load_experiment

    load_experiment(tomllib.loads(text), [], {})


CHECKS: dict[str, Callable[[str], object]] = {"json": _json, "toml": _toml, "python": ast.parse}


def dead_links(page: Page) -> Iterator[tuple[int, str]]:
    """Line and sentence for each link within the project that leads nowhere."""
    prose = page.prose()
    for link in LINK.finditer(prose):
        line = prose[: link.start()].count("\n") + 1
        place, _, anchor = link[1].partition("#")
        if re.match(r"[a-z]+:", place):
            continue  # another host; tests need no network
        target = (page.path.parent / place).resolve() if place else page.path
        if not target.exists():
            yield line, f"the link {link[1]} leads nowhere"
        elif anchor and anchor not in anchors(target if place else page):
            yield line, f"the link {link[1]} leads to a page without this heading"


def anchors(page: Path | Page) -> set[str]:
    """What the headings of a page are called in links: in small letters, without marks, with dashes for spaces."""
    if isinstance(page, Path):
        page = Page.read(page)
    names: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", page.text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return {*names}


def _names(page: Page) -> Iterator[tuple[int, str]]:
    prose = page.prose()
    saved = {Path(block.file).name for block in page.blocks() if block.file}
    for code in CODE.finditer(prose):
        line = prose[: code.start()].count("\n") + 1
        text = code[1]
        if re.fullmatch(r"fedemu(\.\w+)+", text):
            if not _is_importable(text):
                yield line, f"there is no {text}"
        elif re.fullmatch(r"[\w./*-]+", text) and not re.search(r"[A-Z]{3}", text.removesuffix(".md")):
            first, slash, _ = text.partition("/")
            if slash and first in PARTS and not _exists(text):
                yield line, f"there is no {text}"
            elif not slash and text.endswith(".py") and text not in saved | file_names():
                yield line, f"no file is called {text}"


def _exists(path: str) -> bool:
    return any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()


@cache
def file_names() -> set[str]:
    """The names of all modules."""
    return {path.name for part in PARTS for path in (ROOT / part).rglob("*.py")}


def _is_importable(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def _lists(page: Page) -> Iterator[tuple[int, str]]:
    prose = page.prose()
    for found in LIST_IN_PARAGRAPH.finditer(prose):
        yield prose[: found.start()].count("\n") + 2, "a list needs an empty line before it, or the site shows no list"
