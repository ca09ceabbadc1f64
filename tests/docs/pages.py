"""A page of the documentation and its fenced blocks.

The form of a block is the same on all pages. Its first line names its language. A comment may stand before a block:
``<!-- not run: REASON -->`` leaves it out, and ``<!-- run with: NAME=VALUE ... -->`` sets variables of the environment.
The reader saves a block if the line before it ends in "as `NAME`:".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```+ *([^`\n]*)\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- *(.*?) *-->", re.DOTALL)
FILE = re.compile(r"\bas `([\w./-]+)`:$")


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
