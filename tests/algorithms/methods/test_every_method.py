"""What holds for all methods: the losses that they take, the executors, lost devices, and what leaves a device.

Each method is played on all of its devices' samples at once. With ``in_tasks`` it is played on a stream of two tasks
that bring two classes each. Methods that remember earlier tasks are played only on such a stream.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from operator import eq
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.graphs import captures
from fedemu.algorithms.graphs.captures import GraphRecorder
from fedemu.algorithms.graphs.repeated import recorded_by
from fedemu.algorithms.interface import (
    Algorithm,
    Ask,
    Forest,
    Labelled,
    LocalProgram,
    Model,
    PublicData,
    Revealing,
    ServerJob,
    Tree,
)
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.image_generator import generator_for
from fedemu.algorithms.registry import ALGORITHMS, build_algorithm, find_criterion
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training import job_device
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.job_device import jobs_compute_on
from fedemu.algorithms.trees import map_leaves, model_digest, squared_norm
from fedemu.coordinator.asks.payload import PayloadTemplate
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.executor import Job, JobResult, Source
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.trainer import open_device
from fedemu.protocol.errors import ConfigurationError, TrainingError

NOISE = 6
GENERATOR: dict[str, Any] = {"iterations": 2, "generator_batch": 4, "noise": NOISE, "synthetic_batch": 3}
SYNTHESIS: dict[str, Any] = {
    "synthesis_rounds": 2,
    "warm_up": 0,
    "synthesis_steps": 1,
    "generator_batch": 4,
    "noise": NOISE,
    "synthetic_batch": 3,
    "student_steps": 1,
    "student_batch": 4,
}
SHORT: dict[str, dict[str, Any]] = {
    "fedcurv": {"samples": 6, "penalty": 0.01},
    "feddf": {"server_batches": 4, "evaluate_every": 2},
    "fedreg": {"iterations": 2, "rehearsals": 2},
    "flashback": {"server_epochs": 2},
    "fedavg_finetuned": {"server_epochs": 2},
    "central": {"server_epochs": 2},
    "mfcl": GENERATOR,
    "fedavg_gen": GENERATOR,
    "fedcil": {"noise": NOISE, "server_iterations": 2, "server_samples": 4},
    "ncm": {"warm_up": 1},
    "afl": {"warm_up": 1},
    "target": SYNTHESIS,
    "lander": {**SYNTHESIS, "anchor_width": 5},
}
NEED_TASKS = {"mfcl", "fedavg_gen", "fedprox_plus", "fedlwf_2t", "fedcil", "icarl", "glfc", "target", "lander"}
OWN_LOSS = {"central", "flashback", "mfcl", "fedavg_gen", "fedcil", "icarl", "glfc", "target", "lander"}
SUM_UP = {"ncm", "afl", "icarl", "glfc"}
ASK_NOBODY = {"central"}
TELL_LABEL_COUNTS = {"flashback", "fedcil"}
TRAIN_BY_SGD = {"central", "fedavg_finetuned", "flashback", "fedcil"}
HAVE_JOBS = {*TRAIN_BY_SGD, "feddf", "mfcl", "fedavg_gen", "target", "lander"}
"""The methods with server jobs. Adam's first steps have one length, whatever the gradient, so they are less alike."""
LONGER = {"synthesis_rounds": 4, "synthesis_steps": 3, "student_steps": 2}
LONGER_JOBS = ("target", "lander")
WHERE_OPTIONS_COUNT: dict[str, dict[str, Any]] = {
    "flashback": {"server_epochs": 6, "server_lr": 0.03, "patience": 3, "temperature": 1.0, "gamma": 0.5},
    "fedavg_finetuned": {"server_epochs": 6, "patience": 6},
    "feddf": {"server_batches": 24, "server_lr": 0.02, "patience": 24},
    **{name: {"synthesis_steps": 2} for name in LONGER_JOBS},
}
"""Options beside those of ``SHORT`` with which each option of a method makes a difference."""
OTHER_VALUES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "fedreg.perturbed_step": [(0.5, {})],
    "central.server_batch": [(8, {})],
    "fedavg_finetuned.server_batch": [(8, {})],
    "fedavg_finetuned.patience": [(1, {})],
    "fedavg_finetuned.server_epochs": [(2, {})],
    "flashback.server_batch": [(8, {})],
    "flashback.patience": [(1, {})],
    "flashback.server_epochs": [(2, {})],
    "flashback.temperature": [(3.0, {"distil": "devices"}), (0.5, {"distil": "server", "server_lr": 0.3})],
    "flashback.beta": [(3.0, {"local": "not_true"})],
    "flashback.tau": [(3.0, {"local": "not_true"})],
    "feddf.server_batch": [(8, {})],
    "feddf.evaluate_every": [(4, {})],
    "feddf.server_batches": [(4, {})],
    "feddf.patience": [(2, {})],
    "feddf.clip_norm": [(0.01, {})],
    "target.statistics_momentum": [(0.5, {})],
    "lander.statistics_momentum": [(0.5, {})],
    "lander.radius": [(5.0, {})],
}
"""By option: other values, each with what it needs beside it, where the one next to the default tells nothing."""
NO_DIFFERENCE = {
    **dict.fromkeys(("ncm.devices", "afl.devices"), "says who is asked, and here everybody is"),
    "lander.anchors": "is one of two, and the other is a file",
}

