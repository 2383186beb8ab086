import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import harness  # noqa: E402, F401  (imports gluon_syncbn before MXNet computes anything)
