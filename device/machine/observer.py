"""Observers of a machine, such as its metrics and its display. They are told what happens and change nothing."""

from __future__ import annotations

from collections.abc import Mapping


class MachineObserver:
    """An object that is told what happens on a machine, and changes nothing. This one does nothing with it."""

    def placed(self, places: int) -> None:
        """The run has places for so many of the machine's devices. 0: all are taken, and some may get free."""

    def barred(self, reason: str) -> None:
        """The coordinator does not let this machine in, because of keys. The machine goes on trying for a while."""

    def lost(self, seconds: float) -> None:
        """The coordinator is silent. This machine looks for it for ``seconds`` more of real time."""

    def found(self) -> None:
        """The coordinator is back after a silence, or it has started again."""

    def devices(self, counts: Mapping[str, int]) -> None:
        """The numbers of devices that are ``connected``, ``starting`` and ``stopped`` have changed.

        Where devices sleep until they are asked, all count as connected, and ``awake`` are those that are members now.
        """

    def restarted(self, kind: str) -> None:
        """A process has ended and is started again; ``kind`` is device, trainer or zygote."""

    def hung(self, trainer: int, seconds: float, lacked: str, jobs: str) -> None:
        """A trainer that has work ``lacked`` something, such as any processor time, for so long, and is killed.

        ``jobs`` says what it was to do: its jobs, or its start.
        """

    def queue_depth(self, depth: int) -> None:
        """The number of jobs that wait for a trainer has changed."""

    def trained(self, seconds: float, done: int, failed: int) -> None:
        """A trainer has answered a group of jobs after ``seconds`` of real time."""

    def given_up(self) -> None:
        """A job has failed that no trainer has answered."""

    def buffered(self, device: int, samples: int, size: int) -> None:
        """After a job, a device's replay buffer holds this number of samples, of ``size`` bytes together."""
