"""`check`: what it says of nets that synchronize and of nets that do not, and that it changes nothing."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib.amp.amp import bfloat16 as BFLOAT16  # noqa: N812
from mxnet.gluon import nn
from testing import cpus, initialized, sequential, set_mode

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm

pytestmark = pytest.mark.usefixtures("backend")


def images(count=4, channels=3, seed=0, dtype="float32"):
    """Each image with a scale and a mean of its own, as no two are alike."""
    rng = np.random.RandomState(seed)
    scale, shift = rng.uniform(0.5, 2, (2, count, channels, 1, 1))
    return mx.nd.array(rng.standard_normal((count, channels, 9, 8)) * scale + shift, dtype=dtype)


def build(norm=SyncBatchNorm, dropout=0.5, **options):
    return sequential(
        lambda: nn.Conv2D(8, 3),
        lambda: norm(**options),
        lambda: nn.Activation("relu"),
        lambda: nn.Dropout(dropout),
        lambda: nn.Conv2D(4, 3),
        lambda: norm(**options),
        lambda: nn.Dense(5),
    )


def states(result):
    return [layer.state for layer in result.layers]


@pytest.mark.parametrize("count", [2, 3])
def test_a_net_that_synchronizes(count, mode, capsys):
    net = initialized(build(), count, mode)
    result = gluon_syncbn.check(net, images(5))
    assert result.is_synchronized and states(result) == ["synchronized"] * 2
    assert set(result.differences) == {
        "outputs",
        "gradients of the input",
        "gradients of gamma and beta",
        "running statistics",
    }
    assert all(item.found < 1e-4 and item.usual < 1e-4 for item in result.differences.values())
    printed = capsys.readouterr().out
    assert printed == f"{result}\n" and "2 synchronized: cpu(0), cpu(1)" in printed and len(printed.splitlines()) == 8
    assert repr(result) == "<Check: synchronized, 2 of 2 layers>"


def test_a_plain_net(mode):
    result = gluon_syncbn.check(initialized(build(nn.BatchNorm), 2, mode), images())
    assert not result.is_synchronized and states(result) == ["not synchronized"] * 2
    assert all(item.found > 1e-3 > 100 * item.usual for item in result.differences.values())
    assert "convert_sync_batchnorm(net)" in str(result) and "too large" in str(result)
    assert repr(result) == "<Check: NOT synchronized, 0 of 2 layers>"


def test_one_layer_that_was_left_out(mode):
    """The others synchronize, so a net of many layers would not show it."""

    class Own(nn.BatchNorm):
        def forward(self, x):
            return super().forward(x)

    net = sequential(build(dropout=0), lambda: Own(), lambda: nn.Dense(3))
    result = gluon_syncbn.check(initialized(net, 2, mode), images())
    assert states(result) == ["synchronized"] * 2 + ["not synchronized"] and not result.is_synchronized
    assert result.layers[-1].text == "its class has a forward pass of its own"


@pytest.mark.parametrize("others", [True, False], ids=["beside a layer", "alone"])
def test_a_batch_normalization_that_is_no_layer(mode, others):
    """Only the numbers show it."""

    class Own(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            mean = F.mean(x, axis=(0, 2, 3), keepdims=True)
            return F.broadcast_sub(x, mean)

    layers = [lambda: SyncBatchNorm()] if others else []
    net = sequential(lambda: nn.Conv2D(8, 3), *layers, lambda: Own(), lambda: nn.Dense(3))
    result = gluon_syncbn.check(initialized(net, 2, mode), images())
    assert states(result) == ["synchronized"] * others and not result.is_synchronized
    assert result.differences["outputs"].found > 1e-3 and "NOT synchronized" in str(result)
    assert not others or result.differences["running statistics"].found < 1e-5


def everything(net):
    """All arrays, and their values; gradients, and whether they are fresh."""
    parameters = list(net.collect_params().values())
    learning = [parameter for parameter in parameters if parameter.grad_req != "null"]
    arrays = [array for parameter in parameters for array in parameter.list_data()]
    gradients = [array for parameter in learning for array in parameter.list_grad()]
    fresh = [array._fresh_grad for parameter in learning for array in parameter.list_data()]
    return [*map(id, arrays + gradients)], [array.asnumpy() for array in arrays + gradients], fresh


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_nothing_changes_and_training_goes_on(mode, grad_req):
    """Also between the backward pass and the update; a twin that is not checked has the same weights afterwards."""
    nets = []
    for is_checked in (True, False):
        mx.random.seed(3)
        net = initialized(build(dropout=0.2, num_devices=2), 2, mode)
        net.collect_params().setattr("grad_req", grad_req)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for number in range(3):
            net.collect_params().zero_grad()
            parts = gluon.utils.split_and_load(images(seed=number), cpus(2))
            with autograd.record():
                losses = [(net(part) ** 2).sum() for part in parts]
            autograd.backward(losses)
            if is_checked:
                before = everything(net)
                assert gluon_syncbn.check(net, images(6, seed=9)).is_synchronized
                after = everything(net)
                assert before[0] == after[0] and before[2] == after[2]
                for old, new in zip(before[1], after[1]):
                    np.testing.assert_array_equal(old, new)
            trainer.step(4)
            if is_checked:
                gluon_syncbn.check(net, images(2, seed=9))
        nets.append(everything(net)[1])
    for with_check, without in zip(*nets):
        np.testing.assert_array_equal(with_check, without)


def test_before_the_first_call_and_after_a_move(mode):
    net = initialized(build(nn.BatchNorm), 1, mode)
    one = gluon_syncbn.check(net, images())
    assert not one.is_synchronized and all(item.found < 1e-5 for item in one.differences.values())
    gluon_syncbn.convert_sync_batchnorm(net)
    assert "on one device, cpu(0)" in str(gluon_syncbn.check(net, images()))
    net.collect_params().reset_ctx(cpus(2))
    assert gluon_syncbn.check(net, images()).is_synchronized
    gluon_syncbn.convert_batchnorm(net)
    assert not gluon_syncbn.check(net, images()).is_synchronized


def test_frozen_layers_groups_and_layers_that_are_not_called(mode):
    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.frozen, self.unused = (
                    SyncBatchNorm(use_global_stats=True, in_channels=3),
                    SyncBatchNorm(in_channels=4),
                )
                self.norm, self.dense = SyncBatchNorm(group_size=2, in_channels=3), nn.Dense(3, in_units=216)

        def hybrid_forward(self, F, x):
            return self.dense(self.norm(self.frozen(x)))

    result = gluon_syncbn.check(initialized(Net(), 4, mode), images(8))
    assert sorted(states(result)) == ["frozen", "not called", "synchronized"] and result.is_synchronized
    assert "groups of 2 devices" in str(result)
    assert gluon_syncbn.check(initialized(build(group_size=1), 2, mode), images()).layers[0].text == "group_size=1"


class Levels(gluon.HybridBlock):
    """A head on two levels, whose layer shares its statistics with another, behind an embedding that is frozen."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.words, self.stem = nn.Embedding(10, 4), SyncBatchNorm(in_channels=4)
            self.conv, self.head = nn.Conv2D(3, 1, in_channels=4), SyncBatchNorm(in_channels=3)
            self.twin = SyncBatchNorm(in_channels=3, params=self.head.params)
        for block in (self.words, self.stem):
            block.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, x):
        x = F.reshape(F.transpose(self.words(x), axes=(0, 2, 1)), shape=(0, 0, 4, 4))
        x = self.conv(self.stem(x))
        return self.head(x), self.head(F.Pooling(x, kernel=(2, 2), stride=(2, 2))), self.twin(x * x)