SHAPE, CLASSES, WIDTH = (1, 8, 8), 4, 6
MODEL = mlp(SHAPE, CLASSES, (WIDTH,))
GROWING = growing(MODEL, ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
SHARES = [np.arange(40 * i, 40 * i + size) for i, size in enumerate((6, 10, 16, 20))]
# Labels go 0, 1, 2, 3, 0, ...: the second task brings the odd ones, of which the last device has none.
STREAM = [[*(share[first::2] for share in SHARES), np.arange(200, 212 - 12 * first, 2)] for first in (0, 1)]
SETTINGS = [
    *(pytest.param(name, False, id=name) for name in ALGORITHMS if name not in NEED_TASKS),
    *(pytest.param(name, True, id=f"{name}-in_tasks") for name in ALGORITHMS),
]
EVERY_METHOD = pytest.mark.parametrize(("name", "in_tasks"), SETTINGS)
METHODS_THAT_ASK = pytest.mark.parametrize(
    ("name", "in_tasks"), [setting for setting in SETTINGS if setting.values[0] not in ASK_NOBODY]
)


def model_of(in_tasks: bool) -> Model:
    return GROWING if in_tasks else MODEL


def build(
    name: str,
    in_tasks: bool,
    loss: str = "cross_entropy",
    options: Mapping[str, Any] | None = None,
    epochs: int = 2,
    **settings: Any,
) -> Algorithm[Any]:
    model = model_of(in_tasks)
    known = {"devices": 5, "public": True, "input_shape": SHAPE, **settings}
    ingredients = Ingredients(model, find_criterion(loss, model), CLASSES, epochs, 5, 0.05, 0.5, **known)
    return build_algorithm(name, SHORT.get(name, {}) if options is None else options, ingredients)


@pytest.fixture(scope="module")
def corpus(corpus: Corpus) -> Corpus:
    """The middle of the pictures, in a size for which there is a generator."""
    split = replace(corpus.train, x=np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
    return replace(corpus, train=split, test=split, input_shape=SHAPE)


@pytest.fixture(scope="module")
def public(corpus: Corpus) -> PublicData:
    parts = [Labelled(*corpus.batch(corpus.train, np.arange(start, start + 40))) for start in (300, 340)]
    return PublicData(*parts)


@pytest.fixture(scope="module")
def fleet(little_fleet: Callable[..., Any], public: PublicData) -> Callable[..., Any]:
    """``fleet(name, in_tasks)`` makes a fleet of its own, with a round for each task. Nothing of it is recorded."""

    def make(name: str, in_tasks: bool, loss: str = "cross_entropy", **fields: Any) -> Any:
        fields = {"stream": STREAM if in_tasks else (), "public": public, "executor": Serial(plain=True)} | fields
        return little_fleet(build(name, in_tasks, loss), model_of(in_tasks).init(0), SHARES, **fields)

    return make


@EVERY_METHOD
def test_a_method_plays_alike_on_both_executors_while_devices_come_and_go(
    name: str, in_tasks: bool, fleet: Callable[..., Any]
) -> None:
    """``Checked`` compares both executors on every ask, own states included.

    The second task begins with the third round. Then device 2 takes part for the first time, device 4 has no samples,
    and device 0 has a state from the first round only.
    """
    played = fleet(name, in_tasks, executor=Checked(Serial(), Vmapped(2)), rounds_per_period=2)
    first = played.model
    everywhere = [([0, 1, 3], []), ([0, 3], [0]), ([0, 1, 2, 3], [1])]
    for cohort, lost in [*everywhere[:2], ([0, 2, 4], [0]), everywhere[2]] if in_tasks else everywhere:
        played.play(cohort, lost)
        assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values())
    assert any(not torch.equal(leaf, first[key]) for key, leaf in played.model.items())
    if in_tasks:
        assert played.model[SEEN].tolist() == [1, 1, 1, 1]


class OnTheGpu:
    """``Vmapped`` on the GPU, for a fleet whose model and samples lie in host memory."""

    capacity = 2

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        device = open_device("cuda")
        placed = {key: map_leaves(lambda leaf: leaf.to(device), tree) for key, tree in shared.items()}
        return Vmapped(2).run(program, placed, jobs, replace(source, device=device))


@pytest.mark.gpu
def test_a_method_computes_on_a_gpu_what_it_computes_on_a_processor(fleet: Callable[..., Any]) -> None:
    for setting in SETTINGS:
        name, in_tasks = setting.values
        played = fleet(name, in_tasks, executor=Checked(Serial(), OnTheGpu()), rounds_per_period=1)
        for _ in range(2):
            played.play([0, 1, 3], [])
        assert all(bool(torch.isfinite(leaf).all()) for leaf in played.model.values()), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(HAVE_JOBS))
