"""Random loops on several CPU devices with few temporary buffers: no device waits in vain, whatever is called.

    MXNET_CPU_TEMP_COPY=1024 OMP_NUM_THREADS=1 python tests/loops.py --seed 0 --programs 20 --steps 60

A program has one to three nets (convolutions, synchronized layers, Dropout; chains and branches), each in a mode of its
own, on two to four devices. In each step it draws something that users do: train, with one ``record()`` or one for each
device; several nets in a step, or one between the passes of another; another batch size; several backward passes before
an update; weights that are updated without a Trainer; predictions; executors; a Module; a thread for each device; steps
that fail; an active set. Where it can, cpu(0) computes what a device needs when that device is about to begin. A wait
in vain ends in an error after GLUON_SYNCBN_TIMEOUT. Programs of even seeds, in which no step fails, print a hash of all
parameters: the same in each run, whatever the order in which devices arrive, which is drawn anew.
"""

import argparse
import contextlib
import gc
import hashlib
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from testing import initialized, module_of, sequential, shorten_grace

import gluon_syncbn

SIDE, IMAGES = 8, 2
MODES = [None, {}, {"static_alloc": True, "static_shape": True}, {"static_alloc": True}]


class Branches(gluon.HybridBlock):
    """Two branches with a layer each, and their sum."""

    def __init__(self, channels, dropout):
        super().__init__()
        for name in ("left", "right"):
            layer = gluon_syncbn.SyncBatchNorm()
            setattr(self, name, sequential(nn.Conv2D(channels, 3, padding=1), layer, nn.Dropout(dropout)))

    def hybrid_forward(self, F, x):
        return F.relu(self.left(x) + self.right(x))


class Centred(gluon.HybridBlock):
    """Needs temporary space three times."""

    def hybrid_forward(self, F, x):
        for _ in range(3):
            x = F.broadcast_sub(x, F.mean(x, keepdims=True))
        return x * 2


def in_some_mode(draw, block):
    mode = draw.choice(MODES)
    if mode is not None:
        block.hybridize(**mode)
    return block


def make_net(draw, devices):
    net = nn.HybridSequential()
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.4:
            net.add(Branches(4, draw.choice([0, 0.3])))
        else:
            net.add(nn.Conv2D(4, 3, padding=1), gluon_syncbn.SyncBatchNorm(), nn.Activation("relu"))
            if draw.random() < 0.5:
                net.add(nn.Dropout(0.3))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(3))
    gluon_syncbn.convert_sync_batchnorm(net)
    return in_some_mode(draw, initialized(net, devices, init=mx.init.Xavier()))


