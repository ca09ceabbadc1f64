"""What a campaign leaves when it is interrupted, and when it ends early."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedemu.ops.cli.commands import app
from fedemu.ops.stress.campaign import telling
from fedemu.ops.stress.campaign.cases import Case, CaseResult


@pytest.mark.parametrize("complaints", [(), ("another digest",)])
def test_what_a_failed_case_left_survives_an_interruption(
    complaints: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play_case(case: Case, folder: Path, *_: Any) -> CaseResult:
        if case.number == 1:
            raise KeyboardInterrupt
        folder.mkdir()
        return CaseResult(case, 1.0, (), complaints)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(telling, "undisturbed", lambda *_: "digest")
    monkeypatch.setattr(telling, "play_case", play_case)
    ended = CliRunner().invoke(app, ["stress", "campaign", "--format", "json"])
    assert ended.exit_code == 4
    assert [(each["case"]["number"], each["passed"]) for each in json.loads(ended.stdout)] == [(0, not complaints)]
    assert "ended early; this was played to its end before:" in ended.stderr
    assert f"1 case played{'; failed: 0' if complaints else ', all ended as if nothing had happened'}\n" in ended.stderr
    assert len([*tmp_path.glob("fedemu-stress-*/case-0")]) == len(complaints)


def test_a_campaign_in_which_everything_fails_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play_case(case: Case, folder: Path, *_: Any) -> CaseResult:
        return CaseResult(case, 0.0, (), () if case.number == 3 else ("it did not start",))

    monkeypatch.setattr(telling, "undisturbed", lambda *_: "digest")
    monkeypatch.setattr(telling, "play_case", play_case)
    ended = CliRunner().invoke(app, ["stress", "campaign", "--cases", "99", "--out", str(tmp_path / "out")])
    assert ended.exit_code == 1
    assert "the last 20 cases failed, so no more are played" in ended.stderr
    assert "24 cases played; failed: 0, 1, 2, 4, " in ended.stderr
