"""Addresses of the protocol: their form, what is wrong with one, and the files of those that are paths.

Nothing here needs the ZeroMQ library.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.host.paths import LONGEST_OF_SOCKET

if TYPE_CHECKING:
    from zmq import ZMQError

BACKLOG: Final = 4096
"""The most connections that wait to be accepted. A fleet of thousands connects within a second."""

_REASONS: Final = {
    errno.EADDRINUSE: "it is in use by another process; choose another port or path, or stop that process",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address",
    errno.ENODEV: "no network interface of this machine has that address",
    errno.EACCES: "this user may not use it; choose a port above 1023 or another folder",
    errno.EINVAL: "it is not of the form tcp://HOST:PORT or ipc://PATH",
    errno.EPROTONOSUPPORT: "only tcp:// and ipc:// are supported",
    errno.ENOENT: "its folder does not exist",
    errno.ENOTDIR: "its folder does not exist",
    errno.ENAMETOOLONG: f"the path is longer than {LONGEST_OF_SOCKET} bytes; choose a shorter folder",
}


def check_address(address: str, listening: bool) -> None:
    """Raise ConfigurationError for an address of the wrong form. ZeroMQ itself would read port 99999 as 34463."""
    scheme, _, rest = address.partition("://")
    if not rest or not address.isprintable():
        raise ConfigurationError(f"the address {address!r} is not of the form tcp://HOST:PORT or ipc://PATH")
    if scheme not in ("tcp", "ipc"):
        raise ConfigurationError(
            f"the address {address!r} starts with {scheme}://; only tcp:// and ipc:// are supported"
        )
    if scheme == "ipc":
        if len(os.fsencode(rest)) > LONGEST_OF_SOCKET:
            raise ConfigurationError(f"the address {address!r} is unusable: {_REASONS[errno.ENAMETOOLONG]}")
        return
    host, _, port = rest.rpartition(":")
    if listening and host and port == "*":
        return
    if not host or not (port.isascii() and port.isdigit() and (0 if listening else 1) <= int(port[:6]) <= 65535):
        lowest = "0 (or *, for any free one)" if listening else "1"
        raise ConfigurationError(
            f"the address {address!r} is not of the form tcp://HOST:PORT with a port from {lowest} to 65535"
        )


def socket_file(address: str) -> str | None:
    """The path of the file of an ``ipc://`` address. None for one without a file: ``ipc://@NAME``, ``ipc://*``, tcp."""
    path = address.removeprefix("ipc://")
    return None if path == address or path.startswith(("@", "*")) else path


def require_door(address: str) -> None:
    """Raise FedemuError if the file of an ipc address, at which this process listens, was removed."""
    path = socket_file(address)
    if path is not None and not os.path.lexists(path):
        raise FedemuError(
            f"{path} was removed, so no process can connect there any more; leave that folder alone, and start again"
        )


def refuse_taken(address: str) -> None:
    """Raise ConfigurationError if a process listens at this ipc path, or if the file there is no socket.

    ZeroMQ itself would take the path away from that process. A socket at which nobody listens may be replaced.
    """
    path = socket_file(address)
    if path is None:
        return
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"cannot listen at {address}: there is a file that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass
        except OSError:
            return
    raise ConfigurationError(f"cannot listen at {address}: {_REASONS[errno.EADDRINUSE]}")


def reason(error: ZMQError | OSError) -> str:
    """Why an address cannot be used, in words."""
    known = refusal_of(error) if isinstance(error, OSError) else str(error)
    return _REASONS.get(error.errno or 0, known)
