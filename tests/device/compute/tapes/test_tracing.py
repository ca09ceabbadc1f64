"""Tapes: a recorded function computes the same again, and what cannot be recorded is refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fedemu.device.compute.tapes.private_torch import product
from fedemu.device.compute.tapes.tracing import Untraceable, trace
from fedemu.protocol.errors import TrainingError


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()


def test_a_trace_computes_for_other_values_what_the_function_computes() -> None:
    torch.manual_seed(0)

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((x @ w).relu(), y)

    def step(w: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        gradient = torch.func.vmap(torch.func.grad(loss))(w, x, y)
        return [w - 0.1 * gradient, gradient.square().sum((1, 2))]

    def inputs() -> list[Tensor]:
        return [torch.randn(4, 5, 3), torch.randn(4, 7, 5), torch.randint(0, 3, (4, 7))]

    traced = trace(step, inputs())
    for _ in range(3):
        given = inputs()
        for ours, theirs in zip(traced(*given), step(*given), strict=True):
            assert same_bits(ours, theirs)


def test_a_conjugate_is_not_taken_for_the_complex_numbers_that_it_is_a_view_of() -> None:
    torch.manual_seed(0)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * torch.view_as_complex(w)).real.square().sum()

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        return [w - 0.1 * torch.func.grad(loss)(w, x), torch.view_as_complex(w).conj().imag + x]

    traced = trace(step, [torch.randn(8, 2), torch.randn(8)])
    given = torch.randn(8, 2), torch.randn(8)
    assert all(map(same_bits, traced(*given), step(*given)))


@pytest.mark.parametrize(("maker", "by_onednn"), [("AuthenticAMD", [512]), ("", [512]), ("GenuineIntel", [])])
def test_a_large_product_is_computed_by_onednn_unless_the_processor_is_of_intel(
    maker: str, by_onednn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def watched(left: Tensor, right: Tensor) -> Tensor:
        widths.append(left.shape[1])
        return product(left, right)

    room = "fedemu.device.compute.tapes.flat_function"
    monkeypatch.setattr(f"{room}.maker", lambda: maker)
    monkeypatch.setattr(f"{room}.product", watched)
    torch.manual_seed(0)
    for inputs in ((torch.randn(20, 64), torch.randn(64, 10)), (torch.randn(64, 512), torch.randn(512, 128))):
        (found,) = trace(lambda x, w: [x @ w], inputs)(*inputs)
        assert torch.allclose(found, torch.mm(*inputs), rtol=1e-4, atol=1e-4)
    assert widths == by_onednn


def test_inputs_that_were_one_tensor_may_be_two_at_the_next_call() -> None:
    same = torch.tensor([1.0, 2.0])
    traced = trace(lambda a, b: [a * 2 + b, a[:1] + b[:1]], [same, same])
    total, first = traced(torch.tensor([1.0, 1.0]), torch.tensor([10.0, 20.0]))
    assert total.tolist() == [12.0, 22.0]
    assert first.tolist() == [11.0]


def test_spent_inputs_are_written_over_and_others_never() -> None:
    def step(fixed: Tensor, carry: Tensor) -> list[Tensor]:
        return [carry * fixed + 1.0]

    traced = trace(step, [torch.ones(3), torch.ones(3)], spent=1)
    fixed, carry = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    (after,) = traced(fixed, carry)
    assert after.tolist() == [3.0, 4.0, 5.0]
    assert after.data_ptr() == carry.data_ptr()
    assert fixed.tolist() == [2.0, 3.0, 4.0]


def test_nothing_is_written_over_that_is_read_again() -> None:
    def step(fixed: Tensor, carry: Tensor) -> list[Tensor]:
        doubled = carry * 2
        view = doubled.view(3, 1)
        shifted = doubled + fixed
        return [shifted, view.sum(1) + carry, shifted.view(1, 3).neg()]

    traced = trace(step, [torch.ones(3), torch.ones(3)], spent=1)
    carry = torch.tensor([1.0, 2.0, 3.0])
    outputs = traced(torch.tensor([10.0, 10.0, 10.0]), carry.clone())
    assert [output.tolist() for output in outputs] == [
        [12.0, 14.0, 16.0],
        [3.0, 6.0, 9.0],
        [[-12.0, -14.0, -16.0]],
    ]


def test_what_is_to_be_written_over_next_shares_no_memory_with_anything_else() -> None:
    table = torch.tensor([7.0, 8.0])

    def first(fixed: Tensor, *carry: Tensor) -> list[Tensor]:
        total = carry[0] + 1.0
        return [fixed, torch.zeros_like(fixed), table, total, total, total]

    def second(*carry: Tensor) -> list[Tensor]:
        return [leaf + 1.0 for leaf in carry]

    blank = [torch.ones(2) for _ in range(5)]
    traced, following = trace(first, [torch.ones(2), *blank], spent=5), trace(second, blank, spent=5)
    fixed, carry = torch.tensor([5.0, 6.0]), [torch.zeros(2) for _ in range(5)]
    for total in ([1.0, 1.0], [7.0, 8.0], [7.0, 8.0]):
        *carry, measured = traced(fixed, *carry)
        assert [leaf.tolist() for leaf in carry] == [[5.0, 6.0], [0.0, 0.0], [7.0, 8.0], total, total]
        carry = list(following(*carry))
        assert [leaf.tolist() for leaf in carry[:3]] == [[6.0, 7.0], [1.0, 1.0], [8.0, 9.0]]
        assert measured.tolist() == total
    assert fixed.tolist() == [5.0, 6.0]
    assert table.tolist() == [7.0, 8.0]


def test_constants_are_folded_but_captured_tensors_are_not_copied() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])
    traced = trace(lambda x: [x * table + torch.arange(3)], [torch.ones(3)])
    assert traced(torch.ones(3))[0].tolist() == [1.0, 3.0, 5.0]


def test_views_of_tensors_from_outside_and_literals_are_recorded() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def step(x: Tensor) -> list[Tensor]:
        literal = torch.tensor([10.0, 20.0])
        return [x * table.t()[0] + literal + table[1] + literal.flip(0), literal]

    found, literal = trace(step, [torch.ones(2)], apart=2)(torch.tensor([1.0, 2.0]))
    assert found.tolist() == [34.0, 40.0]
    literal.add_(1)
    assert trace(step, [torch.ones(2)])(torch.tensor([0.0, 0.0]))[0].tolist() == [33.0, 34.0]


def test_a_literal_that_is_written_to_cannot_be_traced() -> None:
    with pytest.raises(Untraceable, match="writes to what the program did not make"):
        trace(lambda x: [torch.tensor([10.0, 20.0]).add_(x)], [torch.ones(2)])


def test_operations_that_write_keep_their_order() -> None:
    def count(x: Tensor) -> list[Tensor]:
        total = torch.zeros(2)
        total.add_(x)
        before = total.clone()
        total.mul_(2)
        return [before, total]

    before, total = trace(count, [torch.ones(2)])(torch.tensor([1.0, 4.0]))
    assert before.tolist() == [1.0, 4.0]
    assert total.tolist() == [2.0, 8.0]


def test_reading_a_value_cannot_be_traced() -> None:
    with pytest.raises(Untraceable, match="reads values"):
        trace(lambda x: [x * float(x.sum())], [torch.ones(2)])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_elements_are_chosen_by_numbers_and_not_by_truth_values() -> None:
    def chosen(x: Tensor, labels: Tensor) -> list[Tensor]:
        return [torch.func.grad(lambda x: x[torch.arange(3), labels].exp().sum())(x), x[[2, 0]]]

    given = torch.randn(3, 4), torch.tensor([3, 0, 0])
    traced = trace(chosen, [torch.randn(3, 4), torch.tensor([1, 2, 3])])
    assert all(map(same_bits, traced(*given), chosen(*given)))
    for unfit in (torch.tensor([True, False, True]), torch.tensor([1, 0, 1], dtype=torch.uint8)):
        with pytest.raises(Untraceable, match="reads values"):
            trace(lambda x, unfit=unfit: [x[unfit]], [torch.randn(3, 4)])


def test_writing_to_an_input_cannot_be_traced() -> None:
    with pytest.raises(Untraceable, match="writes to what the program did not make"):
        trace(lambda x: [x.add_(1)], [torch.ones(2)])


def test_a_tensor_whose_making_was_not_seen_cannot_be_traced() -> None:
    def by_the_back_door(x: Tensor) -> list[Tensor]:
        doubled = x * 2
        with _disable_current_modes():
            return [doubled.view(1, 2)]

    with pytest.raises(Untraceable, match="returns a tensor whose making was not seen"):
        trace(by_the_back_door, [torch.ones(2)])
    with pytest.raises(Untraceable, match="takes a tensor whose making was not seen"):
        trace(lambda x: [by_the_back_door(x)[0] + 1], [torch.ones(2)])


def test_random_numbers_are_refused_after_a_value_that_was_read_too() -> None:
    def noisy(x: Tensor) -> list[Tensor]:
        return [x + torch.poisson(x) if float(x.sum()) > 0 else x]

    with pytest.raises(TrainingError, match="draws random numbers by aten::poisson, which can't be repeated"):
        trace(noisy, [torch.ones(2)])


def test_random_numbers_inside_are_refused() -> None:
    with pytest.raises(TrainingError, match="draws random numbers by aten::bernoulli_, which can't be repeated"):
        trace(lambda x: [torch.nn.functional.dropout(x)], [torch.ones(2)])


def test_a_view_of_what_was_done_before_is_not_written_over() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        first = x.exp()
        again = x.exp()  # it is not done again
        return [first, again.view(2, 1) * 3]

    given = torch.tensor([0.0, 1.0])
    first, tripled = trace(twice, [torch.ones(2)])(given)
    assert same_bits(first, given.exp())
    assert same_bits(tripled, (given.exp() * 3).view(2, 1))


TABLE = torch.tensor([[3, 0], [2, 1], [1, 2], [0, 3]])
ONE: list[Callable[[Tensor], Tensor]] = [
    Tensor.sin,
    Tensor.relu,
    Tensor.neg,
    Tensor.detach,
    lambda a: a * 1.5,
    lambda a: a.reshape(-1).view(a.shape),
    lambda a: a.t().contiguous().t(),
    lambda a: a.unsqueeze(0).squeeze(0),
    lambda a: torch.cat([a[:1], a[1:]]),
    lambda a: a + torch.ones_like(a),
    lambda a: a.softmax(-1),
    lambda a: a - a.mean(),
    lambda a: a.chunk(2, 1)[0].sum() + a,
    lambda a: a * torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
    lambda a: a[TABLE.t()[0]] + TABLE[2, 1],
]
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: a @ b.t() @ b,
]


@pytest.mark.parametrize("seed", range(120))
def test_a_random_program_does_the_same_from_its_tape(seed: int) -> None:
    random = Random(seed)
    count, columns = random.randint(1, 3), random.choice([4, 5000])  # 5,000 columns are too large for a constant
    steps = [(random.choice([*ONE, *TWO]), random.random(), random.random()) for _ in range(random.randint(2, 12))]
    chosen = [random.random() for _ in range(random.randint(1, 4))]
    spent, differentiates, stacks = random.randint(0, count), random.random() < 0.5, random.random() < 0.3

    def values(*leaves: Tensor) -> list[Tensor]:
        made = list(leaves)
        for operation, one, other in steps:
            given = made[int(one * len(made))], made[int(other * len(made))]
            made.append(operation(*given) if operation in TWO else operation(given[0]))
        return made

    def program(*leaves: Tensor) -> tuple[Tensor, ...]:
        made = [*values(*leaves), *(-leaf for leaf in values(*leaves))]  # what is the same is done once
        if differentiates:
            made += torch.func.grad(lambda *x: values(*x)[-1].sum(), tuple(range(count)))(*leaves)
        return tuple(made[int(place * len(made))] for place in chosen)

    mapped = torch.func.vmap(program) if stacks else program
    shape = (*([3] if stacks else []), 4, columns)

    def flat(*leaves: Tensor) -> list[Tensor]:
        return [leaf.contiguous() for leaf in mapped(*leaves)]

    torch.manual_seed(seed)
    traced = trace(flat, [torch.randn(shape) for _ in range(count)], spent=spent, apart=len(chosen))
    for _ in range(2):
        given = [torch.randn(shape) for _ in range(count)]
        with torch.no_grad():
            expected = [leaf.clone() for leaf in flat(*given)]
        before = [leaf.clone() for leaf in given]
        found = traced(*given)
        assert all(map(same_bits, found, expected))
        assert all(map(same_bits, given[: count - spent], before))
        assert len({leaf.data_ptr() for leaf in found}) == len(chosen)
