"""Torch's private parts still exist and behave as ``private_torch.py`` relies on. Each failure says what to do."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import fedemu.device.compute.tapes.private_torch as private_torch
from fedemu.algorithms.models.randomness.private_functions import inside_transform, keeping_activations
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.device.compute.tapes.private_torch import (
    LOG_SOFTMAX,
    OperationReplacer,
    OperationWatcher,
    WeakTensorKeyDictionary,
    changes_memory,
    has_product,
    operator_name,
    product,
    reference_to_memory,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    unwatched,
    written_arguments,
)

FILE = "device/compute/tapes/private_torch.py"


class Pair(NamedTuple):
    left: Any
    right: Any


def test_trees_are_flattened_in_one_order_and_put_together_again() -> None:
    tree = {"b": Pair(1, (2,)), "a": [3]}
    leaves, spec = tree_flatten(tree)
    again = tree_unflatten([10 * leaf for leaf in leaves], spec)
    remedy = f"torch {torch.__version__} flattens trees in another way. Write the tree functions of {FILE} anew."
    assert again == {"b": Pair(10, (20,)), "a": [30]}, remedy
    assert isinstance(again["b"], Pair), remedy
    assert spec.num_leaves == 3, remedy
    assert tree_flatten({"b": Pair(4, (5,)), "a": [6]})[1] == spec != tree_flatten({"b": Pair(4, 5), "a": [6]})[1], (
        remedy
    )
    assert tree_map_only(int, lambda leaf: -leaf, [1, "one"]) == [-1, "one"], remedy


def test_a_watcher_sees_the_operations_below_a_transformation_on_plain_tensors() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    remedy = (
        f"torch {torch.__version__} shows other operations to a TorchDispatchMode. Compare OperationWatcher in {FILE} "
        "with the class's documentation; the trace of a program is wrong until this test passes."
    )
    with OperationWatcher(lambda operator, args, kwargs, result: seen.append((operator_name(operator), result.shape))):
        result = torch.func.vmap(lambda x: (x * 2).sum())(torch.ones(3, 4))
    assert ("aten::mul", (3, 4)) in seen, remedy
    assert seen[-1] == ("aten::sum", (3,)), remedy
    assert result.tolist() == [8.0, 8.0, 8.0], remedy


def test_a_watcher_gets_the_operator_its_arguments_and_its_result() -> None:
    calls: list[tuple[Any, ...]] = []
    x, y = torch.ones(2), torch.ones(2)
    with OperationWatcher(lambda *call: calls.append(call)):
        total = torch.add(x, y, alpha=3)
    ((operator, args, kwargs, result),) = calls
    assert operator is torch.ops.aten.add.Tensor
    assert args[0] is x
    assert args[1] is y
    assert kwargs == {"alpha": 3}
    assert result is total


def test_unwatched_operations_are_seen_by_no_watcher_and_no_replacer() -> None:
    seen: list[str] = []

    def fails(*_: Any) -> Any:
        raise AssertionError

    with OperationWatcher(lambda operator, *_: seen.append(operator_name(operator))):
        with OperationReplacer(fails), unwatched():
            result = torch.ones(2) + 1
        torch.neg(result)
    assert result.tolist() == [2, 2]
    assert seen == ["aten::neg"], (
        f"torch {torch.__version__} shows operations within _DisableTorchDispatch to a TorchDispatchMode. Let "
        f"`unwatched` in {FILE} hide them in another way; else a program is recorded in several times the time."
    )


def test_a_watcher_is_not_wrapped_by_the_compiler() -> None:
    base = _python_dispatch.TorchDispatchMode
    since = Version("2.11")  # earlier ones wrap no watcher
    assert ("_should_skip_dynamo" in vars(base)) == (Version(torch.__version__) >= since), (
        f"torch {torch.__version__} no longer asks _should_skip_dynamo. Delete it from OperationWatcher in {FILE}, if "
        "test_watching_and_gradients_import_no_compiler still passes without it."
    )
    assert inspect.getattr_static(OperationWatcher, "__torch_dispatch__").__module__ == private_torch.__name__


def test_a_reference_to_memory_does_not_keep_it_and_keeps_its_number() -> None:
    remedy = f"torch {torch.__version__} refers to memory in another way. Change what names memory in recording.py."
    numbers = set()
    references = []
    for _ in range(20):
        tensor = torch.ones(100_000)
        reference = reference_to_memory(tensor)
        assert reference.cdata == reference_to_memory(tensor.view(10, -1)[3]).cdata, remedy
        assert not reference.expired(), remedy
        del tensor
        assert reference.expired(), remedy
        references.append(reference)
        numbers.add(reference.cdata)
    assert len(numbers) == len(references), remedy


def test_a_dictionary_of_tensors_forgets_them_and_knows_those_that_only_torch_holds() -> None:
    remedy = f"torch {torch.__version__} has other references to tensors. Change what finds values in recording.py."
    known = WeakTensorKeyDictionary()
    seen: list[bool] = []

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        seen.extend(leaf in known for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor))
        known.update((leaf, True) for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor))

    x = torch.rand(2, 50)
    known[x] = True
    with OperationWatcher(note):
        # The gradient of exp takes the result of exp, which nothing in Python holds by then.
        torch.func.vmap(torch.func.grad(lambda x: x.exp().sin().exp().sum()))(x)
    assert len(seen) > 8, remedy
    assert all(seen), remedy
    assert list(known) == [x], remedy


def test_an_operators_schema_tells_its_name_and_what_it_writes_to() -> None:
    remedy = f"torch {torch.__version__} describes operators in another way. Write the schema functions of {FILE} anew."
    add, add_in_place, copy = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default
    assert operator_name(add) == "aten::add", remedy
    assert [changes_memory(operator) for operator in (add, add_in_place, copy)] == [False, True, True], remedy
    assert written_arguments(add, ("x", "y")) == [], remedy
    assert written_arguments(add_in_place, ("x", "y")) == ["x"], remedy
    view = torch.ops.aten.view.default  # its result shares the argument's memory, but nothing is written
    assert not changes_memory(view), remedy
    assert written_arguments(view, ("x", [1])) == [], remedy


def test_the_bindings_of_log_softmax_are_the_operators() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]])
    y = LOG_SOFTMAX["aten::_log_softmax"](x, 1, False)
    gradient = LOG_SOFTMAX["aten::_log_softmax_backward_data"](torch.ones(2, 3), y, 1, torch.float32)
    remedy = f"torch {torch.__version__} binds log_softmax in another way. Delete the entry of LOG_SOFTMAX in {FILE}."
    assert torch.equal(y, torch.ops.aten._log_softmax.default(x, 1, False)), remedy
    operator = torch.ops.aten._log_softmax_backward_data.default
    assert torch.equal(gradient, operator(torch.ones(2, 3), y, 1, torch.float32)), remedy


def test_onednn_multiplies_matrices_of_any_layout() -> None:
    torch.manual_seed(0)
    remedy = f"torch {torch.__version__} has another operator for linear layers. Change product in {FILE}."
    left, right = torch.randn(50, 300), torch.randn(300, 120)
    for a, b in ((left, right), (left, right.t().contiguous().t()), (left.t().contiguous().t(), right)):
        found = product(a, b)
        assert torch.allclose(found, a @ b, rtol=1e-4, atol=1e-4), remedy
        assert found.is_contiguous(), remedy
        assert torch.equal(product(a, b), found), remedy


def test_onednn_is_not_used_where_it_is_switched_off() -> None:
    assert has_product() == bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        assert not has_product()
    finally:
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def without_the_compiler() -> subprocess.CompletedProcess[str]:
    """A process that watches and traces gradients, and then asks for the compiler; each prints a line.

    Its last line tells which libraries the registry has imported.
    """
    code = """
