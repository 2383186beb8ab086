"""What changes between two steps of training counts from the next step on.

Numbers, dtype, devices, what is frozen, statistics from elsewhere, hooks, graphs and options: every change is made once
per case, in an order that is drawn, and after each of them whole steps are compared with the reference. A failure says
which changes came before.
"""

import contextlib
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
import testing
from endings import Late
from mxnet import autograd, gluon
from mxnet.gluon import nn
from reference import UNIT, Sized, check, check_all
from testing import check_step, cpus, options_of, random_affine, reference_of, sequential, set_mode, shards_and_heads

from gluon_syncbn import (
    SyncBatchNorm,
    abandon_step,
    convert_batchnorm,
    convert_sync_batchnorm,
    devices,
    freeze_statistics,
)
from gluon_syncbn.step.steps import steps

pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.filterwarnings("error::UserWarning"),  # nothing that is asked for is worth a warning
    pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments"),
    pytest.mark.filterwarnings("ignore:register_op_hook is experimental"),
]
CHANNELS = 5
VECTORS = ("gamma", "beta", "running_mean", "running_var")
SHAPES = [(3, CHANNELS, 4, 6), (1, CHANNELS, 4, 6)]


def make_block(kind):
    """A layer; one with a ReLU, which it computes, too; a node of a symbol."""
    net = nn.BatchNorm(in_channels=CHANNELS)
    if kind == "net":
        net = sequential(nn.BatchNorm(in_channels=CHANNELS), nn.Activation("relu"))
    elif kind == "symbol":
        data = mx.sym.var("data")
        net = gluon.SymbolBlock(mx.sym.BatchNorm(data, name="norm", fix_gamma=False, eps=1e-3), data)
    return convert_sync_batchnorm(net)


