"""Machines with wires between them, on one computer: network namespaces, joined by a switch that can be told to fail.

Each namespace has one interface, a TUN device. Whatever a machine sends goes through this process, which delays it,
drops it, holds it to a bandwidth, or lets it through. So nothing is needed of the kernel but namespaces and TUN, and
the retransmissions are those of its real TCP.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from fedemu.protocol.errors import ConfigurationError

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_MOST_PACKET: Final = 65536
_LONGEST_QUEUE: Final = 0.5
"""Seconds that a packet waits for the bandwidth of its sender. Beyond that it is dropped, as a router does."""


@dataclass(frozen=True)
class Quality:
    """What every wire does to a packet: the seconds it takes, the share that is lost, the bytes per second (0: all)."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


class Wires:
    """Namespaces with the addresses 10.77.0.1, 10.77.0.2 and so on, one for each name, until ``close``.

    Raises ConfigurationError if this user or this kernel may not make them.
    """

    def __init__(self, names: Sequence[str], quality: Quality) -> None:
        if shutil.which("ip") is None:
            raise ConfigurationError("network namespaces need the command ip; install iproute2")
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._quality = quality
        self._chance = random.Random(1)
        self._cut: frozenset[str] = frozenset()
        self._busy: dict[str, float] = defaultdict(float)
        self._spaces = {name: f"fedemu-{os.getpid()}-{name}" for name in names}
        self._descriptors: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        try:
            for name in names:
                self._join(name)
        except ConfigurationError:
            self.close()
            raise
        self._names = {bytes(map(int, address.split("."))): name for name, address in self.addresses.items()}
        for name, descriptor in self._descriptors.items():
            self._loop.add_reader(descriptor, self._read, name, descriptor)
        self._thread.start()

    def inside(self, name: str) -> list[str]:
        """The words before a command that make it run on this machine."""
        return ["ip", "netns", "exec", self._spaces[name]]

    def cut(self, names: Iterable[str]) -> None:
        """Drop everything that these machines send or are sent, without a word to anybody, until ``heal``."""
        self._cut = frozenset(names)

    def heal(self) -> None:
        """Let everything through again."""
        self._cut = frozenset()

    def close(self) -> None:
        """Remove the namespaces and what is in them."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _join(self, name: str) -> None:
        """Make the namespace of a machine, with its interface."""
        space, device = self._spaces[name], f"fe{os.getpid() % 10**7}{len(self._descriptors)}"
        _ip("netns", "add", space)
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._descriptors[name] = descriptor
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI))
        except OSError as error:
            raise ConfigurationError(f"no network device can be made here ({error.strerror}); be root") from error
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", device)
        for link in (device, "lo"):
            _ip("-n", space, "link", "set", link, "up")

    def _read(self, name: str, descriptor: int) -> None:
        """Take what a machine sends, and see to its way."""
        quality = self._quality
        with suppress(BlockingIOError):
            while True:
                packet = os.read(descriptor, _MOST_PACKET)
                to = self._names.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if to is None or self._chance.random() < quality.loss:
                    continue
                now = self._loop.time()
                leaves = now
                if quality.rate:
                    leaves = max(now, self._busy[name]) + len(packet) / quality.rate
                    if leaves > now + _LONGEST_QUEUE:
                        continue
                    self._busy[name] = leaves
                self._loop.call_at(leaves + quality.delay, self._deliver, name, to, packet)

    def _deliver(self, sender: str, to: str, packet: bytes) -> None:
        if not self._cut & {sender, to}:
            with suppress(OSError):  # its queue is full, or it is gone: the packet is lost
                os.write(self._descriptors[to], packet)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise ConfigurationError(f"network namespaces are not permitted here ({said}); be root, or let a container be")
