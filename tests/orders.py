"""Users call things in any order: nets synchronize, or say why not.

    python tests/orders.py --seed 0 --count 100 [--backend native] [--symbols]
    mpirun -n 2 python tests/orders.py mpi

An order is drawn: initialize, convert there and back with options, hybridize in three ways, calls of several kinds,
moves, casts, files, frozen statistics, export, a wrapper around the net; on one to four devices. Then the net
trains two steps, and is compared with the same net with `nn.BatchNorm` on one device and the whole batch: outputs,
gradients of inputs and Parameters, and running statistics. A net that stays plain goes the same way beside it: what
MXNet refuses for that may be refused; anything else must be right.

``--symbols``: a symbol is made of operators or of a net, converted, saved, loaded, composed and cut in some order, and
run by a Module, by executors, or in a SymbolBlock.

``mpi``: the processes of the job go the same way with nets, and share the batch.
"""

import argparse
import random
import sys
import tempfile
import traceback
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from testing import shorten_grace

import gluon_syncbn

CHANNELS, SIDE = 3, 5
FLAGS = [{}, {"static_alloc": True, "static_shape": True}, {"static_alloc": True}]
# MXNet rounds ε and momentum to float32; where nothing is synchronized, numbers differ by 0.01 or more.
BOUND = {"float64": 1e-5, "float32": 2e-3}


class Branches(gluon.HybridBlock):
    """Two branches, and a layer that both and the rest share."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.left, self.right = (nn.Conv2D(CHANNELS, 3, padding=1) for _ in range(2))
            self.norm, self.other = nn.BatchNorm(momentum=0.7), nn.BatchNorm()

    def hybrid_forward(self, F, x):
        left, right = self.norm(self.left(x)), self.other(self.right(x))
        return self.norm(F.relu(left + right) + left)


class Loop(gluon.HybridBlock):
    """A layer in the body of a loop. MXNet has no backward pass of one, and a static graph computes something else."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        out, _ = F.contrib.foreach(lambda one, state: (self.norm(one), state), F.stack(x, 2 * x), F.zeros_like(x))
        return F.sum(out, axis=0)


def chain():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(CHANNELS, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2D(CHANNELS, 1), nn.BatchNorm(scale=False), nn.LeakyReLU(0.1), nn.Dense(2))
    return net


def branches():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(Branches(), nn.GlobalAvgPool2D(), nn.Dense(2))
    return net


def loop():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(CHANNELS, 1), Loop(), nn.GlobalAvgPool2D(), nn.Dense(2))
    return net


def parts_of_another():
    other, net = chain(), nn.HybridSequential()
    net.other = [other]  # not a child
    for block in list(other)[:3] * 2:
        net.add(block)
    return net


def of_a_symbol():
    source = chain()
    return gluon.SymbolBlock(source(mx.sym.var("data")), mx.sym.var("data"), params=source.collect_params())


def around_a_symbol():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(CHANNELS, 1), nn.BatchNorm(), of_a_symbol())
    return net


NETS = [chain, branches, loop, parts_of_another, of_a_symbol, around_a_symbol]


