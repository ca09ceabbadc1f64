"""The name of this machine."""

import os
import socket
from types import SimpleNamespace

import pytest

from fedemu.protocol.host.hardware import host_name


def test_a_name_that_is_no_text_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_name() == socket.gethostname()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=os.fsdecode(b"caf\xe9-" + b"x" * 300)))
    assert host_name() == "caf\N{REPLACEMENT CHARACTER}-" + "x" * 251
