"""The vmapped executor: it runs many devices at once, by functions that are mapped over a stack of fixed size.

A device has a slot of the stack for as many steps as it needs, and then the next device takes the slot. So no device
waits for the one with the most samples. What an idle slot computes is never read. As the stack's size never changes,
a device's result is the same to the bit in any slot, whatever the other slots hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Forest, LocalProgram, Tree
from fedemu.algorithms.models.randomness.draws import KEY_SHAPE
from fedemu.device.compute.executors.arguments import Arguments, Names
from fedemu.device.compute.executors.cohort import BEGIN, FINISH, Cohort, Lines, cohorts
from fedemu.device.compute.executors.executor import Job, JobResult, Source, failed, is_machine_fault
from fedemu.device.compute.executors.host_memory import in_host_memory
from fedemu.device.compute.executors.lowering import Lowered, Lowering
from fedemu.device.compute.executors.slots import IDLE, SlotPlan, entered, first_stack, leaving, plan_slots
from fedemu.device.compute.tapes.private_torch import tree_unflatten
from fedemu.protocol.errors import TrainingError

RunStep = Callable[[Lowered, Arguments], Sequence[Tensor]]
"""Runs a step. It may write over the given carry, and what it returned of a carry before."""
STACKS_PER_CALL = 4
"""The number of devices in one call, as a multiple of the stack's size: enough of them to fill slots again, and few
enough to bound memory."""
BLOCK_BYTES = 4 * 2**20
"""The size in bytes of the samples that are gathered at once."""


class Vmapped:
    """Runs stacks of ``stack_size`` devices, each step by ``run_step``. Raises ValueError for a stack of one."""

    def __init__(self, stack_size: int, run_step: RunStep = Lowered.run) -> None:
        if stack_size < 2:
            raise ValueError(f"a stack of {stack_size} is computed in another way than larger stacks; use at least 2")
        self.stack_size = stack_size
        self._lowering = Lowering(stack_size)
        self._run_step = run_step

    @property
    def capacity(self) -> int:
        """The number of jobs of ``STACKS_PER_CALL`` full stacks."""
        return STACKS_PER_CALL * self.stack_size

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        results: dict[int, JobResult | TrainingError] = {}
        for cohort in cohorts(program, shared, jobs, source, self.capacity):
            if isinstance(cohort, tuple):
                results[cohort[0]] = cohort[1]
            else:
                found = self._each(program, shared, cohort, source)
                results.update(zip(cohort.places, found, strict=True))
        return [results[place] for place in range(len(jobs))]

    def _each(
        self, program: LocalProgram, shared: Forest, cohort: Cohort, source: Source
    ) -> Sequence[JobResult | TrainingError]:
        """The results of a cohort. If it fails by the numbers of some devices, these fail, and the others go on.

        An error does not tell whose numbers they are. So each half runs by itself, down to one device. A device's
        result does not depend on the others.
        """
        jobs = cohort.jobs
        try:
            return self._run(program, shared, cohort)
        except (Exception, SystemExit) as error:
            if len(jobs) == 1 or not _depends_on_numbers(error):
                return [failed(job.device, "the program failed", error) for job in jobs]
        middle = len(jobs) // 2
        return [each for half in (jobs[:middle], jobs[middle:]) for each in self.run(program, shared, half, source)]

    @torch.inference_mode()
    def _run(self, program: LocalProgram, shared: Forest, cohort: Cohort) -> list[JobResult]:
        call = _Call(self._lowering, self._run_step, self.stack_size, program, shared, cohort)
        totals: dict[str, NDArray[np.float64]] = {}
        sizes: dict[str, NDArray[np.float64]] = {}
        lines: dict[str, NDArray[np.int64]] = {}
        for number in range(len(cohort.stages)):
            for name, (total, size) in call.stage(number).items():
                lines[name] = lines.get(name, 0) + cohort.stages[number].steps
                totals[name] = totals.get(name, 0.0) + total
                sizes[name] = sizes.get(name, 0.0) + size
        means = {name: total / np.maximum(sizes[name], 1e-300) for name, total in totals.items()}
        payloads, owns = call.finish()
        steps, counts = cohort.steps.tolist(), cohort.label_counts.tolist()
        return [
            JobResult(
                payload=payloads[i],
                own=owns[i],
                examples=examples,
                steps=steps[i],
                metrics={name: float(values[i]) for name, values in means.items() if lines[name][i]},
                label_counts=tuple(counts[i]) if program.declares_label_counts else None,
            )
            for i, examples in enumerate(cohort.examples.tolist())
        ]


class _Call:
    """One cohort on its way through a program.

    ``_given`` holds what every device brings, and from ``begin`` on its carry: leaves ``[devices, ...]``. The number of
    devices is rounded up to whole stacks; the added devices repeat the first one.
    """

    def __init__(
        self,
        lowering: Lowering,
        run_step: RunStep,
        slots: int,
        program: LocalProgram,
        shared: Forest,
        cohort: Cohort,
    ) -> None:
        self._lowering, self._slots, self._program, self._cohort = lowering, slots, program, cohort
        self._run_step = run_step
        self._names = Names.of(shared, cohort.each, cohort.own, program)
        lacking = -len(cohort.jobs) % slots
        self._given = Arguments(
            shared=[leaf for tree in shared.values() for leaf in tree.values()],
            each=[*cohort.each.values()],
            own=[*cohort.own.values()],
            facts=cohort.facts,
            key=[torch.zeros((len(cohort.jobs), *KEY_SHAPE), dtype=torch.int32, device=cohort.x.device)],
        ).per_device(lambda leaf: torch.cat([leaf, leaf[:1].expand(lacking, *leaf.shape[1:])]))
        parts = []
        for start, stack in self._stacks():
            lowered = lowering.begin(program, self._names, stack)
            parts.append(lowered.run(self._keyed(lowered, stack, start, BEGIN)))
            self._spec = lowered.spec
        # ``cat`` copies even a single part. The carry is written to, so it must not share memory with the rest.
        self._given = self._given._replace(carry=[torch.cat(leaves) for leaves in zip(*parts, strict=True)])

    def stage(self, number: int) -> Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Take all devices through a stage.

        Returns, for each metric, its sum over a device's steps weighted by their samples, and the number of samples:
        two arrays ``[devices]``.
        """
        lines = self._cohort.stages[number]
        plan = plan_slots(lines.first, lines.steps, self._slots)
        batches = _Batches(plan.lines, lines, self._cohort)
        measured: list[Sequence[Tensor]] = []
        places: Mapping[str, int] = {}
        stack: Arguments | None = None
        keys: Sequence[Tensor] = ()
        left = leaving(self._given.carry)
        for change, end in zip(plan.changes, [change.time for change in plan.changes[1:]], strict=False):
            if stack is None:
                stack = first_stack(self._given, change, self._slots)
            else:
                left.keep(change, stack.carry)
                stack = entered(stack, self._given, change, self._slots)
            for time in range(change.time, end):
                given = stack._replace(batch=batches.at(time), noise=self._noise(plan.devices[time]))
                if not measured:
                    step = self._lowering.step(self._program, number, self._names, self._spec, given)
                    places = step.metrics
                    keys = self._keys(number, plan) if step.draws else []
                if step.draws:
                    given = given._replace(key=[keys[time]])
                outputs = self._run_step(step, given)
                stack = stack._replace(carry=outputs[: len(stack.carry)])
                measured.append([outputs[place] for place in places.values()])
        if stack is not None:
            left.keep(plan.changes[-1], stack.carry)
            self._given = self._given._replace(carry=left.by_device())
        busy = plan.devices != IDLE
        count = len(self._cohort.jobs)
        owner, sizes = plan.devices[busy], batches.sizes[busy]

        def per_device(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.bincount(owner, values, count).astype(np.float64, copy=False)

        return {
            name: (per_device(_table([row[i] for row in measured])[busy] * sizes), per_device(sizes))
            for i, name in enumerate(places)
        }

    def finish(self) -> tuple[list[Forest], list[Tree]]:
        """The payloads and the next own states, in the order of the devices."""
        parts = []
        for start, stack in self._stacks():
            lowered = self._lowering.finish(self._program, self._names, self._spec, stack)
            parts.append(lowered.run(self._keyed(lowered, stack, start, FINISH)))
        with torch.inference_mode(False):  # the rows are new tensors, and must not be inference tensors either
            rows = [
                [row for leaf in leaves for row in leaf.unbind()]
                for leaves in zip(*(in_host_memory(part) for part in parts), strict=True)
            ]
        places = tree_unflatten(list(range(len(rows))), lowered.spec)
        devices = range(len(self._cohort.jobs))
        payloads: list[Forest] = [
            {key: {name: rows[i][device] for name, i in tree.items()} for key, tree in places.payload.items()}
            for device in devices
        ]
        return payloads, [{name: rows[i][device] for name, i in places.own.items()} for device in devices]

    def _stacks(self) -> Iterator[tuple[int, Arguments]]:
        """The tensors that the devices bring, one stack of devices after the other, and the place of its first."""
        for start in range(0, len(self._cohort.jobs), self._slots):
            yield start, self._given.per_device(lambda leaf, start=start: leaf.narrow(0, start, self._slots))

    def _keyed(self, lowered: Lowered, stack: Arguments, start: int, step: int) -> Arguments:
        """A stack with its keys, which are made only if they are read."""
        if not lowered.draws:
            return stack
        # The devices that fill up the last stack draw as the last one does.
        places = np.minimum(np.arange(start, start + self._slots), len(self._cohort.jobs) - 1)
        return stack._replace(key=[self._cohort.keys(places, np.full(self._slots, step))])

    def _noise(self, devices: NDArray[np.int64]) -> list[Tensor]:
        """The noise of one step, ``[slots, ...]`` each: the device's own draws in a busy slot, zeros in an idle one."""
        if not self._names.noise:
            return []
        shapes = [self._program.noise[name] for name in self._names.noise]
        drawn = [np.zeros((self._slots, *shape), np.float32) for shape in shapes]
        for slot in np.flatnonzero(devices != IDLE).tolist():
            for values, shape in zip(drawn, shapes, strict=True):
                values[slot] = self._cohort.noise[devices[slot]].standard_normal(shape, np.float32)
        return [torch.from_numpy(values).to(self._cohort.x.device) for values in drawn]

    def _keys(self, number: int, plan: SlotPlan) -> Sequence[Tensor]:
        """The keys of all steps of a stage, ``[slots, 2]`` each. An idle slot has that of some step."""
        stages = self._cohort.stages
        before = sum((stage.steps for stage in stages[:number]), np.zeros_like(stages[number].first))
        steps = plan.lines - (stages[number].first - before)[plan.devices]
        return self._cohort.keys(plan.devices.ravel(), steps.ravel()).view(*plan.lines.shape, *KEY_SHAPE).unbind()


class _Batches:
    """The batches of a stack by step: x, y, weight, notes ``[slots, batch, ...]``, gathered for several steps at once.

    ``lines [time, slots]`` are those of the slot plan.
    """

    def __init__(self, lines: NDArray[np.int64], stage: Lines, cohort: Cohort) -> None:
        self._stage, self._cohort = stage, cohort
        self._lines = lines
        weights = np.concatenate([stage.weights, np.zeros((1, stage.weights.shape[1]), np.float32)])
        # ``IDLE`` is -1, the last row here: an idle slot sees samples of weight 0.
        self.sizes: NDArray[np.float64] = weights[lines].sum(-1, dtype=np.float64)
        sample = cohort.x[:1].nbytes * stage.rows.shape[1] * lines.shape[1]
        self._span = max(1, BLOCK_BYTES // max(1, sample))
        # Both tables go to the device at once, so that no step has to wait for a copy.
        self._rows = torch.from_numpy(stage.rows[lines]).to(cohort.x.device)
        self._weight = torch.from_numpy(weights[lines]).to(cohort.x.device)
        self._block: list[list[Tensor]] = []
        self._start = 0

    def at(self, time: int) -> list[Tensor]:
        if not self._start <= time < self._start + len(self._block):
            self._start = time
            self._block = self._gathered(slice(time, time + self._span))
        return self._block[time - self._start]

    def _gathered(self, times: slice) -> list[list[Tensor]]:
        cohort, lines = self._cohort, self._lines[times]
        rows = self._rows[times]
        flat = rows.view(-1)
        x = cohort.x.index_select(0, flat)
        if self._stage.augment is not None:
            index = torch.from_numpy(lines.reshape(-1)).remainder(len(self._stage.rows)).to(cohort.x.device)
            drawn = {name: leaf.index_select(0, index).flatten(0, 1) for name, leaf in self._stage.draws.items()}
            x = self._stage.augment.apply(x, drawn)
        x = x.view(*rows.shape, *x.shape[1:])
        y = cohort.y.index_select(0, flat).view(rows.shape)
        weights = self._weight[times]
        notes = [leaf.index_select(0, flat).view(*rows.shape, *leaf.shape[1:]) for leaf in cohort.notes.values()]
        return [list(batch) for batch in zip(*(leaf.unbind() for leaf in (x, y, weights, *notes)), strict=True)]


def _depends_on_numbers(error: BaseException) -> bool:
    """Whether an error may come from the numbers of single devices, and not from what all of them do.

    torch raises these two for an index that is too large, and for a matrix that has no inverse. Code that is mapped
    over devices cannot raise errors of its own by the numbers, because it cannot read them.
    """
    return isinstance(error, IndexError | RuntimeError) and not is_machine_fault(error)


def _table(rows: Sequence[Tensor]) -> NDArray[np.float64]:
    """The values of a metric as an array ``[time, slots]``."""
    return torch.stack(list(rows)).double().cpu().numpy()
