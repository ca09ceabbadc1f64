"""Which keys a coordinator and a machine use, by their settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from fedemu.ops.experiment import Runtime
from fedemu.ops.keys.approval import Approval
from fedemu.ops.keys.store import KeyFolder, read_public
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.hardware import host_name
from fedemu.protocol.host.paths import exists
from fedemu.protocol.transport.curve import ClientKeys, ServerKeys
from fedemu.protocol.wording import counted


def server_keys(runtime: Runtime, environment: Mapping[str, str]) -> ServerKeys | None:
    """The keys of a coordinator that listens at ``runtime.bind``, or None if it needs and uses none.

    Raises ConfigurationError if other machines can reach the address, and there are no keys.
    """
    if runtime.insecure and runtime.keys:
        raise ConfigurationError("--keys and --insecure exclude each other; leave one out")
    private = is_private(runtime.bind)
    if runtime.insecure or (private and not runtime.keys):
        return None
    folder = KeyFolder.of(runtime.keys, environment)
    if not private and not exists(folder.secret_file):
        raise ConfigurationError(
            f"other machines can reach {runtime.bind}, and there are no keys in {folder.path}; make them with "
            f"`fedemu keys new{folder.option}`, let machines in with `fedemu keys approve NAME KEY{folder.option}`, or "
            "say --insecure to let everybody in"
        )
    folder.require_own()
    public, secret = folder.pair()
    approval = Approval(folder, public)
    return ServerKeys(public, secret, approval, approval.of_edge)


def client_keys(runtime: Runtime, environment: Mapping[str, str], below: bool = False) -> ClientKeys | None:
    """The keys of a machine that connects to ``runtime.connect``, or None without ``runtime.server_key``.

    Raises ConfigurationError for ``runtime.keys`` without it. An edge may need these keys only ``below``, if it is on
    the machine of its coordinator.
    """
    if not runtime.server_key:
        if runtime.keys and not (below and is_private(runtime.connect)):
            raise ConfigurationError("--keys needs --server-key, the public key of the coordinator")
        return None
    public, secret = KeyFolder.of(runtime.keys, environment).pair()
    return ClientKeys(runtime.connect, public, secret, read_public(runtime.server_key))


def in_words(runtime: Runtime, environment: Mapping[str, str], keys: ServerKeys | None) -> str:
    """What people are told about the keys of a coordinator."""
    if keys is not None:
        folder = KeyFolder.of(runtime.keys, environment)
        return f"{counted(len(folder.approved()), 'machine')} approved in {folder.approved_folder}"
    if is_private(runtime.bind):
        return "none; only this machine reaches the address"
    return "none (--insecure): whoever reaches the address can read, join and disturb this run"


def reachable_elsewhere(bind: str) -> str:
    """The address by which other machines may reach ``bind``: a wildcard becomes the name of this machine."""
    host, _, port = bind.rpartition(":")
    return f"tcp://{host_name()}:{port}" if host in ("tcp://*", "tcp://0.0.0.0", "tcp://[::]") else bind


def is_private(address: str) -> bool:
    """Whether only this machine reaches an address: a socket in its file system, or the loopback interface."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")
