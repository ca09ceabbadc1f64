"""The trainer of an experiment's programs, which every trainer process opens."""

from __future__ import annotations

from fedemu.algorithms.interface import Selecting
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly.learning import first_ask
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.experiment import Experiment


def open_trainer(experiment: bytes, device_type: str) -> Trainer:
    """Make the trainer of an experiment, given as ``Experiment.to_bytes`` writes it.

    Its ``warm_up`` gets it ready for the first ask of the first round. It needs no partition and no stream, as devices
    send the indices of the samples with their jobs. Raises ConfigurationError or DataError as ``Parts`` does.
    """
    parts = Parts(Experiment.from_bytes(experiment))
    algorithm, model = parts.algorithm, parts.model
    ask = first_ask(algorithm, model.init(0), parts.context)
    return Trainer(
        algorithm.programs,
        parts.corpus,
        parts.experiment.seed,
        device_type=device_type,
        executor=parts.experiment.local.executor,
        kind=model.kind,
        examples={} if ask is None else {ask.program: ask.shared},
        selection=algorithm.selection if isinstance(algorithm, Selecting) else None,
    )
