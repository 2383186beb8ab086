"""Python imports this when it starts: MXNet does without what it need not have, which takes half of its import."""

import sys

sys.modules.update(dict.fromkeys(("cv2", "onnx", "scipy.stats", "sklearn")))  # an import of None is an ImportError
