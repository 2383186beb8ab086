"""What only the native back end does: portable refuses it with one clear error, wherever it shows, and changes nothing.

Several processes are in test_process_ways.py.
"""

import mxnet as mx
import numpy as np
import oracle
import pytest
from harness import MODES, cpus, random_shards, run_python, set_mode, step
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_symbol, convert_sync_batchnorm
from gluon_syncbn.backends import native

OPTIONS = {
    "renorm": ({"renorm": (2, 1)}, "only the native back end has renorm"),
    "in_place": ({"in_place": True}, "only the native back end has in_place"),
}
REFUSALS = pytest.mark.parametrize("options, words", list(OPTIONS.values()), ids=list(OPTIONS))
SHAPES = [(2, 4, 3, 5)] * 2


def refused(words, requested="portable", name="stem"):
    return pytest.raises(
        RuntimeError, match=f"^SyncBatchNorm '{name}': backend='{requested}' cannot run here: .*{words}.$"
    )


def train(net):
    return step(net, random_shards(SHAPES), random_shards(SHAPES, seed=1), cpus(2))


def check(outputs):
    expected = oracle.batch_norm(random_shards(SHAPES), np.ones(4), np.zeros(4))
    assert oracle.distance([item.asnumpy() for item in outputs], expected.outputs) < 1e-5


@REFUSALS
def test_where_it_is_asked_for_a_layer_cannot_be_made(options, words):
    with refused(words):
        SyncBatchNorm(backend="portable", prefix="stem_", **options)


@pytest.mark.parametrize("mode", list(MODES))
@REFUSALS
def test_where_the_environment_says_portable(options, words, mode, monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    layer = SyncBatchNorm(in_channels=4, prefix="stem_", **options)
    layer.initialize(ctx=cpus(2))
    set_mode(layer, mode)
    with refused(words):
        train(layer)
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "native")
    set_mode(layer, mode)
    outputs, _ = train(layer)
    assert np.isfinite(outputs[0].asnumpy()).all()


@REFUSALS
def test_with_a_store_which_only_portable_uses(options, words):
    """Both back ends say why they cannot, where the layer is made."""
    words = f"a kvstore was given, and only the portable back end uses one; and {words}"
    with refused(words, "auto"):
        SyncBatchNorm(prefix="stem_", kvstore="local", **options)
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(prefix="stem_", kvstore="local"))
    with refused(words, "auto"):
        convert_sync_batchnorm(net, **options)
    assert net[0].backend == "portable"


@pytest.mark.parametrize("mode", list(MODES))
@REFUSALS
def test_where_nothing_was_compiled(options, words, mode, monkeypatch):
    monkeypatch.setattr(native, "unavailable_reason", "no compiler")
    layer = SyncBatchNorm(in_channels=4, prefix="stem_", **options)
    layer.initialize(ctx=cpus(2))
    set_mode(layer, mode)
    with refused(f"the compiled operator is not available: no compiler; and {words}", "auto"):
        train(layer)


@REFUSALS
def test_a_net_that_cannot_be_converted_stays_as_it_is(options, words):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=4, prefix="stem_"), nn.Activation("relu"))
    with refused(words, name=net.name):
        convert_sync_batchnorm(net, backend="portable", **options)
    assert type(net[0]) is nn.BatchNorm and type(net[1]) is nn.Activation
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), SyncBatchNorm(prefix="stem_", **options))
    with refused(words):
        convert_sync_batchnorm(net, backend="portable")
    assert type(net[0]) is nn.BatchNorm and net[1].backend == "native"


@pytest.mark.parametrize("given, requested", [({"backend": "portable"}, "portable"), ({"kvstore": "local"}, "auto")])
@REFUSALS
def test_a_symbol(options, words, given, requested):
    data = mx.sym.var("data")
    with refused(words, requested):
        gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **given, **options)
    with refused(words, requested):
        convert_symbol(mx.sym.BatchNorm(data, name="stem"), 2, **given, **options)
    ours = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **options)
    with refused(words, requested):
        convert_symbol(ours, 2, **given)


