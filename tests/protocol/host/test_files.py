import os
from pathlib import Path

import pytest

from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import replace


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path):
    path = tmp_path / "a.json"
    for data in (b"first, longer", b"second"):
        replace(path, data)
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.json"
    replace(path, b"old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FedemuError, match=r"Cannot write .*a\.json: No space left on device\."):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
