"""The executors agree with each other, and a device's result does not depend on the other devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedemu.algorithms.data.augment import augmentation
from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outcome, Stage, Tree
from fedemu.algorithms.models import unfolded
from fedemu.algorithms.models.feed_forward import cnn, lenet, mlp
from fedemu.algorithms.models.layers import Linear
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training.local_sgd import LocalSGD, shuffled_epochs
from fedemu.algorithms.training.objective import Loss, Objective, proximity
from fedemu.algorithms.trees import flatten
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.executor import Executor, Job, JobResult, Source
from fedemu.device.compute.executors.host_memory import handed_over, in_host_memory
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import TrainingError
from fedemu.protocol.ids import Digest

SAMPLES = 400
SHAPE = (1, 12, 12)
CLASSES = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source() -> Source:
    random = np.random.default_rng(0)
    split = Split(random.integers(0, 256, (SAMPLES, *SHAPE), np.uint8), random.integers(0, CLASSES, SAMPLES), {})
    names = tuple("abcd")
    corpus = Corpus("noise", split, split, names, SHAPE, np.array([127.5]), np.array([73.9]), Digest("0" * 64))
    return Source(corpus, seed=5, device=torch.device("cpu"))


def local(model: Model, **settings: Any) -> LocalSGD:
    defaults: dict[str, Any] = {"epochs": 2, "batch_size": 5, "lr": 0.1}
    return LocalSGD(model, Objective(model, terms=(proximity(0.1),)), **{**defaults, **settings})


def jobs_of(sizes: Sequence[int], round: int = 1) -> list[Job]:
    """Device ``i`` holds the ``sizes[i]`` samples from ``11·i`` on."""
    return [Job(i, round, 0, np.arange(11 * i, 11 * i + size) % SAMPLES) for i, size in enumerate(sizes)]


def run(executor: Executor, program: Any, shared: Forest, jobs: Sequence[Job], source: Source) -> list[JobResult]:
    results = []
    for result in executor.run(program, shared, jobs, source):
        assert isinstance(result, JobResult), result
        results.append(result)
    return results


def leaves(result: JobResult) -> dict[str, torch.Tensor]:
    return {**flatten(result.payload), **flatten({"own": result.own})}


def assert_alike(result: JobResult, expected: JobResult) -> None:
    """The results agree up to rounding, which grows with the steps, relative to the largest element of each leaf."""
    assert leaves(result).keys() == leaves(expected).keys()
    for name, leaf in leaves(expected).items():
        bound = 5e-3 * float(leaf.abs().max()) + 1e-6
        torch.testing.assert_close(leaves(result)[name], leaf, rtol=0.0, atol=bound, msg=f"{name} differs")


def bits(result: JobResult) -> dict[str, bytes]:
    return {name: leaf.numpy().tobytes() for name, leaf in leaves(result).items()}


class _Module(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(1, 3, 5),
            torch.nn.BatchNorm2d(3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(192, 4),
        )


def small_resnet(norm: Literal["group", "batch"]) -> Model:
    """The stem and the first three blocks. The last block changes the shape."""
    whole = resnet18(SHAPE, CLASSES, norm=norm, width=2)
    return replace(whole, blocks=whole.blocks[:3], head=Linear("head", 4, CLASSES))


DEVICES = [
    pytest.param("cpu", id="processor"),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]
MODELS: Mapping[str, Model] = {
    "mlp": mlp(SHAPE, CLASSES, (16,)),
    "cnn": cnn(SHAPE, CLASSES),
    "lenet": lenet(SHAPE, CLASSES),
    "resnet-group": small_resnet("group"),
    "resnet-batch": small_resnet("batch"),
    "module": from_module(_Module),
}


@pytest.mark.parametrize(("name", "momentum"), [("mlp", 0.0), *((name, 0.9) for name in MODELS)])
def test_stacked_and_serial_results_agree_for_every_model(name: str, momentum: float, source: Source) -> None:
    model = MODELS[name]
    program = local(model, epochs=1, momentum=momentum, weight_decay=1e-3, lr=0.02)
    shared = {"model": model.init(1)}
    jobs = jobs_of([7, 0, 2, 12])
    serial = run(Serial(), program, shared, jobs, source)
    stacked = run(Vmapped(3), program, shared, jobs, source)
    for expected, result in zip(serial, stacked, strict=True):
        assert (result.examples, result.steps) == (expected.examples, expected.steps)
        assert_alike(result, expected)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-3)


@pytest.mark.parametrize(("name", "stack"), [("mlp", 8), ("mlp", 16), ("lenet", 4), ("resnet-batch", 2)])
def test_a_devices_bits_do_not_depend_on_the_other_devices(name: str, stack: int, source: Source) -> None:
    model = MODELS[name]
    program = local(model, epochs=1, momentum=0.5)
    shared = {"model": model.init(1)}
    random = np.random.default_rng(3)
    jobs = jobs_of([int(size) for size in random.integers(0, 23, 18 if name == "mlp" else 6)])
    executor = Vmapped(stack)
    expected = {
        job.device: bits(result) for job, result in zip(jobs, run(executor, program, shared, jobs, source), strict=True)
    }
    for size in (1, 7, len(jobs)):
        order = [jobs[i] for i in random.permutation(len(jobs))]
        for start in range(0, len(order), size):
            group = order[start : start + size]
            for job, result in zip(group, run(executor, program, shared, group, source), strict=True):
                assert bits(result) == expected[job.device], f"device {job.device} in a group of {len(group)}"


class _WholeBatches(LocalSGD):
    """Each step sees all samples of the device, so that batches are of other sizes at other devices."""

    @property
    def plan(self) -> Any:
        return lambda examples, random: np.tile(np.arange(examples), (3, 1))


@pytest.mark.parametrize("augmented", [False, True])
def test_a_devices_bits_do_not_depend_on_the_sizes_of_other_devices_batches(augmented: bool, source: Source) -> None:
    corpus, model = source.corpus, MODELS["mlp"]
    changes = augmentation(("crop", "flip"), SHAPE, corpus.mean, corpus.std) if augmented else None
    program = _WholeBatches(model, Objective(model), epochs=1, batch_size=5, lr=0.3, augment=changes)
    shared, jobs, executor = {"model": model.init(1)}, jobs_of([3, 0, 40, 7, 3, 64]), Vmapped(8)
    together = run(executor, program, shared, jobs, source)
    for job, result in zip(jobs, together, strict=True):
        (alone,) = run(executor, program, shared, [job], source)
        assert bits(result) == bits(alone)
        assert result.metrics == alone.metrics
    for expected, result in zip(run(Serial(), program, shared, jobs, source), together, strict=True):
        assert_alike(result, expected)


def test_tensors_that_come_in_one_copy_are_those_that_come_one_by_one() -> None:
    leaves = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7),
        torch.arange(8.0).view(2, 2, 2).transpose(0, 2),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
    ]
    alone, together = in_host_memory(leaves, flat=False), in_host_memory(leaves, flat=True)
    for leaf, one, other in zip(leaves, alone, together, strict=True):
        assert torch.equal(one, leaf)
        assert torch.equal(other, leaf)
        assert other.dtype == leaf.dtype
    together[0][0, 0] = 9.0
    assert leaves[0][0, 0] == 0.0
    assert in_host_memory([]) == []


@pytest.mark.parametrize("export", [in_host_memory, handed_over])
def test_a_program_on_a_gpu_may_return_tensors_that_it_made_in_host_memory(
    export: Callable[[Sequence[Tensor]], list[Tensor]],
) -> None:
    with FakeTensorMode():
        there, here = torch.zeros(2, 3, device="cuda"), torch.ones(2)
        for leaves in ([there, here], [here, there]):
            found = export(leaves)
            assert [(leaf.device.type, leaf.shape) for leaf in found] == [("cpu", leaf.shape) for leaf in leaves]


class _InFloat64(Source):
    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().batch(indices)
        return x.double(), y


def trained_in_float64(name: str, executor: Executor, device: str, source: Source) -> list[JobResult]:
    model = MODELS[name]
    variables = {key: leaf.double() if leaf.is_floating_point() else leaf for key, leaf in model.init(1).items()}
    shared = {"model": {key: leaf.to(device) for key, leaf in variables.items()}}
    where = _InFloat64(source.corpus, source.seed, torch.device(device))
    return run(executor, local(model, epochs=1), shared, jobs_of([7, 12, 2]), where)


@pytest.fixture(scope="module")
def reference(source: Source) -> Callable[[str], list[JobResult]]:
    """``reference(name)``: what a processor makes of a model in float64, one device after the other."""
    return cache(lambda name: trained_in_float64(name, Serial(), "cpu", source))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "as_products"),
    [("cnn", False), ("cnn", True), ("resnet-group", False), ("resnet-batch", False), ("resnet-batch", True)],
)
def test_in_float64_executors_and_devices_agree_to_many_digits(
    name: str,
    as_products: bool,
    device: str,
    source: Source,
    reference: Callable[[str], list[JobResult]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 a value may fall on the other side of a kink, such as that of ReLU, and move a gradient by 1 %."""
    expected = reference(name)
    monkeypatch.setattr(unfolded, "suits", lambda *_: as_products and torch.is_grad_enabled())
    # Without products, one by one on a processor, it is the reference.
    for executor in (Serial(), Vmapped(2))[device == "cpu" and not as_products :]:
        for result, other in zip(trained_in_float64(name, executor, device, source), expected, strict=True):
            for leaf, value in zip(leaves(result).values(), leaves(other).values(), strict=True):
                torch.testing.assert_close(leaf, value, rtol=0.0, atol=1e-9 * float(value.abs().max()))


