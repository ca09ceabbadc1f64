"""The benchmark of a GPU, on a processor: the same code up to the kernels."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from fedemu.ops.bench.gpu import gpu
from fedemu.ops.bench.measuring.measure import QUICK
from fedemu.protocol.errors import ConfigurationError


def test_a_work_is_measured_one_by_one_and_in_stacks_and_beside_the_peak() -> None:
    told: list[str] = []
    study = gpu.study(QUICK, told.append, "cpu", ["digits"], (1, 8), product=64)
    assert [(line.work, line.stack, line.why) for line in study.lines] == [("digits", 1, ""), ("digits", 8, "")]
    for line in study.lines:
        assert line.updates_per_second is not None
        assert line.teraflops is not None
        assert line.roof is not None
        assert min(line.updates_per_second.least, line.teraflops, line.roof, study.peak) > 0
        assert line.busy is None
    assert told == ["gpu: digits, stack of 1", "gpu: digits, stack of 8"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(study)
    assert "one by one" in shown.getvalue()
    assert json.loads(json.dumps(study.table()))["about"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device here"):
        gpu.study(QUICK, lambda line: None)
