"""Steps that fail, as users write them, in one process; after each, every array is compared.

    python tests/failed_step.py --backend native|portable [--cases 100] [--seed 0] [--fault NAME] [--mode NAME] ...

A small net trains on two CPU devices. In one step something fails; the program reads the loss at some time, gives the
step up or just goes on. A second net has the same weights and sees the same data, but not the failed step. What must
hold: weights and optimizer states are bit for bit those before the failed step; running statistics are those before
it, or those of its own forward pass; two steps later the weights are those of the second net. Where a backward pass has
failed and a KVStore adds up gradients, each weight and its states may be those after the same step of the second net
instead.

test_failed_step.py runs some of each; what is not named on the command line is drawn at random.
"""

import argparse
import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
from harness import MODES, cpus, mx, set_mode, shorten_grace
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn
from gluon_syncbn.mxnet_engine import failures

DEVICES = cpus(2)
TIMEOUT = 2  # seconds in which even a slow machine starts both devices
fired = threading.Event()  # the user's operator has failed
trouble = {}  # by place in the net: the devices on which the user's operator fails, and the direction


class _Passage(mx.operator.CustomOp):
    def __init__(self, place, device):
        super().__init__()
        self.place, self.device = place, device

    def _fail_in(self, direction):
        devices, when = trouble.get(self.place, ((), ""))
        if self.device in devices and when == direction:
            fired.set()
            # MXNet keeps the error of a custom operator in one slot for all, without a lock.
            time.sleep(0.02 * self.device.device_id)
            raise OSError("the disk is full")

    def forward(self, is_train, req, in_data, out_data, aux):
        self._fail_in("forward")
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self._fail_in("backward")
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("failing_passage")
class _PassageProp(mx.operator.CustomOpProp):
    def __init__(self, place, **_):
        super().__init__()
        self.place = int(place)

    def create_operator(self, ctx, shapes, dtypes):
        return _Passage(self.place, ctx)