def test_a_new_executor_repeats_the_bits_of_another(source: Source) -> None:
    program = local(MODELS["mlp"])
    shared = {"model": MODELS["mlp"].init(1)}
    jobs = jobs_of([3, 14, 6])
    for make in (Serial, lambda: Vmapped(4)):
        one, other = (run(make(), program, shared, jobs, source) for _ in range(2))
        assert [bits(result) for result in one] == [bits(result) for result in other]


def test_training_is_a_plain_loop_of_torch(source: Source) -> None:
    model = MODELS["mlp"]
    program = local(model, momentum=0.9, weight_decay=1e-2, epochs=3)
    shared = {"model": model.init(1)}
    job = jobs_of([0, 0, 13])[2]
    (result,) = run(Vmapped(2), program, shared, [job], source)
    parameters = {name: leaf.clone().requires_grad_() for name, leaf in shared["model"].items()}
    optimiser = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for positions in source.planner.plan(program.stages[0], 0, 13, job.round, job.device):
        x, y = source.corpus.batch(source.corpus.train, job.indices[positions[positions >= 0]])
        outputs, _ = model.apply(parameters, x, True)
        distance = sum((leaf - shared["model"][name]).square().sum() for name, leaf in parameters.items())
        optimiser.zero_grad()
        (torch.nn.functional.cross_entropy(outputs.logits, y) + 0.05 * distance).backward()
        optimiser.step()
    assert (result.examples, result.steps) == (13, 9)
    for name, leaf in parameters.items():
        moved = leaf.detach() - shared["model"][name]
        torch.testing.assert_close(result.payload["delta"][name], moved, rtol=1e-3, atol=1e-5)


