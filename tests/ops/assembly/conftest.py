"""What many trials find anew in forked processes is found before them."""

from __future__ import annotations

import numpy as np
import pytest

from fedemu.ops.assembly import trial
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.experiment.sources import load_experiment


@pytest.fixture(scope="session")
def slots_tried() -> None:
    """How all slots of a stack get the same bits is found for the usual model once, and not in each forked trial."""
    parts = Parts(load_experiment("digits-small", [], {})[0])
    trial._train(parts, np.arange(trial.SAMPLES))
