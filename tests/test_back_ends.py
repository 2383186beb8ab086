"""What a layer computes where it is called, which back end it takes and says, and what portable refuses with one error.

A table of facts: by itself, with the other device, or refused. Choices, stores, profiles; what only GPUs take.
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from executors import bind, check_executors, norm_of
from mxnet.gluon import SymbolBlock, nn
from reference import Sized, check, check_all
from test_layer import CASES, make
from testing import (
    HANG,
    MODES,
    NOT_COMPILED,
    check_running,
    check_step,
    cpus,
    forget_choices,
    instruction_set,
    layers_of,
    observe,
    operators_of,
    options_of,
    play_gpus,
    play_not_compiled,
    precision,
    reference_of,
    run_python,
    set_mode,
    shards_and_heads,
    step,
)

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_symbol, convert_sync_batchnorm

SHAPES = [(3, 4, 3, 5), (1, 4, 3, 5)]
modes = pytest.mark.parametrize("mode", list(MODES))

# In training, by num_devices and the devices that there are: nn.BatchNorm on each device, or one batch.
NOT_SAID, NOT_ALL = "does not say on how many devices it trains", "forward pass waited 0.3 s for 1 of 2 devices"
OTHERS = r"its graph was built for cpu\(\d\), and now runs on cpu\(\d\)"
LAYER = {
    (None, 1): "alone",
    (None, 2): "together",
    (1, 1): "alone",
    (1, 2): "num_devices=1, but its parameters live on 2",
    (2, 1): "num_devices=2, but its parameters live on 1",
    (2, 2): "together",
}
SYMBOL = {  # it knows no parameters
    (None, 1): NOT_SAID,
    (None, 2): NOT_SAID,
    (1, 1): "alone",
    (1, 2): "alone",
    (2, 1): NOT_ALL,
    (2, 2): "together",
}


def fact_of(site, group_size, renorm, num_devices, count) -> str:
    """What happens in training; with ``group_size`` 1 each device is a batch."""
    fact = (SYMBOL if site == "symbol" else LAYER)[num_devices, count]
    if site == "symbol" and group_size == 1 and not renorm:
        return "alone"
    if site == "symbol" and renorm and (num_devices, count) == (1, 2):  # it is not nn.BatchNorm, and knows its device
        return OTHERS
    return "alone" if fact == "together" and group_size == 1 else fact


@pytest.mark.parametrize("num_devices, count", list(LAYER))
@pytest.mark.parametrize("group_size, renorm", [(None, None), (1, None), (None, (2, 1)), (1, (2, 1))])
@pytest.mark.parametrize("site", [*MODES, "symbol"])
def test_alone_together_or_refused(site, group_size, renorm, num_devices, count, backend):
    """In prediction and with frozen statistics it is nn.BatchNorm, and nobody is waited for."""
    if not (renorm and backend == "portable"):  # which has none: see below
        for use in ("training", "prediction", "frozen"):
            check_fact(use, site, group_size, renorm, num_devices, count, backend)


def check_fact(use, site, group_size, renorm, num_devices, count, backend):
    fact = fact_of(site, group_size, renorm, num_devices, count)
    if use != "training" and (site == "symbol" or not fact.startswith("num_devices")):
        fact = "alone"
    options = {"group_size": group_size, "renorm": renorm, "num_devices": num_devices, "timeout": 0.3}
    if fact == "together":  # not in so short a time
        options["timeout"] = 60
    options["use_global_stats"] = use == "frozen"
    shards, heads = shards_and_heads(SHAPES[:count], seed=num_devices or 0)
    own = {"frozen": use != "training", "group_size": 1 if fact == "alone" else None, "renorm": renorm}
    if site == "symbol":
        symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), fix_gamma=False, name="bn", **options)
        norm = norm_of(4, "portable" if fact == "alone" and not renorm else backend, **own)
        executors = bind(symbol, shards, {"bn": norm})

        def train():
            check_executors(executors, norm, shards, heads, is_train=use != "prediction")
    else:
        layer = SyncBatchNorm(in_channels=4, **options)
        layer.initialize(ctx=cpus(count))
        for name, seed in (("gamma", 1), ("beta", 2), ("running_mean", 3), ("running_var", 4)):
            getattr(layer, name).set_data(mx.nd.array(np.random.RandomState(seed).uniform(0.5, 2, 4)))
        set_mode(layer, site)
        norm = reference_of(layer, **own)

        def train():
            check_step(layer, norm, shards, heads, train_mode=use != "prediction")

    if fact in ("alone", "together"):
        for _ in range(2):
            train()
        if site != "symbol" and fact == "alone" and count == 2:  # the other need not come
            check_step(layer, norm, shards[:1], heads[:1], cpus(1), used=[0], train_mode=use != "prediction")
        return
    with pytest.raises((ValueError, mx.MXNetError, gluon_syncbn.SyncBatchNormError), match=fact):
        train()
    gluon_syncbn.abandon_step()


@pytest.mark.parametrize("where", ["converted", "in a block"])
def test_a_layer_on_one_device_is_plain_only_for_now(where, backend):
    """Its symbol may be used on other devices later: nn.BatchNorm on one, and synchronized where it is told to be."""
    layer = SyncBatchNorm(in_channels=4, prefix="bn_", timeout=60, activation="relu", momentum=0.75, epsilon=1e-3)
    layer.initialize(ctx=mx.cpu(0))
    data = mx.sym.var("data")
    symbol = layer(data)
    shards, heads = shards_and_heads(SHAPES)
    norm = norm_of(4, "portable", activation="relu", momentum=0.75, group_size=1)
    check_executors(bind(symbol, shards, {"bn": norm}), norm, shards, heads)
    if where == "converted":
        norm = norm_of(4, backend, activation="relu", momentum=0.75)
        check_executors(bind(convert_symbol(symbol, 2), shards, {"bn": norm}), norm, shards, heads)
        return
    block = SymbolBlock(symbol, data)
    block.initialize(ctx=cpus(2))
    block(mx.nd.array(shards[0]))
    (inside,) = layers_of(block)
    check_step(block, reference_of(inside, activation="relu"), shards, heads, layer=inside)
    assert options_of(inside)["timeout"] == 60


# Which back end, and what is said


@pytest.fixture
def said(caplog, monkeypatch):
    """The log, with no choice made before."""
    forget_choices(monkeypatch)
    caplog.set_level(logging.INFO, logger="gluon_syncbn")
    return caplog


def make_layer(devices=None, **options):
    layer = SyncBatchNorm(in_channels=4, prefix="stem_", timeout=60, **options)
    layer.initialize(ctx=devices or cpus(2))
    return layer


@pytest.mark.parametrize(
    "options, backend, words",
    [
        ({}, "native", f"compiled kernels, {instruction_set()}"),
        ({"backend": "native"}, "native", f"compiled kernels, {instruction_set()}"),
        ({"backend": "portable"}, "portable", "it was asked for"),
        ({"kvstore": "local"}, "portable", "a kvstore was given, and only the portable back end uses one"),
    ],
)
def test_a_layer_says_once_which_back_end_it_takes(options, backend, words, said, recwarn):
    for _ in range(3):
        layer = make_layer(**options)
        assert layer.backend == backend
        check_step(layer, reference_of(layer), *shards_and_heads(SHAPES))
    assert said.messages == [f"back end {backend}: {words}."]
    assert not [item for item in recwarn if issubclass(item.category, UserWarning)]


def on_gpus(**options):
    """Parameters that wait for their shape tell their devices already."""
    layer = SyncBatchNorm(prefix="here_", **options)
    layer.initialize(ctx=[mx.gpu(0), mx.gpu(1)])
    return layer


def test_portable_with_a_warning_where_mxnet_was_built_without_cuda(said, recwarn):
    """But none where it was asked for. What runs on GPUs is in tests/gpu."""
    assert on_gpus(backend="portable").backend == "portable"
    assert said.messages == ["back end portable: it was asked for."] and not recwarn.list
    with pytest.warns(UserWarning, match="SyncBatchNorm 'here' runs on the portable back end.*USE_CUDA=1"):
        assert on_gpus().backend == "portable"
    assert "the CUDA kernels cannot run on gpu(0)" in said.text
    with pytest.raises(RuntimeError, match=r"'here': backend='native' cannot run here: .*gpu\(0\)"):
        _ = on_gpus(backend="native").backend


def test_portable_where_nothing_was_compiled(said, monkeypatch):
    play_not_compiled(monkeypatch)
    layer = make_layer()
    check_step(layer, reference_of(layer), *shards_and_heads(SHAPES))
    assert layer.backend == "portable"
    assert said.messages == ["back end portable: the compiled operator is not available: no compiler."]
    with pytest.raises(RuntimeError, match="SyncBatchNorm 'stem': backend='native' cannot run here.*no compiler"):
        make_layer(backend="native")


def test_the_environment_says_what_auto_means(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    assert make_layer().backend == "portable"
    assert make_layer(backend="native").backend == "native"
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "fast")
    with pytest.raises(ValueError, match="GLUON_SYNCBN_BACKEND must be one of auto, native, portable, not 'fast'"):
        _ = make_layer().backend


FLAGS = {**MODES, "static_alloc only": {"static_alloc": True}}


@pytest.mark.parametrize("inner", [None, "hybridize", "static", "static_alloc only"])
@pytest.mark.parametrize("outer", ["hybridize", "static", "static_alloc only"])
def test_the_flags_of_the_block_that_owns_the_graph_count(outer, inner, backend):
    """What is safe in static graphs only is used in those only; elsewhere values would be overwritten."""
    net = nn.HybridSequential()
    net.add(nn.HybridLambda("sin"), SyncBatchNorm(in_channels=4, timeout=60, fuse=False), nn.Activation("relu"))
    net.initialize(ctx=cpus(2))
    net.hybridize(**FLAGS[outer])
    if inner is not None:
        net[1].hybridize(**FLAGS[inner])
    norm, how = reference_of(net[1], activation="relu"), precision(net[1])
    for seed in range(4):
        shards, heads = shards_and_heads(SHAPES, seed=seed)
        outputs, inputs = step(net, shards, heads, cpus(2))
        seen = [item.asnumpy() for item in outputs]
        expected = norm.step([np.sin(shard) for shard in shards], heads, seen=seen)
        check_all("output", seen, expected.outputs, **how)
        slopes = [np.cos(shard.astype("float64")) for shard in shards]
        chained = [Sized(item.value * by, item.size) for item, by in zip(expected.input_gradients, slopes)]
        check_all("input gradient", [item.grad.asnumpy() for item in inputs], chained, **how)
        check_running(net[1], norm)
    if backend == "native":  # where it is not safe, numbers are wrong too seldom to be seen here
        assert ("_copy" in operators_of(net)) == (outer == "static")


# What only the native back end does. Several processes are in test_process_ways.py.

OPTIONS = {
    "renorm": ({"renorm": (2, 1)}, "only the native back end has renorm"),
    "in_place": ({"in_place": True}, "only the native back end has in_place"),
}
REFUSALS = pytest.mark.parametrize("options, words", list(OPTIONS.values()), ids=list(OPTIONS))


def refused(words, requested="portable", name="stem"):
    where = f"SyncBatchNorm '{name}': backend='{requested}' cannot run here: "
    return pytest.raises(RuntimeError, match=f"^{where}.*{words}.$")


@REFUSALS
def test_what_portable_lacks_is_refused_where_a_layer_is_made_or_converted(options, words):
    """And a net that cannot be converted stays as it is."""
    with refused(words):
        make_layer(backend="portable", **options)
    both = f"a kvstore was given, and only the portable back end uses one; and {words}"  # neither can
    with refused(both, "auto"):
        make_layer(kvstore="local", **options)
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=4, prefix="stem_"), nn.Activation("relu"))
    with refused(words, name=net.name):
        convert_sync_batchnorm(net, backend="portable", **options)
    assert type(net[0]) is nn.BatchNorm and type(net[1]) is nn.Activation
    for given, asked, text, kept in (
        (options, {"backend": "portable"}, words, "native"),
        ({"kvstore": "local"}, options, both, "portable"),
    ):
        net = nn.HybridSequential()
        net.add(nn.BatchNorm(), SyncBatchNorm(prefix="stem_", **given))
        with refused(text, "portable" if "backend" in asked else "auto"):
            convert_sync_batchnorm(net, **asked)
        assert type(net[0]) is nn.BatchNorm and net[1].backend == kept


@modes
@REFUSALS
def test_what_portable_lacks_is_refused_where_the_layer_trains_and_changes_nothing(options, words, mode, monkeypatch):
    """Where the environment says portable, or nothing was compiled. Predictions in imperative mode need no back end."""
    layer = make_layer(**options)
    norm = reference_of(layer, renorm=options.get("renorm"), in_place="float32" if "in_place" in options else None)
    set_mode(layer, mode)
    with monkeypatch.context() as changed:
        changed.setenv("GLUON_SYNCBN_BACKEND", "portable")
        with refused(words):
            step(layer, *shards_and_heads(SHAPES), cpus(2))
        if mode == "imperative":
            x = shards_and_heads(SHAPES)[0][0]
            expected = norm.step([x], training=False).outputs[0]
            check("prediction", layer(mx.nd.array(x)).asnumpy(), expected, units=64)
    with monkeypatch.context() as changed:
        play_not_compiled(changed)
        with refused(f"the compiled operator is not available: no compiler; and {words}", "auto"):
            step(layer, *shards_and_heads(SHAPES), cpus(2))
    set_mode(layer, mode)
    check_step(layer, norm, *shards_and_heads(SHAPES))


@pytest.mark.parametrize("given, requested", [({"backend": "portable"}, "portable"), ({"kvstore": "local"}, "auto")])
@REFUSALS
def test_what_portable_lacks_is_refused_of_symbols_and_files(options, words, given, requested, tmp_path, monkeypatch):
    data = mx.sym.var("data")
    ours = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **options)
    for make_it in (
        lambda: gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **given, **options),
        lambda: convert_symbol(mx.sym.BatchNorm(data, name="stem"), 2, **given, **options),
        lambda: convert_symbol(ours, 2, **given),
    ):
        with refused(words, requested):
            make_it()
    file = str(tmp_path / "net-symbol.json")
    ours.save(file)
    with refused(words):
        gluon_syncbn.symbol.load(file, backend="portable")
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    with refused(words):
        gluon_syncbn.symbol.load(file)
    block = SymbolBlock(mx.sym.load(file), data)
    block.initialize(mx.init.One(), ctx=cpus(2))
    with refused(words):
        step(block, *shards_and_heads(SHAPES), cpus(2))


# Profiles


@pytest.mark.parametrize("site", [*MODES, "symbol"])
def test_no_profile_beside_a_portable_layer_and_no_such_layer_in_a_profile(site):
    shards, heads = shards_and_heads(SHAPES)
    if site == "symbol":
        options = {"num_devices": 2, "fix_gamma": False, "backend": "portable", "timeout": 60}
        symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), name="stem", **options)
        norm = norm_of(4, "portable")
        executors = bind(symbol, shards, {"stem": norm})

        def train():
            check_executors(executors, norm, shards, heads, "stem")
    else:
        layer = set_mode(make_layer(backend="portable"), site)
        norm = reference_of(layer)

        def train():
            check_step(layer, norm, shards, heads)

    # The second device's pass may begin when the first one has failed.
    errors = (RuntimeError, mx.MXNetError, gluon_syncbn.SyncBatchNormError)
    words = r"'stem': gluon_syncbn.profile\(\) does not see layers on the portable back end"
    with gluon_syncbn.profile() as report:
        with pytest.raises(errors, match=words):
            train()
        gluon_syncbn.abandon_step()
    assert report.rows == []
    train()
    if site == "symbol":
        return
    words = "^gluon_syncbn.profile: stem runs on the portable back end, which keeps no notes.$"
    with pytest.raises(RuntimeError, match=words), gluon_syncbn.profile():
        raise AssertionError("it has begun")
    train()
    layer = None
    other = make_layer()
    with gluon_syncbn.profile() as report:
        check_step(other, reference_of(other), shards, heads)
    assert [row.calls for row in report.rows] == [1, 1]


# bfloat16, where MXNet's own BatchNorm takes none

BFLOAT16 = """
import pytest
from testing import *
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

