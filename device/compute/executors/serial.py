"""The serial executor: one device after the other, each with its own tensors. Images are in channels-last memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Forest, LocalProgram
from fedemu.algorithms.layouts import channels_last
from fedemu.algorithms.models.randomness.draws import KEY_SHAPE
from fedemu.algorithms.trees import map_leaves
from fedemu.device.compute.executors.arguments import Arguments, Names
from fedemu.device.compute.executors.cohort import BEGIN, FINISH, Cohort, Lines, cohorts
from fedemu.device.compute.executors.executor import Job, JobResult, Source, failed
from fedemu.device.compute.executors.host_memory import handed_over, in_host_memory
from fedemu.device.compute.executors.lowering import Lowered, Lowering
from fedemu.device.compute.tapes.private_torch import tree_unflatten
from fedemu.protocol.errors import TrainingError

_FIRST: Final = np.zeros(1, np.int64)
"""The place of the one job of a cohort."""


class Serial:
    """Runs one job at a time. It leaves out the padding of batches where padding cannot change a result.

    If it is ``plain``, it runs by torch's ordinary means what ``torch.func`` cannot run (``plain.py``).
    """

    capacity = 1

    def __init__(self, plain: bool = False) -> None:
        self._lowering = Lowering(stack=None, plain=plain)

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        shared = {key: map_leaves(channels_last, tree) for key, tree in shared.items()}
        results: list[JobResult | TrainingError] = []
        for job in jobs:
            for cohort in cohorts(program, shared, [job], source, size=1):
                if isinstance(cohort, tuple):
                    results.append(cohort[1])
                    continue
                try:
                    results.append(self._run(program, shared, cohort))
                except (Exception, SystemExit) as error:
                    results.append(failed(job.device, "the program failed", error))
        return results

    @torch.inference_mode()
    def _run(self, program: LocalProgram, shared: Forest, cohort: Cohort) -> JobResult:
        names = Names.of(shared, cohort.each, cohort.own, program)
        unread = torch.zeros(KEY_SHAPE, dtype=torch.int32, device=cohort.x.device)

        def keyed(lowered: Lowered, given: Arguments, step: int) -> Arguments:
            """With the key of a step, which is made only if it is read."""
            read = lowered.draws or self._lowering.plain
            return given._replace(key=[cohort.keys(_FIRST, np.array([step]))[0]]) if read else given

        given = Arguments(
            shared=[leaf for tree in shared.values() for leaf in tree.values()],
            each=[channels_last(leaf[0]) for leaf in cohort.each.values()],
            own=[channels_last(leaf[0]) for leaf in cohort.own.values()],
            facts=[leaf[0] for leaf in cohort.facts],
            key=[unread],
        )
        lowered = self._lowering.begin(program, names, given)
        # Steps write over the carry, and ``begin`` may return shared tensors as the carry. So it is copied.
        carry: Sequence[Tensor] = [leaf.clone() for leaf in lowered.run(keyed(lowered, given, BEGIN))]
        carry_spec = lowered.spec
        measured: dict[str, list[Tensor]] = {}
        sizes: dict[str, list[float]] = {}
        samples = _rows_last_channel(cohort.x)
        step = 0
        for number, lines in enumerate(cohort.stages):
            rows_matter = program.stages[number].rows_matter
            for line in range(len(lines.rows)):
                batch, size = _batch(lines, line, samples, cohort, rows_matter)
                noise = [_normal(cohort, program.noise[name]) for name in names.noise]
                step_given = given._replace(batch=batch, noise=noise, carry=carry)
                lowered = self._lowering.step(program, number, names, carry_spec, step_given)
                if lowered.draws and not rows_matter:
                    # What is drawn for a sample depends on its place in the batch, and so on the batch's shape.
                    rows_matter = True
                    step_given = step_given._replace(batch=_batch(lines, line, samples, cohort, rows_matter)[0])
                    lowered = self._lowering.step(program, number, names, carry_spec, step_given)
                outputs = lowered.run(keyed(lowered, step_given, step))
                step += 1
                carry = outputs[: len(carry)]
                for name, place in lowered.metrics.items():
                    measured.setdefault(name, []).append(outputs[place])
                    sizes.setdefault(name, []).append(size)
        given = given._replace(carry=carry)
        lowered = self._lowering.finish(program, names, carry_spec, given)
        # What was not recorded may return shared tensors, or two results in the same memory.
        export = handed_over if lowered.recorded else in_host_memory
        outcome = tree_unflatten(export(lowered.run(keyed(lowered, given, FINISH))), lowered.spec)
        return JobResult(
            payload={key: dict(tree) for key, tree in outcome.payload.items()},
            own=dict(outcome.own),
            examples=int(cohort.examples[0]),
            steps=int(cohort.steps[0]),
            metrics={name: _mean(values, sizes[name]) for name, values in measured.items()},
            label_counts=tuple(cohort.label_counts[0].tolist()) if program.declares_label_counts else None,
        )


def _batch(lines: Lines, line: int, samples: Tensor, cohort: Cohort, rows_matter: bool) -> tuple[list[Tensor], float]:
    """The x, y, weight and notes of one step, and its number of samples."""
    rows, weights = lines.rows[line], lines.weights[line]
    drawn = {name: leaf[line] for name, leaf in lines.draws.items()}
    size = float(weights.sum())
    if not rows_matter and size < len(weights):
        present = np.flatnonzero(weights)
        rows, weights = rows[present], weights[present]
        drawn = {name: leaf[torch.from_numpy(present).to(leaf.device)] for name, leaf in drawn.items()}
    index = torch.from_numpy(rows).to(samples.device)
    x = samples.index_select(0, index)
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2)
    if lines.augment is not None:
        x = lines.augment.apply(x, drawn)
    y, *notes = (leaf.index_select(0, index) for leaf in (cohort.y, *cohort.notes.values()))
    return [x, y, torch.from_numpy(weights).to(samples.device), *notes], size


def _rows_last_channel(x: Tensor) -> Tensor:
    """Images as ``[rows, height, width, channels]``, so that rows that are selected and permuted are channels-last."""
    return x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x


def _normal(cohort: Cohort, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(cohort.noise[0].standard_normal(shape, np.float32)).to(cohort.x.device)


def _mean(values: Sequence[Tensor], sizes: Sequence[float]) -> float:
    """The mean of a metric over steps, weighted by the samples of each step, in float64. 0 if there were no samples."""
    total = sum(sizes)
    return float(np.dot(torch.stack(list(values)).double().cpu().numpy(), sizes)) / total if total else 0.0