def test_a_device_without_samples_sends_zeros_after_no_step(source: Source) -> None:
    shared = {"model": MODELS["mlp"].init(1)}
    for executor in (Serial(), Vmapped(4)):
        for jobs in (jobs_of([0]), jobs_of([0, 9])):
            result = run(executor, local(MODELS["mlp"]), shared, jobs, source)[0]
            assert (result.examples, result.steps, result.metrics) == (0, 0, {})
            assert all(not leaf.any() for leaf in leaves(result).values())


class _Afresh(LocalSGD):
    """Each stage is a pass; at the end of the first the device has the global model again."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(shuffled_epochs(1, 5), step) for step in (self.again, self.step))

    def again(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> tuple[Any, Tree]:
        return carry._replace(variables=shared["model"]), {}


@pytest.mark.parametrize("executor", [Serial(), Vmapped(2)], ids=["serial", "stack-2"])
def test_shared_variables_are_not_written_to(executor: Executor, source: Source) -> None:
    program = local(MODELS["lenet"], lr=0.01)
    afresh = _Afresh(program.model, program.loss, 1, 5, 0.01)
    shared = {"model": MODELS["lenet"].init(0)}
    before = {name: leaf.clone() for name, leaf in shared["model"].items()}
    for each in (program, afresh):
        results = run(executor, each, shared, jobs_of([6, 3, 6]), source)
        assert all(torch.equal(leaf, before[name]) for name, leaf in shared["model"].items())
        assert all(leaf.any() for result in results for leaf in result.payload["delta"].values())


class _InPlace(LocalSGD):
    """It writes to its carry, as an optimiser of torch does."""

    def step(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> tuple[Any, Tree]:
        gradients, loss = self.gradients(carry.variables, batch, shared, own, facts)
        for name, slope in gradients.items():
            carry.variables[name].sub_(facts.lr * slope)
        return carry, loss.metrics

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        for name, leaf in carry.variables.items():
            leaf.sub_(shared["model"][name])
        return Outcome({"delta": carry.variables}, own)


@pytest.mark.parametrize("executor", [Serial(), Serial(plain=True), Vmapped(2)], ids=["serial", "plain", "stack-2"])
def test_what_a_program_writes_to_its_carry_counts_once(executor: Executor, source: Source) -> None:
    model = MODELS["mlp"]
    shared, jobs = {"model": model.init(0)}, jobs_of([6, 7, 8, 6])
    in_place = _InPlace(model, Objective(model), epochs=2, batch_size=5, lr=0.1)
    expected = run(executor, LocalSGD(model, in_place.loss, epochs=2, batch_size=5, lr=0.1), shared, jobs, source)
    for result, other in zip(run(executor, in_place, shared, jobs, source), expected, strict=True):
        assert_alike(result, other)


class _Writes(LocalSGD):
    """It writes to the tensor that ``read`` takes of what it is given."""

    read: Any = None

    def initial_own(self, shared: Forest) -> Tree:
        return {"visits": torch.zeros(2)}

    def step(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> tuple[Any, Tree]:
        type(self).read(shared, own, facts).add_(1)
        return super().step(carry, batch, shared, own, facts, noise)


@pytest.mark.parametrize("executor", [Serial(), Serial(plain=True), Vmapped(2)], ids=["serial", "plain", "stack-2"])
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda shared, own, facts: shared["model"]["fc1.bias"][:1], "shared['model']['fc1.bias']"),
        (lambda shared, own, facts: own["visits"], "own['visits']"),
        (lambda shared, own, facts: facts.lr, "facts"),
    ],
)
def test_a_program_that_writes_to_what_others_read_too_is_refused(
    executor: Executor, read: Any, name: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Writes, "read", staticmethod(read))
    model = MODELS["mlp"]
    shared = {"model": model.init(0), "wide": {"ones": torch.ones(1).expand(3)}}
    program = _Writes(model, Objective(model), epochs=1, batch_size=5, lr=0.1)
    for result in executor.run(program, shared, jobs_of([6, 6]), source):
        assert isinstance(result, TrainingError)
        assert f"the program failed: it writes to {name}, which other steps or other devices read, too" in str(result)
    assert all(torch.equal(leaf, shared["model"][name]) for name, leaf in model.init(0).items())


_TABLE = torch.tensor([7.0, 8.0])


class _Returning(LocalSGD):
    """It returns the trained model, a part of it, a shared variable, a tensor twice, and a table of its own."""

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        weight, bias = carry.variables["fc1.weight"], carry.variables["fc1.bias"] + 1
        model = {"all": weight, "part": weight[0], "shared": shared["model"]["fc1.weight"]}
        return Outcome({"model": model, "bias": {"once": bias, "again": bias}}, {"table": _TABLE})


class _NotRecorded(_Returning):
    """It reads a value, so it runs without recorded operations."""

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        assert bool(carry.variables["fc1.bias"].isfinite().all())
        return super().finish(carry, shared, own, facts)


@pytest.mark.parametrize(
    ("executor", "kind"),
    [(Serial(), _Returning), (Serial(), _NotRecorded), (Serial(plain=True), _Returning), (Vmapped(2), _Returning)],
    ids=["serial", "not-recorded", "plain", "stack-2"],
)
def test_results_may_be_written_to(executor: Executor, kind: type[LocalSGD], source: Source) -> None:
    """They share no memory with each other, with what was given, or with the results of the next call."""
    program = kind(MODELS["mlp"], Objective(MODELS["mlp"]), 1, 5, 0.1)
    shared = {"model": MODELS["mlp"].init(0)}
    first, before = [
        [bits(result) for result in run(executor, program, shared, jobs_of([6, 0, 7]), source)] for _ in range(2)
    ]
    results = run(executor, program, shared, jobs_of([6, 0, 7]), source)
    written = [leaf for result in results for leaf in leaves(result).values()]
    assert len(written) == 18
    for number, leaf in enumerate(written):
        leaf.fill_(number)
    assert all(bool((leaf == number).all()) for number, leaf in enumerate(written))
    assert [bits(result) for result in run(executor, program, shared, jobs_of([6, 0, 7]), source)] == before == first
    assert all(torch.equal(leaf, shared["model"][name]) for name, leaf in MODELS["mlp"].init(0).items())


def test_rounds_and_devices_shuffle_differently(source: Source) -> None:
    program = local(MODELS["mlp"])
    shared = {"model": MODELS["mlp"].init(1)}
    indices = np.arange(20)
    jobs = [Job(0, 1, 0, indices), Job(0, 2, 0, indices), Job(1, 1, 0, indices), Job(0, 1, 0, indices)]
    results = [bits(result) for result in run(Vmapped(4), program, shared, jobs, source)]
    assert results[0] == results[3]
    assert results[0] != results[1]
    assert results[0] != results[2]


def test_augmented_training_agrees_and_differs_from_plain(source: Source) -> None:
    model = MODELS["lenet"]
    corpus = source.corpus
    changes = augmentation(("crop", "flip", "cutout"), SHAPE, corpus.mean, corpus.std)
    shared = {"model": model.init(1)}
    jobs = jobs_of([7, 12, 3])
    plain = run(Serial(), local(model), shared, jobs, source)
    serial = run(Serial(), local(model, augment=changes), shared, jobs, source)
    stacked = run(Vmapped(2), local(model, augment=changes), shared, jobs, source)
    for untouched, expected, result in zip(plain, serial, stacked, strict=True):
        assert_alike(result, expected)
        assert any(
            not torch.allclose(leaves(untouched)[name], leaf, rtol=1e-2) for name, leaf in leaves(expected).items()
        )


@dataclass(frozen=True, eq=False)
class Diary:
    """A program of two stages with noise, own state and a part of the ask for each device.

    The first stage adds up the samples' labels, the second counts samples; ``own`` counts visits and remembers the sum.
    """

    noise: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"z": (2,)})
    passes: float = 2.0
    declares_label_counts: bool = True

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(_PLAN, self._labels), Stage(_PLAN, self._samples, rows_matter=False)

    def learning_rate(self, round: int, task: int) -> float:
        return 0.5**round

    def initial_own(self, shared: Forest) -> Tree:
        return {"visits": torch.zeros((), dtype=torch.int64), "sum": torch.zeros(())}

    def payload(self, shared: Forest) -> Forest:
        return {"sums": {"labels": torch.zeros(()), "samples": torch.zeros(()), "offset": torch.zeros(())}}

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any:
        return {"labels": shared["each"]["offset"] * 1.0, "samples": torch.zeros(()), "noise": torch.zeros(2)}

    def _labels(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> Any:
        labels = (batch.y * batch.weight).sum()
        after = {**carry, "labels": carry["labels"] + labels, "noise": carry["noise"] + noise["z"]}
        return after, {"mean_label": labels / batch.weight.sum()}

    def _samples(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> Any:
        after = {**carry, "samples": carry["samples"] + batch.weight.sum(), "noise": carry["noise"] + noise["z"]}
        return after, {}

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        visits = torch.where(facts.first_visit, 1, own["visits"] + 1)
        payload = {
            "sums": {"labels": carry["labels"], "samples": carry["samples"], "offset": shared["each"]["offset"]},
            "seen": {
                "noise": carry["noise"],
                "facts": torch.stack([facts.examples, facts.steps, facts.round, facts.task]),
                "lr": facts.lr,
                "counts": facts.label_counts,
                "before": own["sum"] + 0,
            },
        }
        return Outcome(payload, {"visits": visits, "sum": carry["labels"]})


_PLAN = shuffled_epochs(epochs=2, batch_size=4)


@pytest.mark.parametrize("executor", [Serial(), Vmapped(2), Vmapped(8)], ids=["serial", "stack-2", "stack-8"])
def test_own_state_noise_stages_and_facts_reach_every_device(executor: Executor, source: Source) -> None:
    sizes = [6, 0, 9]
    first = [
        Job(job.device, 3, 2, job.indices, each={"offset": torch.tensor(100.0 * job.device)}) for job in jobs_of(sizes)
    ]
    program = Diary()
    results = run(executor, program, {"model": {"w": torch.zeros(1)}}, first, source)
    again = [
        Job(job.device, 4, 2, job.indices, job.each, result.own) for job, result in zip(first, results, strict=True)
    ]
    later = run(executor, program, {"model": {"w": torch.zeros(1)}}, again, source)
    for job, result, second in zip(first, results, later, strict=True):
        labels = source.corpus.train.y[job.indices]
        steps = 2 * 2 * -(-len(labels) // 4)
        sums = {name: float(leaf) for name, leaf in result.payload["sums"].items()}
        assert sums == {
            "labels": 100.0 * job.device + 2 * labels.sum(),
            "samples": 2.0 * len(labels),
            "offset": 100.0 * job.device,
        }
        seen = result.payload["seen"]
        assert seen["facts"].tolist() == [len(labels), steps, 3, 2]
        assert float(seen["lr"]) == 0.125
        assert seen["counts"].tolist() == np.bincount(labels, minlength=CLASSES).tolist()
        assert result.label_counts == tuple(seen["counts"].tolist())
        assert (float(seen["before"]), int(result.own["visits"])) == (0.0, 1)
        assert (float(second.payload["seen"]["before"]), int(second.own["visits"])) == (sums["labels"], 2)
        assert result.steps == steps
        if len(labels):
            assert result.metrics == {"mean_label": pytest.approx(labels.mean())}
            assert not torch.equal(seen["noise"], second.payload["seen"]["noise"])


class _Fewer(Diary):
    """The second stage leaves out devices with fewer than three samples, and measures another thing."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(_PLAN, self._labels), Stage(_plan_from_three_on, self._measured)

    def _measured(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> Any:
        return carry, {"size": batch.weight.sum()}


def _plan_from_three_on(examples: int, random: np.random.Generator) -> Any:
    return _PLAN(examples, random) if examples >= 3 else np.empty((0, 4), np.int64)


@pytest.mark.parametrize("executor", [Serial(), Vmapped(2)], ids=["serial", "stack-2"])
def test_a_device_has_no_metric_of_a_stage_in_which_it_has_no_step(executor: Executor, source: Source) -> None:
    jobs = [Job(job.device, 1, 0, job.indices, {"offset": torch.zeros(())}) for job in jobs_of([6, 2, 0])]
    results = run(executor, _Fewer(), {"model": {"w": torch.zeros(1)}}, jobs, source)
    assert [sorted(result.metrics) for result in results] == [["mean_label", "size"], ["mean_label"], []]


def test_noise_is_the_devices_own(source: Source) -> None:
    jobs = [Job(job.device, 1, 0, job.indices, {"offset": torch.zeros(())}) for job in jobs_of([6, 3, 9])]
    drawn = []
    for executor in (Serial(), Vmapped(2), Vmapped(8)):
        results = run(executor, Diary(), {}, jobs, source)
        drawn.append([result.payload["seen"]["noise"].tolist() for result in results])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({tuple(noise) for noise in drawn[0]}) == 3


def test_a_job_that_cannot_be_run_fails_alone(source: Source) -> None:
    program = Diary()
    offset = {"offset": torch.zeros(())}
    good = Job(1, 1, 0, np.arange(5), offset)
    jobs = [
        Job(0, 1, 0, np.array([SAMPLES]), offset),
        good,
        Job(2, 1, 0, np.arange(5), offset, own={"visits": torch.zeros(3)}),
        Job(3, 1, 0, np.arange(5)),
        good,
    ]
    for executor in (Serial(), Vmapped(4)):
        results = executor.run(program, {}, jobs, source)
        assert [isinstance(result, TrainingError) for result in results] == [True, False, True, True, False]
        assert str(results[0]) == "device 0: its sample indices reach beyond the 400 training samples"
        assert "device 2: its own state" in str(results[2])
        assert "device 3: the program failed" in str(results[3])
        assert isinstance(results[1], JobResult)
        assert isinstance(results[4], JobResult)
        assert bits(results[1]) == bits(results[4])


def test_a_plan_that_fails_for_one_device_fails_it_alone(source: Source) -> None:
    def plan(examples: int, generator: np.random.Generator) -> Any:
        if examples == 3:
            raise RuntimeError("three is too few")
        return np.arange(examples)[:, None] + (100 if examples == 4 else 0)

    model = MODELS["mlp"]
    base = local(model)

    @dataclass(frozen=True, eq=False)
    class Picky(LocalSGD):
        @property
        def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
            return (Stage(plan, self.step),)

    program = Picky(model, base.loss, 1, 1, 0.1)
    for executor in (Serial(), Vmapped(4)):
        results = executor.run(program, {"model": model.init(0)}, jobs_of([2, 3, 4]), source)
        assert isinstance(results[0], JobResult)
        assert "device 1: planning its batches failed: RuntimeError: three is too few" in str(results[1])
        assert "device 2: planning its batches failed" in str(results[2])


OWN_TABLE = """
from torch import nn

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100, 2)
        self.top = nn.Linear(288, 4)

    def forward(self, x):
        return self.top(self.rows(x.round().long()).flatten(1))
"""


@pytest.mark.parametrize("executor", [Serial(), Vmapped(2)])
def test_a_step_that_fails_after_it_was_recorded_is_told_with_the_programs_line(
    executor: Executor, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_TABLE)
    model = from_module(load(f"{tmp_path / 'own.py'}:Table"))
    x = np.zeros((8, *SHAPE), np.float32)
    x[6] = 10_000
    split = Split(x, np.zeros(8, np.int64), {})
    names, one = tuple("abcd"), np.ones(1)
    source = Source(Corpus("table", split, split, names, SHAPE, 0 * one, one, Digest("0" * 64)), 5, torch.device("cpu"))
    program, shared = local(model, batch_size=2), {"model": model.init(1)}
    assert isinstance(executor.run(program, shared, [Job(0, 1, 0, np.arange(4))], source)[0], JobResult)
    [failed] = executor.run(program, shared, [Job(1, 1, 0, np.arange(4, 8))], source)
    assert isinstance(failed, TrainingError)
    assert f"IndexError: index out of range in self, {tmp_path / 'own.py'}:11" in str(failed)


OWN_PICKS = """
from torch import nn
import torch

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(0, 1, 200).reshape(100, 2))
        self.top = nn.Linear(288, 4)

    def forward(self, x):
        return self.top(self.rows.index_select(0, x.round().long().flatten()).view(len(x), -1))
"""


@pytest.mark.parametrize("beyond", [100, 199, -1])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (OWN_TABLE, r"IndexError: index out of range in self, .*own\.py:11"),
        (OWN_PICKS, r"RuntimeError: index .* is out of bounds for dimension 1 with size 100, .*own\.py:12"),
    ],
    ids=["embedding", "index_select"],
)
def test_a_device_whose_index_is_beyond_a_table_fails_alone_in_a_stack(
    code: str, said: str, beyond: int, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(code)
    model = from_module(load(f"{tmp_path / 'own.py'}:Table"))
    x = np.random.default_rng(0).integers(0, 100, (24, *SHAPE)).astype(np.float32)
    x[13, 0, 3, 3] = beyond
    split = Split(x, np.arange(24) % 4, {})
    names, one = tuple("abcd"), np.ones(1)
    source = Source(Corpus("table", split, split, names, SHAPE, 0 * one, one, Digest("0" * 64)), 5, torch.device("cpu"))
    program, shared = local(model, batch_size=2), {"model": model.init(1)}
    jobs = [Job(device, 1, 0, np.arange(4 * device, 4 * device + 4)) for device in range(6)]
    results = Vmapped(3).run(program, shared, jobs, source)
    fourth = results.pop(3)
    assert isinstance(fourth, TrainingError)
    assert re.search(f"^device 3: the program failed: {said}", str(fourth))
    right = run(Vmapped(3), program, shared, jobs[:3] + jobs[4:], source)
    assert [bits(each) for each in results if isinstance(each, JobResult)] == [bits(each) for each in right]


def test_an_error_that_all_devices_share_is_told_at_once(source: Source) -> None:
    calls = 0

    def loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        nonlocal calls
        calls += 1
        raise KeyError("no such variable")

    model = MODELS["mlp"]
    program = LocalSGD(model, loss, epochs=2, batch_size=5, lr=0.1)
    results = Vmapped(2).run(program, {"model": model.init(0)}, jobs_of([4, 4, 4]), source)
    assert ["KeyError: 'no such variable'" in str(each) for each in results] == [True] * 3
    assert calls == 1


class _Poisson(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(144, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.poisson(super().forward(x.flatten(1)).exp())


def test_random_numbers_that_no_key_can_make_are_refused(source: Source) -> None:
    model = from_module(_Poisson)
    for executor in (Serial(), Vmapped(4)):
        (result,) = executor.run(local(model), {"model": model.init(0)}, jobs_of([6]), source)
        assert isinstance(result, TrainingError)
        assert "random" in str(result)


class _Dropping(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(144, 16), torch.nn.ReLU(), torch.nn.Dropout(0.4), torch.nn.Linear(16, 4)
        )


def test_dropout_agrees_in_any_stack_and_follows_seed_round_and_device(source: Source) -> None:
    model = from_module(_Dropping)
    program, shared, jobs = local(model), {"model": model.init(0)}, jobs_of([7, 0, 3, 12])
    serial = run(Serial(), program, shared, jobs, source)
    for executor in (Vmapped(2), Vmapped(3)):
        for expected, result in zip(serial, run(executor, program, shared, jobs[::-1], source)[::-1], strict=True):
            assert_alike(result, expected)
    again = run(Serial(), local(model), shared, jobs, source)
    assert [bits(result) for result in again] == [bits(result) for result in serial]
    alike = [replace(job, indices=jobs[0].indices) for job in jobs_of([7, 7])]
    here, there = run(Serial(), replace(program, epochs=1, batch_size=7), shared, alike, source)
    assert bits(here) != bits(there)
    for job, other in ((replace(jobs[0], round=2), source), (jobs[0], replace(source, seed=6))):
        assert bits(run(Serial(), program, shared, [job], other)[0]) != bits(serial[0])


def test_a_program_that_reads_values_runs_alone_but_not_in_a_stack(source: Source) -> None:
    model = MODELS["mlp"]

    def loss(variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        weight = float(batch.weight.sum())
        logits = model.apply(variables, batch.x, True)[0].logits
        value = torch.nn.functional.cross_entropy(logits, batch.y, reduction="none") @ batch.weight / weight
        return Loss(value, {}, {"loss": value.detach()})

    program = LocalSGD(model, loss, epochs=2, batch_size=5, lr=0.1)
    plain = LocalSGD(model, Objective(model), epochs=2, batch_size=5, lr=0.1)
    shared = {"model": model.init(0)}
    (result,) = run(Serial(), program, shared, jobs_of([7]), source)
    assert_alike(result, run(Serial(), plain, shared, jobs_of([7]), source)[0])
    assert isinstance(Vmapped(2).run(program, shared, jobs_of([7]), source)[0], TrainingError)


def test_results_that_are_not_finite_are_results(source: Source) -> None:
    model = MODELS["mlp"]
    for executor in (Serial(), Vmapped(2)):
        results = run(executor, local(model, lr=1e30), {"model": model.init(0)}, jobs_of([9, 9]), source)
        assert not all(leaf.isfinite().all() for leaf in leaves(results[0]).values())


def test_the_checked_executor_returns_what_both_agree_on(source: Source) -> None:
    model = MODELS["mlp"]
    checked = Checked(Serial(), Vmapped(4))
    results = run(checked, local(model), {"model": model.init(0)}, jobs_of([9, 0, 4]), source)
    alone = run(Vmapped(4), local(model), {"model": model.init(0)}, jobs_of([9, 0, 4]), source)
    assert [bits(result) for result in results] == [bits(result) for result in alone]


def test_a_stack_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Vmapped(1)
