"""The benchmark of a GPU, on a processor: the same code up to the kernels."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.device.compute.executors.executor import Job, Source
from fedemu.device.compute.executors.serial import Serial
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.bench.gpu import gpu, jobs
from fedemu.ops.bench.gpu.jobs import JOBS, JobLine, job_lines
from fedemu.ops.bench.gpu.lines import Line, _program, _with_figures, cases, covered, lines, operations
from fedemu.ops.bench.gpu.sharing import Share, shares
from fedemu.ops.bench.measuring.measure import QUICK, Spread
from fedemu.ops.bench.peers.environments import Absent
from fedemu.ops.bench.peers.peers import Comparison
from fedemu.ops.bench.training.workloads import WORKLOADS
from fedemu.protocol.errors import ConfigurationError

CPU = torch.device("cpu")
TINY = replace(QUICK, scale=0.001)


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work ``digits`` has two devices."""

    def few(cohorts: int) -> Any:
        made: Any = WORKLOADS["digits"](cohorts)
        return replace(made, cohorts=[made.cohorts[0][:2]])

    monkeypatch.setattr("fedemu.ops.bench.gpu.lines.WORKLOADS", {"digits": few})


@pytest.mark.usefixtures("_few")
def test_a_work_is_measured_one_by_one_and_in_stacks_and_beside_the_peak() -> None:
    told: list[str] = []
    peak = gpu.peak_of(CPU, 64)
    measured = list(lines(TINY, told.append, CPU, peak, ["digits"], (1, 8)))
    assert [(line.work, line.stack, line.graphs, line.why) for line in measured] == [
        ("digits", 1, False, ""),
        ("digits", 8, False, ""),
    ]
    for line in measured:
        assert line.updates_per_second is not None
        assert line.teraflops is not None
        assert line.roof is not None
        assert min(line.updates_per_second.least, line.gflop, line.teraflops, line.roof, peak) > 0
        assert line.kernel_ms is line.gap_ms is line.kernel_roof is None
    assert told == ["gpu: digits, stack of 1", "gpu: digits, stack of 8"]


def test_kernels_gaps_and_the_roof_follow_from_the_rate() -> None:
    line = _with_figures(Line("a", 8, True, 341.0), Spread(100.0, 90.0, 110.0), 0.008, 67.0)
    assert (line.kernel_ms, line.gap_ms) == (8.0, pytest.approx(2.0))
    assert (line.teraflops, line.roof) == (pytest.approx(34.1), pytest.approx(34.1 / 67))
    assert line.kernel_roof == pytest.approx(0.341 / 0.008 / 67)


def test_on_a_gpu_steps_are_captured_too_and_large_works_are_rounded() -> None:
    assert [*cases(10.1, (1, 8, 16), "cuda")] == [
        ("float32", 1, False),
        ("float32", 8, False),
        ("float32", 8, True),
        ("float32", 16, False),
        ("float32", 16, True),
        ("tf32", 8, True),
        ("bfloat16", 8, True),
    ]
    assert {precision for precision, _, _ in cases(9.9, (1, 8), "cuda")} == {"float32"}
    assert [*cases(10.1, (1, 8), "cpu")] == [("float32", 1, False), ("float32", 8, False)]


def test_a_precision_reaches_the_program() -> None:
    """A perceptron's update in bfloat16 differs from that in float32 in the third digit."""
    work: Any = WORKLOADS["digits"](1)
    job = Job(device=0, round=1, task=0, indices=work.cohorts[0][0])
    deltas = []
    for precision in ("float32", "bfloat16"):
        program, shared = _program(work, precision, CPU)
        (result,) = Serial().run(program, shared, [job], Source(work.corpus, 1, CPU))
        deltas.append(torch.cat([leaf.flatten() for leaf in result.payload["delta"].values()]))
    apart = float((deltas[0] - deltas[1]).norm() / deltas[0].norm())
    assert 1e-4 < apart < 0.1


def test_kernels_that_run_at_the_same_time_count_once() -> None:
    assert covered([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (6.0, 7.0)]) == 3.0 + 2.0 + 1.0
    assert covered([]) == 0.0


