"""The rendezvous of both back ends behind one interface: futures of the round's number and the sum over ranks, or of an
error's text."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
from standalone import library
from testing import GRACE, HANG, LONG

from gluon_syncbn import SyncBatchNormError
from gluon_syncbn.backends.portable.group import Rendezvous
from gluon_syncbn.meeting import waiting


class MeetingPoint(AbstractContextManager):
    def __init__(self, ranks, timeout=float(LONG), **options):
        self._open(ranks, timeout, **options)
        self._threads = ThreadPoolExecutor(4 * ranks)

    def meet(self, rank, values, key=0):
        return self._threads.submit(self._meet, rank, np.array(values, np.float64), key)

    def all(self, values, first=0):
        """Of what the ranks from the ``first`` on bring."""
        meetings = [self.meet(rank, value) for rank, value in enumerate(values, first)]
        return [item.result(timeout=HANG) for item in meetings]

    def __exit__(self, *_):
        self._threads.shutdown()


class Native(MeetingPoint):
    def _open(self, ranks, timeout):
        new, self._call = library().gluon_syncbn_rendezvous_new, library().gluon_syncbn_rendezvous_meet
        new.restype, self._call.restype = ctypes.c_void_p, ctypes.c_int64
        self._handle = ctypes.c_void_p(new(b"here", ranks, ctypes.c_double(timeout)))

    def _meet(self, rank, total, key):
        error = ctypes.create_string_buffer(1000)
        address = total.ctypes.data_as(ctypes.c_void_p)
        size, place = ctypes.c_int64(total.size), ctypes.c_int64(key)
        number = self._call(self._handle, rank, address, size, place, error, ctypes.c_int64(1000))
        return (number, total.tolist()) if number else error.value.decode().strip()

    def __exit__(self, *_):
        super().__exit__()
        library().gluon_syncbn_rendezvous_free(self._handle)


class Portable(MeetingPoint):
    """``exchange`` reduces what the ranks bring, through a KVStore perhaps."""

    def _open(self, ranks, timeout, exchange=lambda parts: np.sum(parts, axis=0).tolist()):
        self._rendezvous = Rendezvous("here", [f"rank {rank}" for rank in range(ranks)], timeout, exchange)

    def _meet(self, rank, values, key):
        try:
            result, number = self._rendezvous.all_reduce(rank, values, key)
        except SyncBatchNormError as error:
            return str(error)
        return number, result


def cut_short(because):
    """As `waiting.cut_short_from_now_on`, for the library of these tests, too."""
    waiting.cut_short_from_now_on(because)
    library().gluon_syncbn_cut_waits_short(because.encode(), ctypes.c_double(GRACE), ctypes.c_double(GRACE))


KINDS = {"native": Native, "portable": Portable}
