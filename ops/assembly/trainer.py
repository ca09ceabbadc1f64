"""The trainer of an experiment's programs, which every trainer process opens."""

from __future__ import annotations

from fedemu.algorithms.interface import Selecting
from fedemu.device.compute.environment import hold_to_portable
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly.learning import first_ask
from fedemu.ops.assembly.named_code import received
from fedemu.ops.assembly.parts import Parts


def open_trainer(experiment: bytes, device_type: str) -> Trainer:
    """Make the trainer of an experiment, given as ``Experiment.to_bytes`` writes it.

    Its ``warm_up`` gets it ready for the first ask of the first round. It needs no partition and no stream, as devices
    send the indices of the samples with their jobs. Raises ConfigurationError or DataError as ``received`` and
    ``Parts`` do.
    """
    parts = Parts(received(experiment))
    if parts.experiment.compute.portable:
        device_type = hold_to_portable(device_type)
    algorithm, model = parts.algorithm, parts.model
    variables = model.init(0)
    ask = first_ask(algorithm, variables, parts.context)
    return Trainer(
        algorithm.programs,
        parts.corpus,
        parts.experiment.seed,
        device_type=device_type,
        executor=parts.experiment.local.executor,
        stack=parts.experiment.local.stack,
        cohort=parts.experiment.fleet.asked,
        variables=sum(leaf.numel() for leaf in variables.values()),
        kind=model.kind,
        examples={} if ask is None else {ask.program: ask.shared},
        selection=algorithm.selection if isinstance(algorithm, Selecting) else None,
        tf32=parts.experiment.local.precision == "tf32",
    )