class Training:
    """A block that trains, and what its user has asked for so far."""

    def __init__(self, kind, mode, seed, folder):
        self.rng = np.random.RandomState(seed)
        self.kind, self.mode, self.file = kind, mode, str(folder / "net.params")
        self.devices, self.dtype = cpus(2), "float32"
        self.block = testing.initialized(make_block(kind), self.devices, mode)
        self.numbers = {"momentum": 0.9, "epsilon": 1e-3 if kind == "symbol" else 1e-5}
        self.is_frozen = self.is_back = False
        if kind == "symbol":  # its shapes show in the first pass
            self.block(mx.nd.ones((1, CHANNELS, 2, 2)))
        random_affine(self.layer, CHANNELS)

    @property
    def layer(self):
        if self.kind != "symbol":
            return self.block if self.kind == "layer" else self.block[0]
        if not self.is_back:
            return testing.layers_of(self.block)[0]
        names = {"running_mean": "moving_mean", "running_var": "moving_var"}
        vectors = {name: self.block.params[f"norm_{names.get(name, name)}"] for name in VECTORS}
        told = {"use_global_stats": False, "axis": 1, "eps": 0, "momentum": 0, "fix_gamma": False}
        return types.SimpleNamespace(_kwargs=told, **vectors)

    @property
    def group_size(self):
        return 1 if self.is_back else options_of(self.layer)["group_size"]

    def vectors(self):
        return {name: [getattr(self.layer, name).data(item).asnumpy() for item in self.devices] for name in VECTORS}

    def random(self, options):
        return options[self.rng.randint(len(options))]

    def train(self):
        """Two steps of all devices, and one of the first alone."""
        told = {"activation": "relu" if self.kind == "net" else None, "group_size": self.group_size}
        means, size = self.vectors()["running_mean"], self.group_size or len(self.devices)
        if any((mean != means[number - number % size]).any() for number, mean in enumerate(means)):
            self.block.collect_params().reset_ctx(self.devices)  # a group has one, after other groups their average
        norm = reference_of(self.layer, frozen=self.is_frozen, **told, **self.numbers)
        for number, values in enumerate(zip(*(self.vectors()[name] for name in VECTORS[2:]))):
            norm.set_running(*values, number)
        is_alone = testing.is_plain(self.layer, norm)
        for count in (len(self.devices), len(self.devices), 1):
            shapes = [(self.rng.randint(1, 4), CHANNELS, 3, self.rng.randint(2, 6)) for _ in range(count)]
            shards, heads = shards_and_heads(shapes, self.dtype, self.rng.randint(1 << 20))
            where = {"devices": self.devices[:count], "used": list(range(count)), "layer": self.layer}
            with contextlib.nullcontext() if is_alone else devices(self.devices[:count], self.block):
                check_step(self.block, norm, shards, heads, running=False, **where)
            testing.check_running(self.layer, norm, self.dtype)

    def change(self, name):
        """Parameters and statistics stay as they are, or become what ``self.expected`` then has."""
        self.expected, self.is_average = self.vectors(), False
        CHANGES[name](self)
        for vector, arrays in self.vectors().items():
            expected = np.stack(self.expected[vector])
            rounding = 4 * UNIT[str(expected.dtype)] * np.abs(expected).max() if self.is_average else 0
            np.testing.assert_allclose(np.stack(arrays), expected, rtol=0, atol=rounding, err_msg=vector)

    def expect_average(self, arrays, count):
        """MXNet makes one of the arrays of several devices when it moves or saves them."""
        self.expected = {name: [np.mean(items, 0, dtype=items[0].dtype)] * count for name, items in arrays.items()}
        self.is_average = True

    def convert(self, **options):
        before = {} if self.is_back else options_of(self.layer)
        convert_sync_batchnorm(self.block, **options)
        self.is_back = False
        kept = {name: value for name, value in before.items() if name != "activation"}  # of a ReLU that it fuses or not
        assert options_of(self.layer).items() >= {**kept, **options}.items()

    # What a user may change

    def set_numbers(self):
        self.numbers = {
            "momentum": self.random([item for item in (0.0, 0.3, 0.7) if item != self.numbers["momentum"]]),
            "epsilon": self.random([item for item in (1e-4, 1e-2, 0.1) if item != self.numbers["epsilon"]]),
        }
        self.layer._kwargs.update(momentum=self.numbers["momentum"], eps=self.numbers["epsilon"])
        if self.block._active:
            self.hybridize()  # MXNet's own layer, too, takes them when its graph is made

    def set_numbers_by_conversion(self):
        convert_batchnorm(self.block)
        self.is_back = True
        if self.kind != "symbol":
            self.set_numbers()
        self.convert()

    def cast(self, dtype):
        parameters = self.block.collect_params()
        ways = [
            lambda: self.block.cast(dtype),
            lambda: [parameter.cast(dtype) for parameter in parameters.values()],
            lambda: parameters.setattr("dtype", dtype),
        ]
        self.random(ways if dtype != "float16" else ways[:1])()
        self.dtype = dtype
        # A SymbolBlock casts its vectors there and back.
        via = dtype if self.kind == "symbol" else testing.vector_dtype(dtype)
        for arrays in self.expected.values():
            arrays[:] = [item.astype(via).astype(testing.vector_dtype(dtype)) for item in arrays]

    def move(self):
        group_size = 1 if self.is_back else self.group_size or 1
        count = self.random([item for item in (1, 2, 3, 4) if item % group_size == 0])
        if count == len(self.devices) and count % 2 == 0 and group_size == 1:
            count -= 1
        self.expect_average(self.expected, count)
        self.devices = [mx.cpu(number) for number in self.rng.choice(6, count, replace=False)]
        self.block.collect_params().reset_ctx(self.devices)
        told = None if self.is_back else options_of(self.layer)["num_devices"]
        if told not in (None, count):
            with pytest.raises(ValueError, match=f"num_devices={told}, but its parameters live on {count} "):
                testing.step(self.block, *shards_and_heads([(2, CHANNELS, 3)] * count, dtype=self.dtype), self.devices)
            self.convert(num_devices=self.random([None, count]))

    def freeze_statistics(self, is_frozen):
        assert freeze_statistics(self.block, is_frozen) is self.block
        if not (self.is_back and self.kind == "symbol"):  # whose nodes must have been converted
            self.is_frozen = is_frozen

    def learn(self, gradients):
        self.block.collect_params(".*gamma|.*beta").setattr("grad_req", gradients)

    def load_from_file(self):
        saved = self.expected
        self.block.collect_params().save(self.file)
        self.set_vectors()
        self.train()
        self.block.collect_params().load(self.file, ctx=self.devices)
        self.expect_average(saved, len(self.devices))

    def set_vectors(self):
        random_affine(self.layer, CHANNELS, self.rng.randint(1 << 20))
        for name, low in (("running_mean", -2), ("running_var", 0.5)):
            getattr(self.layer, name).set_data(mx.nd.array(self.rng.uniform(low, 3, CHANNELS)))
        self.expected = self.vectors()

    def watch_calls(self):
        calls = []
        hook = self.block.register_forward_hook(lambda *_: calls.append(1))
        self.train()
        hook.detach()
        assert len(calls) >= 2 * len(self.devices)
        self.expected = self.vectors()

    def watch_operators(self):
        """It cannot be undone, and keeps operators from being computed together."""
        seen = []
        self.hybridize("hybridize")  # in static graphs MXNet has it as an experiment
        self.block.register_op_hook(lambda name, operator, array: seen.append(name))
        self.train()
        assert seen
        self.expected = self.vectors()

    def hybridize(self, mode=None):
        self.mode = mode or self.mode
        flags = testing.MODES[self.mode]
        self.block.hybridize(flags is not None, **(flags or {}))

    def convert_back_and_forth(self):
        options = options_of(self.layer)
        convert_batchnorm(self.block)
        self.is_back = True
        assert not isinstance(self.layer, SyncBatchNorm)
        self.train()
        self.change(self.random(["cast to float64", "move", "freeze", "save and load", "graph in another mode"]))
        self.train()
        self.expected, self.is_average = self.vectors(), False
        self.convert(**{name: options[name] for name in ("backend", "fuse", "timeout")})

    def change_options(self):
        count = len(self.devices)
        self.convert(
            group_size=self.random([item for item in (None, 1, 2, 3, 4) if count % (item or 1) == 0]),
            num_devices=self.random([None, count]),
            timeout=self.random([30.0, 50.0]),
            backend=self.random(["auto", "native", "portable"]),
            fuse=self.random([True, False]),
        )


