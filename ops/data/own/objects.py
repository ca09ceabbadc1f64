"""Objects that hold a data set: pairs of arrays, torch's data sets, tables of pandas and of Hugging Face.

Neither torch nor pandas nor datasets is imported before an object of theirs comes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.own.pillow import channels_first, is_image, of_eight_bits
from fedemu.protocol.code.own_code import account, own_frames
from fedemu.protocol.errors import DataError
from fedemu.protocol.wording import an_object

KEYS = ("x", "y", "test_x", "test_y", "class_names", "columns", "test_columns")
"""The keys of a mapping of arrays. All but the first two may be left out."""
FORMS = (
    "a pair (x, y) of arrays, a torch Dataset of pairs (x, y), a pandas DataFrame, a Hugging Face Dataset, a mapping "
    "with x and y, or two of one kind for training and test"
)


def held_in(said: str, made: Any) -> Any:
    """What an object holds: a mapping of arrays with some of ``KEYS``, or a ``datasets.DatasetDict``.

    ``said`` names the object in errors. Raises DataError if it holds no data set, or an item of it fails.
    """
    train, test = _splits(said, made)
    if _is_table(train) or _is_table(test):
        return _tables(said, train, test)
    if isinstance(train, Mapping):
        return _mapping(said, train, test)
    x, y = _labelled(said, train)
    if test is None:
        return {"x": x, "y": y}
    test_x, test_y = _labelled(f"the test split of {said}", test)
    return {"x": x, "y": y, "test_x": test_x, "test_y": test_y}


def called(found: Any) -> Any:
    """What a function or a class gives without arguments; any other object as it is."""
    plain = isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__"))
    return found() if plain else found


def array_of(value: Any) -> NDArray[Any]:
    """A tensor, an image, a list or an array as an array.

    An image becomes ``[channels, height, width]``, a list of images ``[n, channels, height, width]``.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)
    if is_image(value):
        return channels_first(of_eight_bits(value) or value)
    if isinstance(value, list | tuple) and value and all(map(is_image, value)):
        return np.stack([array_of(image) for image in value])
    return np.asarray(value)


def _splits(said: str, made: Any) -> tuple[Any, Any]:
    """The training part of an object and its test part, None if it has none."""
    if isinstance(made, Mapping) and not _is_table(made) and "train" in made:
        if extra := {*made} - {"train", "test"}:
            raise DataError(f"{said} has the splits {', '.join(map(str, made))}; leave out {extra.pop()!r}")
        return made["train"], made.get("test")
    if isinstance(made, tuple | list) and len(made) == 2 and all(map(_is_whole, made)):
        return made[0], made[1]
    return made, None


def _is_whole(part: Any) -> bool:
    """Whether one half of a pair is a data set by itself, and not an array."""
    return _is_table(part) or _is_items(part) or (isinstance(part, tuple) and len(part) == 2)


def _is_table(made: Any) -> bool:
    return _is(made, "datasets", "Dataset", "DatasetDict") or _is(made, "pandas", "DataFrame")


def _is_items(made: Any) -> bool:
    """Whether an object gives items by their number, as torch's data sets do."""
    if _is(made, "torch.utils.data", "Dataset"):
        return True
    plain = isinstance(made, Mapping | tuple | list | str | bytes | np.ndarray)
    return not plain and not hasattr(made, "__array__") and hasattr(made, "__getitem__") and hasattr(made, "__len__")


def _is(made: Any, module: str, *names: str) -> bool:
    """Whether an object is of one of these classes. If their module was not imported, it is not."""
    found = sys.modules.get(module)
    return found is not None and isinstance(made, tuple(getattr(found, name) for name in names))


def _tables(said: str, train: Any, test: Any) -> Any:
    import datasets  # type: ignore[import-untyped]

    if isinstance(train, datasets.DatasetDict):
        if test is not None:
            raise DataError(f"{said} has several data sets of splits; give one DatasetDict")
        return datasets.DatasetDict({name: _unformatted(said, part) for name, part in train.items()})
    parts = {"train": train} if test is None else {"train": train, "test": test}
    if wrong := [name for name, part in parts.items() if not _is_table(part)]:
        raise DataError(f"{said} has {an_object(parts[wrong[0]])} for {wrong[0]} beside a table; give two tables")
    made = {}
    for name, part in parts.items():
        try:
            whole = isinstance(part, datasets.Dataset)
            made[name] = part if whole else datasets.Dataset.from_pandas(part, preserve_index=False)
        except Exception as error:
            raise DataError(f"{said} can't be read as a table: {account(error)}") from error
    return datasets.DatasetDict({name: _unformatted(said, part) for name, part in made.items()})


