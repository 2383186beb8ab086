"""A small set for detection and segmentation that needs no download, written as a Pascal VOC tree.

Real handwritten digits (`sklearn.datasets.load_digits`, 1,797 images of 8×8 pixels) at random sizes, places and
colours on crops of the two photographs that scikit-learn ships. Held-out images share neither digits nor parts of the
photographs with the training images: the digits are split in two, and so is each photograph, left from right.
"""

from pathlib import Path
from typing import List, Tuple
from xml.etree import ElementTree

import numpy as np
from gluoncv.data import VOCDetection, VOCSegmentation
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGE_SIZE = 128
DIGIT_SIZES = (28, 64)
BACKGROUND_BRIGHTNESS = 0.5  # of the photograph; the ink is bright, so that an hour's training is not needed
INK = (200, 255)
VISIBLE = 0.3  # a pixel with at least this share of ink belongs to a digit
DIGITS_PER_IMAGE = (2, 6)
PLACES_TO_TRY = 20
HELD_OUT_SHARE = 0.25
YEAR = 2007


class DigitsDetection(VOCDetection):
    """gluoncv's Pascal VOC loader with this set's classes."""

    CLASSES = CLASSES


class DigitsSegmentation(VOCSegmentation):
    """gluoncv's Pascal VOC loader for masks, with this set's classes; class 0 is the background."""

    BASE_DIR = f"VOC{YEAR}"
    CLASSES = ("background", *CLASSES)
    NUM_CLASS = len(CLASSES)


def write_digits_voc(root: Path, train: int = 1500, test: int = 200, seed: int = 0) -> Path:
    """Write the set below ``root`` unless it is there already; return ``root``.

    Parameters
    ----------
    root : Path
        Gets ``VOC2007/{JPEGImages,Annotations,SegmentationClass,ImageSets}``.
    train, test : int
        Numbers of images in the lists ``trainval`` and ``test``; for masks the latter is called ``val``.
    seed : int
        The same seed writes the same images.
    """
    lists = root / f"VOC{YEAR}" / "ImageSets"
    files = {"trainval": ("Main/trainval", "Segmentation/trainval"), "test": ("Main/test", "Segmentation/val")}
    wanted = {"trainval": train, "test": test}
    if all(_count_lines(lists / f"{file}.txt") == wanted[name] for name in wanted for file in files[name]):
        return root
    for folder in ("JPEGImages", "Annotations", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (root / f"VOC{YEAR}" / folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.RandomState(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    held_out = int(len(order) * HELD_OUT_SHARE)
    choice = {"trainval": order[held_out:], "test": order[:held_out]}
    number = 0
    for name, count in wanted.items():
        photographs = [_part(photograph, name) for photograph in load_sample_images().images]
        names = []
        for _ in range(count):
            picture, mask, objects = _compose(rng, photographs, digits.images, digits.target, choice[name])
            names.append(f"{number:06d}")
            _write_image(root / f"VOC{YEAR}", names[-1], picture, mask, objects)
            number += 1
        for file in files[name]:
            (lists / f"{file}.txt").write_text("\n".join(names) + "\n")
    return root


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else -1


def _part(photograph: np.ndarray, name: str) -> np.ndarray:
    border = int(photograph.shape[1] * (1 - HELD_OUT_SHARE))
    return photograph[:, :border] if name == "trainval" else photograph[:, border:]


def _compose(rng, photographs, images, labels, choice) -> Tuple[np.ndarray, np.ndarray, List[tuple]]:
    photograph = photographs[rng.randint(len(photographs))]
    side = rng.randint(IMAGE_SIZE // 2, min(photograph.shape[:2]))
    top, left = (rng.randint(extent - side + 1) for extent in photograph.shape[:2])
    crop = Image.fromarray(photograph[top : top + side, left : left + side])
    picture = np.asarray(crop.resize((IMAGE_SIZE, IMAGE_SIZE), Image.BILINEAR)) * BACKGROUND_BRIGHTNESS
    mask = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.uint8)
    objects = []
    taken, wanted = [], rng.randint(DIGITS_PER_IMAGE[0], DIGITS_PER_IMAGE[1] + 1)
    for _ in range(PLACES_TO_TRY):
        size = rng.randint(*DIGIT_SIZES)
        x, y = rng.randint(IMAGE_SIZE - size, size=2)
        place = (x, y, x + size, y + size)
        if len(taken) == wanted or any(_overlap(place, other) for other in taken):
            continue
        taken.append(place)
        digit = choice[rng.randint(len(choice))]
        ink = np.asarray(Image.fromarray(images[digit] / 16).resize((size, size), Image.BICUBIC)).clip(0, 1)
        patch = picture[y : y + size, x : x + size]
        patch += ink[..., None] * (rng.uniform(*INK, size=3) - patch)
        mask[y : y + size, x : x + size][ink > VISIBLE] = labels[digit] + 1
        rows, columns = (np.flatnonzero(ink.max(axis=axis) > VISIBLE) for axis in (1, 0))
        box = (x + columns[0], y + rows[0], x + columns[-1] + 1, y + rows[-1] + 1)
        objects.append((CLASSES[labels[digit]], box))
    return picture.astype(np.uint8), mask, objects


def _overlap(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _write_image(folder: Path, name: str, picture: np.ndarray, mask: np.ndarray, objects: List[tuple]) -> None:
    Image.fromarray(picture).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
    Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
    annotation = ElementTree.Element("annotation")
    size = ElementTree.SubElement(annotation, "size")
    for tag, extent in zip(("width", "height", "depth"), (IMAGE_SIZE, IMAGE_SIZE, 3)):
        ElementTree.SubElement(size, tag).text = str(extent)
    for label, box in objects:
        item = ElementTree.SubElement(annotation, "object")
        ElementTree.SubElement(item, "name").text = label
        ElementTree.SubElement(item, "difficult").text = "0"
        corners = ElementTree.SubElement(item, "bndbox")
        # Pascal VOC counts pixels from 1 and includes the last one.
        for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), (box[0] + 1, box[1] + 1, box[2], box[3])):
            ElementTree.SubElement(corners, tag).text = str(value)
    ElementTree.ElementTree(annotation).write(folder / "Annotations" / f"{name}.xml")