CHANGES = {
    "numbers": Training.set_numbers,
    "numbers by conversion": Training.set_numbers_by_conversion,
    "cast to float64": lambda training: training.cast("float64"),
    "cast to float16": lambda training: training.cast("float16"),
    "cast to float32": lambda training: training.cast("float32"),
    "move": Training.move,
    "move again": Training.move,
    "freeze": lambda training: training.freeze_statistics(True),
    "release": lambda training: training.freeze_statistics(False),
    "gamma and beta stay": lambda training: training.learn("null"),
    "gamma and beta are learned": lambda training: training.learn("write"),
    "save and load": Training.load_from_file,
    "set": Training.set_vectors,
    "a forward hook": Training.watch_calls,
    "the graph anew": Training.hybridize,
    "graph in another mode": lambda training: training.hybridize(training.random(list(testing.MODES))),
    "back and forth": Training.convert_back_and_forth,
    "other options": Training.change_options,
    "other options again": Training.change_options,
    "an operator hook": Training.watch_operators,
}


@pytest.mark.parametrize("kind", ["layer", "net", "symbol"])
def test_every_change_counts_from_the_next_step_on(kind, mode, seed, tmp_path):
    training = Training(kind, mode, seed, tmp_path)
    training.train()
    *names, last = [name for name in CHANGES if kind != "symbol" or name != "numbers"]
    names = [*training.rng.permutation(names), last]
    for number, name in enumerate(names):
        try:
            training.change(name)
            training.train()
        except Exception as error:
            raise AssertionError(f"--seed {seed}, after {names[: number + 1]}: {error}") from error


