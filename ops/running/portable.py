"""``compute.portable``: the same bits on all x86-64 processors with AVX2.

It is mostly environment variables, which a process must have before it loads torch and numpy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from fedemu.device.compute.environment import lacking, portable_environment
from fedemu.ops.experiment import Experiment
from fedemu.protocol.code.source import interpreter

_CHILD = "fedemu.ops.running.child"


def environment_for(experiment: Experiment) -> Mapping[str, str]:
    """The variables that every process which computes for this experiment must be started with.

    Raises ConfigurationError if this machine's processor can't compute so.
    """
    return portable_environment() if experiment.compute.portable else {}


def start_again_portably(experiment: Experiment) -> None:
    """Replace this process by one with the variables that the experiment needs, if it lacks them.

    The command is the same, so nothing must have happened yet that the command does once.
    """
    start_again_with(environment_for(experiment))


def start_again_with(variables: Mapping[str, str]) -> None:
    """Replace this process by one with these variables of the environment, if it lacks any, as above."""
    missing = lacking(os.environ, variables)
    if missing:
        sys.stdout.flush()
        sys.stderr.flush()
        begun = getattr(sys.modules["__main__"], "__spec__", None)
        # The words of a run of a sweep are those of ``child_command``.
        module = _CHILD if begun is not None and begun.name == _CHILD else "fedemu.ops.cli"
        command = [*interpreter(), "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, dict(os.environ) | missing)