refused = pytest.raises(ValueError, match="^SyncBatchNorm 'stem': the portable back end is made of MXNet's own "
    "BatchNorm, which takes no bfloat16 on this processor. "
    "Use the native back end, or cast the net to float16 or float32.$")
shards = random_shards([(3, 4, 3, 5), (1, 4, 3, 5)])
plain = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, cpus(2))]
x = [mx.nd.amp_cast(item, dtype=bfloat16) for item in plain]
rounded = [mx.nd.cast(item, 'float32').asnumpy() for item in x]

class Inside(nn.HybridSequential):
    def hybrid_forward(self, F, x):
        return super().hybrid_forward(F, F.amp_cast(x, dtype=bfloat16))

def check_native(net, inputs, is_relu):
    with autograd.record():
        outputs = [net(item) for item in inputs]
    seen = [mx.nd.cast(item, 'float32').asnumpy() for item in outputs]
    arrays = [np.maximum(item, 0) if is_relu else item for item in rounded]
    expected = reference.Norm(np.ones(4), np.zeros(4), epsilon=1e-3 if is_relu else 1e-5).step(arrays)
    reference.check_all('output', seen, expected.outputs, 'bfloat16')
    print('RIGHT')

def check(net, inputs, is_refused_in_prediction, is_relu=False):
    net.initialize(mx.init.Zero(), ctx=cpus(2))
    with refused, autograd.record():
        net(inputs[0])
    gluon_syncbn.abandon_step()
    if is_refused_in_prediction:  # a graph is made for both
        with refused:
            net(inputs[0])
    else:
        assert net(inputs[0]).dtype == x[0].dtype
    convert_sync_batchnorm(net, backend='native')
    check_native(net, inputs, is_relu)

