"""Steps in which something goes wrong, again and again in one process; after each, every array is compared.

    python tests/failures.py --backend native|portable --mode MODE [--cases 100] [--seed 0] [--fault NAME] ...

A small net trains on three CPU devices. In one step a fault of `FAULTS` happens; the program reads the loss at some
time, abandons the step or just goes on. A second net has the same weights and sees the same data, but not the failed
step. What must hold: weights and optimizer states are bit for bit those before the failed step; running statistics are
those before it, or those of its own forward pass; the next step has the outputs and input gradients of `nn.BatchNorm`
on the whole batch, and bit for bit those that the second net had before the fault; the step after it leaves the second
net's weights. Where a backward pass has failed and a KVStore adds up gradients, each weight and its states may be those
after the same step of the second net instead.

test_failures.py runs each fault once; what is not named on the command line is drawn, by the seed and the case's
number: `--seed SEED+NUMBER --fault NAME --cases 1` is that case again. What ends or forks a process is in endings.py.
"""

import argparse
import contextlib
import gc
import logging
import os
import random
import signal
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import endings
import numpy as np
from endings import Passage, fired, trouble
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn
from reference import Sized, check_all
from testing import LONG, MODES, cpus, has_failed, initialized, mx, on_devices, sequential, set_mode, shorten_grace

import gluon_syncbn

DEVICES = cpus(3)
ALL = (0, 1, 2)
TIMEOUT = 3  # seconds; only of the nets in which a device is missed until then
SHAPE = (2, 3, 8, 8)  # of a shard
LATE = "backward() of the last step was called for"
logged = []  # what the package warns of


class Fault(NamedTuple):
    """What goes wrong in a step."""

    runs: tuple = ALL  # the devices on which the net is called, in this order
    backward: int = 9  # of the losses, the first so many
    operator: str = ""  # of the user's: the direction in which it fails
    broken: str = ""  # what an operator of MXNet's fails for when it runs: "input" or "loss"
    on: tuple = (2,)  # the devices that these two are about
    raises: str = ""  # where an exception comes: "between devices", "before backward" or "between backward passes"
    forks: bool = False  # the process, between backward and update
    subset: bool = False  # in a step of the first two devices, after one that was whole
    interrupt: str = ""  # Ctrl-C: in a "wait", in "passes" at any moment, or in those that make the "graph"

    @property
    def waits(self):
        """Whether somebody waits in vain for the whole timeout: of a failed backward pass the others learn by that."""
        return not (self.operator == "forward" or self.broken or self.raises or self.interrupt)

    @property
    def is_given_up_by_itself(self):
        """Where nothing tells the next step, the program must call `abandon_step`."""
        return self.raises != "before backward" and self.interrupt in ("", "wait")

    @property
    def has_other_statistics(self):
        """Some of its forward passes are none of the other net's."""
        return self.subset or self.interrupt in ("passes", "graph")


FAULTS = {
    "missing_forward": Fault(runs=(0, 1)),
    "missing_backward": Fault(backward=2),
    "called_twice": Fault(runs=(0, 0, 1, 2)),
    "operator_forward": Fault(operator="forward"),
    "operator_forward_on_all_devices": Fault(operator="forward", on=ALL),
    "operator_backward": Fault(operator="backward"),
    "operator_backward_on_all_devices": Fault(operator="backward", on=ALL),
    "input": Fault(broken="input"),
    "all_inputs": Fault(broken="input", on=ALL),
    "inputs_before_a_fork": Fault(broken="input", on=ALL, forks=True),  # for it MXNet waits, and forgets the errors
    "loss": Fault(broken="loss"),
    "all_losses": Fault(broken="loss", on=ALL),
    "exception_between_devices": Fault(raises="between devices"),
    "exception_between_backward_passes": Fault(raises="between backward passes"),
    "exception_after_a_device_ran_twice": Fault(runs=(0, 0, 1), raises="before backward"),
    "exception_in_a_step_of_some_devices": Fault(raises="between devices", subset=True),
    "interrupted_wait": Fault(runs=(0, 1), interrupt="wait"),
    "interrupted_passes": Fault(interrupt="passes"),
    "interrupted_first_step": Fault(interrupt="graph"),
}
READS = ("before", "during", "after", "weights", "gradients", "never")
SETTLES = ("abandon", "go on")
OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}, "decaying": {}}
# The Trainer's KVStore, whether that updates the weights, and whether gradients are added up apart from the update.
UPDATES = {
    "each device by itself": (None, False, False),
    "local": ("local", False, False),
    "local, apart": ("local", False, True),
    "local, by the store": ("local", True, False),
    "device": ("device", False, False),
    "device, by the store": ("device", True, False),
    "a loop of its own": None,
}
# What is drawn; ``steps``: before the one that fails.
Case = namedtuple("Case", "backend mode fault read settle optimizer update activation grad_req steps")