class Program:
    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        mx.random.seed(seed)
        self.devices = [mx.cpu(i) for i in range(draw.randint(2, 4))]
        self.nets = [make_net(draw, self.devices) for _ in range(draw.randint(1, 3))]
        self.trainers = [gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}) for net in self.nets]
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.module, self.executors, self.last, self.reads = None, [], [], draw.choice([1, 1, 5])
        self.centred = [in_some_mode(draw, Centred()) for _ in range(draw.choice([1, 6]))]
        names = [name for name in dir(self) if name.startswith("do_") and (seed % 2 or name != "do_fail")]
        self.actions = draw.sample(names, draw.randint(3, len(names)))

    def run(self, steps):
        for net in self.nets:  # all shapes are known from here on
            net(mx.nd.ones((1, 3, SIDE, SIDE)))
        for number in range(steps):
            name = self.draw.choice(self.actions)
            print(f"step {number}: {name}", flush=True)
            getattr(self, name)()
            if number % self.reads == 0:
                assert all(np.isfinite(item.asnumpy()).all() for item in self.last), name
        mx.nd.waitall()

    def bits(self):
        """A hash of all parameters on all devices."""
        digest = hashlib.sha256()
        for net, device in itertools.product(self.nets, self.devices):
            for parameter in net.collect_params().values():
                digest.update(parameter.data(device).asnumpy().tobytes())
        return digest.hexdigest()

    # What a step is made of

    def batch(self, images=IMAGES):
        count = images * len(self.devices)
        return mx.nd.random.normal(shape=(count, 3, SIDE, SIDE)), mx.nd.random.randint(0, 3, shape=(count,))

    def shards(self, images=IMAGES):
        x, y = self.batch(images)
        parts = (gluon.utils.split_and_load(item, self.devices) for item in (x, y.astype("float32")))
        return list(zip(*parts))

    def computed(self, x, device):
        """As an array of the device, which cpu(0) computes."""
        if self.draw.random() < 0.1:  # its graph is gone before it has run
            self.centred[self.draw.randrange(len(self.centred))] = in_some_mode(self.draw, Centred())
            if self.draw.random() < 0.3:
                gc.collect()
        with self.draw.choice([autograd.pause, contextlib.nullcontext])():
            return self.draw.choice(self.centred)(x).as_in_context(device)

    def behind(self, output):
        """Computed by what also computes shards."""
        return self.draw.choice(self.centred)(output) if self.draw.random() < 0.3 else output

    def shards_one_by_one(self):
        """As `shards`, but cpu(0) computes each when its device is about to begin."""
        x, y = self.batch()
        for rank, device in enumerate(self.devices):
            part = slice(rank * IMAGES, (rank + 1) * IMAGES)
            yield self.computed(x[part], device), mx.nd.cast(y[part], "float32").as_in_context(device)

    def one(self):
        return self.draw.choice(list(zip(self.nets, self.trainers)))

    def record(self, net, shards):
        """Losses of these shards; they may be made, and a loss may be computed, by what computes for all devices."""
        with autograd.record():
            self.last = [self.loss(self.behind(net(x)), y) for x, y in shards]
        return self.last

    def update(self, trainer, count=IMAGES):
        trainer.step(count * len(self.devices))

    # What users do

    def do_train(self):
        """Perhaps another batch size, or shards that are computed within ``record()``."""
        net, trainer = self.one()
        images = self.draw.choice([IMAGES, None, *range(1, 5)])
        autograd.backward(self.record(net, self.shards(images) if images else self.shards_one_by_one()))
        self.update(trainer)

    def do_record_for_each_device(self):
        net, trainer = self.one()
        self.last = [self.record(net, [shard])[0] for shard in self.shards_one_by_one()]
        autograd.backward(self.last)
        self.update(trainer)

    def do_backward_for_each_device(self):
        """Perhaps with another net's step between the passes."""
        net, trainer = self.one()
        losses = self.record(net, self.shards())
        if self.draw.random() < 0.5:
            other = initialized(gluon.nn.Dense(2), self.devices)
            with autograd.record():
                outputs = [other(mx.nd.ones((1, 2), ctx=device)) for device in self.devices]
            if self.draw.random() < 0.5:
                autograd.backward(outputs)
                gluon.Trainer(other.collect_params(), "sgd").step(1)
        for loss in self.draw.sample(losses, len(losses)):
            # cpu(0) computes it when its device is about to begin.
            head = mx.nd.random.normal(shape=loss.shape + (1,) * (4 - loss.ndim))
            loss.backward(self.computed(head, loss.context).reshape(loss.shape))
        self.update(trainer)

    def do_several_nets(self):
        """Every device calls them in the same order, but the devices take turns as they like."""
        nets = self.draw.sample(range(len(self.nets)), len(self.nets))
        to_come = [[(number, x, y) for number in nets] for x, y in self.shards()]
        losses = []
        with autograd.record():
            while any(to_come):
                number, x, y = self.draw.choice([calls for calls in to_come if calls]).pop(0)
                with autograd.pause():
                    x = x.as_in_context(mx.cpu())
                losses.append(self.loss(self.nets[number](self.computed(x, y.context)), y))
        autograd.backward(losses)
        for trainer in self.trainers:
            self.update(trainer)
        self.last = losses

    def do_accumulate(self):
        net, trainer = self.one()
        learning = [item for item in net.collect_params().values() if item.grad_req == "write"]
        for parameter in learning:
            parameter.grad_req = "add"
        for _ in range(3):
            autograd.backward(self.record(net, self.shards()))
        self.update(trainer, 3 * IMAGES)
        for parameter in learning:
            parameter.grad_req = "write"

    def do_without_trainer(self):
        net, _ = self.one()
        for _ in range(3):
            autograd.backward(self.record(net, self.shards()))

    def do_statistics_alone(self):
        net, _ = self.one()
        mx.nd.waitall()  # MXNet gives a static graph the mode of its next call, also if this one has not run
        with autograd.train_mode():
            self.last = [net(x) for x, _ in self.shards_one_by_one()]
        mx.nd.waitall()

    def do_another_shape_for_all(self):
        for block in self.centred:
            block(mx.nd.ones((2, self.draw.randint(1, 5))))

    def do_predict(self):
        for net, device in itertools.product(self.nets, self.draw.sample(self.devices, 1)):
            self.last = [net(mx.nd.ones((self.draw.randint(1, 3), 3, SIDE, SIDE), ctx=device)) for _ in range(3)]
        net, _ = self.one()
        self.last += [net(x) for x, _ in self.shards()]

    def symbol(self):
        data = mx.sym.var("data")
        for number in range(2):
            data = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=4, name=f"conv{number}")
            data = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=len(self.devices), name=f"norm{number}")
        return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=3), name="softmax")

    def do_module(self):
        if self.module is None:
            count = IMAGES * len(self.devices)
            shapes = {"shape": (count, 3, SIDE, SIDE), "softmax_label": (count,)}
            self.module = module_of(self.symbol(), self.devices, **shapes)
        x, y = self.batch()
        self.module.forward(mx.io.DataBatch([x], [y.astype("float32")]), is_train=True)
        self.module.backward()
        self.module.update()
        self.last = self.module.get_outputs()

    def do_executors(self):
        if not self.executors:
            symbol = self.symbol()
            self.executors = [symbol.simple_bind(device, data=(IMAGES, 3, SIDE, SIDE)) for device in self.devices]
            for array in itertools.chain.from_iterable(executor.arg_arrays for executor in self.executors):
                array[:] = mx.nd.random.normal(shape=array.shape, ctx=array.context)
        self.last = []
        for executor, (x, _) in zip(self.executors, self.shards_one_by_one()):
            out = executor.forward(is_train=True, data=x)[0]
            self.last += [out, out.mean()]  # behind the layers
        for executor in self.executors:
            executor.backward()

    def do_threads(self):
        net, trainer = self.one()
        losses, shards = [None] * len(self.devices), self.shards()

        def one(rank):
            time.sleep(random.random() / 100)
            with autograd.record():
                losses[rank] = self.loss(net(shards[rank][0]), shards[rank][1])
            time.sleep(random.random() / 100)
            losses[rank].backward()

        with ThreadPoolExecutor(len(shards)) as threads:
            list(threads.map(one, range(len(shards))))
        self.update(trainer)
        self.last = losses

    def do_fail(self):
        net, _ = self.one()
        with contextlib.suppress(KeyError), autograd.record():
            for x, _ in self.shards():
                net(x)
                if self.draw.random() < 0.5:
                    raise KeyError
        gluon_syncbn.abandon_step()
        self.last = []

    def do_some_devices(self):
        net, trainer = self.one()
        used = self.devices[: self.draw.randint(1, len(self.devices) - 1)]
        with gluon_syncbn.devices(used, net):
            autograd.backward(self.record(net, self.shards()[: len(used)]))
        trainer.step(IMAGES * len(used))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    shorten_grace()
    for seed in range(options.seed, options.seed + options.programs):
        print(f"program {seed}", flush=True)
        program = Program(seed)
        program.run(options.steps)
        if seed % 2 == 0:
            print(f"BITS {seed} {program.bits()}", flush=True)
    print(f"RIGHT: {options.programs} programs")


if __name__ == "__main__":
    main()
