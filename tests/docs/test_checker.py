"""The checks of the pages find what is broken: tried on small texts."""

from __future__ import annotations

import os
import select
import shutil
from contextlib import suppress
from pathlib import Path

import player
import pytest
from checks import mistakes
from pages import Page


def page(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return Page.read(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[there](no.md)", "page.md:1: the link no.md leads nowhere"),
        ("![a picture](no.png)", "page.md:1: the link no.png leads nowhere"),
        ("# One\n\n[there](#two)", "page.md:3: the link #two leads to a page without this heading"),
        ("[there](page.md#two)", "page.md:1: the link page.md#two leads to a page without this heading"),
        ("`coordinator/no_such_file.py`", "page.md:1: there is no coordinator/no_such_file.py"),
        ("`no_such_file.py`", "page.md:1: no file is called no_such_file.py"),
        ("`fedemu.algorithms.no_such_module`", "page.md:1: there is no fedemu.algorithms.no_such_module"),
        ("`fedemu.protocol.ids.NoSuchName`", "page.md:1: there is no fedemu.protocol.ids.NoSuchName"),
        ("`Roster.no_such_name`", "page.md:1: there is no Roster.no_such_name"),
        ("```\nls\n```", "page.md:1: the block is of no known language ('')"),
        ("<!-- not run: -->\n```console\n$ ls\n```", "page.md:2: the block is not run, but no reason is given"),
        ("```console\nls\n```", "page.md:1: a console block begins with a command"),
        ("```json\n{\n```", "page.md:1: the json block is not valid"),
        ("```python\nif\n```", "page.md:1: the python block is not valid"),
        ("```toml\n[local\n```", "page.md:1: the toml block is not valid"),
        ("```toml\n[local]\nlearning_rate = 1\n```", "page.md:1: the toml block is not valid: local.learning_rate"),
        ("`make no-such-target`", "page.md:1: there is no make no"),
        ("`fedemu walk`", "page.md:1: there is no command fedemu walk"),
        ("`fedemu run --no-such`", "page.md:1: fedemu run has no option --no-such"),
        ("`fedemu keys approve A a.key --no-such`", "page.md:1: fedemu keys approve has no option --no-such"),
        (
            "<!-- not run: slow -->\n```console\n$ fedemu run digits+none\n```",
            "page.md:2: there is no preset digits+none",
        ),
        ("A list\n- of one", "page.md:2: a list needs an empty line before it"),
    ],
)
def test_mistakes_on_a_page_are_told_with_their_lines(tmp_path: Path, text: str, complaint: str) -> None:
    [told] = mistakes(page(tmp_path, text))
    assert told.startswith(complaint)


def test_a_page_without_mistakes_has_no_complaints(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n", encoding="utf-8")
    text = """# One (and more)

[here](#one-and-more), [there](other.md#a-heading-with-code), [elsewhere](https://example.org/no-such-page#x),
`coordinator/serve.py`, `fedemu.protocol.ids`, `Columns.begin_again`, `algorithms/NAME.py`, `coordinator/rounds/`

- a list

```toml
[local]
lr = 0.5
```
```json
{"a": 1}
{"a": 2}
```
"""
    assert mistakes(page(tmp_path, text)) == []


SESSION = """Save this as `greeting.txt`:

```text
hello
```
<!-- run with: WORD=again FEDEMU_ROUNDS=7 -->
```console
$ read line < greeting.txt
$ for number in 1 2; do
>   echo $line $WORD $number $FEDEMU_ROUNDS >> said
> done
said, as it was
```
<!-- not run: it would fail -->
```console
$ false
```
```console
$ echo $line ${WORD:-never} $FEDEMU_ROUNDS >> said
```
"""


def play(folder: Path, text: str) -> int:
    bash = shutil.which("bash")
    assert bash is not None
    return player.play(page(folder, text), folder, player.environment(Path(bash).parent))


def test_the_blocks_of_a_page_share_a_folder_and_a_shell(tmp_path: Path) -> None:
    assert play(tmp_path, SESSION) == 2
    assert (tmp_path / "said").read_text() == "hello again 1 7\nhello again 2 7\nhello never 2\n"


@pytest.mark.parametrize("command", ["false", "ls no-such-file", "no-such-command", "false | cat no-such-file"])
def test_a_command_that_fails_fails_the_page_with_its_line_and_its_words(tmp_path: Path, command: str) -> None:
    with pytest.raises(player.PageFailed, match=r"page\.md:3: the block failed; it said last:\nhello"):
        play(tmp_path, f"# A page\n\n```console\n$ echo hello\n$ {command}\n$ echo never said\n```\n")


def test_a_process_that_a_page_leaves_in_the_background_ends_with_the_page(tmp_path: Path) -> None:
    assert play(tmp_path, "```console\n$ sleep 1000 &\n$ echo $! > sleeper\n```\n") == 1
    with suppress(ProcessLookupError):  # it is gone altogether
        watched = os.pidfd_open(int((tmp_path / "sleeper").read_text()))
        ended, _, _ = select.select([watched], [], [], 60)
        os.close(watched)
        assert ended