for mode in MODES:
    layer = SyncBatchNorm(in_channels=4, prefix='stem_', backend='portable')
    check(set_mode(layer, mode), x, mode != 'imperative')
    net = Inside()
    net.add(SyncBatchNorm(in_channels=4, prefix='stem_', backend='portable'))
    check(set_mode(net, mode), plain, mode != 'imperative')
data = mx.sym.amp_cast(mx.sym.cast(mx.sym.var('data'), dtype='float32'), dtype=bfloat16)
with refused:
    gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, backend='portable', name='stem')
block = mx.gluon.SymbolBlock([mx.sym.BatchNorm(mx.sym.relu(mx.sym.var('data')), name='stem')], [mx.sym.var('data')])
check(convert_sync_batchnorm(block, backend='portable'), x, True, True)
alone = SyncBatchNorm(in_channels=4, backend='portable')  # on one device it is nn.BatchNorm, in float32
alone.initialize(ctx=mx.cpu(0))
rounded = rounded[:1]
check_native(alone, x[:1], False)
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
{NOT_COMPILED}
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


# The portable back end as on GPUs, and its stores


@pytest.mark.parametrize("case, mode", [*((case, "hybridize") for case in CASES), *(("N C", mode) for mode in MODES)])
def test_what_portable_does_on_gpus_is_right_too(case, mode, monkeypatch):
    """Its operators differ in how they sum; vectors go through NDArray's interface instead of its memory."""
    play_gpus(monkeypatch)
    layer, norm = make(*CASES[case], mode=mode, backend="portable")
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    for times in (1, 2):
        check_step(layer, norm, *shards_and_heads(CASES[case][0]), times=times)


