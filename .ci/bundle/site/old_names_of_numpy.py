"""NumPy's names for Python's own types, which MXNet 1.9.1 uses and NumPy has dropped in 1.24. A .pth file imports this
when an interpreter starts."""

import numpy

for _type in (bool, int, float, complex, object, str):
    setattr(numpy, _type.__name__, _type)
