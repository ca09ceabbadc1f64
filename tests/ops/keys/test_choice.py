"""When keys are used, and when a coordinator refuses to start without them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.experiment import Runtime
from fedemu.ops.keys.choice import client_keys, in_words, is_private, reachable_elsewhere, server_keys
from fedemu.ops.keys.store import KeyFolder
from fedemu.protocol.errors import ConfigurationError

OPEN = "tcp://0.0.0.0:5577"


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5577", True),
        ("tcp://127.9.9.9:5577", True),
        ("tcp://[::1]:5577", True),
        ("tcp://localhost:5577", True),
        (OPEN, False),
        ("tcp://*:5577", False),
        ("tcp://[::]:5577", False),
        ("tcp://10.0.0.7:5577", False),
        ("tcp://eth0:5577", False),
        ("tcp://localhost.example.org:5577", False),
    ],
)
def test_only_loopback_and_the_file_system_are_private(address: str, private: bool) -> None:
    assert is_private(address) is private


def test_an_open_address_needs_keys_or_an_explicit_word(tmp_path: Path) -> None:
    environment = {"FEDEMU_KEYS": str(tmp_path)}
    with pytest.raises(
        ConfigurationError, match=r"^other machines can reach tcp://0\.0\.0\.0:5577, and there are no keys"
    ):
        server_keys(Runtime(bind=OPEN), environment)
    insecure = Runtime(bind=OPEN, insecure=True)
    assert server_keys(insecure, environment) is None
    assert in_words(insecure, environment, None).startswith("none (--insecure): whoever reaches the address can")
    public = KeyFolder(tmp_path).new()
    keys = server_keys(Runtime(bind=OPEN), environment)
    assert keys is not None
    assert keys.public == public
    assert keys.approved(public), "the devices of the coordinator's own machine"
    assert in_words(Runtime(bind=OPEN), environment, keys) == f"0 machines approved in {tmp_path}/approved"


def test_a_private_address_uses_keys_only_if_they_are_named(tmp_path: Path) -> None:
    KeyFolder(tmp_path).new()
    environment = {"FEDEMU_KEYS": str(tmp_path)}
    assert server_keys(Runtime(), environment) is None
    assert in_words(Runtime(), environment, None) == "none; only this machine reaches the address"
    assert server_keys(Runtime(keys=str(tmp_path)), {}) is not None
    with pytest.raises(ConfigurationError, match="--keys and --insecure exclude each other"):
        server_keys(Runtime(keys=str(tmp_path), insecure=True), {})


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_other_machines_reach_a_wildcard_by_the_name_of_this_machine(host: str) -> None:
    assert reachable_elsewhere(f"tcp://{host}:5577") == f"tcp://{socket.gethostname()}:5577"
    assert reachable_elsewhere("tcp://10.0.0.7:5577") == "tcp://10.0.0.7:5577"


def test_a_folder_in_which_others_could_approve_machines_is_refused(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    public = folder.new()
    folder.approve("lab2", KeyFolder(tmp_path / "other").new())
    folder.approved_folder.chmod(0o770)
    with pytest.raises(ConfigurationError, match=r"other users can write to .*approved, so they could let machines in"):
        server_keys(Runtime(keys=str(folder.path)), {})
    assert client_keys(Runtime(keys=str(folder.path), server_key=public), {}) is not None


def test_a_folder_of_another_user_is_refused_and_one_of_the_superuser_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.new()
    folder.approve("lab2", KeyFolder(tmp_path / "other").new())
    stat = Path.stat
    owners = {}

    def owned(path: Path, **more: Any) -> os.stat_result:
        found = stat(path, **more)
        return os.stat_result((*found[:4], owners.get(path, found.st_uid), *found[5:]))

    monkeypatch.setattr(Path, "stat", owned)
    for place in (folder.path, folder.approved_folder):
        for nobody_or_mallory in (65534, os.getuid() + 1):
            owners[place] = nobody_or_mallory
            with pytest.raises(ConfigurationError) as caught:
                server_keys(Runtime(keys=str(folder.path)), {})
            assert str(caught.value) == (
                f"{place} belongs to another user (number {nobody_or_mallory}), who could let machines in; chown it, "
                "or name another folder with --keys"
            )
        owners[place] = 0
        assert server_keys(Runtime(keys=str(folder.path)), {}) is not None


def test_a_machine_uses_its_keys_if_it_knows_that_of_the_coordinator(tmp_path: Path) -> None:
    public = KeyFolder(tmp_path).new()
    assert client_keys(Runtime(), {"FEDEMU_KEYS": str(tmp_path)}) is None
    with pytest.raises(ConfigurationError, match="--keys needs --server-key"):
        client_keys(Runtime(keys=str(tmp_path)), {})
    below = Runtime(connect="tcp://127.0.0.1:5577", keys=str(tmp_path))
    assert client_keys(below, {}, below=True) is None, "an edge beside its coordinator needs keys only for those below"
    for runtime, edge in ((below, False), (Runtime(connect="tcp://10.0.0.7:5577", keys=str(tmp_path)), True)):
        with pytest.raises(ConfigurationError, match="--keys needs --server-key"):
            client_keys(runtime, {}, below=edge)
    keys = client_keys(Runtime(connect="tcp://a:1", keys=str(tmp_path), server_key=public), {})
    assert keys is not None
    assert (keys.address, keys.public, keys.server) == ("tcp://a:1", public, public)