def test_layers_whose_statistics_one_device_moves_otherwise(mode):
    words = np.random.RandomState(0).randint(10, size=(6, 16))
    result = gluon_syncbn.check(initialized(Levels(), 2, mode), mx.nd.array(words))
    assert result.is_synchronized and "running statistics" not in result.differences, str(result)
    assert re.search(r"running statistics of \w+, \w+, \w+ were not compared: one device", str(result))
    net = convert_batchnorm(Levels())
    assert not gluon_syncbn.check(initialized(net, 2, mode), mx.nd.array(words)).is_synchronized


def test_several_inputs_and_nested_outputs(mode):
    """An output whose first axis is not the batch is left out, also where a device has one image."""

    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.norm, self.dense = SyncBatchNorm(), nn.Dense(3)

        def hybrid_forward(self, F, x, label):
            anchors = F.contrib.MultiBoxPrior(x, sizes=(0.5,))
            x = self.norm(x)
            return [F.broadcast_mul(self.dense(x), label), (anchors, F.cast(x, "int32"), x)]

    net = initialized(Net(), 2, mode)
    labels = np.array([[1.0], [2.0]], dtype="float32")
    result = gluon_syncbn.check(net, images(2), labels)
    assert result.is_synchronized
    gluon_syncbn.check(set_mode(initialized(Net(), 2), "imperative"), images(2).asnumpy(), labels)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype, mode):
    for norm in (SyncBatchNorm, nn.BatchNorm):
        net = sequential(lambda: norm(), lambda: nn.Activation("relu"), lambda: norm())  # noqa: B023
        if dtype == "bfloat16" and norm is nn.BatchNorm:
            continue  # which takes it on few CPUs
        net.cast(BFLOAT16 if dtype == "bfloat16" else dtype)
        given = images().astype(BFLOAT16) if dtype == "bfloat16" else images(dtype=dtype)
        result = gluon_syncbn.check(initialized(net, 2, mode), given)
        assert result.is_synchronized == (norm is SyncBatchNorm)
        assert result.differences["outputs"].found < 0.01 or norm is not SyncBatchNorm