STORES = {
    "local": lambda: "local",
    "device": lambda: "device",
    "created": lambda: mx.kv.create("local"),
}


@pytest.mark.parametrize("store", list(STORES))
@pytest.mark.parametrize("ranks", [2, 8])
def test_vectors_arrive_through_a_store_as_they_were(ranks, store, backend):
    """To the last bit of numbers of any size, and NaN stays in its channel."""
    shapes = [(2 + rank % 3, 7, 3, 2) for rank in range(ranks)]
    results = []
    for kvstore in (None, STORES[store]()):
        layer = SyncBatchNorm(in_channels=7, timeout=60, backend="portable", kvstore=kvstore)
        layer.cast("float64")
        layer.initialize(ctx=cpus(ranks))
        norm = reference_of(layer)
        check_step(layer, norm, *shards_and_heads(shapes, "float64"))
        sizes = 10.0 ** np.array([-120, -60, -3, 0, 7, 60, 120]).reshape(7, 1, 1)
        shards = [shard * sizes for shard in shards_and_heads(shapes, "float64", 1)[0]]
        shards[0][0, 3, 0, 0], shards[-1][0, 4, 0, 0] = np.nan, np.inf
        seen = observe(layer, shards, shards_and_heads(shapes, "float64", 2)[1], cpus(ranks))
        results.append([*seen.outputs, *seen.input_gradients, layer.running_var.data(mx.cpu(1)).asnumpy()])
    for array, other in zip(*results):
        np.testing.assert_array_equal(array, other)
        finite = np.isfinite(array if array.ndim == 1 else np.moveaxis(array, 1, 0)[:, 0, 0, 0])
        assert finite.tolist() == [True] * 3 + [False, False] + [True] * 2