@pytest.mark.parametrize(("work", "each"), [("cifar", 101_087_232), ("fedntd", 136_421_376)])
def test_an_update_of_the_cnn_takes_so_many_operations_for_each_image(work: str, each: int) -> None:
    """FedNTD also asks the global model, whose loss has no gradient. An update of 500 images and 5 epochs: 341 GFLOP.

    A product of an ``m × k`` and a ``k × n`` matrix counts as ``2mkn``; the first layer needs no gradient of images.
    """
    made: Any = WORKLOADS[work](1)
    model, algorithm = open_algorithm(made.experiment, made.corpus)
    indices = made.cohorts[0][0][:10]
    jobs = [Job(device=0, round=1, task=0, indices=indices)]
    counted = operations(algorithm.programs["train"], {"model": model.init(1)}, jobs, Source(made.corpus, 1, CPU))
    assert counted == each * 10 * made.experiment.local.epochs


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize(("error", "why"), [(MemoryError(), "out of memory"), (ValueError("so\nand so"), "so")])
def test_a_work_that_fails_says_why_and_the_next_one_is_measured(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> list[float]:
        raise error

    monkeypatch.setattr("fedemu.ops.bench.gpu.lines._rates", fails)
    found = list(lines(TINY, lambda line: None, CPU, 1.0, ["digits"], (1, 8)))
    assert [(line.stack, line.why) for line in found] == [(1, why), (8, why)]


def counting(start: int = 0, sign: int = 1) -> ServerJob:
    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        return {"n": carry["n"] + sign}, False

    return ServerJob("count", lambda: {"n": torch.tensor(start)}, step, steps=99, checkpoint_every=1)


def test_server_jobs_are_measured_with_graphs_and_without_and_their_bits_are_compared() -> None:
    signs = iter((1, 1, 1, -1))

    def broken() -> ServerJob:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")

    told: list[str] = []
    jobs = {"good": counting, "broken": broken, "another end": lambda: counting(sign=next(signs))}
    good, none, odd = job_lines(TINY, told.append, CPU, jobs)
    assert (good.job, good.same, good.why) == ("good", True, "")
    assert good.ordinary_ms is not None
    assert good.graphs_ms is not None
    assert min(good.ordinary_ms.least, good.graphs_ms.least) > 0
    assert (none.ordinary_ms, none.same, none.why) == (None, None, "CUDA out of memory. Tried to allocate 2 GiB.")
    assert odd.same is False
    assert told[:5] == ["gpu: good", "gpu: good, captured", "gpu: good", "gpu: good, captured", "gpu: broken"]


@pytest.mark.parametrize("name", JOBS)
def test_a_server_job_of_the_benchmark_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PUBLIC", (64, 32))  # a batch to train on
    carry = JOBS[name]().init()
    assert sum(leaf.numel() for leaf in carry.values()) > 100_000
    assert all(bool(leaf.isfinite().all()) for leaf in carry.values())


@pytest.mark.usefixtures("forks")
def test_several_trainers_are_measured_and_a_machine_without_the_service_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    found = shares(TINY, lambda line: None, "cpu", ["digits"], (2,))
    share = next(found)
    assert (share.work, share.trainers, share.service, share.why) == ("digits", 2, False, "")
    assert share.updates_per_second is not None
    assert share.updates_per_second.least > 0
    with pytest.raises(Absent, match="nvidia-cuda-mps-control is not on this machine"):
        next(found)


def test_the_tables_show_everything_and_the_study_is_json() -> None:
    rate = Spread(1234.5, 1000.0, 2000.0)
    study = gpu.GpuStudy(
        {"torch": torch.__version__},
        67.0,
        [
            Line("digits", 1, False, 0.1, why="out of memory"),
            _with_figures(Line("fedntd", 8, True, 341.0, "bfloat16"), rate, 0.0005, 67.0),
        ],
        [
            JobLine("distillation", Spread(61.0, 60.0, 62.0), Spread(24.4, 24.0, 25.0), True),
            JobLine("odd", rate, rate, False),
            JobLine("large", why="no [memory]"),
        ],
        [Share("digits", 4, True, rate)],
        "it did not start",
        Comparison([], {"pfl-research": "No matching distribution found"}),
    )
    shown = io.StringIO()
    Console(file=shown, width=200).print(study)
    for words in (
        "bfloat16",
        "one by one",
        "out of memory",
        "0.5 ms",
        "0.31 ms",
        "1,234.5",
        "no trainers with MPS: it did not",
        "61.0 ms",
        "2.5  the same",
        "NOT THE SAME",
        "no [memory]",
    ):
        assert words in shown.getvalue(), words
    assert "left out: pfl-research: No matching distribution found" in shown.getvalue()
    assert json.loads(json.dumps(study.table()))["about"]["torch"] == torch.__version__


def test_reasons_that_look_like_markup_are_shown_as_they_are() -> None:
    missing = {"Flower": "no distribution found for flwr[simulation]", "pfl-research": "can't open [/tmp/x]"}
    failed = [Line("digits", 8, False, 0.1, why="a shape of [batch, 3]")]
    shared = [Share("digits", 2, True, None, "[/mps]")]
    study = gpu.GpuStudy({}, 67.0, failed, [], shared, "[no]", Comparison([], missing))
    shown = io.StringIO()
    Console(file=shown, width=250).print(study)
    for words in (*missing.values(), "a shape of [batch, 3]", "[/mps]", "with MPS: [no]"):
        assert words in shown.getvalue(), words


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device here"):
        next(gpu.study(QUICK, tmp_path, lambda line: None))
