"""The readers of data sets, one for each form that data come in.

To add a form, write ``decode_x(source, place, ...) -> Decoded`` in a file of its own (``leaf.py`` is a short example),
and add a ``Reader`` to ``READERS``. ``split.divided`` makes the test split, leaves out rare ids and gives the
``Decoded``; ``source.locate`` has to know names that are neither folders nor files nor ids of the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedemu.ops.data.cache import Decoded
from fedemu.ops.data.leaf import decode_leaf, leaf_files
from fedemu.ops.data.made import built_in, own
from fedemu.ops.data.source import CSV_FILES, TABLE_FILES, DataSource, Place, ends_in
from fedemu.ops.data.tables import decode_numbers
from fedemu.ops.data.texts import decode_texts
from fedemu.protocol.errors import DataError


@dataclass(frozen=True)
class Reader:
    """How one form of data is recognised and read.

    ``fits`` says whether a place holds data of this form. ``decode`` gets the source, the place, an empty folder for
    temporary files, and whether images are to have one channel only; it raises DataError if it cannot read the data.
    ``follows`` are those of the settings ``SETTINGS`` that it follows; a source that has another one is refused.
    """

    fits: Callable[[DataSource, Place], bool]
    decode: Callable[[DataSource, Place, Path, bool], Decoded]
    follows: frozenset[str] = frozenset()


SETTINGS = {
    "train_split": "the data set {0!r} has no splits to choose from; leave out data.train_split",
    "text": "the data set {0!r} holds no texts; set data.text.kind = 'none'",
    "image_size": "data.image_size goes with folders and hub data sets of images, not with {0!r}",
    "regroup": "data.regroup goes with folders and hub data sets of images, not with {0!r}",
}
"""The fields of ``DataSource`` that only some readers follow, each with what is said to a source of another reader."""


def reader_of(source: DataSource, place: Place) -> Reader:
    """The first of ``READERS`` that fits. Raises DataError if it does not follow a setting of the source."""
    reader = next(reader for reader in READERS if reader.fits(source, place))
    for setting, complaint in SETTINGS.items():
        if getattr(source, setting) and setting not in reader.follows:
            raise DataError(complaint.format(source.dataset))
    return reader


def _texts(source: DataSource, place: Place, scratch: Path, grey: bool) -> Decoded:
    if source.text is None and ends_in(place.where, CSV_FILES):
        return decode_numbers(source, place)
    if source.text is None:
        raise DataError(f"{source.dataset!r} is a file of texts; set data.text.kind to what is to be predicted of them")
    return decode_texts(source, source.text, place, scratch)


def _images(source: DataSource, place: Place, scratch: Path, grey: bool) -> Decoded:
    # Only a process that decodes images imports these: they need datasets, pyarrow and Pillow.
    from fedemu.ops.data.imagenet import decode_imagenet, imagenet_folder

    folder = imagenet_folder(place)
    if folder is not None:
        return decode_imagenet(source, place, folder, grey)
    from fedemu.ops.data.hugging_face import decode_table, open_tables

    return decode_table(source, open_tables(source, place, scratch), grey)


READERS = (
    Reader(lambda source, place: place.kind == "built_in", lambda source, place, *_: built_in(place, source)),
    Reader(
        lambda source, place: place.kind in ("function", "object"),
        lambda source, place, _, grey: own(place, source, grey),
        frozenset({"text", "train_split", "image_size"}),
    ),
    Reader(
        lambda source, place: bool(leaf_files(place)),
        lambda source, place, scratch, _: decode_leaf(source, leaf_files(place), scratch),
    ),
    Reader(
        lambda source, place: (
            source.text is not None or (place.kind == "file" and not ends_in(place.where, TABLE_FILES))
        ),
        _texts,
        frozenset({"text", "train_split"}),
    ),
    Reader(lambda source, place: True, _images, frozenset({"train_split", "image_size", "regroup"})),
)
"""All readers, in the order in which they are tried. The last one fits every folder and every data set of the hub."""
