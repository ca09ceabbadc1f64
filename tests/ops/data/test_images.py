"""Images brought to one size, and the data that have none to bring."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedemu.ops.data.corpora import load_corpus, source_of
from fedemu.ops.data.images import image_blocks
from fedemu.ops.data.source import DataSource, entry_of, locate
from fedemu.ops.experiment import Data
from fedemu.protocol.errors import DataError


def decoded(image, side, tmp_path):
    image.save(tmp_path / "image.png")
    cells = [{"bytes": None, "path": str(tmp_path / "image.png")}]
    source = DataSource("any", image_size=side)
    (block,) = image_blocks(source, np.arange(1), lambda start, stop: cells[start:stop], grey=False)
    return block[0]


def test_the_shorter_side_is_resized_to_eight_sevenths_and_the_centre_is_cut_out(tmp_path):
    gradient = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (64, 256, 3))
    found = decoded(Image.fromarray(np.ascontiguousarray(gradient)), 56, tmp_path)
    # 64 pixels high already, so only the columns 100 to 155 and the rows 4 to 59 are left.
    assert found.shape == (3, 56, 56)
    assert found[0, 0].tolist() == list(range(100, 156))
    wide = Image.fromarray(np.ascontiguousarray(gradient)).resize((512, 128), Image.Resampling.NEAREST)
    halved = decoded(wide, 56, tmp_path)
    assert np.abs(halved[0].astype(int) - found[0]).max() <= 1


def test_an_image_of_the_size_asked_for_stays_as_it_is(tmp_path):
    pixels = np.random.RandomState(0).randint(0, 256, (8, 8, 3), dtype=np.uint8)
    assert decoded(Image.fromarray(pixels), 8, tmp_path).tolist() == pixels.transpose(2, 0, 1).tolist()


def test_a_small_image_is_enlarged(tmp_path):
    assert decoded(Image.new("RGB", (4, 5), (7, 8, 9)), 224, tmp_path).mean((1, 2)).tolist() == [7, 8, 9]


def sideways(place):
    """The bytes of an image of 1 × 2 pixels, 10 and 200 from left to right, that is to be turned by 90 degrees."""
    exif, image, text = Image.Exif(), io.BytesIO(), PngInfo()
    exif[0x0112] = 6
    plain, content = Image.fromarray(np.array([[10, 200]], np.uint8)), exif.tobytes()
    if place == "a JPEG's XMP":
        # Blocks of 8 × 8 pixels of one value each, which JPEG keeps.
        plain = plain.resize((16, 8), Image.Resampling.NEAREST)
        xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
        plain.save(image, "JPEG", xmp=xmp)
    elif place == "a TIFF's tags":
        plain.save(image, "TIFF", exif=exif)
    elif place == "a PNG's text":
        text.add_text("Raw profile type exif", f"\nexif\n{len(content):8}\n{content.hex()}\n")
        plain.save(image, "PNG", pnginfo=text)
    else:
        plain.save(image, "PNG")
        chunk = b"eXIf" + content.removeprefix(b"Exif\0\0")
        whole = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        at = image.getvalue().index(b"IDAT" if place == "before a PNG's pixels" else b"IEND") - 4
        return image.getvalue()[:at] + whole + image.getvalue()[at:]
    return image.getvalue()


@pytest.mark.parametrize(
    "place",
    ["before a PNG's pixels", "behind a PNG's pixels", "a PNG's text", "a JPEG's XMP", "a TIFF's tags"],
)
def test_an_image_that_was_taken_sideways_is_turned_upright_wherever_the_file_tells_it(place):
    cells = [{"bytes": sideways(place), "path": None}]
    (block,) = image_blocks(DataSource("photos"), np.arange(1), lambda start, stop: cells[start:stop], grey=True)
    height, width = block.shape[2:]
    assert height == 2 * width
    assert (block[0, 0, 0, 0], block[0, 0, -1, 0]) == (10, 200)


def test_an_image_whose_exif_is_damaged_is_named():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "taken sideways"
    image = io.BytesIO()
    Image.new("RGB", (4, 5)).save(image, "JPEG", exif=exif)
    damaged = image.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x53\x00\x02")  # a text where numbers should be
    cells = [{"bytes": damaged, "path": None}]
    blocks = image_blocks(DataSource("photos"), np.arange(1), lambda start, stop: cells[start:stop], grey=False)
    with pytest.raises(DataError, match=r"^the image in row 1 of 'photos' can't be decoded: required argument"):
        next(blocks)


@pytest.mark.parametrize("setting", [{"image_size": 8}, {"regroup": "superimagenet-s"}])
def test_sizes_and_classes_of_data_that_are_no_folder_of_images_stay(tmp_path, setting):
    (name,) = setting
    with pytest.raises(DataError, match=f"data.{name} goes with folders and hub data sets of images, not with"):
        load_corpus(DataSource("digits", **setting), cache=tmp_path / "cache")


def test_numbers_have_no_image_size(tmp_path):
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("a,label\n1,0\n2,1\n3,0\n4,1\n")
    with pytest.raises(DataError, match="'table' holds numbers and no images; leave out"):
        load_corpus(DataSource("table", image_size=8), cache=tmp_path / "cache", data=tmp_path)


def test_the_settings_reach_the_cache(tmp_path):
    (tmp_path / "imagenet").mkdir()
    plain = source_of(Data(dataset="imagenet"))
    changed = source_of(Data(dataset="imagenet", image_size=64, regroup="superimagenet-l"))
    assert (plain.image_size, plain.regroup) == (0, None)
    assert (changed.image_size, changed.regroup) == (64, "superimagenet-l")
    place = locate("imagenet", tmp_path)
    assert entry_of(plain, place, tmp_path) != entry_of(changed, place, tmp_path)
