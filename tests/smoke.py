"""What a wheel must be able to do with every MXNet that it is meant for; needs nothing but MXNet and NumPy.

    python tests/smoke.py

A small net trains a step on 2 CPU contexts with the compiled operator, in every mode, and gives what nn.BatchNorm gives
for the whole batch on one; its exported graph is plain and converts again; Module and the NumPy interface run; a device
that does not come is named in the error; the step after an exception is right; and from MXNet 1.7 on, each CPU device
has temporary space of its own, which does not grow.
"""

import os
import re
import sys
import tempfile
import time

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

import gluon_syncbn

DEVICES = [mx.cpu(0), mx.cpu(1)]
MODES = {"imperative": None, "hybridize": {}, "static": {"static_alloc": True, "static_shape": True}}
BATCH = np.random.RandomState(0).standard_normal((4, 16, 9, 9)).astype("float32")


def make_net(devices, convert: bool, mode: str):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(2):
            net.add(nn.Conv2D(16, 3, padding=1, in_channels=16), nn.BatchNorm(in_channels=16), nn.Activation("relu"))
        net.add(nn.Conv2D(16, 1, in_channels=16))
    if convert:
        gluon_syncbn.convert_sync_batchnorm(net, backend="native", timeout=20)
    net.initialize(ctx=devices)
    rng = np.random.RandomState(1)
    for name, parameter in sorted(net.collect_params().items()):
        if "weight" in name:
            parameter.set_data(mx.nd.array(0.1 * rng.standard_normal(parameter.shape)))
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


def step(net, devices):
    inputs = [mx.nd.array(part, ctx=device) for part, device in zip(np.split(BATCH, len(devices)), devices)]
    for item in inputs:
        item.attach_grad()
    with autograd.record():
        outputs = [net(item) for item in inputs]
        losses = [(output * output).sum() for output in outputs]
    autograd.backward(losses)
    return [np.concatenate([item.asnumpy() for item in items]) for items in (outputs, [x.grad for x in inputs])]


def graphs(net) -> None:
    """What a trained static net exports, as a SymbolBlock and as a Module on two devices."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "net")
        net.export(prefix)
        sym, arguments, states = mx.model.load_checkpoint(prefix, 0)
        assert "Custom" not in sym.tojson() and sym.tojson().count('"BatchNorm"') == 2
        block = mx.gluon.SymbolBlock.imports(prefix + "-symbol.json", ["data"], prefix + "-0000.params", ctx=DEVICES)
    gluon_syncbn.convert_sync_batchnorm(block, backend="native", timeout=20)
    outputs, _ = step(block, DEVICES)
    module = mx.mod.Module(gluon_syncbn.convert_symbol(sym, 2, timeout=20), context=DEVICES, label_names=None)
    module.bind([("data", BATCH.shape)])
    module.init_params(arg_params=arguments, aux_params=states)
    module.forward(mx.io.DataBatch([mx.nd.array(BATCH)]), is_train=True)
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), outputs, rtol=1e-3, atol=1e-4)


def numpy_interface() -> None:
    mx.npx.set_np()
    layer = gluon_syncbn.SyncBatchNorm(in_channels=16, timeout=20)
    layer.initialize(ctx=DEVICES)
    layer.hybridize()
    with autograd.record():
        outputs = [layer(mx.np.array(part, ctx=d)) for part, d in zip(np.split(BATCH, 2), DEVICES)]
    assert all(type(item) is mx.np.ndarray for item in outputs)
    normalized = np.concatenate([item.asnumpy() for item in outputs])
    np.testing.assert_allclose(normalized.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(normalized.var(axis=(0, 2, 3)), 1, atol=1e-3)
    mx.npx.reset_np()


def exceptions() -> None:
    """One between the devices of a step; the next step is right, and no one has waited for long."""
    for backend in ("native", "portable"):
        layer = gluon_syncbn.SyncBatchNorm(in_channels=16, timeout=900, backend=backend)
        layer.initialize(ctx=DEVICES)
        before = step(layer, DEVICES)
        started = time.monotonic()
        try:
            with autograd.record():
                layer(mx.nd.array(BATCH, ctx=DEVICES[0]))
                raise KeyError
        except KeyError:
            pass
        assert all((a == b).all() for a, b in zip(before, step(layer, DEVICES))), backend
        assert time.monotonic() - started < 600, backend


def temporary_space() -> None:
    """The ordinary loop, with its loss outside the net."""
    version = tuple(map(int, mx.__version__.split(".")[:2]))
    reason = gluon_syncbn.mxnet_engine.cpu_resources.shared_because()
    assert bool(reason) == (version < (1, 7)), reason
    if reason:
        return print(f"CPU devices share temporary space: {reason}")

    def resident() -> int:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1])

    for mode in MODES:
        net, images = make_net(DEVICES, True, mode), mx.nd.random.normal(shape=(8, 16, 48, 48))
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
        for number in range(60):
            with autograd.record():
                losses = [(net(part) ** 2).sum() for part in mx.gluon.utils.split_and_load(images, DEVICES)]
            autograd.backward(losses)
            trainer.step(8)
            [loss.asscalar() for loss in losses]
            if number == 9:
                early = resident()
        assert resident() < 1.3 * early, mode
    print("temporary space: does not grow")


def main() -> None:
    for mode in MODES:
        expected = step(make_net(DEVICES[:1], False, mode), DEVICES[:1])
        net = make_net(DEVICES, True, mode)
        for _ in range(20):
            for seen, wanted in zip(step(net, DEVICES), expected):
                worst = np.abs(seen - wanted).max() / np.abs(wanted).max()
                assert worst < 1e-4, (mode, worst)
        print(f"{mode}: right")
    graphs(net)
    print("export, SymbolBlock, Module: right")
    temporary_space()
    numpy_interface()
    print("mx.np: right")
    layer = gluon_syncbn.SyncBatchNorm(in_channels=16, timeout=1, prefix="stem_", backend="native")
    layer.initialize(ctx=DEVICES)
    with autograd.record():
        output = layer(mx.nd.array(BATCH, ctx=DEVICES[0]))
    try:
        output.wait_to_read()
    except mx.MXNetError as error:
        words = r"SyncBatchNorm 'stem': forward pass waited (1|only \d\.\d) s for 1 of 2 devices"
        assert re.search(words, str(error)), error
        print("missing device: named in the error")
    else:
        sys.exit("a device was missing and nothing failed")
    exceptions()
    print("after exceptions: right")
    print(f"RIGHT with MXNet {mx.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}")


if __name__ == "__main__":
    main()
