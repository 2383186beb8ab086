"""``python -m gluon_syncbn.run script.py ...``: run a script whose ``gluon.contrib.nn.SyncBatchNorm`` is ours.

The script is not changed and sees its own arguments, as in ``python script.py ...``. With ``-m`` a module is run, as in
``python -m module ...``. For GluonCV's training scripts::

    python -m gluon_syncbn.run train_ssd.py --network resnet50_v1 --gpus 0,1,2,3 --syncbn

Without a GPU it says on stderr what such a script takes of memory, and what bounds that.
"""

import os
import runpy
import sys

from gluon_syncbn._install import install
from gluon_syncbn.engine.cpu_resources import may_have_gpus

SLOTS = "MXNET_CPU_TEMP_COPY"
USAGE = "usage: python -m gluon_syncbn.run [-m] script_or_module [arguments ...]"


def main() -> None:
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip() + "\n\n" + USAGE)
        sys.exit(0 if arguments else 2)
    if not is_module and not os.path.exists(arguments[0]):
        sys.exit(f"{USAGE}\ngluon_syncbn.run: there is no file {arguments[0]}")
    if not may_have_gpus():
        slots = os.environ[SLOTS]  # the user's number, or ours since the package was imported
        print(
            f"gluon_syncbn.run: no GPU is used. With several CPU devices, a net that is not static keeps a buffer for "
            f"each of {SLOTS}={slots} slots: 1 to 11 GiB after a few steps of GluonCV's scripts, and more later. Set "
            f"it to 1024 for two devices (docs/migration.md).",
            file=sys.stderr,
        )
    install()
    sys.argv = arguments
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