import sys, torch
import fedemu.algorithms.registry
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.algorithms.training.mixing import OwnModel
from fedemu.device.compute.tapes.private_torch import OperationWatcher
from fedemu.device.compute.tapes.tracing import trace

heavy = sorted({"transformers", "tokenizers"} & {*sys.modules})

def compiler():
    return [name for name in ("torch._dynamo", "sympy") if name in sys.modules], "_dynamo" in vars(torch)

with without_compiler(), OperationWatcher(lambda *call: None):
    torch.func.grad(lambda v: (v * v).sum())(torch.ones(3))
print("watched", *compiler(), flush=True)
trace(lambda w: [torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))(w)], [torch.ones(2, 3)])
print("traced", *compiler(), flush=True)
own = OwnModel(from_module(lambda: torch.nn.Linear(6, 2)), (6,), tokens=False)
print("mixes", own.mixes(True), own.mixes(False), *compiler(), flush=True)
with without_compiler():
    stand_in = torch._dynamo
    print("asked", type(stand_in).__name__, stand_in.is_compiling())
print("after", type(torch._dynamo).__name__)
print("registry", heavy)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_watching_and_gradients_import_no_compiler(without_the_compiler: subprocess.CompletedProcess[str]) -> None:
    assert without_the_compiler.stdout.splitlines()[:1] == ["watched [] False"], (
        f"torch {torch.__version__} uses torch._dynamo in another way for gradients. Every trainer now imports the "
        f"compiler or fails; see what torch/_functorch/eager_transforms.py asks of it, and give that to "
        f"_CompilerStandIn in algorithms/training/compiler.py.\n"
        f"{without_the_compiler.stdout}{without_the_compiler.stderr}"
    )


