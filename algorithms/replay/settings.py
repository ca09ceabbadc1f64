"""The settings of replay: how devices choose what they keep, as one checked object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fedemu.algorithms.replay.selection.diversity import RESTARTS
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.protocol.errors import ConfigurationError

COORDINATED: Final = "coordinated"
"""The name of the strategy by which devices select together."""
BALANCED: Final = "fedcbdr"
"""The name of the strategy by which the fleet balances classes."""
OWN: Final = "own"
"""The name of the strategy by which the method itself has devices select."""
CHOICES: Final = {
    "strategy": (*STRATEGIES, COORDINATED, BALANCED, OWN),
    "targets": ("mean", "each"),
    "final": ("zero_diagonal", "convex"),
    "objective": ("cheap", "always", "never"),
}


@dataclass(frozen=True)
class ReplaySettings:
    """How devices choose what they keep. Raises ConfigurationError if a value is not possible.

    ``strategy`` is one of STRATEGIES, ``coordinated``, ``fedcbdr`` or ``own``, and ``budget`` is the number of samples
    that a device keeps after a period. With ``fedcbdr`` devices keep as many on average, and none keeps more than
    ``capacity``. ``proportion`` is an option of ``fixed_proportion``; ``restarts`` is one of the relaxation with a
    zero diagonal. A coordinated selection asks for sums ``iterations`` times, answers them in the form ``targets``, and
    ends with the relaxation ``final``; its default is not the paper's (``CoordinatedSelect`` says why). ``objective``
    says for which strategies the objective of the kept samples is measured: ``cheap`` for those that compute gradients
    anyway, ``always`` or ``never``. With ``census`` devices tell how many samples they keep of each label and of each
    of the ``periods``. ``memory`` is the most that the gradients of one device's samples take at a time, in bytes. With
    ``logits`` devices note the logits of the samples that they keep.
    """

    strategy: str
    budget: int = 0
    capacity: int = 0
    proportion: float = 0.5
    restarts: int = RESTARTS
    iterations: int = 1
    targets: Literal["mean", "each"] = "mean"
    final: Literal["zero_diagonal", "convex"] = "zero_diagonal"
    objective: Literal["cheap", "always", "never"] = "cheap"
    census: bool = True
    memory: int = 2**29
    periods: int = 1
    logits: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigurationError(
                    f"replay.{name} is {getattr(self, name)!r}; set one of {', '.join(map(repr, choices))}"
                )
        for name, least in {
            "budget": 0,
            "capacity": 0,
            "restarts": 0,
            "iterations": 0,
            "memory": 1,
            "periods": 1,
        }.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"replay.{name} is {getattr(self, name)}; it must be {least} or more")
        if not 0.0 < self.proportion < 1.0:
            raise ConfigurationError(
                f"replay.proportion is {self.proportion}, the share of new samples; it must lie between 0 and 1"
            )
