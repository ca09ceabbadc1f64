"""Tries the model and the program of the first ask on two samples, before any device is started.

What is found decides how devices are computed (``computing.py``). ``trial_of_model.py`` has what is tried of the model.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Ask, Forest, LocalProgram, Plan, Tree, mixes
from fedemu.algorithms.terms.importance import AskImportance
from fedemu.algorithms.terms.remembering import IMPORTANCE, kept_at_first
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.trees import flatten
from fedemu.coordinator.asks.naming import named_devices
from fedemu.coordinator.asks.payload import PayloadTemplate
from fedemu.coordinator.asks.tensors import lacks_tree, require_tensors, told_payload
from fedemu.coordinator.rounds.server_job_worker import settle
from fedemu.coordinator.sums.partial import reduced_leaves
from fedemu.device.compute.executors.executor import Job, JobResult, Source, is_machine_fault
from fedemu.device.compute.executors.promises import broken
from fedemu.device.compute.executors.query import run_query
from fedemu.device.compute.rule import compute_rule, kind_of
from fedemu.device.compute.trainer import open_executor
from fedemu.device.host.limits import free_memory
from fedemu.ops.assembly.computing import Computing, choose, depends_on_trial, own_part
from fedemu.ops.assembly.hints import warnings_of
from fedemu.ops.assembly.learning import first_ask, require_built_again
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trial_of_model import (
    draws_outside,
    evaluate,
    refuse,
    require_gradient,
    require_gradient_of_loss,
    states_of_generators,
)
from fedemu.ops.data.apart import decode_apart
from fedemu.ops.experiment import Experiment
from fedemu.ops.figures import readable_bytes
from fedemu.protocol.code.own_code import Told, account, own_frames, retold, told
from fedemu.protocol.errors import ConfigurationError, TrainingError
from fedemu.protocol.host.starting import starting
from fedemu.protocol.messages import MOST_METRICS
from fedemu.protocol.wording import ending

SAMPLES = 2
STACK_SIZE = 2
"""The number of devices that a vmapped executor takes at once: the smallest possible stack."""
_FILLED = "filled up to local.batch_size with copies that have no weight in the loss"
_NOT_OF_ALL = ("processed", "kind", "notes", "local_model", "measured")
"""What only some programs have: ``CountingSteps``, ``OfItsOwnKind``, ``Noting``, ``Revealing`` and ``Measuring``."""


def tried_parts(experiment: Experiment, say: Callable[[str], None], began: str = "") -> Parts:
    """Put an experiment together as a coordinator needs it, and try it out.

    ``say`` gets a line for people while data are decoded, which happens in a process of its own, one for each of
    ``warnings_of``, and one if devices are computed in another way than the experiment says. Its ``local.executor`` is
    then the one that is taken. ``began`` is as for ``try_out``.
    Raises ConfigurationError or DataError if a part cannot be made, if the parts do not fit together, or if the trial
    came to no end and devices would be computed by what it finds.
    """
    decode_apart(experiment, say)
    parts = Parts(experiment)
    # These are made first, because a wrong name and an impossible partition are found quickly.
    _ = parts.algorithm, parts.stream
    computing = try_out(parts, began)
    for warning in warnings_of(parts):
        say(warning)
    if computing.why:
        say(computing.why)
    local = experiment.local.model_copy(update={"executor": computing.executor})
    parts.experiment = experiment.model_copy(update={"local": local})
    return parts


def try_out(parts: Parts, began: str = "") -> Computing:
    """How devices are computed. ``began`` is the executor with which the run began, which it keeps; empty if unknown.

    Raises ConfigurationError if the model cannot be evaluated on the data, or fails in its first training step, or if a
    device would train for more steps than this machine's memory can list.

    It happens in a forked process, so nothing changes in this process: no random state, and no tensor to which
    somebody's own code writes. No thread of autograd starts here. After such a start, server jobs could not compute
    gradients beside a CUDA device.

    A process that dies or lacks memory proves nothing against the experiment: devices may have more. But it does not
    tell either how code of the user's own can be computed. If nothing else tells that, ConfigurationError is raised:
    another executor would give other results, and nobody would know.
    """
    named = parts.experiment.local.executor
    samples = np.arange(min(SAMPLES, len(parts.corpus.train)), dtype=np.int64)
    _require_memory_for_batches(parts, free_memory())
    # The variables and the public data are made before the fork, so that their errors are raised here.
    _ = parts.variables, parts.public

    def found() -> _Found:
        torch.set_num_threads(1)
        try:
            evaluate(parts, samples)
            require_built_again(parts.experiment, parts.corpus, parts.model, parts.algorithm)
            return _train(parts, samples)
        except ConfigurationError as error:
            return told(error)
        except SystemExit as error:
            return told(error, f"the first training step ends its process: {account(error)}")
        except Exception as error:
            if is_machine_fault(error):
                return _Unfinished(f"lacked memory ({account(error).splitlines()[0]})")
            return told(error, f"the first training step can't be tried: {account(error)}")

    if not len(samples):
        return Computing(began or named)
    result = _apart(found)
    if isinstance(result, Computing):
        return Computing(began) if began not in ("", result.executor) else result
    if isinstance(result, Told):
        raise retold(result, ConfigurationError)
    if not began and depends_on_trial(parts.experiment):
        raise ConfigurationError(
            "the process that tried the first training step, to find how your own code can be computed, "
            f"{result.how}; free memory and try again, or set local.executor = 'plain', which computes any code"
        )
    return Computing(began or named)


def _require_memory_for_batches(parts: Parts, free: int | None) -> None:
    """Raise ConfigurationError if the list of a device's samples, in all batches of a round, takes more than ``free``.

    A device that has an even part of the samples is the measure. ``free`` is in bytes, None if it is not known.
    """
    local, even = parts.experiment.local, len(parts.corpus.train) // parts.experiment.fleet.devices
    key = f"local.steps = {local.steps}" if local.steps else f"local.epochs = {local.epochs}"
    for program in parts.algorithm.programs.values():
        if not isinstance(program, LocalSGD):
            continue
        listed = np.dtype(np.int64).itemsize * (program.passes * even + program.processed)
        if free is not None and listed > free:
            raise ConfigurationError(
                f"{key} is too much: the list of a device's batches alone would take {readable_bytes(listed)}, and "
                f"{readable_bytes(free)} of memory are free; lower it"
            )


def _train(parts: Parts, samples: NDArray[np.int64]) -> Computing:
    """Take one step of each stage, as a trainer without a GPU would. Queries have no steps.

    Where local terms find something else after the first task, a second step is that of a later one.
    """
    experiment, algorithm, model = parts.experiment, parts.algorithm, parts.model
    named = Computing(experiment.local.executor)
    ask = _first_request(parts)
    if ask is None:
        return named
    program: Any = algorithm.programs[ask.program]
    if hasattr(program, "ask"):
        return named
    steps = _Steps(parts, ask, samples)
    outside = f"model {experiment.model.name!r}" if draws_outside(parts, samples) else ""
    if not outside and (part := own_part(experiment)):
        before = states_of_generators()
        steps.attempt("serial")
        outside = part if states_of_generators() != before else ""
        if not outside:
            steps.attempt("serial")
            _require_repeated(part, steps.found)
    stacked = compute_rule("auto", steps.kind, "cpu").executor == "vmapped"
    computing = choose(experiment, steps.attempt, stacked=stacked, draws_outside=outside)
    if isinstance(computing, Exception):
        if (key := _missing_key(computing)) is not None and key not in ask.shared:
            raise lacks_tree(ask.program, key, ask.shared)
        said = f"{experiment.algorithm.name!r} can't train the model {experiment.model.name!r} by the loss "
        said += f"{experiment.algorithm.loss!r}{' after the first task' if computing in steps.later else ''}"
        refuse(said, computing)
    PayloadTemplate.of(program.payload(ask.shared)).require_at_most(experiment.limits.max_payload_bytes, ask.program)
    if isinstance(program, LocalSGD):
        require_gradient(parts, samples)
        require_gradient_of_loss(parts, samples)
    _require_importances(parts, steps.job, steps.source)
    if not model.buffers and mixes(model, train=True):
        filled = f"model {experiment.model.name!r} mixes the samples of a batch, so all batches are {_FILLED}"
        computing = computing._replace(why="; ".join(filter(None, (computing.why, filled))))
    return computing


def _first_request(parts: Parts) -> Ask | None:
    """The first ask of the method, whose program it has; None if it asks nobody. Raises ConfigurationError."""
    name = parts.experiment.algorithm.name
    try:
        ask = first_ask(parts.algorithm, parts.variables, parts.context)
    except ConfigurationError:
        raise
    except Exception as error:
        refuse(f"algorithm {name!r} fails before its first request", error)
    if ask is None:
        return None
    require_tensors(ask)
    named_devices(ask, parts.experiment.fleet.devices)
    program = parts.algorithm.programs.get(ask.program)
    if program is None:
        raise ConfigurationError(f"algorithm {name!r} asks for the program {ask.program!r}, which it does not have")
    reduced_leaves(ask.reduce, PayloadTemplate.of(told_payload(ask.program, program, ask.shared)).leaves)
    return ask


class _Steps:
    """The first steps of the program of an ask: one of the first task, and one of a later task if that may differ.

    ``found`` has the results of each attempt that went well, and ``later`` what went wrong after the first task.
    """

    def __init__(self, parts: Parts, ask: Ask, samples: NDArray[np.int64]) -> None:
        self._experiment = parts.experiment
        self._ask = ask
        self._program: Any = parts.algorithm.programs[ask.program]
        self.kind = kind_of(self._program, parts.model.kind)
        each: Tree = next(iter((ask.each or {}).values()), {})
        self.job = Job(device=0, round=1, task=0, indices=samples, each=each)
        self.source = Source(parts.corpus, parts.experiment.seed, torch.device("cpu"))
        several = parts.experiment.stream.period_count > 1
        kept = kept_at_first(parts.algorithm, parts.variables) if several else {}
        self._tasks: list[Forest] = [ask.shared, {**ask.shared, **kept}] if kept else [ask.shared]
        self.found: list[Tree] = []
        self.later: list[Exception] = []

    def attempt(self, executor: str) -> Exception | None:
        """Take the steps by the executor of this name. Returns what went wrong, or None.

        Raises ConfigurationError if the program returns something else than it tells, and a lack of memory as it is.
        """
        results: dict[str, Tensor] = {}
        for task, shared in enumerate(self._tasks):
            result = self._step(executor, shared)
            if isinstance(result, Exception):
                self.later.extend([result] if task else [])
                return result
            results |= {f"{task}/{leaf}": value for leaf, value in result.items()}
        self.found.append(results)
        return None

    def _step(self, executor: str, shared: Forest) -> Tree | Exception:
        """The payload and the measures of one step of each stage, or what went wrong."""
        result: JobResult | Exception
        try:
            opened = open_executor(executor, self.kind, "cpu", stack_size=STACK_SIZE)
            [result] = opened.run(cast(LocalProgram, _FirstSteps(self._program)), shared, [self.job], self.source)
        except Exception as error:
            result = error
        if isinstance(result, Exception):
            if is_machine_fault(result):  # another executor may need less, but this one may be the right one
                raise result
            return result
        self._require_as_told(result, shared)
        measures = {name: torch.tensor(value) for name, value in result.metrics.items()}
        return {**flatten(result.payload), **measures}

    def _require_as_told(self, result: JobResult, shared: Forest) -> None:
        """Raise ConfigurationError if a result is not what the program tells, or has too many measures."""
        program, experiment = self._program, self._experiment
        what = f"algorithm {experiment.algorithm.name!r}: the program {self._ask.program!r}"
        wrong = broken("payload", flatten(program.payload(shared)), flatten(result.payload))
        if wrong := wrong or broken("initial_own", program.initial_own(shared), result.own):
            raise ConfigurationError(f"{what} {wrong}")
        replays = experiment.replay.kept > 0  # the device then tells the size of its replay buffer, too
        if (many := len(result.metrics) + replays) > MOST_METRICS:
            counted = f"{many} measures{', one of them of replay,' if replays else ','}"
            raise ConfigurationError(f"{what} tells {counted} and a reply holds {MOST_METRICS}; tell fewer")


def _require_repeated(part: str, found: Sequence[Tree]) -> None:
    """Raise ConfigurationError if two tries of the same step ``found`` other results."""
    pairs = [(leaf, found[-1][name]) for name, leaf in found[0].items()] if len(found) > 1 else []
    if not all(torch.allclose(one.double(), other.double(), rtol=1e-5, equal_nan=True) for one, other in pairs):
        raise ConfigurationError(
            f"the first training step has another result when it is done again, because the {part} keeps something "
            "from one call to the next, or draws by a generator of its own; keep it in the method's state, or take it "
            "from the facts, such as facts.round"
        )


def _require_importances(parts: Parts, job: Job, source: Source) -> None:
    """Raise ConfigurationError if a device can't answer how important variables are for a local term."""
    question = parts.algorithm.programs.get(IMPORTANCE)
    if not isinstance(question, AskImportance):
        return
    for name, importance in question.measures.items():
        asked = replace(question, measures={name: importance})
        result = run_query(asked, {"model": parts.variables}, replace(job, each={}), source)
        if isinstance(result, TrainingError):
            refuse(f"the importances of the local term {name!r} can't be computed", result)


