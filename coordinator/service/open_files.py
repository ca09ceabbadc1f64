"""The open files that a coordinator needs. They are asked of the machine before anything is written."""

from __future__ import annotations

from typing import Final

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.open_files import allow_open_files, most_open_files

LEAST_FILES: Final = 4096
"""Where strangers can connect, they do so in bursts, faster than their connections are closed."""
MOST_FILES: Final = 2**20
"""A higher limit of open files is of no use."""
MOST_MACHINES: Final = 1024
"""So many connections have to be possible if devices share those of their machines."""
SPARE_FILES: Final = 256
"""Open files that a coordinator needs beside the connections of the devices: libraries, data, logs, checkpoints."""


def files_for(devices: int, shared: bool, address: str) -> int:
    """The open files that the coordinator of so many devices needs at this address.

    ``shared`` says whether devices share the connections of their machines. Where strangers can come, their connections
    must not use up all.
    """
    wanted = (min(devices, MOST_MACHINES) if shared else devices) + SPARE_FILES
    return max(2 * wanted, LEAST_FILES) if _for_strangers(address) else wanted


def require_files(wanted: int, address: str) -> None:
    """Raise ConfigurationError if this process cannot have so many open files."""
    if (most := most_open_files()) < wanted:
        remedies = "fewer fleet.devices, or fleet.link=shared, need fewer"
        if _for_strangers(address):
            remedies = "fewer fleet.devices, fleet.link=shared, or an ipc:// address, need fewer"
        raise ConfigurationError(
            f"the coordinator needs {wanted} open files, but at most {most} are allowed; "
            f"raise the limit (ulimit -Hn {wanted}); {remedies}"
        )


def allow_files(wanted: int, address: str) -> None:
    """Raise this process's soft limit of open files to the hard limit, so that strangers cannot use up all.

    Raises ConfigurationError if the hard limit is below ``wanted``.
    """
    require_files(wanted, address)
    allow_open_files(max(wanted, MOST_FILES))


def _for_strangers(address: str) -> bool:
    return address.startswith("tcp://")