def test_a_server_job_computes_on_a_gpu_what_it_computes_on_a_processor(
    name: str, fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its iterations, captured and not, have the same bits, and are near those of the processor."""
    records: list[object] = []

    class Counted(GraphRecorder):
        def record(self, work: Any) -> Any:
            records.append(made := super().record(work))
            return made

    def computed(fleet: Any, job: ServerJob) -> Tree:
        with jobs_compute_on(lambda: torch.device("cuda")):
            found, again = played(fleet, job), played(fleet, job)
            with recorded_by(lambda device: None):
                ordinary = played(fleet, job)
        assert model_digest(found) == model_digest(again) == model_digest(ordinary)
        expected, first = played(fleet, job), job.init()
        moved = {key: leaf for key, leaf in expected.items() if key.startswith("model/")}
        if name in TRAIN_BY_SGD:
            apart = math.sqrt(squared_norm({key: found[key].cpu() - leaf for key, leaf in moved.items()}))
            far = math.sqrt(squared_norm({key: first[key] - leaf for key, leaf in moved.items()}))
            assert apart < 1e-3 * far > 0
        return expected

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(job_device, "is_large", lambda model, variables: True)
    monkeypatch.setattr(captures, "ORDINARY_STEPS", 1)
    if name in LONGER_JOBS:
        monkeypatch.setitem(SHORT, name, SHORT[name] | LONGER)
    little = fleet(name, True, rounds_per_period=1)
    played = type(little)._compute
    monkeypatch.setattr(type(little), "_compute", computed)
    with recorded_by(lambda device: Counted() if device.type == "cuda" else None):
        for _ in range(2):
            little.play([0, 1, 3])
    assert little.jobs
    assert records


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_takes_the_reweighted_softmax_unless_cross_entropy_is_built_into_its_loss(
    name: str, fleet: Callable[..., Any]
) -> None:
    in_tasks = name in NEED_TASKS
    if name in OWN_LOSS:
        with pytest.raises(ConfigurationError, match="has a loss of its own"):
            build(name, in_tasks, "wsm")
        return
    with_it, without_it = (fleet(name, in_tasks, loss) for loss in ("wsm", "cross_entropy"))
    for played in (with_it, without_it):
        played.play([2])
    assert any(not torch.equal(leaf, without_it.model[key]) for key, leaf in with_it.model.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_of_a_method_changes_what_is_learnt(
    name: str, little_fleet: Callable[..., Any], public: PublicData
) -> None:
    in_tasks = name in NEED_TASKS
    usual = SHORT.get(name, {}) | WHERE_OPTIONS_COUNT.get(name, {})

    def learnt(**options: Any) -> Iterator[str]:
        """The model after each of two rounds."""
        algorithm = build(name, in_tasks, options=usual | options, epochs=1)
        fields = {"stream": STREAM if in_tasks else (), "public": public, "executor": Serial(plain=True)}
        played = little_fleet(algorithm, model_of(in_tasks).init(0), SHARES, **fields)
        for cohort in ([2], [0, 2]):
            played.play(cohort)
            yield model_digest(played.model)

    builder = ALGORITHMS[name]
    hints = get_type_hints(builder)
    plain, lost = [*learnt()], []
    for option, parameter in [*inspect.signature(builder).parameters.items()][1:]:
        if f"{name}.{option}" in NO_DIFFERENCE:
            continue
        value = usual.get(option, parameter.default)
        for other, beside in OTHER_VALUES.get(f"{name}.{option}") or [(another(value, hints[option]), {})]:
            expected = learnt(**beside) if beside else plain
            if all(map(eq, learnt(**beside, **{option: other}), expected)):
                lost.append(f"{option} = {other} with {beside}")
    assert not lost


def another(value: Any, hint: Any) -> Any:
    """A value of an option that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return next(other for other in get_args(hint) if other != value)
    return value + 1 if isinstance(value, int) else 2 * value or 0.5


@pytest.fixture(scope="module")
def rounds_of_one(fleet: Callable[..., Any]) -> Callable[..., Sequence[tuple[Any, Ask]]]:
    """``rounds_of_one(name, in_tasks)``: one round, or one of each task, in which device 3 alone is asked.

    Each is the fleet as it is after the round, and the last ask of the round. All are played once for all tests.
    """

    @cache
    def rounds(name: str, in_tasks: bool) -> Sequence[tuple[Any, Ask]]:
        played, found = fleet(name, in_tasks), []
        for _ in range(2 if in_tasks else 1):
            played.play([3])
            found.append((copy(played), played.asks[-1]))
        return found

    return rounds


@METHODS_THAT_ASK
def test_a_device_sends_what_its_program_declares(
    name: str, in_tasks: bool, rounds_of_one: Callable[..., Sequence[tuple[Any, Ask]]]
) -> None:
    for played, ask in rounds_of_one(name, in_tasks):
        program: Any = played.algorithm.programs[ask.program]
        reply = PayloadTemplate.of(program.payload(ask.shared)).bytes / 4
        assert reply == pytest.approx(weight_of_a_reply(name, model_of(in_tasks).init(0)), rel=0.01)
        assert program.declares_label_counts == (name in TELL_LABEL_COUNTS)
        told = {device: result.label_counts is not None for device, result in played.results.items()}
        assert set(told.values()) == {name in TELL_LABEL_COUNTS}


def weight_of_a_reply(name: str, model: Tree) -> int:
    """The number of values in a payload: models, statistics, FedCIL's generator and second head, or sums of doubles."""
    numbers = sum(leaf.numel() for leaf in model.values())
    generator = generator_for(SHAPE, NOISE + CLASSES).model.init(0)
    match name:
        case "scaffold":
            return 2 * numbers
        case "fedcurv":
            return 3 * numbers
        case "mfcl" | "fedavg_gen" | "target":
            return numbers + 2 * WIDTH
        case "lander":
            return numbers + 2 * WIDTH + 5 * (WIDTH + 1)
        case "ncm" | "icarl":
            return 2 * (CLASSES * WIDTH + CLASSES)
        case "glfc":
            return 2 * 2 * CLASSES
        case "afl":
            return 2 * ((WIDTH + 1) ** 2 + (WIDTH + 1) * CLASSES + CLASSES)
        case "fedcil":
            return numbers + WIDTH + 1 + sum(leaf.numel() for leaf in generator.values())
    return numbers


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in {*ASK_NOBODY, *SUM_UP}])
def test_a_method_takes_steps_in_place_of_epochs(name: str) -> None:
    """Its first program takes as many steps with few samples as with many, and the emulated time follows."""
    in_tasks = name in NEED_TASKS

    def first(steps: int) -> Any:
        return next(iter(build(name, in_tasks, local_steps=steps).programs.values()))

    program, by_epochs = first(3), first(0)
    assert program.processed > 0
    assert program.passes < by_epochs.passes
    assert by_epochs.processed == 0
    lengths = {len(program.stages[-1 if name == "fedreg" else 0].plan(n, np.random.default_rng(0))) for n in (5, 40)}
    assert lengths == {3}


@METHODS_THAT_ASK
def test_a_reply_tells_the_devices_model(
    name: str, in_tasks: bool, rounds_of_one: Callable[..., Sequence[tuple[Any, Ask]]]
) -> None:
    """The model that diagnosis tests. With a single device, and no training after it, this is the global model."""
    for played, ask in rounds_of_one(name, in_tasks):
        program = played.algorithm.programs[ask.program]
        assert isinstance(program, Revealing) or name in SUM_UP
        if name in SUM_UP:
            continue
        found = program.local_model(ask.shared, played.payloads[3])
        assert found.keys() == played.model.keys()
        # Generators and samples are made before devices are asked.
        if {*played.jobs} <= {"generator", "synthesis"}:
            for key, leaf in found.items():
                torch.testing.assert_close(leaf, played.model[key])
