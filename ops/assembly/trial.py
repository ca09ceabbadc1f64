"""An experiment's model and the program of its first request, tried on two samples before any device is started."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Algorithm, Context, LocalProgram, Model, Plan, PublicData, Tree
from fedemu.coordinator.evaluation.evaluate import read
from fedemu.coordinator.rounds.server_job_worker import settle
from fedemu.device.compute.executors.executor import Job, Source
from fedemu.device.compute.trainer import kind_of, open_executor
from fedemu.ops.assembly.learning import first_ask, lacks_memory
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, TrainingError

SAMPLES = 2
STACK_SIZE = 2
"""Of a vmapped executor: the smallest that is one."""
LONGEST = 400
"""Characters that somebody else's error may have."""


def try_out(
    experiment: Experiment,
    corpus: Corpus,
    model: Model,
    algorithm: Algorithm[Any],
    variables: Tree,
    public: PublicData | None,
) -> None:
    """Raise ConfigurationError where the model can't be evaluated on the data, or fails in its first training step.

    It happens in a forked process. So nothing changes here: no random state, no tensor that somebody's own code writes
    to, and no thread of autograd, after which server jobs could not compute gradients beside a CUDA device.

    A process that dies or lacks memory has found nothing: devices may have more.
    """
    samples = np.arange(min(SAMPLES, len(corpus.train)), dtype=np.int64)

    def problem() -> str:
        torch.set_num_threads(1)
        try:
            _evaluate(experiment, corpus, model, variables, samples)
            _train(experiment, corpus, model, algorithm, variables, public, samples)
        except ConfigurationError as error:
            return str(error)
        return ""

    if len(samples) and (found := _apart(problem)):
        raise ConfigurationError(found)


def _evaluate(
    experiment: Experiment, corpus: Corpus, model: Model, variables: Tree, samples: NDArray[np.int64]
) -> None:
    name = experiment.model.name
    [(x, _)] = read(model, corpus, corpus.train, samples)
    try:
        with torch.inference_mode():
            outputs, _ = model.apply(variables, x, False)
        logits: object = outputs.logits
    except Exception as error:
        _refuse(f"model {name!r} can't be applied to a batch {list(x.shape)} of the data", error)
    each = [corpus.input_shape[-1], corpus.outputs] if corpus.language else [corpus.classes]
    wanted = [len(samples), *each]
    what = f"{corpus.outputs} tokens" if corpus.language else f"{corpus.classes} classes"
    if not isinstance(logits, Tensor):
        raise ConfigurationError(
            f"model {name!r} gives {type(logits).__name__} for logits; it must be a tensor {wanted}"
        )
    if list(logits.shape) != wanted:
        raise ConfigurationError(
            f"model {name!r} gives logits {list(logits.shape)} where the data have {what}; they must be {wanted}"
        )
    if not logits.is_floating_point():
        raise ConfigurationError(f"model {name!r} gives logits of {logits.dtype}; they must be floating-point numbers")


def _train(
    experiment: Experiment,
    corpus: Corpus,
    model: Model,
    algorithm: Algorithm[Any],
    variables: Tree,
    public: PublicData | None,
    samples: NDArray[np.int64],
) -> None:
    """One step of each stage, by the executor that trainers without a GPU would take; queries have no steps."""
    name = experiment.algorithm.name
    try:
        ask = first_ask(algorithm, variables, Context(0, 0, experiment.seed, corpus.classes, public))
    except ConfigurationError:
        raise
    except Exception as error:
        _refuse(f"algorithm {name!r} fails before its first request", error)
    if ask is None:
        return
    program: Any = algorithm.programs.get(ask.program)
    if program is None:
        raise ConfigurationError(f"algorithm {name!r} asks for the program {ask.program!r}, which it does not have")
    if hasattr(program, "ask"):
        return
    said = f"{name!r} can't train the model {experiment.model.name!r} by the loss {experiment.algorithm.loss!r}"
    job = Job(device=0, round=1, task=0, indices=samples, each=next(iter((ask.each or {}).values()), {}))
    try:
        executor = open_executor(experiment.local.executor, kind_of(program, model.kind), "cpu", stack_size=STACK_SIZE)
        source = Source(corpus, experiment.seed, torch.device("cpu"))
        [result] = executor.run(cast(LocalProgram, _FirstSteps(program)), ask.shared, [job], source)
    except Exception as error:
        _refuse(said, error)
    if isinstance(result, TrainingError):
        _refuse(said, result)


class _FirstSteps:
    """A program with no more than one step in each stage."""

    def __init__(self, program: LocalProgram) -> None:
        self._program = program
        self.stages = tuple(replace(stage, plan=_first_line(stage.plan)) for stage in program.stages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _first_line(plan: Plan) -> Plan:
    return lambda examples, generator: plan(examples, generator)[:1]


def _refuse(said: str, error: Exception) -> NoReturn:
    """Raise what was found; not finding memory for it is no fault of the experiment."""
    if lacks_memory(error):
        raise error
    kind = "" if isinstance(error, TrainingError) else f"{type(error).__name__}: "
    raise ConfigurationError(f"{said}: {kind}{_first_sentence(str(error).removeprefix('device 0: '))}") from error


def _first_sentence(text: str) -> str:
    """Without the advice that torch's errors go on with."""
    sentence = re.split(r"(?<=[.?!])\s+(?=[A-Z])", " ".join(text.split()))[0].rstrip(".")
    return textwrap.shorten(sentence, LONGEST, placeholder=" ...")


def _apart(problem: Callable[[], str]) -> str:
    """What ``problem`` returns in a process of its own; nothing where that dies.

    ``coordinator/rounds/server_job.py`` tells why a fork is safe in a thread that has never computed.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_forked, problem).result()


def _forked(problem: Callable[[], str]) -> str:
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            settle(writing, parent)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends what hangs in somebody's own code
            os.write(writing, problem().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as said:
        found = said.read()
    os.waitpid(pid, 0)
    return found