class Net(HybridBlock):
    """Two branches, and a norm that is called twice; the user's operator before, between and after the norms.

    Not `has_operators` where Ctrl-C may come when MXNet makes such an operator, which may end the process.
    """

    def __init__(self, activation, has_operators=True):
        super().__init__(prefix="net_")
        places = [Passage(place) if has_operators else nn.HybridLambda("identity") for place in range(3)]
        with self.name_scope():
            conv, norm = nn.Conv2D(6, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=6)
            self.stem = sequential(conv, places[0], norm, nn.Activation(activation), places[1])
            self.branch = sequential(nn.Conv2D(6, 3, padding=1, in_channels=6), nn.BatchNorm(in_channels=6))
            self.head = nn.BatchNorm(in_channels=6)
            behind = nn.BatchNorm(in_channels=4), nn.Activation(activation)
            self.side = sequential(nn.Conv2D(4, 3, in_channels=6), *behind)
            self.last = places[2]

    def hybrid_forward(self, F, x):
        x = self.stem(x)
        return self.last(self.head(self.branch(x) + x) + self.head(x)), self.side(x)


@mx.optimizer.register
class Decaying(mx.optimizer.Optimizer):
    """Weights decay without a look at the gradient; and Ctrl-C may come when a device has been updated."""

    is_interrupted = False

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight[:] *= 0.99
        mx.nd.sgd_update(weight, grad, lr=self.lr, rescale_grad=self.rescale_grad, out=weight)
        if self.is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)


class Apart(gluon.Trainer):
    """Whoever clips gradients updates like this."""

    def step(self, batch_size, ignore_stale_grad=False):
        self.allreduce_grads()
        self.update(batch_size, ignore_stale_grad)


class OwnLoop:
    """It updates weights itself, on each device; it has no states."""

    _update_on_kvstore, _updaters = False, ()

    def __init__(self, parameters):
        self.parameters = parameters

    def step(self, batch_size, ignore_stale_grad=False):
        with gluon_syncbn.guard_update(self.parameters):
            for parameter in learning(self.parameters):
                for weight, gradient in zip(parameter.list_data(), parameter.list_grad()):
                    weight[:] *= 0.999  # without a look at the gradient
                    mx.nd.sgd_update(weight, gradient, lr=0.05, rescale_grad=1 / batch_size, out=weight)


def learning(parameters):
    return [parameter for parameter in parameters.values() if parameter.grad_req != "null"]


def make(case, weights=None, timeout=LONG):
    """A net with its Trainer; ``weights``: those of another."""
    net = Net(case.activation, FAULTS[case.fault].interrupt not in ("passes", "graph"))
    initialized(net, DEVICES, dtype="float64", init=mx.init.Xavier(rnd_type="gaussian"))
    for name, parameter in net.collect_params().items():
        if weights is not None:
            parameter.set_data(mx.nd.array(weights[name][0], dtype="float64"))
        elif name.endswith(("gamma", "beta")):
            parameter.set_data(mx.nd.random.uniform(0.5, 2, parameter.shape, "float64"))
        if parameter.grad_req != "null":
            parameter.grad_req = case.grad_req
    gluon_syncbn.convert_sync_batchnorm(net, backend=case.backend, timeout=timeout)
    set_mode(net, case.mode)
    if UPDATES[case.update] is None:
        return net, OwnLoop(net.collect_params())
    kvstore, by_store, is_apart = UPDATES[case.update]
    options = {"learning_rate": 0.05, "wd": 1e-3, **OPTIMIZERS[case.optimizer]}
    how = {} if kvstore is None else {"update_on_kvstore": by_store}
    trainer = (Apart if is_apart else gluon.Trainer)(net.collect_params(), case.optimizer, options, kvstore, **how)
    return net, trainer


def arrays_of(net):
    return {name: [item.asnumpy() for item in p.list_data()] for name, p in net.collect_params().items()}


