"""The attacks that there are, and the page that tells of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedemu.ops.stress.strangers.attacks import ATTACKS
from fedemu.ops.stress.strangers.play import names
from fedemu.ops.stress.strangers.telling import play_strangers
from fedemu.protocol.errors import ConfigurationError

PAGE = (Path(__file__).parents[4] / "docs" / "security.md").read_text()


def test_the_page_on_security_tells_of_every_attack_and_of_no_other() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.partition("## Trying it")[2], re.MULTILINE)
    assert rows == list(ATTACKS)


def test_a_stolen_lease_is_played_against_keys_alone() -> None:
    assert set(names((), keys=True)) - set(names((), keys=False)) == {"stolen-lease"}
    assert names(("garbage", "arrays", "garbage"), keys=True) == ["garbage", "arrays"], "each is played once"


def test_an_attack_that_there_is_not_is_told_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no attack 'flood'; choose from messages, arrays"):
        play_strangers(tmp_path, ["flood"], 1.0)
