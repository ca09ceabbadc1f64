"""Where a server job computes: on the processor, or on the coordinator's GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch

from fedemu.algorithms.interface import Model, Tree
from fedemu.algorithms.trees import map_leaves
from fedemu.protocol.errors import ConfigurationError

LEAST_VARIABLES: Final = 100_000
"""A model with fewer variables is trained on the processor.

The process of a job takes a second to open a GPU, and its first steps wait there for Python. So a job with a small
model is over sooner on the processor.
"""

_PROCESSOR: Final = torch.device("cpu")
_NO_MEMORY: Final = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What torch says of a GPU without memory, where it does not raise an OutOfMemoryError."""

FindDevice = Callable[[], torch.device]


def processor() -> torch.device:
    """The device of jobs that no process of their own runs."""
    return _PROCESSOR


def gpu_or_processor(device_type: str) -> torch.device:
    """This machine's GPU if there is one, unless ``device_type`` (``auto``, ``cpu`` or ``cuda``) is ``cpu``.

    A process that has asked for the GPU cannot fork any more. So only the job's own process may ask. Raises
    ConfigurationError for ``cuda`` if there is none.
    """
    if device_type == "cpu":
        return _PROCESSOR
    if torch.cuda.is_available():
        return torch.device("cuda")
    if device_type == "cuda":
        raise ConfigurationError(
            "jobs of this coordinator compute on CUDA, but torch finds no CUDA device any more; see what nvidia-smi "
            "says, and go on with --resume when the GPU is there again"
        )
    return _PROCESSOR


_find: ContextVar[FindDevice] = ContextVar("find", default=processor)


@contextmanager
def jobs_compute_on(find: FindDevice) -> Iterator[None]:
    """A context in which server jobs compute on the device that ``find`` gives. It is called when a job needs it."""
    token = _find.set(find)
    try:
        yield
    finally:
        _find.reset(token)


def job_device() -> torch.device:
    """The device that a server job computes on. Only its ``init`` and its ``step`` may ask."""
    return _find.get()()


def device_for(model: Model, variables: Tree) -> torch.device:
    """The device for a server job that trains or asks ``model`` with these ``variables``: a GPU only if it is large.

    The model alone decides and no measurement does, because devices differ in the last bits of results.
    """
    return job_device() if is_large(model, variables) else _PROCESSOR


def is_large(model: Model, variables: Tree) -> bool:
    """Whether a step of the model takes long enough on a processor. Dense models never do."""
    return model.kind != "dense" and sum(leaf.numel() for leaf in variables.values()) >= LEAST_VARIABLES


def moved(tree: Tree, device: torch.device) -> Tree:
    """The tree on ``device``. Leaves that are there already are not copied."""
    return map_leaves(lambda leaf: leaf.to(device), tree)


def rounds_to_tf32() -> tuple[bool, bool]:
    """Whether a GPU may round the inputs of float32 to TF32: those of products, and those of convolutions."""
    switches: Any = torch.backends
    return switches.cuda.matmul.fp32_precision == "tf32", switches.cudnn.conv.fp32_precision == "tf32"


def round_to_tf32(products: bool, convolutions: bool) -> None:
    """Let a GPU round inputs to TF32 from now on, or not, whatever somebody's own code has told torch before.

    torch has two sets of switches. If the newer one was used, the older one does not change convolutions by itself; and
    torch raises an error where the older one is read and the newer one says something else. So both are set.
    """
    switches: Any = torch.backends
    switches.cuda.matmul.allow_tf32, switches.cudnn.allow_tf32 = products, convolutions
    for layers in (switches.cudnn.conv, switches.cudnn.rnn):
        layers.fp32_precision = "tf32" if convolutions else "ieee"


def gpu_lacks_memory(error: BaseException) -> bool:
    """Whether an error of torch, of CUDA, of cuBLAS or of cuDNN says that the memory of a GPU does not suffice."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


@contextmanager
def same_every_time(device: torch.device) -> Iterator[None]:
    """A context in which a GPU gives the same bits every time, in float32. On a processor it changes nothing.

    An operation that has no deterministic algorithm on a GPU is a RuntimeError, as at trainers.
    """
    if device.type == "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    ways, rounded = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic), rounds_to_tf32()
    # torch.use_deterministic_algorithms does the same, but imports torch's compiler: seconds in each job's process.
    torch.set_deterministic_debug_mode("error")
    # No job reads memory that nobody wrote, and filling it would take time.
    settings.fill_uninitialized_memory = False
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = True, False, True
    round_to_tf32(False, False)
    try:
        yield
    finally:
        round_to_tf32(*rounded)
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = ways
        mode, settings.fill_uninitialized_memory = before
        torch.set_deterministic_debug_mode(mode)