@pytest.mark.parametrize("before", ["nothing", "a pass", "a pass, then the mode", "a pass that is refused"])
@pytest.mark.parametrize("kind", ["net", "symbol"])
def test_weights_may_be_there_before_the_devices_are(kind, before, mode, tmp_path):
    """On one device, as GluonCV loads base weights, and makes SSD's symbol of them; on two, on others, and back again.

    ``num_devices`` counts where it trains.
    """
    file, is_for_2 = str(tmp_path / "net.params"), before == "a pass that is refused"
    layer = SyncBatchNorm(in_channels=CHANNELS, num_devices=2 if is_for_2 else None, epsilon=1e-3, momentum=0.7)
    block = net = testing.initialized(sequential(layer))
    random_affine(layer, CHANNELS)
    if kind == "symbol":
        data = mx.sym.var("data")
        block = gluon.SymbolBlock(net(data), data, params=net.collect_params())
        (layer,) = testing.layers_of(block)
    if before != "a pass, then the mode":
        set_mode(block, mode)
    shards, heads = shards_and_heads(SHAPES[:1])
    if is_for_2:
        with pytest.raises(ValueError, match="num_devices=2, but its parameters live on 1"):
            testing.step(block, shards, heads, cpus(1))
    elif before != "nothing":
        block(mx.nd.array(shards[0])).wait_to_read()
        check_step(block, reference_of(layer, epsilon=1e-3, momentum=0.7), shards, heads, layer=layer)
    set_mode(block, mode)
    block.collect_params().save(file)
    block.collect_params().load(file)
    for used in (cpus(2), [mx.cpu(3), mx.cpu(1), mx.cpu(2)], cpus(1), cpus(2))[: 1 if is_for_2 else 4]:
        block.collect_params().reset_ctx(used)
        norm = reference_of(layer, epsilon=1e-3, momentum=0.7)
        for seed in range(2):
            shapes = [(1 + number, *SHAPES[0][1:]) for number in range(len(used))]
            check_step(block, norm, *shards_and_heads(shapes, seed=seed), used, layer=layer)


def test_who_reads_running_statistics_waits_for_the_layers_that_write_them(mode):
    """The first step of a Trainer too, which copies all parameters: in static graphs it lost what came later."""
    layers = [SyncBatchNorm(in_channels=CHANNELS, timeout=60) for _ in range(2)]
    late = [Late(lambda device: 0.1) for _ in layers]
    net = testing.initialized(sequential(late[0], layers[0], late[1], layers[1]), 2, mode)
    for layer in layers:
        random_affine(layer, CHANNELS)
    norms = [reference_of(layer) for layer in layers]
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    shards, heads = shards_and_heads(SHAPES)

    def check_statistics():
        """Read while the net may still run."""
        between = norms[0].step(shards).outputs
        norms[1].step([output.value for output in between])
        for layer, norm, more in zip(layers, norms, (0, max(output.size.max() for output in between))):
            for device in cpus(2):
                for name, wanted in zip(VECTORS[2:], norm.running()):
                    size = wanted.size + more * (1 + 2 * wanted.size)  # of the errors of what it was given
                    seen = getattr(layer, name).data(device).asnumpy()
                    check(name, seen, Sized(wanted.value, size), units=testing.precision(layer)["units"])

    testing.step(net, shards, heads, cpus(2))
    trainer.step(4)
    check_statistics()
    with autograd.record():
        outputs = [net(x) for x in testing.on_devices(shards)]
    check_statistics()
    assert len(outputs) == 2