class Order:
    """One of them. ``nets`` are ours and the one that stays plain."""

    def __init__(self, seed, backend):
        self.draw, self.seed, self.backend = random.Random(seed), seed, backend
        self.rng = np.random.RandomState(seed % 2**32)
        self.rank, self.job = 0, [None]  # the place of this process among those that share the batch
        self.make, self.dtype = self.draw.choice(NETS), self.draw.choice(["float64", "float64", "float32"])
        self.flags = FLAGS[:1] if self.make is loop else FLAGS
        with mx.name.NameManager():
            self.nets = [self.made() for _ in range(2)]
        self.inner = list(self.nets)  # without wrappers
        self.is_initialized = self.is_converted = self.is_frozen = False
        self.devices = [mx.cpu(0)]
        self.done = []

    def made(self):
        with mx.name.Prefix("o_"):
            net = self.make()
        net.cast(self.dtype)
        return net

    def some_devices(self):
        return [mx.cpu(i) for i in self.draw.sample(range(4), self.draw.randint(1, 4))]

    def array(self, device, images=2):
        return mx.nd.array(self.rng.standard_normal((images, CHANNELS, SIDE, SIDE)), ctx=device, dtype=self.dtype)

    def run(self):
        """Returns why it was refused, or an empty text."""
        names = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(self.draw.randint(2, 9)):
            reason = self.act(self.draw.choice(names + ["do_initialize"] * 8 * (not self.is_initialized)))
            if reason:
                return reason
        for name, is_done in (("do_initialize", self.is_initialized), ("do_convert", self.is_converted)):
            reason = "" if is_done else self.act(name)
            if reason:
                return reason
        return self.check() or self.check()

    def act(self, name):
        self.done.append(name[3:])
        state, numbers = self.draw.getstate(), self.rng.get_state()
        for number in (1, 0):  # the plain one first
            self.draw.setstate(state)
            self.rng.set_state(numbers)
            try:
                getattr(self, name)(number)
            except Exception as problem:
                mx.nd.waitall() if number else None
                if not number:
                    raise
                self.done.append(f"(refused by MXNet: {type(problem).__name__})")
                return ""
        return ""

    # What users do

    def do_initialize(self, number):
        if not self.is_initialized:
            devices = self.some_devices()
            mx.random.seed(self.seed)
            self.nets[number].initialize(mx.init.Uniform(0.5), ctx=devices)
            if number == 0:
                self.devices, self.is_initialized = devices, True

    def do_convert(self, number):
        fuse, convert = self.draw.random() < 0.7, self.draw.choice(["all", "all", "inner", "part"])
        if number == 0:
            block = self.nets[0] if convert == "all" else self.inner[0]
            if convert == "part":
                gluon_syncbn.convert_sync_batchnorm(self.draw.choice([block, *block._children.values()]))
            gluon_syncbn.convert_sync_batchnorm(block, fuse=fuse, backend=self.backend, timeout=8)
            self.is_converted = True

    def do_convert_back(self, number):
        if number == 0:
            gluon_syncbn.convert_batchnorm(self.draw.choice([self.nets[0], self.inner[0]]))
            self.is_converted = False

    def do_hybridize(self, number):
        flags, active = self.draw.choice(self.flags), self.draw.random() < 0.85
        self.draw.choice([self.nets, self.inner])[number].hybridize(active, **(flags if active else {}))

    def do_predict(self, number):
        if self.is_initialized:
            self.draw.choice([self.nets, self.inner])[number](self.array(self.draw.choice(self.devices))).wait_to_read()

    def do_forward_in_training(self, number):
        if self.is_initialized:
            with autograd.train_mode():
                [self.nets[number](self.array(device)) for device in self.devices]
            mx.nd.waitall()

    def do_train(self, number):
        if self.is_initialized and self.make is not loop:
            self.step(self.nets[number], self.devices, [self.array(device) for device in self.devices])

    def do_infer_shape(self, number):
        if not isinstance(self.nets[number], gluon.SymbolBlock):
            self.nets[number].infer_shape(mx.nd.zeros((1, CHANNELS, SIDE, SIDE), dtype=self.dtype))

    def do_move(self, number):
        if self.is_initialized:
            devices = self.some_devices() if self.draw.random() < 0.8 else self.devices
            self.nets[number].collect_params().reset_ctx(devices)
            if number == 0:
                self.devices = devices

    def do_cast(self, number):
        for dtype in ("float32", "float64", self.dtype):
            self.nets[number].cast(dtype)

    def do_files(self, number):
        if self.is_initialized:
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "net.params")
                self.nets[number].save_parameters(file)
                self.nets[number].load_parameters(file, ctx=self.devices)

    def do_freeze(self, number):
        if self.make in (of_a_symbol, around_a_symbol):
            return  # its nodes must have been converted
        frozen = self.draw.random() < 0.5
        gluon_syncbn.freeze_statistics(self.nets[number], frozen)
        if number == 0:
            self.is_frozen = frozen

    def do_export(self, number):
        if self.nets[number]._cached_graph and self.nets[number]._active:
            with tempfile.TemporaryDirectory() as folder:
                self.nets[number].export(str(Path(folder) / "net"))
                assert "Custom" not in (Path(folder) / "net-symbol.json").read_text()

    def do_wrap(self, number):
        wrapper = nn.HybridSequential()
        wrapper.add(self.nets[number])
        if self.draw.random() < 0.5:
            wrapper.hybridize(**self.draw.choice(self.flags))
        self.nets[number] = wrapper

    # How it is compared

    @staticmethod
    def step(net, devices, inputs, has_backward=True):
        for item in inputs:
            item.attach_grad()
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.zero_grad()
        with autograd.record():
            outputs = [net(item) for item in inputs]
            losses = [(out**2).sum() for out in outputs]
        if has_backward:
            autograd.backward(losses)
        found = (outputs, [x.grad for x in inputs]) if has_backward else (outputs,)
        return [np.concatenate([item.asnumpy() for item in items]) for items in found]

    def check(self):
        """A step of the net, and of the whole batch on one device."""
        net = self.nets[0]
        with mx.name.NameManager():
            whole = self.made()
        whole.initialize(ctx=mx.cpu(0))
        self.done.append(f"check on {len(self.devices)}")
        batches = [
            [self.array(device, images).asnumpy() for device, images in zip(self.devices, self.sizes())]
            for _ in self.job
        ]
        shards = batches[self.rank]
        try:
            net(mx.nd.array(shards[0], ctx=self.devices[0], dtype=self.dtype))
        except Exception as problem:
            return f"the first call: {problem}"[:200]
        whole(mx.nd.array(shards[0], dtype=self.dtype))
        ours, theirs = (dict(self.named(some)) for some in (net, whole))
        assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
        for name, parameter in theirs.items():
            value = ours[name].data(self.devices[0])
            ours[name].set_data(value)  # statistics of a layer that has been plain differ
            parameter.set_data(value.as_in_context(mx.cpu(0)))
        if self.is_frozen:
            gluon_syncbn.freeze_statistics(gluon_syncbn.convert_sync_batchnorm(whole))
        inputs = [mx.nd.array(x, ctx=d, dtype=self.dtype) for x, d in zip(shards, self.devices)]
        has_backward = self.make is not loop
        seen = self.step(net, self.devices, inputs, has_backward)
        batch = mx.nd.array(np.concatenate([shard for some in batches for shard in some]), dtype=self.dtype)
        expected = self.step(whole, [mx.cpu(0)], [batch], has_backward)
        mx.nd.waitall()
        first = sum(len(shard) for some in batches[: self.rank] for shard in some)
        for what, one, other in zip(("outputs", "input gradients"), seen, expected):
            self.compare(what, one, other[first : first + len(one)])
        if has_backward and self.writes_elsewhere(net):
            self.step(self.nets[1], self.devices, inputs)
            assert self.writes_elsewhere(self.nets[1])
            return ""
        learned = [name for name, parameter in theirs.items() if parameter.grad_req != "null" and has_backward]
        # The gradient of a bias before a layer is rounding alone.
        least = 0.1 * max((np.abs(theirs[name].grad().asnumpy()).max() for name in learned), default=0)
        for name, parameter in theirs.items():
            if name in learned:
                gradient = self.total(sum(ours[name].grad(device).asnumpy() for device in self.devices))
                self.compare(f"gradient of {name}", gradient, parameter.grad().asnumpy(), least)
            # On a CPU, `nn.BatchNorm` has updated the statistics once, if it was called several times in a step.
            is_shared = "running" in name and self.make in (branches, loop, parts_of_another)
            wanted = (ours[name].data(self.devices[0]) if is_shared else parameter.data()).asnumpy()
            for device in self.devices:
                self.compare(f"{name} on {device}", ours[name].data(device).asnumpy(), wanted)
        return ""

    def writes_elsewhere(self, net):
        """Whether MXNet writes gradients into arrays from before a move, as it does where a plain static net moves."""
        learned = [parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"]
        arrays = [(item.data(device).grad, item.grad(device)) for item in learned for device in self.devices]
        return any((seen.asnumpy() != wanted.asnumpy()).any() for seen, wanted in arrays)

    def total(self, array):
        """The sum over the processes of the job."""
        return array

    def sizes(self):
        return [self.draw.randint(1, 3) + (len(self.devices) == 1) for _ in self.devices]

    def named(self, net):
        return ((name.split("o_", 1)[-1], parameter) for name, parameter in net.collect_params().items())

    def compare(self, what, one, other, least=1e-3):
        worst = np.abs(one - other).max() / (np.abs(other).max() + least)
        assert worst < BOUND[self.dtype], f"{what} differ by {worst:.1e}"


class OrderOfProcesses(Order):
    """One for all processes of a job."""

    def __init__(self, seed, backend):
        from mpi4py import MPI

        super().__init__(seed, backend)
        self.total = MPI.COMM_WORLD.allreduce
        self.rank, self.job = MPI.COMM_WORLD.rank, range(MPI.COMM_WORLD.size)

    def some_devices(self):
        return super().some_devices()[:2]


class SymbolOrder:
    """One for a symbol; `plain` is what it would be without this package."""

    def __init__(self, seed, backend):
        self.draw, self.seed, self.backend, self.dtype = random.Random(seed), seed, backend, "float64"
        self.rng = np.random.RandomState(seed % 2**32)
        self.devices = [mx.cpu(i) for i in self.draw.sample(range(4), self.draw.randint(1, 4))]
        self.make = self.draw.choice([self.of_operators, self.of_a_net, self.of_a_converted_net])
        with mx.name.NameManager():
            self.symbol, self.plain, self.is_ready = self.make()
        self.done = [f"{len(self.devices)} devices"]

    compare = Order.compare

    # Where it comes from: the symbol, the plain one, and whether it is for these devices

    def of_operators(self):
        data, norms = mx.sym.var("data"), []
        for norm in (gluon_syncbn.symbol.SyncBatchNorm, mx.sym.BatchNorm):
            options = (
                {"num_devices": len(self.devices), "backend": self.backend} if norm is not mx.sym.BatchNorm else {}
            )
            out = mx.sym.Convolution(data, kernel=(3, 3), num_filter=CHANNELS, name="conv")
            out = mx.sym.relu(
                norm(out, fix_gamma=False, name="a", **({**options, "dtype": "float64"} if options else {}))
            )
            norms.append(norm(out, fix_gamma=False, name="b", **({**options, "dtype": "float64"} if options else {})))
        return (*norms, True)

    def of_a_net(self):
        net = self.draw.choice([chain, branches])()
        net.cast("float64")
        symbol = net(mx.sym.var("data"))
        return symbol, symbol, False

    def of_a_converted_net(self):
        net = self.draw.choice([chain, branches])()
        net.cast("float64")
        plain = net(mx.sym.var("data"))
        gluon_syncbn.convert_sync_batchnorm(net, backend=self.backend, timeout=8)
        count = self.draw.choice([0, 1, len(self.devices)])
        if count:
            net.initialize(ctx=self.devices[:count])
        return net(mx.sym.var("data")), plain, count == len(self.devices)

    def run(self):
        names = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(self.draw.randint(0, 6)):
            name = self.draw.choice(names)
            self.done.append(name[3:])
            getattr(self, name)()
        kind = self.draw.choice(["module", "executors", "block"])
        self.done.append(kind)
        if kind != "block" and not self.is_ready:
            self.do_convert()
        getattr(self, f"check_{kind}")()
        return ""

    def do_convert(self):
        options = {"dtype": "float64", "backend": self.backend, "fuse": self.draw.random() < 0.7}
        self.symbol = gluon_syncbn.symbol.convert_symbol(self.symbol, len(self.devices), **options)
        self.is_ready = True

    def do_make_plain(self):
        self.symbol, self.is_ready = gluon_syncbn.symbol.plain_symbol(self.symbol), False

    def do_files(self):
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "x-symbol.json")
            self.symbol.save(file)
            assert "Custom" not in Path(file).read_text()
            self.symbol = mx.sym.load(file)

    def do_compose(self):
        data = mx.sym.var("data")
        front = data * data * 0.5
        self.symbol, self.plain = (symbol(data=front) for symbol in (self.symbol, self.plain))

    def do_put_behind(self):
        if len(self.plain.list_outputs()) > 1:
            return
        self.symbol, self.plain = (
            mx.sym.LeakyReLU(symbol, slope=0.1, name="behind") for symbol in (self.symbol, self.plain)
        )

    def do_cut(self):
        outputs = [
            name for name in self.plain.get_internals().list_outputs() if name.endswith(("fwd_output", "a_output"))
        ]
        name = self.draw.choice([name for name in outputs if outputs.count(name) == 1] or self.plain.list_outputs()[:1])
        self.symbol, self.plain = (symbol.get_internals()[name] for symbol in (self.symbol, self.plain))

    def do_group(self):
        if len(self.plain.list_outputs()) == 1:
            self.symbol, self.plain = (mx.sym.Group([symbol, symbol * 2]) for symbol in (self.symbol, self.plain))

    # What runs it

    def shards(self):
        shape = (2 + (len(self.devices) == 1), CHANNELS, SIDE, SIDE)
        return [self.rng.standard_normal(shape) for _ in self.devices]

    def values(self, images):
        shapes = self.plain.infer_shape(data=(images, CHANNELS, SIDE, SIDE))
        names = self.plain.list_arguments() + self.plain.list_auxiliary_states()
        found = dict(zip(names, shapes[0] + shapes[2]))
        return {name: self.rng.uniform(0.5, 1.5, shape) for name, shape in found.items() if name != "data"}

    @staticmethod
    def executor(symbol, device, values, shard):
        arrays = {name: mx.nd.array(value, ctx=device, dtype="float64") for name, value in values.items()}
        arrays["data"] = mx.nd.array(shard, ctx=device, dtype="float64")
        given = {name: arrays[name] for name in symbol.list_arguments()}
        gradients = {name: mx.nd.zeros_like(array) for name, array in given.items()}
        states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
        return symbol.bind(device, given, gradients, "write", states)

    @staticmethod
    def results(executors):
        """Outputs and input gradients, together; other gradients, added up; states on each device."""
        for executor in executors:
            executor.forward(is_train=True)
        for executor in executors:
            executor.backward([out * 2 for out in executor.outputs])
        found = {
            f"output {i}": np.concatenate([e.outputs[i].asnumpy() for e in executors])
            for i in range(len(executors[0].outputs))
        }
        for name in executors[0].grad_dict:
            some = [executor.grad_dict[name].asnumpy() for executor in executors]
            found[f"gradient of {name}"] = np.concatenate(some) if name == "data" else sum(some)
        for name in executors[0].aux_dict:
            found[name] = np.stack([executor.aux_dict[name].asnumpy() for executor in executors])
        return found

    def check(self, found, values, shards):
        expected = self.results([self.executor(self.plain, mx.cpu(0), values, np.concatenate(shards))])
        assert found.keys() == expected.keys(), (found.keys(), expected.keys())
        for name, value in found.items():
            if self.make == self.of_operators or "moving" not in name and "running" not in name:
                self.compare(name, value, expected[name])

    def check_executors(self):
        shards = self.shards()
        values = self.values(len(shards[0]))
        made = [self.executor(self.symbol, device, values, shard) for device, shard in zip(self.devices, shards)]
        self.check(self.results(made), values, shards)

    def check_module(self):
        shards = self.shards()
        values, images = self.values(len(shards[0])), sum(map(len, shards))
        arrays = {name: mx.nd.array(value, dtype="float64") for name, value in values.items()}
        module = mx.mod.Module(self.symbol, context=self.devices, label_names=None)
        batch = mx.nd.array(np.concatenate(shards), dtype="float64")
        module.bind([mx.io.DataDesc("data", (images, *shards[0].shape[1:]), "float64")], inputs_need_grad=True)
        module.init_params(arg_params=arrays, aux_params=arrays, allow_extra=True)
        module.forward(mx.io.DataBatch([batch]), is_train=False)
        self.check(self.results(module._exec_group.execs), values, shards)

    def check_block(self):
        shards = self.shards()
        values = self.values(len(shards[0]))
        block = gluon.SymbolBlock(self.symbol, mx.sym.var("data"))
        block.cast("float64")
        if self.draw.random() < 0.5:
            block.hybridize(**self.draw.choice(FLAGS))
        moves = self.draw.random() < 0.6
        if moves or not hasattr(block, "layers_of_nodes"):
            gluon_syncbn.convert_sync_batchnorm(block, backend=self.backend, timeout=8, num_devices=None)
        block.initialize(ctx=self.devices[:1] if moves else self.devices)
        if moves and self.draw.random() < 0.7:
            block(mx.nd.zeros((1, *shards[0].shape[1:]), ctx=self.devices[0], dtype="float64"))
        block.collect_params().reset_ctx(self.devices)
        for name, parameter in block.collect_params().items():
            parameter.shape = values[name].shape
            parameter.set_data(mx.nd.array(values[name], dtype="float64"))
        inputs = [mx.nd.array(shard, ctx=d, dtype="float64") for shard, d in zip(shards, self.devices)]
        [item.attach_grad() for item in inputs]
        with autograd.record():
            outputs = [block(item) for item in inputs]
            outputs = [out if isinstance(out, (list, tuple)) else [out] for out in outputs]
        heads = [out for some in outputs for out in some]
        autograd.backward(heads, [head * 2 for head in heads])
        found = {f"output {i}": np.concatenate([some[i].asnumpy() for some in outputs]) for i in range(len(outputs[0]))}
        for name in self.plain.list_arguments():
            gradients = [item.grad for item in inputs] if name == "data" else block.params[name].list_grad()
            gradients = [gradient.asnumpy() for gradient in gradients]
            found[f"gradient of {name}"] = np.concatenate(gradients) if name == "data" else sum(gradients)
        for name in self.plain.list_auxiliary_states():
            found[name] = np.stack([item.asnumpy() for item in block.params[name].list_data()])
        self.check(found, values, shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["mpi"], nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--symbols", action="store_true")
    options = parser.parse_args()
    shorten_grace()
    kind = OrderOfProcesses if options.engine else SymbolOrder if options.symbols else Order
    if options.engine:
        gluon_syncbn.init_process_group(options.engine)
    wrong, refused = [], 0
    for seed in range(options.seed, options.seed + options.count):
        order = kind(seed, options.backend)
        try:
            reason = order.run()
        except Exception as problem:
            where = traceback.extract_tb(problem.__traceback__)[-1]
            reason = ""
            wrong.append(seed)
            place = f"{where.filename}:{where.lineno}"
            print(f"WRONG {seed}: {order.make.__name__}, {order.done}: {str(problem)[:400]} ({place})")
            gluon_syncbn.abandon_step()
        refused += bool(reason)
        if reason:
            print(f"refused {seed}: {order.make.__name__}, {order.done}: {reason}")
    print(f"{len(wrong)} of {options.count} orders wrong, {refused} refused")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
