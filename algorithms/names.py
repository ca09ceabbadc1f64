"""The names of methods and losses in a fixed order, for those who tell them apart without importing torch.

Pictures give each method its colour by this order, so it stays as it is: a new name goes to the end of its list.
``tests/algorithms/test_registry.py`` compares the lists with the registry.
"""

from __future__ import annotations

from typing import Final

METHODS: Final = (
    *("fedavg", "fedprox", "fedntd", "scaffold", "moon", "fedcurv", "fednova"),
    *("fedavg_gen", "fedprox_plus", "mfcl", "fedcil", "target", "lander", "fedlwf_2t"),
    *("fedavg_finetuned", "feddf", "fedreg", "afl", "flashback", "icarl", "glfc"),
    *("central", "ncm", "fedkd"),
)
"""The methods. Those in one line get seven different colours: they are often compared with each other."""
LOSSES: Final = ("cross_entropy", "token_cross_entropy", "wsm", "new_classes", "task_temperature", "er_ace")
"""The losses. The first two are the usual ones, of labels and of tokens."""
USUAL_LOSSES: Final = LOSSES[:2]
