"""The nursery: it imports torch once, and forks the trainers of a machine on command (``device/forking.py``).

So the trainers share that second of work, and the memory in which it ends. ``device/machine/trainers.py`` starts it as
``python -m fedemu.device.compute.nursery TRAINER FD PARENT``. TRAINER names the function that opens a trainer, FD is
the descriptor of the nursery's end of the pipe, PARENT is the supervisor's process id.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable

from fedemu.device.compute.shell import Runner, run_trainer
from fedemu.device.forking import FAILED, Forker, begin, tell_end
from fedemu.device.pipe import TO_NURSERY, TrainerSetup
from fedemu.protocol.code.named import load
from fedemu.protocol.host.phases import mark
from fedemu.protocol.messages import Message

OpenRunner = Callable[[TrainerSetup], Runner]


def _serve(pipe: socket.socket, open_runner: OpenRunner) -> None:
    """Fork a trainer for each setup that comes through ``pipe``. When the supervisor closes it, kill all trainers."""

    def obey(setup: Message) -> None:
        assert isinstance(setup, TrainerSetup)
        forker.fork(setup.number, "fedemu-trainer", lambda: _live(setup, open_runner))

    gc.freeze()  # what imports have made is hardly garbage, and to look at all of it takes a sixth of a second
    gc.enable()
    forker = Forker(pipe, TO_NURSERY, obey)
    forker.serve()


def _live(setup: TrainerSetup, open_runner: OpenRunner) -> int:
    """Be a trainer. CUDA has not been touched before the fork, so it sees the GPU that is chosen here."""
    if setup.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = setup.gpu
    return run_trainer(setup, open_runner)


def run_nursery(arguments: list[str], open_runner: OpenRunner) -> int:
    """Run the nursery and return its exit code. ``arguments`` are those that the docstring of this file names."""
    trainer, *place = arguments
    with begin("fedemu-nursery", place) as pipe:
        try:
            load(trainer)
            mark("nursery", "imports")
            _serve(pipe, open_runner)
        except Exception as error:
            tell_end("fedemu-nursery", error)
            return FAILED
    return 0


if __name__ == "__main__":
    gc.disable()  # it would look at what imports make again and again
    # Only a real nursery imports torch here; the toys of tests do not.
    from fedemu.device.compute.process import open_runner

    os._exit(run_nursery(sys.argv[1:], open_runner))  # the interpreter would first take torch apart, piece by piece
