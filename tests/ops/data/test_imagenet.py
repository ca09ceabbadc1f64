"""ImageNet and TinyImageNet in small trees of their forms."""

import datasets as hugging_face
import numpy as np
import pytest
from PIL import Image

from fedemu.ops.data.corpora import load_corpus
from fedemu.ops.data.source import DataSource
from fedemu.protocol.errors import DataError

FISH, SHARK, COCK = "n01443537", "n01484850", "n01514668"


@pytest.fixture
def opened(tmp_path):
    """Opens a folder of this test as a data set."""

    def open_it(name="tiny", **settings):
        return load_corpus(DataSource(name, **settings), cache=tmp_path / "cache", data=tmp_path)

    return open_it


def save(path, value, size=(16, 16), colour=True):
    """An image of one colour, whose first channel is about ``value``. Without ``colour`` it is grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Image.new("RGB", size, (value, 20, 200)) if colour else Image.new("L", size, value)
    made.save(path, "JPEG", quality=95, subsampling=0)


def told(split):
    """The values that were drawn. JPEG changes them a little."""
    return [round(float(value), -1) for value in split.x[:, 0].mean((1, 2))]


@pytest.fixture
def tiny(tmp_path):
    """A tree as in TinyImageNet's archive, with two classes: two training images and one test image each.

    One is grey.
    """
    folder = tmp_path / "tiny"
    for wnid, values in ((SHARK, (10, 20)), (FISH, (30, 40))):
        for number, value in enumerate(values):
            image = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            save(image, value, colour=value != 40)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("0 0 1 1\n")
    save(folder / "val" / "images" / "val_0.JPEG", 50)
    save(folder / "val" / "images" / "val_1.JPEG", 60, colour=False)
    (folder / "val" / "val_annotations.txt").write_text(
        f"val_0.JPEG\t{SHARK}\t0\t0\t9\t9\nval_1.JPEG\t{FISH}\t1\t1\t9\t9\n"
    )
    (folder / "wnids.txt").write_text(f"{SHARK}\n{FISH}\n")
    save(folder / "test" / "images" / "test_0.JPEG", 70)
    return folder


# TinyImageNet


def test_tinyimagenet_is_read_as_it_is_unpacked_and_grey_images_get_three_channels(tiny, opened):
    corpus = opened()
    assert corpus.class_names == (FISH, SHARK)
    assert corpus.input_shape == (3, 16, 16)
    assert (told(corpus.train), corpus.train.y.tolist()) == ([30, 40, 10, 20], [0, 0, 1, 1])
    assert (told(corpus.test), corpus.test.y.tolist()) == ([60, 50], [0, 1])
    grey = corpus.train.x[1]
    assert grey[0].tolist() == grey[1].tolist() == grey[2].tolist()


def test_tinyimagenet_may_lie_below_its_archives_folder(tiny, opened, tmp_path):
    (tmp_path / "unpacked").mkdir()
    tiny.rename(tmp_path / "unpacked" / "tiny-imagenet-200")
    assert told(opened("unpacked").test) == [60, 50]


def test_the_hugging_face_form_of_tinyimagenet_is_the_same_data(tiny, opened, tmp_path):
    tree = opened()
    features = hugging_face.Features(
        image=hugging_face.Image(), label=hugging_face.ClassLabel(names=list(tree.class_names))
    )
    (tmp_path / "tiny-imagenet").mkdir()
    for name, split in (("train", tree.train), ("valid", tree.test)):
        images = [Image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0))) for x in split.x]
        made = hugging_face.Dataset.from_dict({"image": images, "label": split.y.tolist()}, features=features)
        made.to_parquet(tmp_path / "tiny-imagenet" / f"{name}-00000-of-00001.parquet")
    assert opened("tiny-imagenet").digest == tree.digest


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda folder: (folder / "val" / "val_annotations.txt").unlink(),
            r"nothing tells the classes of the images in .*/val/images: there is no .*/val/val_annotations.txt",
        ),
        (
            lambda folder: (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09999999\n"),
            r"line 1 of .*/val_annotations.txt names the class n09999999, which has no training folder",
        ),
        (
            lambda folder: (folder / "val" / "val_annotations.txt").write_text(f"\nval_7.JPEG\t{FISH}\n"),
            r"line 2 of .*/val_annotations.txt names val_7.JPEG, which is not in .*/val/images",
        ),
        (
            lambda folder: (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\n"),
            r"line 1 of .*/val_annotations.txt should give an image and its class, but is 'val_0.JPEG'",
        ),
        (
            lambda folder: (folder / "val" / "val_annotations.txt").write_text(f"val_1.JPEG\t{FISH}\n"),
            r"val_annotations.txt does not tell the class of val_0.JPEG in .*/val/images",
        ),
        (
            lambda folder: (folder / "wnids.txt").write_text("n00000001 n00000002 n00000003 n00000004"),
            r"wnids.txt lists n00000001, n00000002, n00000003 and 1 more, but .*/train has no such folder",
        ),
        (
            lambda folder: (folder / "train" / COCK).mkdir(),
            rf"the folder .*/train/{COCK} holds no images",
        ),
        (
            lambda folder: (folder / "train" / FISH / "images" / f"{FISH}_0.JPEG").write_bytes(b"no image"),
            rf"the image in .*/train/{FISH}/images/{FISH}_0.JPEG can't be decoded: cannot identify image file$",
        ),
        (
            lambda folder: save(folder / "train" / FISH / "images" / "z.JPEG", 0, size=(20, 16)),
            rf"the images of 'tiny' differ in size: 16 x 16 first, 20 x 16 in .*/{FISH}/images/z.JPEG; set data.im",
        ),
        (
            lambda folder: save(folder / "val" / COCK / "0.JPEG", 0),
            rf"/val has folders of classes that .*/train lacks: {COCK}$",
        ),
    ],
)
def test_a_mistake_in_a_tree_is_told_with_the_name_of_its_file(tiny, opened, change, complaint):
    change(tiny)
    with pytest.raises(DataError, match=complaint):
        opened()


def test_a_tree_has_no_columns(tiny, opened):
    with pytest.raises(DataError, match="'tiny' has no column 'person': it is a folder of images by class"):
        opened(columns=("person",))


# ImageNet


@pytest.fixture
def imagenet(tmp_path):
    """Writes a tree with a number of training images for each class, some wide and some high, and one test image."""

    def write(base="imagenet", **counts):
        folder = tmp_path / base
        for place, (wnid, count) in enumerate(counts.items()):
            for number in range(count):
                size = ((24, 16), (16, 30), (40, 40))[number % 3]
                save(folder / "train" / wnid / f"{wnid}_{number}.JPEG", 10 * place, size=size)
            save(folder / "val" / wnid / f"ILSVRC2012_val_{place:08d}.JPEG", 10 * place + 100, size=(30, 17))
        return folder

    return write


def test_imagenets_images_are_brought_to_one_size(imagenet, opened):
    imagenet(**{SHARK: 3, FISH: 2})
    corpus = opened("imagenet", image_size=8)
    assert (corpus.class_names, corpus.input_shape) == ((FISH, SHARK), (3, 8, 8))
    assert (told(corpus.train), corpus.train.y.tolist()) == ([10, 10, 0, 0, 0], [0, 0, 1, 1, 1])
    assert (told(corpus.test), corpus.test.y.tolist()) == ([110, 100], [0, 1])


def test_validation_images_in_one_folder_are_read_by_kaggles_solution(imagenet, opened, tmp_path):
    tree = imagenet("kaggle/ILSVRC/Data/CLS-LOC", **{SHARK: 1, FISH: 1})
    for place, wnid in enumerate((SHARK, FISH)):
        (tree / "val" / wnid / f"ILSVRC2012_val_{place:08d}.JPEG").rename(tree / "val" / f"image_{place}.JPEG")
        (tree / "val" / wnid).rmdir()
    lines = ["ImageId,PredictionString", f"image_1,{FISH} 1 1 9 9 {FISH} 2 2 7 7", f"image_0,{SHARK} 0 0 9 9", ""]
    (tmp_path / "kaggle" / "LOC_val_solution.csv").write_text("\n".join(lines))
    corpus = opened("kaggle", image_size=8)
    assert (told(corpus.test), corpus.test.y.tolist()) == ([110, 100], [0, 1])


def test_without_validation_images_a_part_is_set_apart(imagenet, opened, tmp_path):
    folder = imagenet(**{SHARK: 4, FISH: 2})
    (folder / "val").rename(tmp_path / "elsewhere")
    corpus = opened("imagenet", image_size=8, test_fraction=0.3)
    assert (len(corpus.train), len(corpus.test)) == (4, 2)


def test_a_tree_of_links_is_decoded_again_when_a_link_or_a_file_behind_one_has_come(imagenet, opened, tmp_path):
    store = imagenet("store", **{SHARK: 2, FISH: 2, COCK: 2})
    for split in ("train", "val"):
        (tmp_path / "some" / split).mkdir(parents=True)
    (tmp_path / "some" / ".#open in an editor").symlink_to("nobody@nowhere:1")
    (tmp_path / "some" / "round").symlink_to(tmp_path / "some")

    def link(*wnids):
        for split in ("train", "val"):
            for wnid in wnids:
                (tmp_path / "some" / split / wnid).symlink_to(store / split / wnid)

    link(SHARK, FISH)
    assert opened("some", image_size=8).class_names == (FISH, SHARK)
    link(COCK)
    corpus = opened("some", image_size=8)
    assert (corpus.class_names, len(corpus.train)) == ((FISH, SHARK, COCK), 6)
    save(store / "train" / COCK / "another.JPEG", 70, size=(40, 40))
    assert len(opened("some", image_size=8).train) == 7


def test_a_split_whose_labels_are_kept_back_is_not_tested_on(opened, tmp_path):
    features = hugging_face.Features(x=hugging_face.Value("float32"), label=hugging_face.ClassLabel(names=["a", "b"]))
    (tmp_path / "hidden").mkdir()
    for split, x, label in (("train", [1.0, 2.0], [0, 1]), ("validation", [3.0], [1]), ("test", [4.0], [-1])):
        made = hugging_face.Dataset.from_dict({"x": x, "label": label}, features=features)
        made.to_parquet(tmp_path / "hidden" / f"{split}-00000-of-00001.parquet")
    corpus = opened("hidden")
    assert (corpus.test.x.tolist(), corpus.test.y.tolist()) == ([[3.0]], [1])