def _unformatted(said: str, table: Any) -> Any:
    """A table without the form in which it hands out its cells. Raises DataError if a function computes them."""
    if table.format["type"] == "custom":
        raise DataError(
            f"{said} has a transform, which computes samples whenever they are read; apply it by map(), or take it off "
            "by with_format(None)"
        )
    return table.with_format(None)


def _mapping(said: str, made: Mapping[Any, Any], test: Any) -> dict[str, Any]:
    if not {"x", "y"} <= set(made):
        raise DataError(f"{said} is a mapping without x and y, but with {', '.join(map(str, made)) or 'nothing'}")
    extra = set(made) - set(KEYS)
    if extra or ("test_x" in made) != ("test_y" in made):
        raise DataError(f"{said} returned {', '.join(sorted(map(str, made)))}; docs/data.md tells the keys")
    found: dict[str, Any] = {key: _array(said, key, value) for key, value in made.items() if key in KEYS[:4]}
    if test is not None:
        found["test_x"], found["test_y"] = _labelled(f"the test split of {said}", test)
        if isinstance(test, Mapping) and "columns" in test:
            made = {**made, "test_columns": test["columns"]}
    for key in ("columns", "test_columns"):
        if key in made:
            found[key] = _columns(said, key, made[key])
    if "class_names" in made:
        names = made["class_names"]
        if isinstance(names, str | bytes) or not isinstance(names, Sequence | np.ndarray):
            raise DataError(f"{said} has class_names that are no list, but {type(names).__name__}")
        found["class_names"] = list(map(str, names))
    return found


def _columns(said: str, key: str, made: Any) -> dict[str, NDArray[Any]]:
    if not isinstance(made, Mapping):
        raise DataError(f"{said} has {key} that are no mapping of names to values, but {type(made).__name__}")
    return {str(name): _array(said, f"the column {name!r}", column) for name, column in made.items()}


def _labelled(said: str, part: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """The samples and labels of one part: a pair of arrays, a mapping, or items by number."""
    if isinstance(part, Mapping) and {"x", "y"} <= set(part):
        return _array(said, "x", part["x"]), _array(said, "y", part["y"])
    if isinstance(part, tuple | list) and len(part) == 2:
        return _array(said, "x", part[0]), _array(said, "y", part[1])
    if _is_items(part):
        return _items(said, part)
    many = f" of {len(part)}" if isinstance(part, tuple | list) else ""
    raise DataError(f"{said} holds no data set but {type(part).__name__}{many}; give {FORMS}")


def _array(said: str, what: str, value: Any) -> NDArray[Any]:
    """Numbers or texts as an array. They may be objects, as a column of pandas gives them."""
    try:
        array = array_of(value)
    except ValueError as error:
        raise DataError(f"{said} has parts of different shapes in {what}: {error}") from error
    except Exception as error:  # such as a sparse tensor, or one without values
        raise DataError(f"{said} has no array in {what}: {account(error)}") from error
    if np.ma.is_masked(value):
        raise DataError(f"{said} has masked values in {what}; fill them, or leave these samples out")
    if array.dtype != object:
        return array
    kind = next((kind for kind in (str, Number) if array.size and isinstance(array.flat[0], kind)), ())
    if odd := [cell for cell in array.flat if not isinstance(cell, kind)]:
        raise DataError(f"{said} has {odd[0]!r:.60} in {what}; it must be all numbers, or all texts")
    return np.array(array.tolist())


def _items(said: str, data: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """All items ``(x, y)`` of a data set that gives them by their number."""
    try:
        count = len(data)
    except Exception as error:
        if isinstance(error, TypeError | AttributeError) and not own_frames(error):
            raise DataError(
                f"{said} is {an_object(data)} without a length; give one whose items have numbers, with __len__"
            ) from error
        raise DataError(f"the length of {said} failed with {account(error)}") from error
    found: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for number in range(count):
        try:
            item = data[number]
        except Exception as error:
            raise DataError(f"item {number} of {said} failed with {account(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            many = f" of {len(item)}" if isinstance(item, tuple | list | Mapping) else ""
            raise DataError(f"item {number} of {said} is {an_object(item)}{many}; it must be a pair (x, y)")
        pair = _array(said, f"x of item {number}", item[0]), _array(said, f"y of item {number}", item[1])
        if found and pair[0].shape != found[0][0].shape:
            raise DataError(
                f"item {number} of {said} has a sample {list(pair[0].shape)}, and item 0 has "
                f"{list(found[0][0].shape)}; all must have one shape"
            )
        if pair[1].size != 1:
            raise DataError(f"item {number} of {said} has a label {list(pair[1].shape)}; it must be one value")
        found.append(pair)
    if not found:
        raise DataError(f"{said} has no items")
    return np.stack([x for x, _ in found]), np.array([y.item() for _, y in found])
