"""SuperImageNet: the mapping that comes with the package, and what is taken of a data set by such a mapping."""

import json

import datasets as hugging_face
import numpy as np
import pytest
from PIL import Image

from fedemu.ops.data.corpora import load_corpus
from fedemu.ops.data.regroup import MAPPING, Regrouping, _part, even_shares, regrouped, regrouping
from fedemu.ops.data.source import DataSource
from fedemu.ops.data.split import Part
from fedemu.protocol.errors import DataError

FISH, SHARK, COCK = "n01443537", "n01484850", "n01514668"


@pytest.mark.parametrize(
    ("name", "groups", "classes", "samples"),
    [
        ("superimagenet-s", 100, 461, (2500, 100)),
        ("superimagenet-m", 75, 407, (5000, 200)),
        ("superimagenet-l", 50, 304, (7500, 300)),
    ],
)
def test_the_versions_of_superimagenet_have_the_papers_numbers(name, groups, classes, samples):
    by = regrouping(name)
    assert (len(by.groups), len(by.members), (by.train, by.test)) == (groups, classes, samples)
    assert sum(len(group) for group in by.groups.values()) == classes
    # Complete ImageNet has 732 to 1,300 images of a class, and 50 to test on.
    assert all(by.test <= 50 * len(group) and by.train <= 1300 * len(group) for group in by.groups.values())
    assert by.members[FISH if groups > 50 else "n02113712"] in ("goldfish", "miniature_poodle")


PETS = Regrouping("pets", {"fish": {FISH: "goldfish", SHARK: "great_white_shark"}, "bird": {COCK: "cock"}}, 5, 3)


def part(y):
    """Samples that tell where they come from."""
    return Part(np.array(y), {"row": np.arange(len(y))}, lambda rows: [np.asarray(rows)])


def test_groups_take_their_samples_evenly_from_their_classes():
    # Rows 0-3 are other, 4-7 goldfish, 8-9 shark, 10-16 cock.
    train = part([3] * 4 + [0] * 4 + [1] * 2 + [2] * 7)
    names, kept, test = regrouped(DataSource("any"), (FISH, SHARK, COCK, "n0"), train, part([2, 1, 0, 0, 0, 0]), PETS)
    assert names == ("fish", "bird")
    assert np.bincount(kept.y).tolist() == [5, 5]
    assert test is not None
    assert (test.y.tolist().count(0), test.y.tolist().count(1)) == (3, 1)
    rows = kept.columns["row"]
    assert sorted(rows) == list(rows)
    assert [int(((rows >= low) & (rows < high)).sum()) for low, high in ((0, 4), (4, 8), (8, 10), (10, 17))] == [
        0,
        3,
        2,
        5,
    ]
    (read,) = kept.read(np.array([0, 9]))
    assert read.tolist() == rows[[0, 9]].tolist()


def test_the_same_samples_are_drawn_again():
    drawn = [regrouped(DataSource("any"), (FISH, SHARK, COCK), part([0, 1, 2] * 9), None, PETS)[1] for _ in range(2)]
    assert drawn[0].columns["row"].tolist() == drawn[1].columns["row"].tolist()
    assert drawn[0].columns["row"].tolist() != list(range(10))


def test_classes_are_known_by_the_synonyms_of_the_hugging_face_form():
    names = ("cock", "goldfish, Carassius auratus", "great white shark, white shark", "maillot, tank suit", "maillot")
    _, kept, _ = regrouped(DataSource("any"), names, part([0, 1, 2, 3]), None, PETS)
    assert (kept.columns["row"].tolist(), kept.y.tolist()) == ([0, 1, 2], [1, 0, 0])
    swimsuit = Regrouping("swimsuits", {"swimsuit": {"n03710637": "maillot"}}, 5, 3)
    _, kept, _ = regrouped(DataSource("any"), names, part([3, 4, 4]), None, swimsuit)
    assert kept.columns["row"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("y", "test", "complaint"),
    [
        ([0, 0, 2], None, f"no training images of 1 of them: {SHARK}; add them"),
        ([0, 1, 2], [1], f"no test images of 2 of them: {FISH}, {COCK}; add them"),
    ],
)
def test_classes_that_are_missing_are_named(y, test, complaint):
    with pytest.raises(DataError, match=f"pets needs 3 classes of ImageNet, but 'any' has {complaint}"):
        regrouped(DataSource("any"), (FISH, SHARK, COCK), part(y), None if test is None else part(test), PETS)