def states_of(trainer):
    """Of the optimizer, flat; and what it counts."""
    is_on_store = trainer._update_on_kvstore and trainer._kvstore is not None
    found = {}
    for number, updater in enumerate([trainer._kvstore._updater] if is_on_store else trainer._updaters or ()):
        for index, state in updater.states.items():
            items = state if isinstance(state, (list, tuple)) else [state]
            found[number, index] = [item.asnumpy() for item in items if item is not None]
        counts = updater.optimizer._all_index_update_counts  # the only place
        updates = sorted(n for some in counts.values() for n in some.values())
        found[number, "counts"] = updates, updater.optimizer.num_update
    return found


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def break_off(array):
    """What MXNet computes with the result fails when it runs."""
    return array + mx.nd.random.normal(0, -1, shape=(1,), ctx=array.context, dtype=array.dtype)


def read_quietly(arrays):
    for array in arrays:
        with contextlib.suppress(mx.MXNetError):
            array.asnumpy()


def batch(number):
    """The shards of a step, and the heads of the net's outputs."""
    values = np.random.RandomState(1000 + number)
    shapes = [SHAPE, (SHAPE[0], 6, 8, 8), (SHAPE[0], 4, 6, 6)]
    return [[values.standard_normal(shape) for _ in DEVICES] for shape in shapes]


def wait_until_failed():
    deadline = time.monotonic() + 60
    while not has_failed():
        assert time.monotonic() < deadline, "the failure was not noticed"
        time.sleep(0.005)


def passes(net, number, fault=Fault()):  # noqa: B008
    """Forward and backward; returns losses, outputs and inputs, which have gradients."""
    shards, *heads = batch(number)
    inputs = on_devices(shards, learn=True)
    parts = list(inputs)
    for rank in fault.on if fault.broken == "input" else ():
        parts[rank] = break_off(parts[rank])
    limit = random.randrange(1, len(fault.runs)) if "between" in fault.raises else 0
    losses, outputs = [], []
    with autograd.record():
        for calls, rank in enumerate(fault.runs):
            if fault.raises == "between devices" and calls == limit:
                time.sleep(random.choice([0, 0.01]))
                raise ValueError("in between")
            outputs.append(net(parts[rank]))
            factors = [mx.nd.array(head[rank], ctx=DEVICES[rank], dtype="float64") for head in heads]
            loss = sum((out * factor).sum() for out, factor in zip(outputs[-1], factors))
            losses.append(break_off(loss) if fault.broken == "loss" and rank in fault.on else loss)
    if fault.raises:
        for loss in losses[:limit]:
            loss.backward()
        raise ValueError("in between")
    autograd.backward(losses[: fault.backward])
    return losses, outputs, inputs


def pass_until_interrupted(net):
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        losses = passes(net, 2)[0]
        if random.random() < 0.5:
            [loss.asnumpy() for loss in losses]
    raise KeyboardInterrupt  # Python drops one that is raised in a destructor


def step(net, trainer, number, fault=None, read=None):
    """Forward, backward, update; the loss is read ``before``, ``during`` or ``after`` the update, or ``never``.

    Without a fault it returns the outputs and the gradients of the inputs.
    """
    fault, is_usual = fault or Fault(), fault is None
    if fault.subset:
        with gluon_syncbn.devices(DEVICES[:2], net):
            passes(net, number, Fault(runs=(0, 1)))
            passes(net, number, fault._replace(runs=(0, 1)))
    if fault.interrupt in ("passes", "graph"):
        endings.send(signal.SIGINT, random.uniform(0, 0.3 if fault.interrupt == "passes" else 0.06))
        pass_until_interrupted(net)
    losses, outputs, inputs = passes(net, number, fault)
    if fault.forks:
        endings.fork(0)
    if fault.interrupt:
        endings.send(signal.SIGINT, random.uniform(0.1, 0.4))  # before that a wait does not notice
    which = losses if read is None or random.random() < 0.5 else losses[::-1]
    if read == "before":
        with contextlib.suppress(mx.MXNetError, KeyboardInterrupt):
            [loss.asnumpy() for loss in which]
    with ThreadPoolExecutor(1) as pool:
        if read == "during":
            pool.submit(read_quietly, which)
            time.sleep(random.choice([0, 0, 0.001, 0.01, 0.5]))
        is_stale = set(fault.runs) != set(ALL) or fault.backward < len(fault.runs)
        trainer.step(len(DEVICES) * SHAPE[0], ignore_stale_grad=is_stale)
    if read in ("weights", "gradients"):
        parameters = learning(net.collect_params())
        random.shuffle(parameters)
        for parameter in parameters:
            read_quietly([random.choice(parameter.list_data() if read == "weights" else parameter.list_grad())])
    if read != "never":
        [loss.asnumpy() for loss in which]
    if is_usual:
        for parameter in learning(net.collect_params()):
            if parameter.grad_req == "add":
                parameter.zero_grad()
        return [out.asnumpy() for both in outputs for out in both], [item.grad.asnumpy() for item in inputs]


