"""Images of Pillow as samples: grey or in colours, whatever their mode. Pillow is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_GREY = ("1", "L", "LA", "La")
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


def is_image(value: Any) -> bool:
    """Whether an object is an image of Pillow."""
    return hasattr(value, "getbands")


def of_eight_bits(image: Image.Image) -> Image.Image | None:
    """The image in the mode ``L`` if it is grey, and else in ``RGB``. A palette is looked up, transparency is dropped.

    None if its pixels do not fit eight bits, as in the modes ``I`` and ``F``.
    """
    if image.mode not in (*_GREY, *_COLOUR):
        return None
    wanted = "L" if image.mode in _GREY else "RGB"
    if image.mode == "La":  # Pillow has no direct way
        image = image.convert("LA")
    return image if image.mode == wanted else image.convert(wanted)


def channels_first(image: Image.Image) -> NDArray[Any]:
    """The pixels of an image that is grey or ``RGB``: ``[1, height, width]`` or ``[3, height, width]``."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
