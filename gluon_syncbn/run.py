"""``python -m gluon_syncbn.run script.py ...``: run a script whose ``gluon.contrib.nn.SyncBatchNorm`` is ours.

The script is not changed and sees its own arguments, as in ``python script.py ...``. With ``-m`` a module is run, as in
``python -m module ...``. For GluonCV's training scripts::

    python -m gluon_syncbn.run train_ssd.py --network resnet50_v1 --data-shape 512 --gpus 0,1 --syncbn

In a job of several processes, started by ``horovodrun`` or ``mpirun``, layers synchronize over all of them::

    horovodrun -np 4 python -m gluon_syncbn.run train_faster_rcnn.py --dataset coco --use-fpn --horovod \
        --norm-layer syncbn --kv-store device

Some scripts make plain BatchNorm layers in spite of their options: GluonCV's train_ssd.py and train_yolo3.py in a
process with one device. Others have no such option. ``--convert`` before the script's name converts the net where the
script makes its Trainer::

    horovodrun -np 4 python -m gluon_syncbn.run --convert train_ssd.py --network mobilenet0.25 --horovod

``GLUON_SYNCBN_PROCESS_GROUP`` chooses the library that connects them ('horovod', 'mpi'), or 'none'. The default is MPI
if ``mpirun`` has started them and mpi4py is installed, and else Horovod, which the script initializes.
"""

import contextlib
import logging
import os
import runpy
import sys
from typing import Iterator

import gluon_syncbn
from gluon_syncbn.distributed.default import VARIABLE, is_first_of_job, job_of_launcher, name_of_communicator

USAGE = "usage: python -m gluon_syncbn.run [--convert] [-m] script_or_module [arguments ...]"


def main() -> None:
    arguments = sys.argv[1:]
    converts = arguments[:1] == ["--convert"]
    if converts:
        del arguments[0]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip().replace("``", "") + "\n\n" + USAGE)
        sys.exit(0 if arguments else 2)
    if not is_module and not os.path.exists(arguments[0]):
        sys.exit(f"{USAGE}\ngluon_syncbn.run: there is no file {arguments[0]}")
    _connect_processes()
    gluon_syncbn.install(converts)
    sys.argv = arguments
    with _showing_conversions() if converts else contextlib.nullcontext():
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")


def _connect_processes() -> None:
    """Choose the library that connects the processes of a job, before the script makes layers."""
    job = job_of_launcher()
    if job is None:
        return
    name = os.environ.setdefault(VARIABLE, "auto")
    if name == "auto":
        name = os.environ[VARIABLE] = name_of_communicator()
    if name == "mpi":
        gluon_syncbn.init_process_group(name)  # while all processes are here
    if name != "none" and is_first_of_job():
        print(f"gluon_syncbn.run: layers synchronize over {job.size} processes, through {name}.", file=sys.stderr)


@contextlib.contextmanager
def _showing_conversions() -> Iterator[None]:
    """Within the ``with`` block, write the log of conversions to stderr, also if the script configures no logging."""
    log = logging.getLogger("gluon_syncbn")
    log.setLevel(logging.INFO)
    if not is_first_of_job():
        log.addHandler(logging.NullHandler())
        yield
        return
    records = []

    def count(record: logging.LogRecord) -> bool:
        if record.name == "gluon_syncbn._install":
            records.append(record)
        return True

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gluon_syncbn.run: %(message)s"))
    handler.addFilter(count)
    log.addHandler(handler)
    try:
        yield
    finally:
        if not records:
            log.warning("the script made no gluon.Trainer, so --convert has converted nothing.")


if __name__ == "__main__":
    main()