@REFUSALS
def test_a_file_is_not_loaded_without_what_it_says(options, words, tmp_path, monkeypatch):
    file = str(tmp_path / "net-symbol.json")
    gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), num_devices=2, name="stem", **options).save(file)
    with refused(words):
        gluon_syncbn.symbol.load(file, backend="portable")
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    with refused(words):
        gluon_syncbn.symbol.load(file)
    block = mx.gluon.SymbolBlock(mx.sym.load(file), mx.sym.var("data"))
    block.initialize(mx.init.One(), ctx=cpus(2))
    with refused(words):
        train(block)


@REFUSALS
def test_predictions_in_imperative_mode_need_no_back_end(options, words, monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    layer = SyncBatchNorm(in_channels=4, **options)
    layer.initialize(ctx=cpus(2))
    x = mx.nd.array(random_shards(SHAPES)[0])
    assert np.abs(layer(x).asnumpy() - x.asnumpy() / np.sqrt(1 + 1e-5)).max() < 1e-6


# Profiles


def portable_layer(mode="imperative"):
    layer = SyncBatchNorm(in_channels=4, prefix="stem_", backend="portable", timeout=30)
    layer.initialize(ctx=cpus(2))
    return set_mode(layer, mode)


@pytest.mark.parametrize("mode", list(MODES))
def test_no_profile_begins_beside_a_layer_that_it_would_not_see(mode):
    layer = portable_layer(mode)
    check(train(layer)[0])
    words = "^gluon_syncbn.profile: stem runs on the portable back end, which keeps no notes.$"
    with pytest.raises(RuntimeError, match=words), gluon_syncbn.profile():
        raise AssertionError("it has begun")
    check(train(layer)[0])
    del layer
    other = SyncBatchNorm(in_channels=4)
    other.initialize(ctx=cpus(2))
    with gluon_syncbn.profile() as report:
        train(other)
    assert [row.calls for row in report.rows] == [1, 1]


@pytest.mark.parametrize("mode", list(MODES))
def test_such_a_layer_does_not_begin_to_train_in_a_profile(mode):
    layer = portable_layer(mode)
    words = r"SyncBatchNorm 'stem': gluon_syncbn.profile\(\) does not see layers on the portable back end"
    with gluon_syncbn.profile() as report, pytest.raises(RuntimeError, match=words):
        train(layer)
    assert report.rows == []
    gluon_syncbn.abandon_step()
    check(train(layer)[0])


def test_such_a_symbol_does_not_train_in_a_profile():
    sym = gluon_syncbn.symbol.SyncBatchNorm(
        mx.sym.var("data"), num_devices=2, name="stem", fix_gamma=False, eps=1e-5, backend="portable", timeout=30
    )
    executors = [sym.simple_bind(device, data=SHAPES[0]) for device in cpus(2)]
    shards = random_shards(SHAPES)

    def forward():
        for executor, shard in zip(executors, shards):
            executor.arg_dict["stem_gamma"][:] = 1
            executor.forward(is_train=True, data=mx.nd.array(shard))
        return [executor.outputs[0] for executor in executors]

    check(forward())
    with gluon_syncbn.profile():
        # The second device's pass may begin when the first one has failed.
        errors = (mx.MXNetError, gluon_syncbn.SyncBatchNormError)
        with pytest.raises(errors, match=r"'stem': gluon_syncbn.profile\(\) does not see"):
            for output in forward():
                output.asnumpy()
        gluon_syncbn.abandon_step()
    check(forward())


# bfloat16, where MXNet's own BatchNorm takes none

BFLOAT16 = """
import pytest
from harness import *
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

refused = pytest.raises(ValueError, match="^SyncBatchNorm 'stem': the portable back end is made of MXNet's own "
    "BatchNorm, which takes no bfloat16 on this processor. "
    "Use the native back end, or cast the net to float16 or float32.$")
shards = random_shards([(2, 4, 3, 5)] * 2)
x = [mx.nd.amp_cast(mx.nd.array(shard, ctx=device), dtype=bfloat16)
     for shard, device in zip(shards, cpus(2))]

class Inside(nn.HybridSequential):
    def hybrid_forward(self, F, x):
        return super().hybrid_forward(F, F.amp_cast(x, dtype=bfloat16))

def check(net, inputs, is_refused_in_prediction):
    net.initialize(ctx=cpus(2))
    with refused, autograd.record():
        net(inputs[0])
    gluon_syncbn.abandon_step()
    if is_refused_in_prediction:  # a graph is made for both
        with refused:
            net(inputs[0])
    else:
        assert net(inputs[0]).dtype == x[0].dtype
    convert_sync_batchnorm(net, backend='native')
    with autograd.record():
        outputs = [net(item) for item in inputs]
    assert all(np.isfinite(mx.nd.cast(item, 'float32').asnumpy()).all() for item in outputs)
    print('RIGHT')

for mode in MODES:
    layer = SyncBatchNorm(in_channels=4, prefix='stem_', backend='portable')
    check(set_mode(layer, mode), x, mode != 'imperative')
    net = Inside()
    net.add(SyncBatchNorm(in_channels=4, prefix='stem_', backend='portable'))
    inputs = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(2))]
    check(set_mode(net, mode), inputs, mode != 'imperative')
data = mx.sym.amp_cast(mx.sym.cast(mx.sym.var('data'), dtype='float32'), dtype=bfloat16)
with refused:
    gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, backend='portable', name='stem')
block = mx.gluon.SymbolBlock([mx.sym.BatchNorm(mx.sym.relu(mx.sym.var('data')), name='stem')], [mx.sym.var('data')])
check(convert_sync_batchnorm(block, backend='portable'), x, True)
alone = SyncBatchNorm(in_channels=4, backend='portable')  # on one device it is nn.BatchNorm, in float32
alone.initialize(ctx=mx.cpu(0))
with autograd.record():
    assert alone(x[0]).dtype == x[0].dtype
print('RIGHT')
"""


def test_bfloat16_where_mxnet_takes_none():
    done = run_python(BFLOAT16, DNNL_MAX_CPU_ISA="AVX2", GLUON_SYNCBN_MAX_CPU_ISA="avx2")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.count("RIGHT") == 2 * len(MODES) + 2


@pytest.mark.parametrize("interface", ["nd", "np", "np before the import"])
def test_where_nothing_was_compiled_every_device_gets_its_error(interface):
    """MXNet has one place for what custom operators raise: of two that fail together it lost one, and NaN was read.

    Also in backward passes. MXNet chooses the class of a custom operator's arrays when the package is imported.
    """
    set_np = "mx.npx.set_np()" if "np" in interface else ""
    code = f"""
import pathlib
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: path.suffix != '.so' and exists(path)
import mxnet as mx
{set_np if "before" in interface else ""}
import gluon_syncbn
{set_np}
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, timeout=0.2)
layer.initialize(ctx=[mx.cpu(i) for i in range(4)])
assert layer.backend == "portable"
ones = mx.np.ones if mx.util.is_np_array() else mx.nd.ones
for count, direction in [(3, "forward"), (4, "backward")] * 4:
    inputs = [ones((2, 3, 4, 4), ctx=mx.cpu(i)) for i in range(count)]
    for data in inputs:
        data.attach_grad()
    with mx.autograd.record():
        outputs = [layer(data) for data in inputs]
    if direction == "backward":
        mx.autograd.backward(outputs[:3])
    for array in [data.grad for data in inputs[:3]] if direction == "backward" else outputs:
        try:
            array.asnumpy()
        except gluon_syncbn.SyncBatchNormError as error:
            print("ERROR" if " pass waited 0.2 s for " in str(error) else error)
    try:
        mx.nd.random.normal(0, -1, shape=1).asnumpy()
    except mx.MXNetError as error:
        print("ANOTHER" if "scale" in str(error) else error)
    gluon_syncbn.abandon_step()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == (["ERROR"] * 3 + ["ANOTHER"]) * 8, done.stdout
