"""The attacks that there are, and the page that tells of them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedemu.ops.cli.commands import app
from fedemu.ops.stress.strangers import telling
from fedemu.ops.stress.strangers.attacks import ATTACKS
from fedemu.ops.stress.strangers.play import AttackResult, Calm, names
from fedemu.ops.stress.strangers.refusals import REFUSED, not_refused
from fedemu.ops.stress.strangers.telling import play_strangers
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.protocol.code.source import interpreter
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
        play_strangers(tmp_path, ["flood"], 1.0, [])


def test_attacks_that_were_played_before_an_interruption_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(attacks: list[str], *_: Any, keys: bool, edge: bool) -> AttackResult:
        if keys:
            raise KeyboardInterrupt
        return AttackResult(tuple(attacks), keys, 1.0, pace=0.9)

    monkeypatch.setattr(telling, "undisturbed", lambda *_: Calm(9, 3, Undisturbed("d", ()), 1.0, 1.0, 0, 0.0))
    monkeypatch.setattr(telling, "play", played)
    ended = CliRunner().invoke(app, ["stress", "strangers", "--attack", "garbage", "--format", "json"])
    assert ended.exit_code == 4
    assert [(each["attacks"], each["keys"], each["passed"]) for each in json.loads(ended.stdout)] == [
        (["garbage"], False, True)
    ]
    assert "90.0 %" in ended.stderr.partition("ended early; this was played to its end before:")[2]


def test_an_edge_of_nobody_that_is_let_in_is_a_complaint_whatever_else_is_refused() -> None:
    let_in = {"lease_unknown": 10_000, "unknown_peer": 100}  # by a coordinator that took every key for one of an edge
    assert list(not_refused(["channels"], True, let_in)) == [
        "the coordinator refused nothing of the attack channels: it counted no no_edge"
    ]
    assert list(not_refused(["channels"], True, let_in | {"no_edge": 1})) == []
    assert list(not_refused(["channels"], False, let_in)) == [], "without keys everybody may say that he is an edge"


def test_it_is_known_of_every_attack_what_has_to_be_refused() -> None:
    assert list(REFUSED) == list(ATTACKS)
    assert list(not_refused(list(ATTACKS), True, {"no_edge": 1, "lease_unknown": 1, "handshake": 1, "key": 1})) == [
        f"the coordinator refused nothing of the attack {name}: it counted no {reason}"
        for name, reason in (
            ("messages", "too_much"), ("arrays", "too_much"), ("garbage", "encoding"),
            ("idle-connections", "connections"),
        )
    ]  # fmt: skip


def test_an_attack_that_dies_ends_the_process_of_the_attacker() -> None:
    words = [*interpreter(), "-m", "fedemu.ops.stress.strangers.attacker"]
    said = {"address": "nowhere", "attacks": ["messages"], "lease": "", "keys": None}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None
        assert attacker.stderr is not None
        attacker.stdin.write(json.dumps(said) + "\n")
        attacker.stdin.flush()
        try:
            assert attacker.wait(60) == 1
            assert attacker.stderr.read().splitlines()[-1] == "the attack messages has ended"
        finally:
            attacker.kill()
