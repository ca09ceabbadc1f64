"""Machines with wires between them, on one computer: network namespaces, joined by a switch that can be told to fail.

Each namespace has one interface, a TUN device. Whatever a machine sends goes through this process, which delays it,
drops it, holds it to a bandwidth, or lets it through. So nothing is needed of the kernel but namespaces and TUN, and
the retransmissions are those of its real TCP. The namespaces have no names: each lasts as long as a process in it,
which waits for the end of this one. So nothing stays behind, however this process ends.
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
        for command, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
            if shutil.which(command) is None:
                raise ConfigurationError(f"network namespaces need the command {command}; install {package}")
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._quality = quality
        self._chance = random.Random(1)
        self._cut: frozenset[str] = frozenset()
        self._busy: dict[str, float] = defaultdict(float)
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        """A process in each namespace."""
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
        return ["nsenter", "--target", str(self.keeper(name)), "--net"]

    def keeper(self, name: str) -> int:
        """The id of a process that is on this machine all the time."""
        return self._keepers[name].pid

    def cut(self, names: Iterable[str]) -> None:
        """Drop everything that these machines send or are sent, without a word to anybody, until ``heal``."""
        self._cut = frozenset(names)

    def heal(self) -> None:
        """Let everything through again."""
        self._cut = frozenset()

    def close(self) -> None:
        """Remove the interfaces, and the namespaces once no process is in them."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for keeper in self._keepers.values():
            keeper.communicate()  # closes its input

    def _join(self, name: str) -> None:
        """Make the namespace of a machine, with its interface."""
        keeper = self._keepers[name] = _keep_namespace()
        device = f"fe{os.getpid() % 10**7}{len(self._descriptors)}"
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._descriptors[name] = descriptor
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI))
        except OSError as error:
            raise ConfigurationError(f"no network device can be made here ({error.strerror}); be root") from error
        _run("ip", "link", "set", device, "netns", str(keeper.pid))
        _run(*self.inside(name), "ip", "addr", "add", f"{self.addresses[name]}/24", "dev", device)
        for link in (device, "lo"):
            _run(*self.inside(name), "ip", "link", "set", link, "up")

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


def _keep_namespace() -> subprocess.Popen[bytes]:
    """A process in a new namespace, which ends when its input does. Ctrl-C of the terminal does not reach it."""
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(["unshare", "--net", "cat"], stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with suppress(BrokenPipeError):
        keeper.stdin.write(b"\n")
        keeper.stdin.flush()
    if not keeper.stdout.readline():  # it is not in its namespace: it has ended
        raise _refused(keeper.communicate()[1].decode(errors="replace"))
    return keeper


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _refused(done.stderr)


def _refused(said: str) -> ConfigurationError:
    why = " ".join(said.split())
    return ConfigurationError(f"network namespaces are not permitted here ({why}); be root, or let a container be")
