"""Server jobs on a GPU: a step with and without CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fedemu.algorithms.graphs.repeated import graph_recorder, recorded_by
from fedemu.algorithms.incremental.generator.training import GeneratorSettings, GeneratorTraining
from fedemu.algorithms.interface import Context, Labelled, Model, PublicData, ServerJob, Tree
from fedemu.algorithms.models.feed_forward import cnn, lenet
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.image_generator import generator_for
from fedemu.algorithms.models.layer_statistics import watched
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.job_device import jobs_compute_on
from fedemu.algorithms.training.losses import dynamic_distillation
from fedemu.algorithms.training.server_training import ServerTraining
from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.record.checkpoint import canonical
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell

SHAPE: Final = (3, 32, 32)
TEACHERS: Final = 11
"""Ten devices and the global model."""
PUBLIC: Final = (938, 312)
"""Public images to train on, and to validate with: 2.5 % of CIFAR-10."""
_CLASSES: Final = 100
_TASKS: Final = 10
_NOISE: Final = 200
_PASSES: Final = 50
_STEPS: Final = 8
"""The number of steps that are measured."""
_WARM: Final = 4
"""So many steps come before those that are measured. In them iterations are captured."""


@dataclass(frozen=True)
class JobLine:
    """A server job. The times are those of a step in milliseconds, ordinary and with graphs.

    ``same`` says whether both end with the same bits. ``why`` tells why nothing was measured, such as a lack of memory.
    """

    job: str
    ordinary_ms: Spread | None = None
    graphs_ms: Spread | None = None
    same: bool | None = None
    why: str = ""


def distillation(make: Callable[..., Model]) -> ServerJob:
    """A pass over the public images in batches of 64, with the answers of the teachers, and the validation."""
    random = torch.Generator().manual_seed(0)
    parts = (
        Labelled(torch.randn(n, *SHAPE, generator=random), torch.randint(0, 10, (n,), generator=random)) for n in PUBLIC
    )
    answers = torch.randn(TEACHERS, PUBLIC[0], 10, generator=random)
    shares = torch.rand(TEACHERS, 10, generator=random)

    def taught(logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
        alphas = lessons["shares"]
        return dynamic_distillation(logits, y, lessons["answers"][:, rows], alphas[0], alphas, 3.0)

    model = make(SHAPE, 10)
    training = ServerTraining.by_passes(model, taught, 0.01, 0.9, 64, _PASSES, _PASSES)
    context = Context(round=1, task=0, seed=1, classes=10, public=PublicData(*parts))
    return training.job("distillation", model.init(1), lambda public: {"answers": answers, "shares": shares}, context)


def generator(make: Callable[..., Model], batch: int) -> ServerJob:
    """Twenty iterations of a generator, against a classifier of 100 classes that knows twenty."""
    known = growing(make(SHAPE, _CLASSES), ClassTasks.of(_CLASSES, _TASKS, list(range(_CLASSES))), SHAPE)
    classifier = known.entered(watched(known, SHAPE).init(1), 1, 1)
    settings = GeneratorSettings(batch_size=batch, class_signal=10.0)
    training = GeneratorTraining(generator_for(SHAPE, _NOISE), known.observed(), settings)
    return training.job(classifier, {}, Context(round=1, task=1, seed=1, classes=_CLASSES))


JOBS: Final[Mapping[str, Callable[[], ServerJob]]] = {
    "distillation of the CNN, a pass over 938 images": partial(distillation, cnn),
    "distillation of ResNet-18, the same": partial(distillation, resnet18),
    "generator against LeNet, 20 iterations of 32": partial(generator, lenet, 32),
    "generator against ResNet-18, 20 iterations of 128": partial(generator, resnet18, 128),
}
"""Server jobs by name. They begin anew with each call."""


def job_lines(
    effort: Effort,
    tell: Tell,
    device: torch.device,
    jobs: Mapping[str, Callable[[], ServerJob]] = JOBS,
) -> Iterator[JobLine]:
    """Measure each job ordinary and captured, in turns of two."""
    for name, make in jobs.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        digests = set()
        try:
            for captured in (False, True, False, True):
                tell(f"gpu: {name}{', captured' if captured else ''}")
                with jobs_compute_on(lambda: device), recorded_by(graph_recorder if captured else lambda device: None):
                    steps, last = _played(make(), _WARM + effort.count(_STEPS))
                times[captured] += steps
                digests.add(last)
        except Exception as error:
            yield JobLine(name, why=(str(error) or type(error).__name__).splitlines()[0][:60])
            continue
        yield JobLine(name, Spread.of(times[False]), Spread.of(times[True]), len(digests) == 1)


def _played(job: ServerJob, steps: int) -> tuple[list[float], str]:
    """The milliseconds of each step but the first ones, and the digest of the last carry."""
    carry, taken = job.init(), []
    for index in range(steps):
        carry = canonical(carry)  # as the process of a job does where there may be a checkpoint
        began = time.perf_counter()
        carry, _ = job.step(carry, index)
        next(iter(carry.values())).sum().item()  # to read a value waits for the step
        taken.append(1e3 * (time.perf_counter() - began))
    return taken[_WARM:], model_digest(carry)
