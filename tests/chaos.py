"""Training in which everything goes wrong, again and again in one process, and the step after each time is right.

    python tests/chaos.py --backend native|portable --mode imperative|hybridize|static [--seconds 90] [--seed 0]

Exceptions between the devices' passes and Ctrl-C at any moment (while a graph is made, too) are drawn at random and
caught; `abandon_step` is called, and the outputs and input gradients of the next step are compared with those of
`nn.BatchNorm` on the concatenated batch. test_chaos.py runs some seconds of it.
"""

import argparse
import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import psutil
from harness import MODES, cpus, mx, set_mode
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn

DEVICES = cpus(3)
PREFIX = "branches_"


class Branches(HybridBlock):
    """A head that is called twice, behind convolutions and on parallel branches."""

    def __init__(self):
        super().__init__(prefix=PREFIX)
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"))
            self.branch = nn.HybridSequential()
            self.branch.add(nn.Conv2D(8, 3, padding=1, in_channels=8), nn.BatchNorm(in_channels=8))
            self.head = nn.BatchNorm(in_channels=8)

    def hybrid_forward(self, F, x):
        x = self.stem(x)
        return self.head(self.branch(x) + x) + self.head(x)


class Chaos:
    def __init__(self, mode: str, seed: int):
        self.mode = mode
        self.chance = random.Random(seed)
        values = np.random.RandomState(seed)
        self.shards = [values.standard_normal((2, 3, 8, 8)).astype("float32") for _ in DEVICES]
        self.heads = [values.standard_normal((2, 8, 8, 8)).astype("float32") for _ in DEVICES]
        self.net = Branches()
        self.net.initialize(mx.init.Xavier(), ctx=DEVICES)
        self.expected = self._expect()
        gluon_syncbn.convert_sync_batchnorm(self.net)
        set_mode(self.net, mode)

    def _expect(self):
        reference = Branches()
        reference.initialize()
        ours, theirs = (net.collect_params() for net in (self.net, reference))
        for name in ours:
            theirs[name].set_data(ours[name].data(DEVICES[0]))
        whole = mx.nd.array(np.concatenate(self.shards))
        whole.attach_grad()
        with autograd.record():
            out = reference(whole)
        out.backward(mx.nd.array(np.concatenate(self.heads)))
        return out.asnumpy(), whole.grad.asnumpy()

    def inputs(self, count=None):
        arrays = [mx.nd.array(shard, ctx=device) for shard, device in zip(self.shards[:count], DEVICES)]
        for item in arrays:
            item.attach_grad()
        return arrays

    def forward(self, arrays):
        with autograd.record():
            return [self.net(item) for item in arrays]

    def backward(self, outputs):
        autograd.backward(outputs, [mx.nd.array(head, ctx=out.context) for head, out in zip(self.heads, outputs)])

    def step(self, count=None):
        arrays = self.inputs(count)
        outputs = self.forward(arrays)
        self.backward(outputs)
        return outputs, [item.grad for item in arrays]

    def check(self):
        for seen, right in zip(self.step(), self.expected):
            seen = np.concatenate([item.asnumpy() for item in seen])
            assert np.abs(seen - right).max() < 1e-3 * np.abs(right).max(), np.abs(seen - right).max()
        for parameter in self.net.collect_params().values():
            assert all(np.isfinite(item.asnumpy()).all() for item in parameter.list_data()), parameter.name

    def interrupt(self, *limits: float):
        """Ctrl-C at some time between these, from now."""
        threading.Timer(self.chance.uniform(*limits), os.kill, (os.getpid(), signal.SIGINT)).start()

    # What can go wrong; each ends in an exception.

    def raise_between_devices(self):
        arrays = self.inputs()
        with autograd.record():
            for item in arrays[: self.chance.randrange(1, len(DEVICES))]:
                self.net(item)
            time.sleep(self.chance.choice([0, 0.01, 0.3]))
            raise ValueError

    def raise_between_backward_passes(self):
        outputs = self.forward(self.inputs())
        self.backward(outputs[: self.chance.randrange(1, len(DEVICES))])
        raise ValueError

    def raise_after_one_device_ran_twice(self):
        arrays = self.inputs()
        self.forward([arrays[0], arrays[0], arrays[1]])
        raise ValueError

    def raise_in_a_step_of_some_devices(self):
        with gluon_syncbn.devices(DEVICES[:2], self.net):
            self.step(2)
            self.forward(self.inputs(1))
            raise ValueError

    def interrupt_a_wait(self):
        outputs = self.forward(self.inputs(2))
        self.interrupt(0.3, 1.5)  # in its first tenth of a second a wait does not notice
        outputs[1].asnumpy()

    def interrupt_training(self):
        read = self.chance.choice([self.step, self.check])
        self.interrupt(0, 0.3)
        self._until_interrupted(read)

    def interrupt_the_first_step(self):
        set_mode(self.net, self.mode)  # drops the graph
        self.interrupt(0, 0.06)
        self._until_interrupted(self.step)

    def _until_interrupted(self, action):
        # Python drops a KeyboardInterrupt that is raised in a destructor.
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            action()
        raise KeyboardInterrupt

    FAULTS = (
        raise_between_devices,
        raise_between_backward_passes,
        raise_after_one_device_ran_twice,
        raise_in_a_step_of_some_devices,
        interrupt_a_wait,
        interrupt_training,
        interrupt_the_first_step,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "portable"], required=True)
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["GLUON_SYNCBN_BACKEND"] = options.backend
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chaos, counts, longest = Chaos(options.mode, options.seed), {}, 0.0
    chaos.check()
    deadline = time.monotonic() + options.seconds
    while time.monotonic() < deadline:
        fault = chaos.chance.choice(Chaos.FAULTS)
        started = time.monotonic()
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            fault(chaos)
            raise AssertionError(f"{fault.__name__} did not end in an exception")
        gluon_syncbn.abandon_step()
        longest = max(longest, time.monotonic() - started)
        try:
            chaos.check()
        except BaseException:
            print("WRONG AFTER", fault.__name__)
            raise
        counts[fault.__name__] = counts.get(fault.__name__, 0) + 1
    process = psutil.Process()
    memory, threads = process.memory_info().rss >> 20, process.num_threads()
    print(f"RIGHT AFTER {sum(counts.values())}: {counts}")
    print(f"at most {longest:.1f} s each; {memory} MiB and {threads} threads at the end")


if __name__ == "__main__":
    main()
