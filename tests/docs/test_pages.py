"""Every block on the pages runs or says why not, every link leads somewhere, and every name that is told exists."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import player
import pytest
import warm
from checks import dead_links, mistakes
from pages import ROOT, Page

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT

FLOORS = ("protocol", "algorithms", "device", "coordinator", "ops")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_nothing_that_does_not_exist(name: str) -> None:
    found = mistakes(Page.read(ROOT / name))
    assert not found, "\n".join(found)


def test_the_changelog_links_to_what_is_there() -> None:
    found = [*dead_links(Page.read(ROOT / "CHANGELOG.md"))]  # the changelog may name files that are gone
    assert found == []


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the command ``fedemu``. A process that has imported everything already does its work."""
    folder = tmp_path_factory.mktemp("commands")
    address = str(folder / "warm.socket")
    warm.install(folder, address, sys.executable)
    large_pages = {"GLIBC_TUNABLES": COMPUTE_ENVIRONMENT["GLIBC_TUNABLES"]}  # forks take half of the time
    server = subprocess.Popen([sys.executable, warm.__file__, address], env=player.environment(folder) | large_pages)
    deadline = time.monotonic() + 100
    while not Path(address).exists():
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)  # until the server has imported everything
    yield folder
    server.terminate()
    server.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NAMES if any(Page.read(ROOT / name).blocks())])
def test_the_blocks_of_a_page_run_in_order(name: str, commands: Path, tmp_path: Path) -> None:
    page = Page.read(ROOT / name)
    if "$ pkill " in page.text and shutil.which("pkill") is None:
        pytest.skip("pkill is not installed; Debian has it in the package procps")
    runnable = [block for block in page.blocks() if block.language in ("console", "python") and block.not_run is None]
    assert player.play(page, tmp_path, player.environment(commands)) == len(runnable)


def test_the_tree_of_the_page_for_contributors_is_that_of_the_code() -> None:
    told = re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    rooms = [path.parent for floor in FLOORS for path in (ROOT / floor).rglob("__init__.py")]
    assert sorted(told) == sorted(str(room.relative_to(ROOT)) for room in rooms)


def test_the_order_of_rooms_on_the_page_is_the_one_that_holds() -> None:
    [order] = [
        node.value
        for node in ast.parse((ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ORDER"
    ]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| (.*\\\|.*) \|$", page, re.MULTILINE))
    assert {floor: columns(text, r"\|", ",") for floor, text in told.items()} == {
        floor: columns(text, "|") for floor, text in ast.literal_eval(order).items()
    }


def columns(text: str, bar: str, comma: str | None = None) -> list[set[str]]:
    return [{room.strip() for room in column.split(comma)} for column in text.split(bar)]


def test_the_names_of_the_glossary_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    defined = {
        name for text in sources for name in re.findall(r"^(?:class )?([A-Z]\w+)(?: = |\(|:)", text, re.MULTILINE)
    }
    told = set(re.findall(r"`([A-Z][a-z]\w+)`", page))
    assert len(told) > 20
    assert told - defined == set()


def test_a_word_stands_once_in_the_glossary() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [
        word.strip() for row in re.findall(r"^\| ([a-z][^|]+) \| [A-Z]", page, re.MULTILINE) for word in row.split(",")
    ]
    assert len(words) > 80
    assert sorted(words) == sorted({*words})


@pytest.mark.timeout(600)
def test_python_blocks_share_their_names_and_one_that_raises_fails_the_page(commands: Path, tmp_path: Path) -> None:
    good = "```python\nseven = 7\n```\n```python\nassert seven == 7\n```\n"
    page = Page(tmp_path / "page.md", good)
    assert player.play(page, tmp_path, player.environment(commands)) == 2
    page = Page(tmp_path / "page.md", good + "```python\nraise ValueError(seven)\n```\n")
    with pytest.raises(player.PageFailed, match=r"(?s)page\.md:7: the block failed.*ValueError: 7"):
        player.play(page, tmp_path, player.environment(commands))


@pytest.mark.timeout(600)
def test_a_command_that_fedemu_refuses_fails_the_page(commands: Path, tmp_path: Path) -> None:
    page = Page(tmp_path / "page.md", "```console\n$ fedemu run no-such-preset\n```\n")
    with pytest.raises(player.PageFailed, match=r"(?s)page\.md:1: .*fedemu: .*no-such-preset"):
        player.play(page, tmp_path, player.environment(commands))
