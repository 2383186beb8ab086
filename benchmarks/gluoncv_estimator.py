"""Trains an estimator of gluoncv.auto on gpu(0) and gpu(1), as its users do. gluoncv_scripts.py runs this.

Needs Python 3.8 or 3.9: on 3.10 and later, GluonCV's settings (autocfg) raise a TypeError.
"""

import argparse
import os

from gluoncv.auto.data.dataset import ObjectDetectionDataset
from gluoncv.auto.estimators import SSDEstimator, YOLOv3Estimator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("estimator", choices=["SSD", "YOLOv3"])
parser.add_argument("--syncbn", action="store_true")
options = parser.parse_args()

data = ObjectDetectionDataset.from_voc(
    os.path.join(os.environ["MXNET_HOME"], "datasets", "voc", "VOC2007"), splits=["trainval"]
)
common = {"gpus": [0, 1], "num_workers": 0, "train": {"batch_size": 4, "epochs": 2}}
if options.estimator == "SSD":
    network = {"transfer": "ssd_512_mobilenet1.0_coco", "syncbn": options.syncbn}
    estimator = SSDEstimator({**common, "ssd": network})
else:
    # With "transfer" GluonCV leaves the network of its data loader at 80 classes, with any synchronized layer.
    network = {"transfer": None, "base_network": "mobilenet1.0", "syncbn": options.syncbn, "no_random_shape": True}
    estimator = YOLOv3Estimator({**common, "yolo3": {**network, "data_shape": 128}})
print(estimator.fit(data, data))