def _missing_key(error: BaseException | None) -> object:
    """The key for which an error outside of the user's own code says that it is missing; None for another error."""
    while error is not None and not isinstance(error, KeyError):
        error = error.__cause__
    return error.args[0] if error is not None and error.args and not own_frames(error) else None


class _FirstSteps:
    """A program with no more than one step in each stage.

    Whether a program is ``Noting`` and the like is seen by the attributes that it has itself, not by ``__getattr__``.
    """

    def __init__(self, program: LocalProgram) -> None:
        self._program = program
        self.stages = tuple(replace(stage, plan=_first_line(stage.plan)) for stage in program.stages)
        for name in _NOT_OF_ALL:
            if hasattr(program, name):
                setattr(self, name, getattr(program, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _first_line(plan: Plan) -> Plan:
    return lambda examples, generator: plan(examples, generator)[:1]


class _Unfinished(NamedTuple):
    """A trial that came to no end, and how its process ended, to stand after its name."""

    how: str


_Found = Computing | Told | _Unfinished
_KINDS: Final = {kind.__name__: kind for kind in (Computing, Told, _Unfinished)}


def _apart(found: Callable[[], _Found]) -> _Found:
    """Call ``found`` in a forked process, and return what it returns, or how the process died.

    ``coordinator/rounds/server_job.py`` tells why a fork is safe in a thread that has never computed.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_forked, found).result()


def _forked(found: Callable[[], _Found]) -> _Found:
    reading, writing = os.pipe()
    parent = os.getpid()
    with open(reading, encoding="utf-8") as said, open(writing, "w", encoding="utf-8") as telling:
        with warnings.catch_warnings(), starting():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                settle(writing, parent)
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends what hangs in somebody's own code
                result = found()
                json.dump([type(result).__name__, *result], telling)
                telling.flush()
            finally:
                os._exit(0)
        telling.close()
        text = said.read()
    _, status = os.waitpid(pid, 0)
    try:
        kind, *fields = json.loads(text)
        return _KINDS[kind](*fields)
    except ValueError:  # the process died before it said anything, or while it did
        return _Unfinished(ending(os.waitstatus_to_exitcode(status)))
