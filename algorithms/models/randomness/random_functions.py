"""torch's random functions, as they are in training: dropout, noise and all else draws by a key.

Inside of ``Keyed`` nothing is drawn from torch's own generators. ``keyed_layers.py`` has the layers that torch computes
in one piece, such as attention with dropout. Inside of ``Keyed``, views also work for images with their channels last.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedemu.algorithms.models.randomness.draws import KEY_SHAPE, Draws
from fedemu.algorithms.models.randomness.generators import all_seeded, generators_for
from fedemu.algorithms.models.randomness.keyed_layers import LAYERS
from fedemu.algorithms.models.randomness.private_functions import inside_transform, opened


class Keyed(TorchFunctionMode):
    """A context in which torch's random functions are functions of ``draws``."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __enter__(self) -> Keyed:
        _depth.set(_depth.get() + 1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _depth.set(_depth.get() - 1)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replaced = _REPLACED.get(func)
        if replaced is not None:
            others = {name: value for name, value in kwargs.items() if name not in ("out", "requires_grad")}
            made = replaced(self._draws, *args, **others)
            made = made if kwargs.get("out") is None else _written(kwargs["out"], made)
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        body = opened(func)
        if body is None:
            return func(*args, **kwargs)
        # The parts of the function may draw too, so they are called in this context.
        with self:
            return body(*args, **kwargs)


def repeatable() -> AbstractContextManager[object]:
    """A context in which torch's random functions, as far as they are known here, draw by a key.

    It is the present ``Keyed``, or one with the draws of ``models_draw_by``, or one with a fixed key.
    """
    return nullcontext() if _depth.get() else Keyed(_present())


@contextmanager
def seeded_alike(device: torch.device) -> Iterator[Callable[[], bool]]:
    """A context for one application of a model on this device, in which what knows no key draws alike each time.

    This is for the generators of Python and numpy, and for torch's own, by which functions such as ``torch.poisson``
    draw. They are seeded by the draws of ``models_draw_by``, or by a fixed key, and are as they were before at the end.
    The function that it gives tells whether anything may have been drawn by one of them. It is not for calls inside of
    ``Keyed``, where the executor has seeded what is drawn.
    """
    # Within a transformation a generator's state cannot be read. There vmap refuses what would draw by it.
    own = [] if inside_transform() else generators_for(device)

    def states() -> tuple[object, ...]:
        torchs = [each.get_state().numpy().tobytes() for each in own]
        return random.getstate(), str(np.random.get_state()), *torchs

    with all_seeded(_present().seed(), own):
        begun = states()
        yield lambda: not own or states() != begun


def has_keys() -> bool:
    """Whether a ``Keyed`` is around this call."""
    return _depth.get() > 0


def drawn() -> int:
    """How often models have drawn so far in this ``models_draw_by``."""
    present = _draws.get()
    return 0 if present is None else present.count + present.seeds


def _present() -> Draws:
    return _draws.get() or Draws(torch.zeros(KEY_SHAPE, dtype=torch.int32))


@contextmanager
def models_draw_by(draws: Draws) -> Iterator[None]:
    """A context in which models draw by ``draws``. All other code draws by torch's generators, as it always does."""
    token = _draws.set(draws)
    try:
        yield
    finally:
        _draws.reset(token)


_depth: ContextVar[int] = ContextVar("_depth", default=0)
"""How many contexts ``Keyed`` are open."""
_draws: ContextVar[Draws | None] = ContextVar("_draws", default=None)
"""What models draw by outside of ``Keyed``."""


# The functions below have the signatures of torch's functions, with ``draws`` before their arguments.


def _dropout(draws: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropped(draws, input, p, train, input.shape)


def _feature_dropout(draws: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropped(draws, input, p, train, _features(input))


def _alpha_dropout(draws: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(draws, input, p, train, input.shape)


def _feature_alpha_dropout(draws: Draws, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(draws, input, p, train, _features(input))


def _native_dropout(draws: Draws, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    noise = draws.kept(input, 0.0 if train is False else p)
    return input * noise, noise > 0


def _features(input: Tensor) -> list[int]:
    """The shape of what is the same at all places of a channel."""
    return [*input.shape[:2], *(1 for _ in input.shape[2:])]


def _dropped(draws: Draws, input: Tensor, p: float, train: bool, shape: Sequence[int]) -> Tensor:
    """Dropout. The input itself if nothing is dropped."""
    _check_probability(p)
    return input * draws.kept(input, p, shape) if train and p else input


def _alpha(draws: Draws, input: Tensor, p: float, train: bool, shape: Sequence[int]) -> Tensor:
    """Alpha dropout, which keeps mean and variance (Klambauer et al., 2017)."""
    _check_probability(p)
    if not train or p == 0:
        return input
    if p == 1:
        return input * 0
    least = -1.7580993408473766
    scale = 1 / math.sqrt((1 - p) * (1 + p * least**2))
    kept = draws.below(1 - p, shape, input.device).to(input.dtype)
    return input * (kept * scale) + ((1 - kept) * (least * scale) - least * scale * p)


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _rrelu(
    draws: Draws,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> Tensor:
    slope: Tensor | float = (lower + upper) / 2
    if training:
        slope = lower + (upper - lower) * draws.uniform(input.shape, input.device, input.dtype)
    return torch.where(input >= 0, input, input * slope)


def _filled(values: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that writes ``values`` over a tensor."""

    def method(draws: Draws, tensor: Tensor, *arguments: Any, generator: object = None, **keywords: Any) -> Tensor:
        return _written(tensor, values(draws, tensor, *arguments, **keywords))

    return method


def _written(tensor: Tensor, values: Tensor) -> Tensor:
    return tensor if values is tensor else tensor.copy_(values)


def _like(values: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor of the shape of another one."""

    def function(
        draws: Draws,
        input: Tensor,
        *arguments: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> Tensor:
        keywords = {name: others[name] for name in ("low", "high") if name in others}
        place = input.device if device is None else torch.device(device)
        return values(draws, *arguments, **keywords, shape=input.shape, device=place, dtype=dtype or input.dtype)

    return function


def _sized(values: Callable[..., Tensor], usual: torch.dtype | None = None, before: int = 0) -> Callable[..., Tensor]:
    """A function that makes a tensor of a given size, which comes after at most ``before`` other arguments."""

    def function(
        draws: Draws,
        *arguments: Any,
        size: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> Tensor:
        keywords = {name: others[name] for name in ("low", "high") if name in others}
        if size is None:
            if before or (len(arguments) == 1 and isinstance(arguments[0], list | tuple)):
                *arguments, size = arguments  # type: ignore[assignment]
            else:
                arguments, size = (), arguments
        place = draws.key.device if device is None else torch.device(device)
        dtype = dtype or usual or torch.get_default_dtype()
        return values(draws, *arguments, **keywords, shape=tuple(map(int, size)), device=place, dtype=dtype)

    return function


def _rand(draws: Draws, *, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return draws.uniform(shape, device, dtype)


def _randn(draws: Draws, *, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return draws.normal(shape, device, dtype)


def _empty(draws: Draws, *, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Made from the key, so that in a stack each device has its own tensor, which can be filled in place."""
    return draws.key.new_empty(tuple(shape), dtype=dtype, device=device)


def _randint(
    draws: Draws,
    *bounds: int,
    low: int = 0,
    high: int | None = None,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The last bound that is given by its place is the upper one, as in torch, unless ``high`` is given."""
    if high is None:
        *bounds, high = bounds  # type: ignore[assignment]
    low = bounds[0] if bounds else low
    values = draws.uniform(shape, device, torch.float64) * (high - low)
    return (values.floor().clamp(max=high - low - 1) + low).to(dtype)


def _randperm(
    draws: Draws,
    n: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **others: Any,
) -> Tensor:
    place = draws.key.device if device is None else torch.device(device)
    return torch.argsort(draws.bits([n], place), stable=True).to(dtype or torch.int64)


def _bernoulli(draws: Draws, input: Tensor, p: float | None = None, *, generator: object = None) -> Tensor:
    return draws.below(input if p is None else p, input.shape, input.device).to(input.dtype)


def _normal(draws: Draws, mean: Tensor | float, std: Tensor | float = 1.0, size: Any = None, **others: Any) -> Tensor:
    others.pop("generator", None)
    if size is not None:
        return _sized(_randn)(draws, size=size, **others) * std + mean
    like = torch.as_tensor(mean) + torch.as_tensor(std)
    return draws.normal(like.shape, like.device, like.dtype) * std + mean


def _multinomial(
    draws: Draws, input: Tensor, num_samples: int, replacement: bool = False, *, generator: object = None
) -> Tensor:
    if not replacement:
        keys = input.log() - draws.exponential(input.shape, input.device, input.dtype).log()
        return keys.topk(num_samples, -1).indices
    shares = input.cumsum(-1) / input.sum(-1, keepdim=True)
    values = draws.uniform([*input.shape[:-1], num_samples], input.device, input.dtype)
    return (values[..., None] >= shares[..., None, :]).sum(-1).clamp(max=input.shape[-1] - 1)


def _uniform_(draws: Draws, tensor: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)  # "from" can be no parameter's name
    return low + (high - low) * draws.uniform(tensor.shape, tensor.device, tensor.dtype)


def _normal_(draws: Draws, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * draws.normal(tensor.shape, tensor.device, tensor.dtype)


def _log_normal_(draws: Draws, tensor: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal_(draws, tensor, mean, std).exp()


def _exponential_(draws: Draws, tensor: Tensor, lambd: float = 1.0) -> Tensor:
    return draws.exponential(tensor.shape, tensor.device, tensor.dtype) / lambd


def _bernoulli_(draws: Draws, tensor: Tensor, p: Any = 0.5) -> Tensor:
    return draws.below(p, tensor.shape, tensor.device).to(tensor.dtype)


def _cauchy_(draws: Draws, tensor: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * torch.tan(math.pi * (draws.uniform(tensor.shape, tensor.device, tensor.dtype) - 0.5))


def _in_any_memory(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A view, or a copy in its place if the memory does not allow it.

    Executors and the evaluation keep the channels of images last in memory. Modules are written for channels first.
    """

    def viewed(draws: Draws, tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        try:
            return function(tensor, *arguments, **keywords)
        except RuntimeError:
            return function(tensor.contiguous(), *arguments, **keywords)

    return viewed


def _as_strided(draws: Draws, tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    """The view of a tensor in C order, whose memory may be in another order here, as that of images is."""
    return torch.as_strided(tensor.contiguous(), *arguments, **keywords)


_REPLACED: Final[dict[Any, Callable[..., Any]]] = {
    torch.dropout: _dropout,
    torch.dropout_: _filled(_dropout),
    torch.feature_dropout: _feature_dropout,
    torch.feature_dropout_: _filled(_feature_dropout),
    torch.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout_: _filled(_alpha_dropout),
    torch.feature_alpha_dropout: _feature_alpha_dropout,
    torch.feature_alpha_dropout_: _filled(_feature_alpha_dropout),
    torch.native_dropout: _native_dropout,
    torch.rrelu: _rrelu,
    torch.rrelu_: _filled(_rrelu),
    torch.rand: _sized(_rand),
    torch.randn: _sized(_randn),
    torch.randint: _sized(_randint, torch.int64, before=2),
    torch.empty: _sized(_empty),
    torch.rand_like: _like(_rand),
    torch.randn_like: _like(_randn),
    torch.randint_like: _like(_randint),
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _multinomial,
    Tensor.uniform_: _filled(_uniform_),
    Tensor.normal_: _filled(_normal_),
    Tensor.log_normal_: _filled(_log_normal_),
    Tensor.exponential_: _filled(_exponential_),
    Tensor.bernoulli_: _filled(_bernoulli_),
    Tensor.cauchy_: _filled(_cauchy_),
    torch.as_strided: _as_strided,
    Tensor.as_strided: _as_strided,
    **LAYERS,
    **{view: _in_any_memory(view) for view in (Tensor.view, Tensor.view_as, torch.view_as_complex)},
}
"""What stands for each of torch's functions that draw, and for views.

Other functions that draw are refused where they are recorded or mapped.
"""