@pytest.mark.parametrize("how", ["one thread", "a thread per device"])
def test_calls_that_nobody_records_keep_their_modes(how, mode):
    """Also if others follow before they have run. MXNet gives those of a static graph the mode of the last one."""
    layer = SyncBatchNorm(in_channels=CHANNELS, timeout=10)
    net = testing.initialized(sequential(Late(lambda device: 0.05), layer), 2, mode)
    random_affine(layer, CHANNELS)
    norm, (shards, _) = reference_of(layer), shards_and_heads(SHAPES)
    modes = True, False, True, True, False, False

    def call(x, is_training):
        with autograd.train_mode() if is_training else autograd.predict_mode():
            return net(x)

    def call_late(x):
        call(x, True)
        both.wait()  # from now on it is known which thread has which device
        outputs = []
        for is_training in modes:
            time.sleep(0.1 * x.context.device_id)
            outputs.append(call(x, is_training))
        return outputs

    inputs = testing.on_devices(shards)
    if how == "one thread":
        found = [[call(x, is_training) for x in inputs] for is_training in modes]
    else:
        both = threading.Barrier(2, timeout=20)
        norm.step(shards)
        with ThreadPoolExecutor(2) as threads:
            found = zip(*threads.map(call_late, inputs))
    for outputs, is_training in zip(found, modes):
        expected = norm.step(shards, training=is_training).outputs
        check_all("output", [out.asnumpy() for out in outputs], expected, **testing.precision(layer))


@pytest.mark.parametrize("others", [(), (SyncBatchNorm, 3), (nn.BatchNorm, 1)], ids=["alone", "more devices", "plain"])
@pytest.mark.parametrize("order", ["predict first", "train first"])
def test_recorded_passes_of_both_modes_keep_them(order, others, mode):
    """As adversarial training has them; nobody keeps the outputs of the first, and its operators come late. Backward
    passes of other nets, whose weights nobody has updated since, change nothing."""
    abandon_step()  # of other tests
    if others:
        kind, count = others
        testing.step(testing.initialized(kind(), count), *shards_and_heads(SHAPES[:1] * count), cpus(count))
    layer = SyncBatchNorm(in_channels=CHANNELS, timeout=10)
    net = testing.initialized(sequential(Late(lambda device: 0.05), layer), 2, mode)
    random_affine(layer, CHANNELS)
    norm, (shards, heads) = reference_of(layer), shards_and_heads(SHAPES)
    for _ in range(3):
        for is_training in (False, True) if order == "predict first" else (True, False):
            inputs = testing.on_devices(shards, learn=True)
            with autograd.record(train_mode=is_training):
                outputs = [net(x) for x in inputs]
            autograd.backward(outputs, testing.on_devices(heads), train_mode=is_training)
            del outputs
            expected = norm.step(shards, heads, training=is_training)
            found = inputs, expected.input_gradients
        assert steps.progress.is_balanced()  # or the next step could use no buffer of this one
        check_all("input gradient", [x.grad.asnumpy() for x in found[0]], found[1], **testing.precision(layer))
    for name, wanted in zip(VECTORS[2:], norm.running()):
        check(name, getattr(layer, name).data(mx.cpu(1)).asnumpy(), wanted, **testing.precision(layer))


def test_the_gradient_of_a_recorded_prediction_is_that_of_its_own_statistics(mode, backend):
    """Which the training passes after it, in the same record(), have moved when its backward pass comes."""
    if backend == "portable" and mode != "imperative":
        return  # it is MXNet's BatchNorm, which reads them then (docs/limits.md)
    layer = SyncBatchNorm(in_channels=CHANNELS, timeout=10)
    testing.initialized(layer, 2, mode)
    random_affine(layer, CHANNELS)
    norm, (shards, heads) = reference_of(layer), shards_and_heads(SHAPES)
    inputs, others = (testing.on_devices(shards, learn=True) for _ in range(2))
    with autograd.record():
        with autograd.predict_mode():
            outputs = [layer(x) for x in inputs]
        trained = [layer(x) for x in others]
    expected = norm.step(shards, heads, training=False).input_gradients
    autograd.backward([*outputs, *trained], [*testing.on_devices(heads), *(0 * y for y in trained)])
    check_all("input gradient", [x.grad.asnumpy() for x in inputs], expected, **testing.precision(layer))