def on_one_device(weights, number, activation):
    """Outputs and input gradients of the net with `nn.BatchNorm` on the whole batch, in float64; as of `step`."""
    net = initialized(Net(activation), dtype="float64")
    for name, parameter in net.collect_params().items():
        parameter.set_data(mx.nd.array(weights[name][0], dtype="float64"))
    whole, *heads = (mx.nd.array(np.concatenate(items), dtype="float64") for items in batch(number))
    whole.attach_grad()
    with autograd.record():
        outputs = net(whole)
    autograd.backward(outputs, heads)
    main, side, gradients = (np.split(item.asnumpy(), len(DEVICES)) for item in (*outputs, whole.grad))
    return [part for pair in zip(main, side) for part in pair], gradients


def check_numbers(seen, expected, activation):
    """By channel; these layers together lose far less than 2²⁰ units of rounding, and any mistake is far more.

    At the edge of a ReLU a rounding changes a gradient.
    """
    for what, arrays, wanted in zip(("output", "gradient"), seen, expected):
        if what == "output" or activation != "relu":
            sized = [Sized(item, np.abs(item).max((0, 2, 3))) for item in wanted]
            check_all(what, arrays, sized, "float64", units=2**20)


def draw(backend, mode, name):
    fault, update = FAULTS[name], random.choice(list(UPDATES))
    # MXNet's own static graphs add up gradients for ever if they are called twice in their first step.
    steps = 2 if name == "called_twice" else random.choice([0, 2])
    # Gradients that are added up are cleared where a Trainer has updated, or the step has failed in its first update.
    may_add = update != "a loop of its own" and not fault.interrupt and (steps or not fault.raises)
    optimizers = list(OPTIMIZERS)[: 2 if update.endswith("by the store") else 3]  # the store's own weights decay
    how = [random.choice(some) for some in (READS, SETTLES, optimizers)]
    activation, grad_req = (
        random.choice(["relu", "softrelu"]),
        random.choice(["write", "add"] if may_add else ["write"]),
    )
    return Case(backend, mode, name, *how, update, activation, grad_req, steps)


def has_known_defect(case):
    """Of the package today: goes, with --strict, when it is mended. It fails in a part of the cases."""
    # The optimizer has counted updates that were skipped.
    return case.optimizer != "sgd" and FAULTS[case.fault].operator == "backward"


