"""The mark by which the page says that it watches, and what processes write for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedemu.ops.watching import feed
from fedemu.ops.watching.feed import MARK, is_watched, read_feed, watch


def test_a_folder_is_watched_for_some_seconds_after_each_mark(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    assert not is_watched(folder)
    watch(folder)
    assert is_watched(folder)
    os.utime(folder / MARK, (0, 0))
    assert not is_watched(folder)
    watch(folder)
    assert is_watched(folder)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (run / "live").symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        watch(run / "live")
    (run / "live").unlink()
    (run / "live").mkdir()
    (run / "live" / MARK).symlink_to(elsewhere / "nologin")
    with pytest.raises(OSError, match="symbolic links"):
        watch(run / "live")
    assert list(elsewhere.iterdir()) == []


def test_a_run_directory_that_is_named_by_a_link_is_watched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "last").symlink_to("run")
    watch(tmp_path / "last" / "live")
    assert is_watched(tmp_path / "run" / "live")


def test_nothing_is_made_in_the_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        watch(tmp_path / "live")
    (tmp_path / "live").mkdir()
    with pytest.raises(PermissionError):
        watch(tmp_path / "live")
    assert list((tmp_path / "live").iterdir()) == []


def test_a_pipe_in_the_place_of_the_mark_or_of_a_feed_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MARK)
    with pytest.raises(OSError, match="No such device"):
        watch(tmp_path)
    assert read_feed(tmp_path / MARK) is None
