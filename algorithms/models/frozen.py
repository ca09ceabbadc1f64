"""What of a ``torch.nn.Module`` is frozen: what ``requires_grad_(False)`` says, and what follows from it.

Frozen tensors are no variables. They belong to the model, which every process builds by itself, so they are never
trained, sent or averaged.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from fedemu.algorithms.interface import Model, PartlyFrozen, Tree
from fedemu.protocol.errors import ConfigurationError

_NOTHING: Final[Tree] = {}


def frozen_of(model: Model) -> Tree:
    """The frozen tensors of any model by name. There are none unless it is ``PartlyFrozen``."""
    return model.frozen if isinstance(model, PartlyFrozen) else _NOTHING


def resting_parts(module: nn.Module) -> list[str]:
    """The names of the parts of a module that have parameters, none of which is trained, and of all parts in them.

    Such a part is applied as in evaluation, always: dropout in it draws nothing, and its running statistics stay as
    they are. Raises ConfigurationError if the whole module is such a part, or has no parameters.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(
            f"nothing in the module {type(module).__name__} can be trained, because none of its parameters requires a "
            "gradient; take requires_grad_(False) away from one layer at least, such as the last one"
        )
    resting: list[str] = []
    for name, part in module.named_modules():
        asked = [parameter.requires_grad for parameter in part.parameters()]
        if _within(name, resting) or (asked and not any(asked)):
            resting.append(name)
    return resting


def fixed_tensors(module: nn.Module, resting: list[str]) -> dict[str, Tensor]:
    """The parameters that are not trained, and the buffers of ``resting`` parts, by name. They are not copied."""
    parameters = {name: leaf for name, leaf in module.named_parameters() if not leaf.requires_grad}
    return parameters | {name: leaf for name, leaf in module.named_buffers() if _within(name, resting)}


def saved_tensors(module: nn.Module, fixed: Tree) -> dict[str, Tensor]:
    """The ``fixed`` tensors by all names that ``state_dict`` has for them, so that it can be loaded into a module."""
    kept = {id(leaf) for leaf in fixed.values()}
    named = module.state_dict(keep_vars=True)
    return {name: leaf.detach() for name, leaf in named.items() if id(leaf) in kept}


def _within(name: str, parts: list[str]) -> bool:
    """Whether something of this name lies inside one of the parts."""
    return any(name.startswith(f"{part}.") for part in parts)
