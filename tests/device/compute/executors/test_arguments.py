"""The arguments of a program's function: a flat list of tensors, and the parts by name."""

from __future__ import annotations

import torch

from fedemu.device.compute.executors.arguments import Arguments, Names
from fedemu.device.compute.executors.cohort import EACH

GIVEN = Arguments(
    shared=[torch.tensor(1.0), torch.tensor(2.0)],
    each=[torch.tensor(3.0)],
    own=[],
    facts=[torch.tensor([9, 5, 4, 2, 1, 8, 6, 3]), torch.tensor(0.5)],
    key=[torch.tensor([1, 2])],
    noise=[torch.tensor(7.0)],
    carry=[torch.tensor(8.0)],
)
NAMES = Names(shared=(("model", "w"), ("control", "w")), each=("offset",), own=(), noise=("z",))


def test_a_flat_list_is_cut_into_the_parts_it_was_made_of() -> None:
    flat = GIVEN.flat()
    assert flat[-1] is GIVEN.carry[0]
    assert Arguments.cut(flat, GIVEN.lengths).flat() == flat
    assert Arguments.cut(range(8), GIVEN.lengths) == ([0, 1], [2], [], [3, 4], [5], [], [6], [7])  # type: ignore[arg-type]


def test_a_program_gets_every_tensor_by_its_name() -> None:
    shared, own, facts = NAMES.inputs(GIVEN)
    assert {key: {name: float(leaf) for name, leaf in tree.items()} for key, tree in shared.items()} == {
        "model": {"w": 1.0},
        "control": {"w": 2.0},
        EACH: {"offset": 3.0},
    }
    assert own == {}
    assert (int(facts.examples), int(facts.steps), int(facts.round), int(facts.task)) == (9, 5, 4, 2)
    assert facts.device is not None
    assert int(facts.device) == 8
    assert (bool(facts.first_visit), float(facts.lr), facts.label_counts.tolist()) == (True, 0.5, [6, 3])
    assert NAMES.drawn(GIVEN) == {"z": GIVEN.noise[0]}


def test_what_is_done_per_device_leaves_the_shared_tensors_alone() -> None:
    doubled = GIVEN.per_device(torch.add, GIVEN)
    assert doubled.shared is GIVEN.shared
    assert [float(leaf) for part in (doubled.each, doubled.noise, doubled.carry) for leaf in part] == [6.0, 14.0, 16.0]
    assert doubled.lengths == GIVEN.lengths
