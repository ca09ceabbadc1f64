"""Child processes that measure on request, so that each side has its own environment and its own imports.

A factory, named ``module:function``, is called with keyword arguments, and returns a function that measures once.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

from fedemu.ops.bench.measuring.measure import Sample
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import FedemuError

Measurement = Callable[[], Sample]


class BenchmarkError(FedemuError):
    """A benchmark could not be measured."""


class Worker:
    """A child process that measures. Its start and each measurement may take ``seconds`` at most.

    It has a folder of its own for temporary files, which goes with it: a child that is killed would leave them behind.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        seconds: float = 120.0,
    ) -> None:
        self._factory = factory
        self._seconds = seconds
        self._pending = b""
        self._temporary = tempfile.TemporaryDirectory(prefix="fedemu-bench-", ignore_cleanup_errors=True)
        self._child = subprocess.Popen(
            [*interpreter(), "-m", "fedemu.ops.bench.measuring.worker", factory, json.dumps(dict(arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": self._temporary.name} | dict(environment or {}),
            process_group=0,  # Ctrl-C in a terminal reaches the command alone, which ends its workers
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def ready(self) -> Worker:
        """Wait until the child's factory has returned. Raises BenchmarkError if it fails or takes too long."""
        self._line()
        return self

    def request(self) -> None:
        """Ask the child to measure once. ``answer`` returns the result."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(b"measure\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> Sample:
        """The sample that was asked for. Raises BenchmarkError if the child fails or takes too long."""
        return Sample(**json.loads(self._line()))

    def measure(self) -> Sample:
        """Ask the child to measure once, and wait for the sample."""
        self.request()
        return self.answer()

    def close(self) -> None:
        """End the child by the end of its input. Kill it if it is still busy after two seconds."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(10.0)
        self._child.stdout.close()
        self._temporary.cleanup()

    def _line(self) -> bytes:
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        deadline = time.monotonic() + self._seconds
        while b"\n" not in self._pending:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise BenchmarkError(f"{self._factory} did not answer within {self._seconds:.0f} s")
            data = os.read(descriptor, 65536)
            if not data:
                raise self._failure()
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failure(self) -> BenchmarkError:
        return BenchmarkError(f"{self._factory} ended with code {self._child.wait(10.0)}; its error is above")


def together(workers: list[Worker]) -> list[Sample]:
    """Measure in all workers at the same time. Returns their samples."""
    for worker in workers:
        worker.request()
    return [worker.answer() for worker in workers]


def at_once(workers: list[Worker]) -> Sample:
    """Measure in all workers at the same time. Returns one sample: all their work, in the time of the slowest."""
    samples = together(workers)
    return Sample(
        work=sum(sample.work for sample in samples),
        wall=max(sample.wall for sample in samples),
        cpu=sum(sample.cpu for sample in samples),
    )


def _serve(factory: str, arguments: str) -> None:
    # The prints of libraries go to stderr, and the answers have a descriptor of their own.
    answers = os.dup(1)
    os.dup2(2, 1)
    module, _, name = factory.partition(":")
    measurement: Measurement = getattr(import_module(module), name)(**json.loads(arguments))
    _answer(answers, "ready")
    for _ in sys.stdin:
        _answer(answers, json.dumps(asdict(measurement())))


def _answer(answers: int, line: str) -> None:
    """Write a line. If nobody waits for it any more, as after Ctrl-C, this process ends."""
    try:
        os.write(answers, f"{line}\n".encode())
    except BrokenPipeError:
        raise SystemExit from None


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
