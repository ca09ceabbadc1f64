"""What can be wrong with a page without running it: blocks, links, names of files and modules, command lines, lists."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from pages import FENCE, ROOT, Page

LANGUAGES = ("console", "python", "toml", "json", "text")
PARTS = ("protocol", "algorithms", "device", "coordinator", "ops", "docs", "tests", ".ci")
LINK = re.compile(r"(?<!`)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LIST_IN_PARAGRAPH = re.compile(r"^(?![-*\d|#>< ]|$).*\n(?:- |\* |1\. )", re.MULTILINE)


def mistakes(page: Page) -> list[str]:
    """One sentence for each mistake on a page, found without running anything. It begins with the page and the line."""
    found = [*_blocks(page), *dead_links(page), *_names(page), *_command_lines(page), *_lists(page)]
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
    """The names of a page's headings in links: in small letters, without marks, with dashes for spaces."""
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
        elif member := re.match(r"([A-Z][a-z]\w*)\.([a-z_]\w*)", text):
            if member[2] not in members(member[1]):
                yield line, f"there is no {member[0]}"
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
    """The file names of all modules."""
    return {Path(path).name for path in _modules()}


@cache
def _modules() -> dict[str, str]:
    """The text of all modules, by their paths."""
    paths = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    return {str(path): path.read_text(encoding="utf-8") for path in paths}


@cache
def members(name: str) -> set[str]:
    """The names that the classes called ``name`` define, in whatever module."""
    found: set[str] = set()
    for text in (text for text in _modules().values() if f"class {name}" in text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                found.update(_defined(node))
    return found


def _defined(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.id if isinstance(inner, ast.Name) else inner.attr


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


def _command_lines(page: Page) -> Iterator[tuple[int, str]]:
    """Line and sentence for each wrong command of fedemu or of make, also for commands that are not run."""
    prose = page.prose()
    lines = [(prose[: code.start()].count("\n") + 1, code[1]) for code in CODE.finditer(prose)]
    for block in page.blocks():
        if block.language == "console":
            commands = block.commands() or block.text
            lines += [(block.line, line) for line in commands.replace("\\\n", " ").splitlines()]
    for line, text in lines:
        for target in re.findall(r"^make ([a-z]+)", text):
            if f"\n{target}:" not in (ROOT / "Makefile").read_text(encoding="utf-8"):
                yield line, f"there is no make {target}"
        for words in re.findall(r"(?:^|\$ |; do |^ +)fedemu ([a-z][^#;<>|]*)", text):
            yield from ((line, complaint) for complaint in _complaints(words.split()))


def _complaints(words: list[str]) -> Iterator[str]:
    from fedemu.ops.experiment.presets import is_preset

    command, *rest = words
    if rest and f"{command} {rest[0]}" in commands_and_options():
        command, rest = f"{command} {rest[0]}", rest[1:]
    options = commands_and_options().get(command)
    if options is None:
        yield f"there is no command fedemu {command}"
        return
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] not in options:
            yield f"fedemu {command} has no option {word}"
    first = rest[0] if rest and command in ("run", "validate", "coordinator") else ""
    if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*[a-z0-9]", first) and not first.endswith(".toml") and not is_preset(first):
        yield f"there is no preset {first}"


@cache
def commands_and_options() -> dict[str, set[str]]:
    """The options of each command of fedemu. A command below another one is named with it, as ``keys approve``."""
    from fedemu.ops.cli.commands import command as group

    commands = dict(group.commands)
    for name, command in group.commands.items():
        commands |= {f"{name} {below}": each for below, each in getattr(command, "commands", {}).items()}
    return {
        name: {"--help", *(option for parameter in command.params for option in parameter.opts)}
        for name, command in commands.items()
    }


def _lists(page: Page) -> Iterator[tuple[int, str]]:
    prose = page.prose()
    for found in LIST_IN_PARAGRAPH.finditer(prose):
        yield prose[: found.start()].count("\n") + 2, "a list needs an empty line before it, or the site shows no list"
