"""The state of a process's steps, in one object: `steps`."""

from typing import NamedTuple

from gluon_syncbn.step.held import Updates
from gluon_syncbn.step.layers import SynchronizedLayers
from gluon_syncbn.step.progress import Progress


class Steps(NamedTuple):
    """The layers that take part, how far Python has come, and updates that are held."""

    layers: SynchronizedLayers
    progress: Progress
    updates: Updates


steps = Steps(SynchronizedLayers(), Progress(), Updates())