def test_layers_share_a_store_of_the_users_which_does_not_grow_and_is_the_one_that_is_used():
    store, made, pushed = mx.kv.create("local"), [], []
    init, push, pull = store.init, store.push, store.pull
    store.init = lambda key, value: (made.append(key), init(key, value))
    store.push = lambda key, value: (pushed.append(key), push(key, value))
    for number in range(5):
        layer = make_layer(kvstore=store)
        norm = reference_of(layer)
        for seed in range(2):
            check_step(layer, norm, *shards_and_heads(SHAPES, seed=number + 10 * seed))
    there_and_back = ["gluon_syncbn/cpu(0)/cpu(1)/9", "gluon_syncbn/cpu(0)/cpu(1)/8"]
    assert made == there_and_back  # a count, a mean and an M2 each; two sums each
    assert pushed == there_and_back * 10
    layer = make_layer(cpus(3), kvstore=store)
    check_step(layer, reference_of(layer), *shards_and_heads([*SHAPES, SHAPES[0]]))
    assert made[2:] == [f"gluon_syncbn/cpu(0)/cpu(1)/cpu(2)/{length}" for length in (9, 8)]
    store.pull = lambda key, out: out.__setitem__(slice(None), 7)
    layer = make_layer(kvstore=store)
    with pytest.raises(AssertionError, match="output"):
        check_step(layer, reference_of(layer), *shards_and_heads(SHAPES))
    store.pull = pull
    layer = make_layer(kvstore=store)
    check_step(layer, reference_of(layer), *shards_and_heads(SHAPES))


def test_layers_that_meet_at_the_same_time_share_a_store():
    """Vectors of one length have one key, and threads of several devices come at once."""
    store = mx.kv.create("local")

    def train(number):
        layer = SyncBatchNorm(in_channels=4, timeout=60, kvstore=store, prefix=f"layer{number}_")
        layer.initialize(ctx=cpus(2))
        norm = reference_of(layer)
        for seed in range(15):
            check_step(layer, norm, *shards_and_heads(SHAPES, seed=10 * seed + number))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(train, number) for number in range(4)]:
            future.result(timeout=HANG)
