"""The memory that the pods of a run ask for: what its processes take, and what its model adds to each.

What the model adds was measured as anonymous and shared memory: with perceptrons of 4, 16 and 33 MiB on processors, and
for the coordinator of 65 and 213 MiB, too. It is counted in multiples of the bytes of the model's variables. What a
batch takes while it is computed is in the 400 MiB of each trainer, or in the limit, which is twice what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fedemu.algorithms.models.frozen import frozen_of
from fedemu.device.compute.rule import compute_rule, kind_of
from fedemu.device.host.limits import demand, pack_size
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.data.apart import at_hand, decode_apart
from fedemu.ops.engines.kubernetes import Memory, Pods
from fedemu.ops.engines.places import share
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.figures import readable_bytes
from fedemu.protocol.errors import ConfigurationError

_MIB: Final = 2**20
_COORDINATOR_MIB: Final = 2048
"""The memory of a coordinator without its model: torch, the test samples, the record of the fleet."""
_MACHINE_MIB: Final = 768
"""The memory of a machine without devices and trainers: its supervisor, zygote and nursery."""
_COORDINATED: Final = 12
"""How many times a coordinator holds the variables: in its state, in exact sums, in what is evaluated and written."""
_STACKED: Final = 10
"""How many times a trainer holds the variables for each place of its stack: models, gradients, what is between."""
_STACKED_ON_GPU: Final = 3
"""The same in host memory if the stack is on a GPU: results that are encoded. It is estimated, not measured."""
_CARRIED: Final = 3
"""How many times a busy device holds the variables: its result as it came, as bytes, and encrypted."""
_FROZEN: Final = 2
"""How many times a coordinator and a trainer hold what is frozen in the model. It is estimated, not measured."""


def needed(experiment: Experiment, runtime: Runtime, pods: Pods, say: Callable[[str], None]) -> Memory:
    """The memory that ``pods`` ask for.

    The model is made here to find its size. If that is impossible, as without its data, ``say`` gets a line for people,
    and the model is not counted.
    """
    fleet, trainers, on_gpu = experiment.fleet, pods.trainers(runtime), bool(pods.gpus)
    most = max(share(fleet.devices, pods.machines))
    packed = pack_size(runtime.per_process) if fleet.wake == "on-demand" else runtime.per_process
    machine = _MACHINE_MIB + demand(min(most, fleet.awake), packed, trainers)[2] // _MIB
    of_coordinator, of_machine = f"{_COORDINATOR_MIB} MiB", f"{machine} MiB for its processes"
    try:
        if not at_hand(experiment):
            raise ConfigurationError("its data are not on this machine")
        decode_apart(experiment, say)
        variables, frozen, stack = _of_model(experiment, on_gpu)
    except ConfigurationError as error:
        say(
            "the memory of the model is not counted in the manifests, because it can't be made here "
            f"({str(error).splitlines()[0]}); if it is large, raise what they ask for"
        )
        return Memory(
            _COORDINATOR_MIB, machine, f"{of_coordinator}, without the model", f"{of_machine}, without the model"
        )
    busy, times = min(most, fleet.asked), _STACKED_ON_GPU if on_gpu else _STACKED
    trained = trainers * (times * stack * variables + _FROZEN * frozen)
    size = readable_bytes(variables) + (f" and {readable_bytes(frozen)} that are frozen" if frozen else "")
    return Memory(
        _COORDINATOR_MIB + (_COORDINATED * variables + _FROZEN * frozen) // _MIB,
        machine + (trained + busy * _CARRIED * variables) // _MIB,
        f"{of_coordinator}, and {_COORDINATED} times the model ({size})",
        f"{of_machine}, {_CARRIED} times the model ({size}) for each of {busy:,} busy devices, and {times} times for "
        f"each place of the stacks of trainers ({trainers} × {stack})",
    )


def _of_model(experiment: Experiment, on_gpu: bool) -> tuple[int, int, int]:
    """The bytes of the model's variables and of what is frozen in it, and how many devices a trainer stacks at most."""
    parts = Parts(experiment)
    tensors = parts.variables.values()
    stacks = (
        compute_rule(
            experiment.local.executor,
            kind_of(program, parts.model.kind),
            "cuda" if on_gpu else "cpu",
            experiment.local.stack,
            experiment.fleet.asked,
            sum(leaf.numel() for leaf in tensors),
        ).stack_size
        for program in parts.algorithm.programs.values()
    )
    frozen = sum(leaf.nbytes for leaf in frozen_of(parts.model).values())
    return sum(leaf.nbytes for leaf in tensors), frozen, max(stacks, default=1)
