"""The commands about keys: what they print, and where a coordinator refuses to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.cli import commands
from fedemu.ops.cli.shell.options import overrides_of
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.keys.store import KeyFolder


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    monkeypatch.setenv("FEDEMU_KEYS", str(tmp_path / "keys"))
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        commands.command(list(arguments), prog_name="fedemu")
    return int(ended.value.code or 0)


def test_a_machine_is_approved_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("keys", "new") == 0
    own = capsys.readouterr().out.strip()
    other = KeyFolder(tmp_path / "other").new()
    assert call("keys", "approve", "lab2", other) == 0
    assert capsys.readouterr().out == f"lab2 is approved: {other}\n"
    assert call("keys", "list") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"keys in {tmp_path}/keys", f"  this machine  {own}", f"  lab2          {other}  approved"]
    assert call("keys", "list", "--format", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == {"folder": f"{tmp_path}/keys", "public_key": own, "approved": {"lab2": other}, "edges": []}
    assert call("keys", "approve", "lab2", other, "--edge") == 0
    assert capsys.readouterr().out == f"lab2 is approved as an edge: {other}\n"
    assert call("keys", "list") == 0
    assert capsys.readouterr().out.splitlines()[2] == f"  lab2          {other}  approved as an edge"
    assert call("keys", "revoke", "lab2") == 0
    assert capsys.readouterr().out == f"lab2 is not approved any more: {other}\n"
    assert KeyFolder(tmp_path / "keys").approved() == {}


def test_a_disk_that_takes_no_keys_ends_the_command_with_5_and_gets_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files_end_at: Any
) -> None:
    other = KeyFolder(tmp_path / "other").new()
    with files_end_at(10):
        assert (call("keys", "new"), call("keys", "approve", "lab2", other)) == (5, 5)
    keys = tmp_path / "keys"
    assert capsys.readouterr().err.splitlines() == [
        f"fedemu: {place} cannot be written: File too large; name another folder with --keys"
        for place in (keys, keys / "approved" / "lab2.key")
    ]
    assert [path for path in keys.rglob("*") if path.is_file()] == []


def test_a_second_key_under_a_name_takes_the_place_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (KeyFolder(tmp_path / name) for name in ("first", "second"))
    for folder in (first, second):
        folder.new()
        assert call("keys", "approve", "lab2", str(folder.public_file), "--keys", "mine") == 0
    assert "lab2 is approved with another key than before" in capsys.readouterr().out
    assert KeyFolder(tmp_path / "mine").approved() == {"lab2": second.pair()[0]}


@pytest.mark.parametrize("command", [(), ("new",), ("list",), ("approve",), ("revoke",)])
def test_every_command_about_keys_has_help_and_an_example(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("keys", *command, "--help") == 0
    shown = capsys.readouterr().out
    said = " ".join(("fedemu keys", *command))
    assert f"Usage: {said} " in shown
    assert "Exit codes: 0 done;" in shown
    assert shown.rstrip().splitlines()[-1].startswith(f"    {said}")


def test_keys_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("keys") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: fedemu keys")
    assert all(f"\n  {command} " in shown for command in ("new", "list", "approve", "revoke"))


@pytest.mark.parametrize("command", ["coordinator", "run"])
def test_an_address_that_others_reach_is_refused_without_keys(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "digits-small", "--bind", "tcp://0.0.0.0:25599", "--out", "out") == 2
    told = capfd.readouterr().err
    assert told.startswith(f"fedemu: other machines can reach tcp://0.0.0.0:25599, and there are no keys in {tmp_path}")
    assert "`fedemu keys new`" in told
    assert "--insecure" in told
    assert not (tmp_path / "out").exists()
    assert call(command, "digits-small", "--bind", "tcp://0.0.0.0:25599", "--keys", "my keys") == 2
    assert (
        "`fedemu keys new --keys 'my keys'`, let machines in with `fedemu keys approve NAME KEY --keys 'my keys'`"
        in (capfd.readouterr().err)
    )


def test_a_machine_without_its_own_key_is_told_before_it_begins(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("device", "--server-key", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "--state", "state") == 2
    assert "there is no key in" in capfd.readouterr().err
    assert not Path("state").exists()


def test_a_folder_of_keys_may_have_any_name() -> None:
    folder = Path('k "\\ \U0001f511')
    _, runtime = load_experiment("digits", overrides_of(None, runtime__keys=folder), {})
    assert Path(runtime.keys) == folder
