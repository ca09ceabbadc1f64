"""What an experiment's settings make of the coordinator's plan."""

from pathlib import Path

import numpy as np
import pytest

from fedemu.algorithms.streams_plan import StreamPlan
from fedemu.coordinator.evaluate import Evaluator
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.ops.config_sources import load_experiment
from fedemu.ops.coordinator_process import assemble
from fedemu.ops.datasets import open_corpus
from fedemu.protocol.blobs import decode_tree
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.memory_transport import MemoryNetwork


def plan_of(directory: Path, *settings: str) -> CoordinatorPlan:
    experiment, _ = load_experiment("digits-small", list(settings), {})
    return assemble(directory, experiment, MemoryNetwork(), "inproc://assembled")


def test_a_run_is_diagnosed_only_on_request(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.diagnosis, plan.settings.diagnose_every) == (None, 0)


@pytest.mark.parametrize(("samples", "used"), [(0, 360), (50, 50), (1000, 360)])
def test_a_diagnosis_takes_as_many_test_samples_as_it_is_told(tmp_path: Path, samples: int, used: int) -> None:
    plan = plan_of(tmp_path, "diagnose.every=5", f"diagnose.samples={samples}")
    assert plan.diagnosis is not None
    assert (len(plan.diagnosis.evaluator), plan.settings.diagnose_every) == (used, 5)
    assert (plan.diagnosis.evaluator is plan.evaluator) == (samples == 0), "all samples are kept once"


def test_a_diagnosis_goes_by_the_samples_that_devices_get(tmp_path: Path) -> None:
    settings = ("diagnose.every=1", "data.validation=0.2", "data.public={fraction=0.1}")
    plan = plan_of(tmp_path, *settings)
    assert plan.diagnosis is not None
    assert plan.diagnosis.validates
    published = decode_tree(plan.partition)
    labels = open_corpus(load_experiment("digits-small", list(settings), {})[0]).train.y
    start, stop = published["offsets"][3:5]
    expected = np.bincount(labels[published["indices"][start:stop]], minlength=plan.classes)
    assert plan.diagnosis.label_counts([DeviceId(3)], round=1).tolist() == [expected.tolist()]
