"""How devices are computed: by the executor that an experiment names, or by one that can run what is the user's own.

The coordinator decides it once, by trying the first step, and all machines are told the result as the experiment's
``local.executor``. So they all compute in the same way. The checkpoints of the run keep it, and a resume takes it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fedemu.device.compute.executors.checked import Disagreement
from fedemu.ops.experiment import Experiment
from fedemu.protocol.code.own_code import cause_of, own_frames, place
from fedemu.protocol.errors import ConfigurationError

Attempt = Callable[[str], Exception | None]
"""Takes the first step by the executor of this name. Returns what went wrong, or None."""


_REPLACEABLE: Final = ("auto", "serial")
"""The names of executors in place of which another one is taken for what they cannot compute."""


class Computing(NamedTuple):
    """The executor of a run. If it is not the one that the experiment names, ``why`` tells the reason in a sentence."""

    executor: str
    why: str = ""


def began_with(record: Mapping[str, Any]) -> str:
    """The executor of a run, as the coordinator's record in a checkpoint has it. Empty if earlier versions wrote it."""
    return str(record.get("compute", {}).get("executor", ""))


def depends_on_trial(experiment: Experiment) -> bool:
    """Whether ``choose`` may take another executor than the one that the experiment names."""
    return _has_own(experiment) and experiment.local.executor in _REPLACEABLE


def choose(experiment: Experiment, attempt: Attempt, *, stacked: bool, draws_outside: str) -> Computing | Exception:
    """The executor that runs the experiment's first step, or the error if none can.

    Code of the user's own is tried in a stack, then one device after the other, then by torch's ordinary means. Other
    experiments are tried as they are. ``stacked`` says whether a machine without a GPU stacks devices, and
    ``draws_outside`` what draws by the generators of Python or numpy, empty if nothing does. A disagreement that the
    executor ``checked`` finds is returned as it is. Raises ConfigurationError if the experiment names an executor that
    cannot run what another one can.
    """
    named = experiment.local.executor
    if draws_outside and named != "plain":
        said = f"{draws_outside} draws random numbers by Python or numpy"
        _require_choice(named, said)
        return attempt("plain") or Computing("plain", f"{said}, so {_PLAIN}")
    own = _has_own(experiment)
    # A machine with a GPU stacks what others do not, so it has to be known at once whether that works.
    found = attempt("vmapped" if own and named == "auto" else named)
    if found is None and own and named == "auto" and not stacked:
        return attempt("serial") or Computing(named)
    if found is None or not own or named == "plain" or isinstance(found, Disagreement):
        return found or Computing(named)
    alone = found if named == "serial" else attempt("serial")
    ordinary = attempt("plain") if alone is not None else None
    if alone is not None and ordinary is not None:
        # The ordinary error is the clearest, but the first one tells more if it is of the same kind.
        return found if type(cause_of(found)) is type(cause_of(ordinary)) else ordinary
    said = _said(experiment, [found] if alone is None else [alone, found])
    _require_choice(named, said)
    return Computing("serial", f"{said}, so {_SERIAL}") if alone is None else Computing("plain", f"{said}, so {_PLAIN}")


def _require_choice(named: str, said: str) -> None:
    """Raise ConfigurationError unless ``named`` allows another executor, which is necessary for what is ``said``."""
    if named not in _REPLACEABLE:
        raise ConfigurationError(f"{said}, so local.executor = {named!r} can't compute it; choose 'auto'")


def _has_own(experiment: Experiment) -> bool:
    """Whether devices compute with code of the user's own."""
    return ":" in experiment.model.name or bool(own_part(experiment))


def own_part(experiment: Experiment) -> str:
    """A loss, a method or a local term of the user's own, beside the model. Empty if there is none."""
    algorithm = experiment.algorithm
    named = [("loss", algorithm.loss), ("method", algorithm.name), *(("local term", term) for term in algorithm.terms)]
    return next((f"{what} {name!r}" for what, name in named if ":" in name), "")


_SERIAL = "devices are computed one by one"
_PLAIN = "devices are computed one by one, in torch's ordinary way (executor 'plain')"

_REASONS = {
    "data-dependent control flow": "branches on values",
    "dynamic shape": "makes shapes that depend on values",
    "writes to": "writes in place",
    "inplace": "writes in place",
    "in-place": "writes in place",
    "out=": "writes in place",
    "randomness": "draws random numbers that no key can make",
    "draws random numbers": "draws random numbers that no key can make",
    "setup_context": "has a torch.autograd.Function without setup_context",
    "data pointer": "hands values to other libraries",
    "saved tensor hooks": "computes activations again in its backward pass",
    "mutating directly with `.data`": "gives a variable other memory (.data = ...)",
    "requires_grad_()": "computes gradients itself, by torch.autograd",
}
"""What an error of torch means, by a part of its text."""


def _said(experiment: Experiment, errors: Sequence[Exception]) -> str:
    """Which part of the experiment cannot be run in a faster way, why, and where it says so. The first error counts."""
    causes = [cause_of(error) or error for error in errors]
    traces = [traceback.extract_tb(cause.__traceback__) for cause in causes]
    in_model = any(frame.filename.endswith("torch_module.py") for trace in traces for frame in trace)
    model, part = experiment.model.name, own_part(experiment)
    who = f"model {model!r}" if ":" in model and (in_model or not part) else part
    reason = next((said for text, said in _REASONS.items() if text in str(causes[0])), "can't be mapped over devices")
    frames = [frames[-1] for frames in map(own_frames, causes) if frames]
    return f"{who} {reason}" + (f" ({place(frames[0])})" if frames else "")
