"""See cupy.py."""

import numpy as np


def zeros_pinned(shape, dtype):
    return np.zeros(shape, dtype)