def test_another_data_set_than_imagenet_cannot_be_regrouped():
    source = DataSource("pets", regroup="superimagenet-l")
    with pytest.raises(DataError, match=r"'pets' has no training images of 304 of them: (n\d{8}, ){5}\.\.\.; add them"):
        regrouped(source, ("cat", "dog"), part([0, 1]))


def test_a_tree_with_all_classes_of_superimagenet_is_regrouped(tmp_path):
    by = regrouping("superimagenet-l")
    for place, wnid in enumerate([*by.members, COCK]):
        for split in ("train", "val"):
            (tmp_path / "imagenet" / split / wnid).mkdir(parents=True)
            Image.new("RGB", (8, 8), (place % 256, 0, 9)).save(tmp_path / "imagenet" / split / wnid / "0.JPEG")
    source = DataSource("imagenet", regroup="superimagenet-l")
    corpus = load_corpus(source, cache=tmp_path / "cache", data=tmp_path)
    assert corpus.class_names == tuple(by.groups)
    sizes = [len(group) for group in by.groups.values()]
    assert np.bincount(corpus.train.y).tolist() == np.bincount(corpus.test.y).tolist() == sizes


def test_the_hugging_face_form_of_imagenet_is_regrouped_by_its_names(tmp_path):
    by = regrouping("superimagenet-l")
    names = sorted({f"{name.replace('_', ' ')}, another name" for name in by.members.values()} | {"tench, Tinca tinca"})
    features = hugging_face.Features(image=hugging_face.Image(), label=hugging_face.ClassLabel(names=names))
    pixel = Image.new("RGB", (8, 8), (1, 0, 9))
    (tmp_path / "imagenet").mkdir()
    for split, labels in (("train", range(len(names))), ("validation", range(len(names))), ("test", [-1])):
        columns = {"image": [pixel] * len(labels), "label": list(labels)}
        made = hugging_face.Dataset.from_dict(columns, features=features)
        made.to_parquet(tmp_path / "imagenet" / f"{split}-00000-of-00001.parquet")
    source = DataSource("imagenet", regroup="superimagenet-l")
    corpus = load_corpus(source, cache=tmp_path / "cache", data=tmp_path)
    assert corpus.class_names == tuple(by.groups)
    sizes = [len(group) for group in by.groups.values()]
    assert np.bincount(corpus.train.y).tolist() == np.bincount(corpus.test.y).tolist() == sizes


@pytest.mark.parametrize(
    ("counts", "most", "shares"),
    [
        ([10, 10], 6, [3, 3]),
        ([10, 10, 10], 7, [3, 2, 2]),
        ([1, 10, 10], 9, [1, 4, 4]),
        ([1, 2, 10], 10, [1, 2, 7]),
        ([1, 2], 10, [1, 2]),
        ([0, 5], 4, [0, 4]),
    ],
)
def test_shares_are_as_even_as_the_counts_let_them_be(counts, most, shares):
    assert even_shares(counts, most) == shares


def test_which_samples_a_group_takes_follows_from_the_order_of_all():
    y = np.arange(300) % 3
    found = _part(Part(y, {"row": np.arange(300)}, lambda rows: [rows]), [np.array([0, 2])], 50)
    random = np.random.RandomState(0)
    drawn = [row for one in (0, 2) for row in random.permutation(np.flatnonzero(y == one))[:25].tolist()]
    assert found.columns["row"].tolist() == sorted(drawn)


def test_the_mapping_is_whole():
    stored = json.loads(MAPPING.read_text())
    assert len(stored["superclasses"]) == 100
    assert len({one["wnid"] for group in stored["superclasses"] for one in group["classes"]}) == 461
    assert {name: len(chosen) for name, chosen in stored["versions"].items()} == {"S": 100, "M": 75, "L": 50}
