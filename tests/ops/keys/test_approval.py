"""Approvals are read again while a coordinator runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fedemu.ops.keys import approval, store
from fedemu.ops.keys.approval import AGAIN_SECONDS, Approval
from fedemu.ops.keys.store import KeyFolder

FIRST, SECOND = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(approval.time, "monotonic", lambda: now[0])
    return now


def test_a_change_counts_after_a_second_at_most(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(tmp_path)
    approved = Approval(folder, own=SECOND)
    assert [approved(FIRST), approved(SECOND)] == [False, True]
    assert not caplog.records, "a folder without approvals needs no words"
    folder.approve("lab", FIRST)
    assert not approved(FIRST), "the files are not looked at for every message"
    clock[0] += AGAIN_SECONDS
    assert approved(FIRST)
    folder.revoke("lab")
    clock[0] += AGAIN_SECONDS
    assert not approved(FIRST)


def test_a_machine_may_be_an_edge_while_it_is_approved_as_one(tmp_path: Path, clock: list[float]) -> None:
    folder = KeyFolder(tmp_path)
    approved = Approval(folder, own=SECOND)
    folder.approve("site", FIRST, edge=True)
    clock[0] += AGAIN_SECONDS
    assert [approved(FIRST), approved.of_edge(FIRST), approved.of_edge(SECOND)] == [True, True, True]
    folder.approve("site", FIRST)
    clock[0] += AGAIN_SECONDS
    assert [approved(FIRST), approved.of_edge(FIRST)] == [True, False]


def test_a_file_that_is_changed_in_its_place_counts(tmp_path: Path, clock: list[float]) -> None:
    folder = KeyFolder(tmp_path)
    folder.approve("lab", FIRST)
    approved = Approval(folder, own="")
    assert approved(FIRST)
    (folder.approved_folder / "lab.key").write_text(f'curve\n  public-key = "{SECOND}"\n\n')
    clock[0] += AGAIN_SECONDS
    assert [approved(FIRST), approved(SECOND)] == [False, True]


def test_nobody_is_approved_while_the_folder_cannot_be_read(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(tmp_path)
    folder.approve("lab", FIRST, edge=True)
    approved = Approval(folder, own=SECOND)
    assert approved.of_edge(FIRST)
    folder.approved_folder.rename(tmp_path / "elsewhere")
    folder.approved_folder.touch()
    clock[0] += AGAIN_SECONDS
    assert [approved(FIRST), approved.of_edge(FIRST), approved(SECOND)] == [False, False, True]
    assert "can't read" in caplog.text
    assert "no machine is approved" in caplog.text
    folder.approved_folder.unlink()
    (tmp_path / "elsewhere").rename(folder.approved_folder)
    clock[0] += AGAIN_SECONDS
    assert approved.of_edge(FIRST)


def test_a_link_to_nothing_hides_no_change(tmp_path: Path, clock: list[float]) -> None:
    folder = KeyFolder(tmp_path)
    folder.approve("lab", FIRST)
    (folder.approved_folder / "gone.key").symlink_to(tmp_path / "nothing")
    approved = Approval(folder, own="")
    assert approved(FIRST)
    folder.revoke("lab")
    clock[0] += AGAIN_SECONDS
    assert not approved(FIRST)


@pytest.mark.parametrize("hindered", ["folder", "file"])
def test_what_was_approved_counts_while_the_system_cannot_look(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hindered: str
) -> None:
    folder = KeyFolder(tmp_path)
    folder.approve("lab", FIRST, edge=True)
    approved = Approval(folder, own="")
    assert approved(FIRST)
    folder.approve("other", SECOND)

    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    place = (approval.os, "scandir") if hindered == "folder" else (store, "load_certificate")
    with monkeypatch.context() as patch:
        patch.setattr(*place, no_descriptor)
        for _ in range(3):
            clock[0] += AGAIN_SECONDS
            assert [approved(FIRST), approved.of_edge(FIRST), approved(SECOND)] == [True, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"can't look at {folder.approved_folder} now (Too many open files); what it approved before counts until this "
        "is over"
    ]
    clock[0] += AGAIN_SECONDS
    assert approved(SECOND)