def test_a_symbol_inside(mode):
    x = mx.sym.var("data")
    net = mx.sym.BatchNorm(mx.sym.Convolution(x, num_filter=4, kernel=(3, 3), name="c"), name="n", fix_gamma=False)
    block = gluon.SymbolBlock(net, x)
    initialized(block, 2, mode)
    result = gluon_syncbn.check(block, images())
    assert [tuple(layer)[:2] for layer in result.layers] == [("n", "not synchronized")]
    result = gluon_syncbn.check(gluon_syncbn.convert_sync_batchnorm(block), images())
    assert [tuple(layer)[:2] for layer in result.layers] == [("n", "synchronized")] and result.is_synchronized


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_check_that_fails_changes_nothing(mode, grad_req, monkeypatch):
    """Neither gradients that were added up, nor dropout, which it turns off."""
    net = initialized(build(), 2, mode)
    net.collect_params().setattr("grad_req", grad_req)
    gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises((mx.MXNetError, ValueError)):
        gluon_syncbn.check(net, mx.nd.random.normal(shape=(4, 3)))  # before the shapes are known
    with autograd.record():
        losses = [net(part).sum() for part in gluon.utils.split_and_load(images(), cpus(2))]
    autograd.backward(losses)
    before, given = everything(net), images()
    monkeypatch.setattr(np.random, "RandomState", None)  # that draws the weights of outputs
    with pytest.raises(TypeError):
        gluon_syncbn.check(net, given)
    monkeypatch.undo()
    after = everything(net)
    assert before[0] == after[0] and before[2] == after[2]
    for old, new in zip(before[1], after[1]):
        np.testing.assert_array_equal(old, new)
    assert gluon_syncbn.check(net, images()).is_synchronized