def run_case(case, is_strict=False):
    """Returns what was wrong."""
    fault = FAULTS[case.fault]
    net, trainer = make(case, timeout=TIMEOUT if fault.waits else LONG)
    twin, its_trainer = make(case, arrays_of(net))
    for number in range(case.steps):
        step(net, trainer, number)
        step(twin, its_trainer, number)
    before, states = arrays_of(net), states_of(trainer)
    expected = on_one_device(before, 2, case.activation)
    its_results = step(twin, its_trainer, 2)
    after, states_after = arrays_of(twin), states_of(its_trainer)
    is_reduced = "device by itself" not in case.update and UPDATES[case.update] is not None
    may_be_partial = is_reduced and fault.operator == "backward"
    changed = set()
    wrong = []

    def require(is_right, words):
        if not is_right:
            wrong.append(words)

    def compare(when):
        now, theirs = arrays_of(net), states_of(trainer)
        for name in before:
            if may_be_partial and "running" not in name and same(now[name], after[name]):
                changed.add(name)
                continue
            for device, seen, old, new in zip(DEVICES, now[name], before[name], after[name]):
                # A running variance of the norm that is called twice may become NaN: the third that is known.
                is_left_out = (case.backend, case.mode) == ("portable", "hybridize") and "batchnorm2" in name
                if "running" in name and is_left_out and not is_strict:
                    continue
                if "running" in name and (fault.has_other_statistics or np.array_equal(seen, new)):
                    require(np.isfinite(seen).all(), f"{when}: {name} is {seen}")
                else:
                    change = np.abs(seen - old).max()
                    require(np.array_equal(seen, old), f"{when}: {name} on {device} changed by {change}")
        for key, old in states.items():
            seen = theirs.get(key, [] if case.steps else old)  # the first step decides who has them
            is_updated = may_be_partial and same(states_after.get(key, []), seen)
            is_counted = changed and key[1] == "counts"
            require(is_updated or is_counted or same(old, seen), f"{when}: state {key} changed")

    if fault.interrupt == "graph":
        set_mode(net, case.mode)  # drops it
    if fault.operator:
        trouble[random.choice([0, 1, 2])] = [DEVICES[rank] for rank in fault.on], fault.operator
    error = None
    try:
        step(net, trainer, 2, fault, case.read)
    except (mx.MXNetError, RuntimeError, ValueError, KeyboardInterrupt) as problem:
        error = problem
    if isinstance(error, KeyboardInterrupt):  # between two instructions of record() it leaves autograd recording
        autograd.set_recording(False)
        autograd.set_training(False)
    if fault.interrupt and not isinstance(error, KeyboardInterrupt):  # it may come late
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(1)
    if fault.raises:
        assert "in between" in str(error), error
    is_told = error is not None or fault.forks  # of a fork the log says it
    comes_later = case.read != "after" or fault.operator == "backward" or fault.backward != Fault().backward
    require(is_told or comes_later, "no error")
    if trouble:
        assert fired.wait(60)
    time.sleep(random.choice([0, 0, 0.01, 0.1]))
    if case.settle == "abandon" or not fault.is_given_up_by_itself:
        gluon_syncbn.abandon_step()
        compare("after abandon_step")
    elif not fault.raises:  # else it is abandoned when a layer is called
        wait_until_failed()
        for attempt in range(2):
            try:
                with autograd.record():
                    pass
            except mx.MXNetError as problem:
                require(attempt == 0, f"second record() raised {problem}")
                error = problem
        compare("after record")
        require(is_told or error is not None or case.read != "never", "nobody was told")
    trouble.clear()
    fired.clear()
    if fault.forks:
        expected_words = "When the process forked, pending work", "scale param"
        require(all(words in str(logged) for words in expected_words), f"at the fork: {logged}")
    logged.clear()
    try:
        results = step(net, trainer, 2)
        step(net, trainer, 3)
        step(twin, its_trainer, 3)
        is_late = fault.raises == "between backward passes" and case.settle != "abandon"  # the next step abandons it
        wrong.extend(logged if not is_late else [] if LATE in str(logged) else [f"not noticed: {logged}"])
        if not changed:
            if is_reduced or not case.steps:  # else each device has weights of its own
                check_numbers(results, expected, case.activation)
            require(all(map(same, results, its_results)), "the next step: not the bits of the other net")
            theirs = arrays_of(twin)
            for name, arrays in arrays_of(net).items():
                require("running" in name or same(arrays, theirs[name]), f"two steps later: {name}")
    except (AssertionError, mx.MXNetError) as problem:
        wrong.append(f"the next step: {str(problem)[:300]}")
        gluon_syncbn.abandon_step()
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "portable"], required=True)
    parser.add_argument("--mode", choices=list(MODES), help="in place of all in turn")
    parser.add_argument("--fault", choices=list(FAULTS), help="in place of all in turn")
    parser.add_argument("--cases", type=int, default=len(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", action="store_true", help="also what is known to be wrong")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shorten_grace(0.2)
    logging.getLogger("gluon_syncbn").addFilter(lambda record: logged.append(record.getMessage()) or True)
    number_wrong = 0
    for number in range(options.cases):
        for seed in (random.seed, mx.random.seed, np.random.seed):
            seed((options.seed + number) % (1 << 31))
        mode = options.mode or list(MODES)[(options.seed + number) % len(MODES)]
        case = draw(options.backend, mode, options.fault or list(FAULTS)[number % len(FAULTS)])
        while has_known_defect(case) and not options.strict:
            case = draw(*case[:3])
        gc.collect()  # Trainers of cases before
        wrong = run_case(case, options.strict)
        number_wrong += bool(wrong)
        if wrong:
            print("WRONG", f"seed {options.seed + number}: {case}", *wrong[:4], sep="\n    ", flush=True)
    print(f"{number_wrong} of {options.cases} cases wrong")
    raise SystemExit(number_wrong > 0)


if __name__ == "__main__":
    main()