def test_gradients_are_traced_without_importing_the_compiler(
    without_the_compiler: subprocess.CompletedProcess[str],
) -> None:
    assert without_the_compiler.stdout.splitlines()[1:2] == ["traced [] False"], without_the_compiler.stderr


def test_whether_a_model_mixes_samples_is_found_out_without_importing_the_compiler(
    without_the_compiler: subprocess.CompletedProcess[str],
) -> None:
    assert without_the_compiler.stdout.splitlines()[2:3] == ["mixes False False [] False"], without_the_compiler.stderr


def test_the_compiler_is_switched_off_by_name() -> None:
    from torch._dynamo import compiled_autograd

    with compiled_autograd._disable(), without_compiler():
        assert torch.func.grad(torch.sum)(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_other_uses_of_the_compiler_get_the_real_one(without_the_compiler: subprocess.CompletedProcess[str]) -> None:
    expected = ["asked _CompilerStandIn False", "after module"]
    assert without_the_compiler.stdout.splitlines()[3:-1] == expected, without_the_compiler.stderr
    assert without_the_compiler.returncode == 0


def test_the_registry_does_not_import_transformers(without_the_compiler: subprocess.CompletedProcess[str]) -> None:
    assert without_the_compiler.stdout.splitlines()[-1:] == ["registry []"], without_the_compiler.stderr


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_give_gradients_of_variables_from_outside(reentrant: bool) -> None:
    layer, weight = torch.nn.Linear(2, 2, bias=False).requires_grad_(False), torch.ones(2, 2, requires_grad=True)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(lambda y: self.layer(y).relu(), x, use_reentrant=reentrant)
            return found

    with keeping_activations():
        found = torch.func.functional_call(Net(), {"layer.weight": weight}, (torch.tensor([[2.0, 3.0]]),))
        (slope,) = torch.autograd.grad(found.sum(), weight)
    assert slope.tolist() == [[2.0, 3.0], [2.0, 3.0]], (
        f"torch {torch.__version__} computes activations again in another way. Look in torch/utils/checkpoint.py for "
        "what keeping_activations in algorithms/models/randomness/private_functions.py has to replace."
    )


def test_it_can_be_told_whether_a_transformation_is_around() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(inside_transform())
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True, True], (
        f"torch {torch.__version__} keeps its transformations elsewhere. Write inside_transform and inside_vmap of "
        "algorithms/models/randomness/private_functions.py anew."
    )
