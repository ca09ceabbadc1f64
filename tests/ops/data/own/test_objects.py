"""Objects that hold a data set become arrays or tables, whatever form they have."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedemu.ops.data.own.objects import called, held_in
from fedemu.protocol.errors import DataError

X, Y = [[0.5, 1.0], [2.0, 3.0], [4.0, 5.5]], [0, 1, 0]


class Items(Dataset):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        if isinstance(self.items[number], Exception):
            raise self.items[number]
        return self.items[number]


class Torn(Items):
    def __len__(self) -> int:
        raise RuntimeError("no length today")


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(X[0], 0)])


def listed(held: Any) -> dict[str, Any]:
    return {key: value.tolist() for key, value in held.items()}


@pytest.mark.parametrize(
    "made",
    [
        (X, Y),
        [np.array(X), np.array(Y)],
        (torch.tensor(X), torch.tensor(Y)),
        (torch.tensor(X, requires_grad=True), Y),
        {"x": X, "y": torch.tensor(Y)},
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        Items(*zip(X, Y, strict=True)),
    ],
)
def test_a_pair_and_a_torch_data_set_are_arrays(made: Any) -> None:
    assert listed(held_in("data", made)) == {"x": X, "y": Y}


@pytest.mark.parametrize(
    "made",
    [
        ((X, Y), (X[:1], Y[:1])),
        {"train": (X, Y), "test": (X[:1], Y[:1])},
        (TensorDataset(torch.tensor(X), torch.tensor(Y)), Items((X[0], 0))),
        {"train": {"x": X, "y": Y}, "test": (X[:1], Y[:1])},
        {"train": {"x": X, "y": Y}, "test": {"x": X[:1], "y": Y[:1]}},
    ],
)
def test_two_objects_are_the_two_splits(made: Any) -> None:
    assert listed(held_in("data", made)) == {"x": X, "y": Y, "test_x": X[:1], "test_y": Y[:1]}


def test_types_are_those_of_the_object() -> None:
    tokens = held_in("data", (torch.tensor([[1, 2**40]]), ["word"]))
    assert (tokens["x"].dtype, tokens["x"].tolist(), tokens["y"].tolist()) == (np.int64, [[1, 2**40]], ["word"])
    assert held_in("data", Items((torch.tensor([1.5], dtype=torch.bfloat16), 0)))["x"].dtype == np.float32
    grey, coloured = (Image.fromarray(np.full(shape, 7, np.uint8)) for shape in ((2, 3), (2, 3, 3)))
    assert held_in("data", Items((grey, 0)))["x"].shape == (1, 1, 2, 3)
    assert held_in("data", Items((coloured, 0)))["x"].shape == (1, 3, 2, 3)


def solid(mode: str, colour: Any) -> Image.Image:
    """An image of one colour. One with a palette is told its red, green and blue."""
    return (
        Image.new("RGB", (3, 2), colour).quantize(4).convert(mode) if "P" in mode else Image.new(mode, (3, 2), colour)
    )


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (solid("P", (200, 40, 0)), [200, 40, 0]),
        (solid("PA", (200, 40, 0)), [200, 40, 0]),
        (solid("RGBA", (200, 40, 0, 7)), [200, 40, 0]),
        (solid("RGBX", (200, 40, 0, 7)), [200, 40, 0]),
        (solid("RGBa", (200, 40, 0, 255)), [200, 40, 0]),
        (solid("CMYK", (0, 255, 255, 0)), [255, 0, 0]),
        (solid("HSV", (0, 255, 200)), [200, 0, 0]),
        (solid("YCbCr", (9, 128, 128)), [9, 9, 9]),
        (solid("LA", (9, 0)), [9]),
        (solid("La", (9, 255)), [9]),
        (solid("1", 1), [255]),
        (solid("I;16", 300), [300]),
    ],
)
def test_images_of_any_mode_are_grey_or_rgb_without_transparency(image: Image.Image, pixel: list[int]) -> None:
    for made in (Items((image, 0), (image, 1)), ([image, image], [0, 1])):
        x = held_in("data", made)["x"]
        assert x.shape == (2, len(pixel), 2, 3)
        assert x[1, :, 1, 2].tolist() == x[0, :, 0, 0].tolist() == pixel
        assert x.dtype == (np.uint16 if image.mode == "I;16" else np.uint8)


def test_a_function_and_a_class_are_called_and_other_objects_are_not() -> None:
    items = Items((X[0], 0))
    assert called(items) is items
    assert called(lambda: items) is items
    assert isinstance(called(Items), Items)


def test_texts_of_pandas_are_texts_and_every_split_has_its_columns() -> None:
    words = pandas.Series(["low", "high", "low"], dtype=object)
    who = {"who": words.to_numpy()}
    held = held_in("data", {"train": {"x": X, "y": words, "columns": who}, "test": {"x": X, "y": Y, "columns": who}})
    assert held_in("data", (X, np.array([2, 1, True], object)))["y"].tolist() == [2, 1, 1]
    assert {held["y"].dtype.kind, held["columns"]["who"].dtype.kind, held["test_columns"]["who"].dtype.kind} == {"U"}
    assert held["test_columns"]["who"].tolist() == ["low", "high", "low"]
    assert [*held] == ["x", "y", "test_x", "test_y", "columns", "test_columns"]


def test_a_table_is_read_as_it_is_whatever_form_it_hands_out_and_one_that_computes_is_refused() -> None:
    table = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["x", "y"]})
    formed = table.with_format("numpy", columns=["label"])
    for made in (formed, datasets.DatasetDict(train=formed)):
        assert held_in("mine", made)["train"][0] == {"a": 1.0, "label": "x"}
    computing = table.with_transform(lambda rows: rows)
    for made in (computing, datasets.DatasetDict(train=computing), (table, computing)):
        with pytest.raises(DataError, match=r"^mine has a transform, which computes samples when"):
            held_in("mine", made)


def test_frames_and_tables_stay_tables() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0], "label": ["x", "y"]}, index=[5, 6])
    table = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["x", "y"]})
    for made in (frame, table, {"train": frame}, datasets.DatasetDict(train=table)):
        held = held_in("data", made)
        assert held["train"].to_dict() == {"a": [1.0, 2.0], "label": ["x", "y"]}
    both = held_in("data", (frame, table))
    assert [*both] == ["train", "test"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (pandas.DataFrame([X[0]], columns=["a", "a"]), "data can't be read as a table: ValueError: Duplicate column"),
        ((pandas.DataFrame({"a": Y}), (X, Y)), "data has a tuple for test beside a table; give two tables"),
        (3, "data holds no data set but int; give a pair (x, y)"),
        ((X, Y, X, Y), "data holds no data set but tuple of 4; give"),
        ({"x": X}, "data is a mapping without x and y, but with x"),
        ({"train": (X, Y), "valid": (X, Y)}, "data has the splits train, valid; leave out 'valid'"),
        (([[1], [1, 2]], [0, 1]), "data has parts of different shapes in x"),
        (([solid("L", 1), solid("RGB", (1, 2, 3))], [0, 1]), "data has parts of different shapes in x"),
        ({"x": X, "y": [[0], [1, 0], [1]]}, "data has parts of different shapes in y"),
        ((torch.tensor(X).to_sparse(), Y), "data has no array in x: TypeError: can't convert Sparse"),
        (Items((torch.tensor(X[0]).to_sparse(), 0)), "data has no array in x of item 0: TypeError"),
        ((np.ma.masked_equal(X, 2.0), Y), "data has masked values in x; fill them"),
        ((X, None), "data has None in y; it must be all numbers, or all texts"),
        ({"x": X, "y": Y, "columns": {"who": ["a", None, "b"]}}, "data has None in the column 'who'; it must be all"),
        ({"x": X, "y": Y, "columns": Y}, "data has columns that are no mapping of names to values, but list"),
        ({"x": X, "y": Y, "class_names": "ab"}, "data has class_names that are no list, but str"),
        ({"x": X, "y": Y, "class_names": None}, "data has class_names that are no list, but NoneType"),
        (((X, Y), (X, [0, 1, None])), "the test split of data has None in y"),
        (Items((X[0], 0), (X[0][:1], 1)), "item 1 of data has a sample [1], and item 0 has [2]; all must have one"),
        (Items((X[0], [0, 1])), "item 0 of data has a label [2]; it must be one value"),
        (Items({"x": X[0], "y": 0}), "item 0 of data is a dict of 2; it must be a pair (x, y)"),
        (Items((X[0], 0, 1)), "item 0 of data is a tuple of 3; it must be a pair (x, y)"),
        (Items((X[0], 0), ValueError("torn")), "item 1 of data failed with ValueError: torn"),
        (Items(), "data has no items"),
        (Torn(), "the length of data failed with RuntimeError: no length today"),
        (Endless(), "data is an Endless without a length; give one whose items have numbers"),
    ],
)
def test_what_holds_no_data_set_is_told_why(made: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        held_in("data", made)
    assert said in str(caught.value)
