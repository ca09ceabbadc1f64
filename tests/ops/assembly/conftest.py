"""What many trials find anew in forked processes is found before them, or in this process."""

from __future__ import annotations

import json
from collections.abc import Callable

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


@pytest.fixture
def tried_here(slots_tried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials happen in this process. A fork of it, whose memory both would copy, takes longer than a trial.

    What is found goes the way that it goes from a process to its parent. ``test_trial.py`` has trials in forks.
    """

    def here(found: Callable[[], trial._Found]) -> trial._Found:
        result = found()
        kind, *fields = json.loads(json.dumps([type(result).__name__, *result]))
        return trial._KINDS[kind](*fields)

    monkeypatch.setattr(trial, "_forked", here)