class Passage(HybridBlock):
    """The user's own operator, written in Python."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def hybrid_forward(self, F, x):
        return F.Custom(x, place=self.place, op_type="failing_passage")


class Net(HybridBlock):
    """Eight blocks of convolution, norm and ReLU, one of them on a branch; two outputs."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.trunk = nn.HybridSequential()
            for number in range(6):
                self.trunk.add(nn.Conv2D(12, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
                if number in (1, 4):
                    self.trunk.add(Passage(number))
            self.main = nn.HybridSequential()
            self.main.add(nn.Conv2D(12, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D())
            self.side = nn.HybridSequential()
            self.side.add(nn.Conv2D(6, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D())

    def hybrid_forward(self, F, x):
        x = self.trunk(x)
        return self.main(x), self.side(x)


def make(backend, mode, optimizer, kvstore, update_on_kvstore, weights=None):
    net = Net()
    net.initialize(mx.init.Xavier(rnd_type="gaussian"), ctx=DEVICES)
    net(mx.nd.zeros((1, 3, 16, 16)))  # shapes
    if weights is not None:
        for name, parameter in net.collect_params().items():
            parameter.set_data(mx.nd.array(weights[name][0]))
    gluon_syncbn.convert_sync_batchnorm(net, backend=backend, timeout=TIMEOUT)
    set_mode(net, mode)
    options = {"learning_rate": 0.05, "wd": 1e-3, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    how = {} if kvstore is None else {"update_on_kvstore": update_on_kvstore}
    return net, gluon.Trainer(net.collect_params(), optimizer, options, kvstore=kvstore, **how)


def arrays_of(net):
    return {name: [item.asnumpy() for item in p.list_data()] for name, p in net.collect_params().items()}


def states_of(trainer):
    """Of the optimizer, flat."""
    updaters = [trainer._kvstore._updater] if trainer._update_on_kvstore else trainer._updaters
    found = {}
    for number, updater in enumerate(updaters):
        for index, state in updater.states.items():
            items = state if isinstance(state, (list, tuple)) else [state]
            found[number, index] = [item.asnumpy() for item in items if item is not None]
    return found


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


class Loop:
    """A training loop as users write it. `fail` says what goes wrong in a step, and when it is read."""

    def __init__(self, net, trainer):
        self.net, self.trainer = net, trainer

    def batch(self, number):
        values = np.random.RandomState(1000 + number)
        shards = [values.standard_normal((4, 3, 16, 16)).astype("float32") for _ in DEVICES]
        return [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, DEVICES)]

    def step(self, number, fault=None, read=None):
        """Forward, backward, update; the loss is read ``before``, ``during`` or ``after`` the update, or ``never``."""
        parts = self.batch(number)
        devices = list(range(len(DEVICES)))
        if fault in ("missing_forward", "keyboard_interrupt"):
            devices = [0]
        if fault == "called_twice":
            devices = [0, 0, 1]
        broken = {"input": [1], "all_inputs": [0, 1]}.get(fault, [])
        for rank in broken:  # an operator of MXNet's that fails when it runs
            parts[rank] = parts[rank] + mx.nd.random.normal(0, -1, shape=(1,), ctx=DEVICES[rank])
        with autograd.record():
            losses = []
            for rank in devices:
                main, side = self.net(parts[rank])
                loss = main.square().sum() + side.sum()
                if fault in ("loss", "all_losses") and (rank == 1 or fault == "all_losses"):
                    loss = loss + mx.nd.random.normal(0, -1, shape=(1,), ctx=DEVICES[rank])
                losses.append(loss)
                if fault == "exception_between_devices":
                    raise ValueError("in between")
        if fault == "missing_backward":
            losses[0].backward()
        elif fault == "exception_between_backward_passes":
            losses[0].backward()
            raise ValueError("in between")
        else:
            autograd.backward(losses)
        if fault == "keyboard_interrupt":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        which = losses if read is None or random.random() < 0.5 else losses[::-1]
        reader = None
        if read == "before":
            with contextlib.suppress(mx.MXNetError, KeyboardInterrupt):
                [loss.asnumpy() for loss in which]
        if read == "during":
            reader = threading.Thread(target=read_quietly, args=(which,))
            reader.start()
            time.sleep(random.choice([0, 0, 0.001, 0.01, 0.5]))
        try:
            self.trainer.step(sum(len(part) for part in parts), ignore_stale_grad=fault is not None)
        finally:
            if reader is not None:
                reader.join()
        if read in ("weights", "gradients"):
            parameters = [item for item in self.net.collect_params().values() if item.grad_req != "null"]
            random.shuffle(parameters)
            for parameter in parameters:
                lists = parameter.list_data() if read == "weights" else parameter.list_grad()
                read_quietly([random.choice(lists)])
        if read != "never":
            [loss.asnumpy() for loss in which]


def read_quietly(arrays):
    for array in arrays:
        with contextlib.suppress(mx.MXNetError):
            array.asnumpy()


FAULTS = (
    "missing_forward",
    "missing_backward",
    "called_twice",
    "operator",
    "operator_on_all_devices",
    "operator_in_backward",
    "operator_in_backward_on_all_devices",
    "input",
    "all_inputs",
    "loss",
    "all_losses",
    "exception_between_devices",
    "exception_between_backward_passes",
    "keyboard_interrupt",
)
READS = ("before", "during", "after", "weights", "gradients", "never")
SETTLES = ("abandon", "go on")
OPTIMIZERS = ("sgd", "adam")
KVSTORES = ((None, False), ("local", False), ("local", True), ("device", False), ("device", True))


def set_trouble(fault):
    trouble.clear()
    fired.clear()
    if fault == "operator":
        trouble[1] = (DEVICES[1:], "forward")
    if fault == "operator_on_all_devices":
        trouble[4] = (DEVICES, "forward")
    if fault == "operator_in_backward":
        trouble[4] = (DEVICES[1:], "backward")
    if fault == "operator_in_backward_on_all_devices":
        trouble[1] = (DEVICES, "backward")


def run_case(backend, mode, fault, read, settle, optimizer, kvstore):
    """Returns what was wrong."""
    net, trainer = make(backend, mode, optimizer, *kvstore)
    twin, its_trainer = make(backend, mode, optimizer, *kvstore, weights=arrays_of(net))
    loop, undisturbed = Loop(net, trainer), Loop(twin, its_trainer)
    for number in range(2):
        loop.step(number)
        undisturbed.step(number)
    before, states = arrays_of(net), states_of(trainer)
    undisturbed.step(2)
    after, states_after = arrays_of(twin), states_of(its_trainer)
    may_be_partial = kvstore[0] is not None and "in_backward" in fault
    changed = set()
    wrong = []

    def compare(when):
        now = arrays_of(net)
        for name in before:
            for rank in range(len(DEVICES)):
                seen = now[name][rank]
                if "running" in name and np.array_equal(seen, after[name][rank]):
                    continue
                if may_be_partial and same(now[name], after[name]):
                    changed.add(name)
                    continue
                if not np.array_equal(seen, before[name][rank]):
                    worst = np.abs(seen - before[name][rank]).max()
                    wrong.append(f"{when}: {name} on {DEVICES[rank]} changed by {worst}")
        theirs = states_of(trainer)
        for key, expected in states.items():
            is_updated = may_be_partial and same(states_after[key], theirs.get(key, []))
            if not (is_updated or same(expected, theirs.get(key, []))):
                wrong.append(f"{when}: state {key} changed")

    set_trouble(fault)
    error = None
    try:
        loop.step(2, fault, read)
    except (mx.MXNetError, RuntimeError, ValueError, KeyboardInterrupt) as problem:
        error = problem
    if fault == "keyboard_interrupt" and not isinstance(error, KeyboardInterrupt):  # it may come late
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.5)
    if error is None and read == "after" and "backward" not in fault:
        wrong.append("no error")
    if trouble:
        assert fired.wait(5)
    time.sleep(random.choice([0, 0, 0.01, 0.1]))
    if settle == "abandon":
        gluon_syncbn.abandon_step()
        compare("after abandon_step")
    else:
        deadline = time.monotonic() + 5
        while not (error is not None and "in between" in str(error)) and not failures.failure():
            assert time.monotonic() < deadline, "the failure was not noticed"
            time.sleep(0.005)
        for attempt in range(2):
            try:
                with autograd.record():
                    pass
            except mx.MXNetError as problem:
                if attempt:
                    wrong.append(f"second record() raised {problem}")
                error = problem
        if error is None or "in between" not in str(error):  # else it is given up when a layer is called
            compare("after record")
    trouble.clear()
    if error is None and read == "never" and settle == "go on":
        wrong.append("nobody was told")
    try:
        for number in (2, 3):
            loop.step(number)
        undisturbed.step(3)
        ours, theirs = arrays_of(net), arrays_of(twin)
        for name in ours:
            if "running" not in name and not changed and not same(ours[name], theirs[name]):
                wrong.append(f"two steps later: {name} differs")
    except mx.MXNetError as problem:
        wrong.append(f"the next step failed: {str(problem)[:300]}")
        gluon_syncbn.abandon_step()
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "portable"], required=True)
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--read", choices=READS)
    parser.add_argument("--settle", choices=SETTLES)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--each-fault", action="store_true", help="once, in place of --cases")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shorten_grace(0.2)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    print("seed", seed, flush=True)
    number_wrong = 0
    faults = FAULTS if options.each_fault else [options.fault] * options.cases
    for number, fault in enumerate(faults):
        random.seed(seed + number)
        mx.random.seed(seed + number)
        np.random.seed((seed + number) % (1 << 32))
        case = (
            options.mode or random.choice(list(MODES)),
            fault or random.choice(FAULTS),
            options.read or random.choice(READS),
            options.settle or random.choice(SETTLES),
            random.choice(OPTIMIZERS),
            random.choice(KVSTORES),
        )
        started = time.monotonic()
        wrong = run_case(options.backend, *case)
        seconds = time.monotonic() - started
        if wrong:
            number_wrong += 1
            print(f"WRONG {number} {case} ({seconds:.1f} s): {len(wrong)}:", *wrong[:4], sep="\n    ", flush=True)
        elif os.environ.get("VERBOSE"):
            print(f"right {number} {case} ({seconds:.1f} s)", flush=True)
    print(f"{number_wrong} of {len(faults)} cases wrong")
    raise SystemExit(number_wrong > 0)


if __name__ == "__main__":
    main()