def test_dropout_is_back_afterwards(mode):
    net = initialized(sequential(lambda: SyncBatchNorm(in_channels=3), lambda: nn.Dropout(0.5)), 2, mode)
    with pytest.raises(ValueError, match="all alike"):
        gluon_syncbn.check(net, mx.nd.ones((4, 3, 5, 5)))
    for _ in range(2):
        with autograd.train_mode():
            outputs = [net(x) for x in gluon.utils.split_and_load(images(), cpus(2))]
        assert 0.3 < np.mean([(out.asnumpy() == 0).mean() for out in outputs]) < 0.7
        gluon_syncbn.check(net, images())


def test_what_else_a_net_may_have(mode, tmp_path):
    """Indices, which have no gradient; blocks that Gluon does not know; a layer that is never called; one image per
    device; dead channels. It can be exported afterwards."""

    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense = nn.Dense(6, flatten=False, in_units=4)
                if mode == "imperative":  # a graph cannot have such
                    self.hidden = [self.dense]
                    del self._children["dense"]
                self.embedding, self.norm = nn.Embedding(9, 4), SyncBatchNorm(axis=-1, in_channels=6)
                self.unused = SyncBatchNorm() if mode == "imperative" else nn.Activation("relu")

        def hybrid_forward(self, F, x):
            return self.norm(self.dense(self.embedding(x)))

    net = initialized(Net(), 2, mode)
    if mode == "imperative":
        net.dense.initialize(ctx=cpus(2))
    net.dense.weight.grad(mx.cpu(1))[:] = 7
    for indices in (np.array([[1, 2, 3], [4, 5, 6]]), mx.nd.array([[1, 2, 3], [4, 5, 6]])):
        result = gluon_syncbn.check(net, indices)
        assert result.is_synchronized and "gradients of the input" not in result.differences
    assert (net.dense.weight.grad(mx.cpu(1)).asnumpy() == 7).all()
    two = sequential(lambda: nn.Dense(5), lambda: SyncBatchNorm(), lambda: nn.Dense(4), lambda: SyncBatchNorm())
    initialized(two, 2, mode)(images(1))
    for seed in range(6):
        assert gluon_syncbn.check(two, images(2, seed=seed)).is_synchronized
    if mode != "imperative":
        two.export(str(tmp_path / "net"))


def test_mxnets_numpy(mode):
    mx.npx.set_np()
    try:
        net = initialized(sequential(lambda: nn.Conv2D(4, 3), lambda: SyncBatchNorm()), 2, mode)
        for given in (images().as_np_ndarray(), images().asnumpy()):
            assert gluon_syncbn.check(net, given).is_synchronized
    finally:
        mx.npx.reset_np()


def test_errors():
    net = build()
    with pytest.raises(TypeError, match="expected a Gluon block"):
        gluon_syncbn.check(3, images())
    with pytest.raises(ValueError, match="is not initialized"):
        gluon_syncbn.check(net, images())
    initialized(net, 2)
    for inputs, error, text in (
        ((), TypeError, "pass what the net is called with"),
        (("images",), TypeError, "not str"),
        ((images(), images(2)), ValueError, "different numbers of images .4, 2."),
        ((images(1),), ValueError, r"too few images \(1\) for 2 devices"),
        ((mx.nd.ones((4, 3, 9, 8)),), ValueError, "the images are all alike"),
    ):
        with pytest.raises(error, match=text):
            gluon_syncbn.check(net, *inputs)
    head = initialized(nn.Dense(2, in_units=5), 1)  # as those of GluonCV's segmentation nets, which are made on one
    with pytest.raises(ValueError, match=r"2 parameters \(.*weight.* are on other devices than cpu\(0\), cpu\(1\)"):
        gluon_syncbn.check(sequential(net, head), images())
    with autograd.record(), pytest.raises(ValueError, match="a step is under way"):
        gluon_syncbn.check(net, images())
    scalar = sequential(net, lambda: nn.HybridLambda(lambda F, x: F.sum(x)))
    with pytest.raises(ValueError, match="returns no floats whose first axis is the batch"):
        gluon_syncbn.check(scalar, images())
    assert gluon_syncbn.check(net, images()).is_synchronized
