"""What a layer computes where it is called, which back end it takes and says, and what portable refuses with one error.

A table of facts: by itself, with the other device, or refused. Choices, stores, profiles; what only GPUs take.
"""

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
import testing
from executors import bind, check_executors, norm_of
from mxnet.gluon import SymbolBlock, nn
from reference import check
from test_layer import CASES, make
from testing import MODES, check_step, cpus, initialized, reference_of, sequential, set_mode, shards_and_heads, step

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_symbol, convert_sync_batchnorm

SHAPES = [(3, 4, 3, 5), (1, 4, 3, 5)]

# In training, by num_devices and the devices that there are: nn.BatchNorm on each device, or one batch.
NOT_SAID, NOT_ALL = "does not say on how many devices it trains", "forward pass waited 0.3 s for 1 of 2 devices"
OTHERS = r"its graph was built for cpu\(\d\), and now runs on cpu\(\d\)"
LAYER = {
    (None, 1): "alone",
    (None, 2): "together",
    (1, 1): "alone",
    (1, 2): "'stem'.*num_devices=1, but its parameters live on 2",
    (2, 1): "'stem'.*num_devices=2, but its parameters live on 1",
    (2, 2): "together",
}
# It knows no parameters.
SYMBOL = {**LAYER, (None, 1): NOT_SAID, (None, 2): NOT_SAID, (1, 2): "alone", (2, 1): NOT_ALL}
SAID = [  # options, the back end and why it; None where nothing was compiled
    ({}, "native", f"compiled kernels, {testing.instruction_set()}"),
    ({"backend": "native"}, "native", f"compiled kernels, {testing.instruction_set()}"),
    ({"backend": "portable"}, "portable", "it was asked for"),
    ({"kvstore": "local"}, "portable", "a kvstore was given, and only the portable back end uses one"),
    (None, "portable", "the compiled operator is not available: no compiler"),
]


def fact_of(site, group_size, renorm, num_devices, count) -> str:
    """What happens in training; with ``group_size`` 1 each device is a batch."""
    fact = (SYMBOL if site == "symbol" else LAYER)[num_devices, count]
    if site == "symbol" and group_size == 1 and not renorm:
        return "alone"
    if site == "symbol" and renorm and (num_devices, count) == (1, 2):  # it is not nn.BatchNorm, and knows its device
        return OTHERS
    return "alone" if fact == "together" and group_size == 1 else fact


def step_of(site, own, count=2, **options):
    """A layer in a mode, or a symbol, as a function that does a step and compares it with its reference of ``own``."""
    if site == "symbol":
        symbol = gluon_syncbn.symbol.SyncBatchNorm(mx.sym.var("data"), fix_gamma=False, name="stem", **options)
        norm = norm_of(4, **own)
        executors = bind(symbol, shards_and_heads(SHAPES[:count])[0], {"stem": norm})
        return lambda shards, heads, train_mode=True: check_executors(
            executors, norm, shards, heads, "stem", is_train=train_mode
        )
    layer = make_layer(cpus(count), **options)
    for name, seed in (("gamma", 1), ("beta", 2), ("running_mean", 3), ("running_var", 4)):
        getattr(layer, name).set_data(mx.nd.array(np.random.RandomState(seed).uniform(0.5, 2, 4)))
    return functools.partial(check_step, set_mode(layer, site), reference_of(layer, **own))


@pytest.mark.parametrize("num_devices, count", list(LAYER))
@pytest.mark.parametrize("group_size, renorm", [(None, None), (1, None), (None, (2, 1)), (1, (2, 1))])
@pytest.mark.parametrize("site", [*MODES, "symbol"])
@pytest.mark.parametrize("use", ["training", "prediction", "frozen"])
def test_alone_together_or_refused(use, site, group_size, renorm, num_devices, count, backend):
    """In prediction and with frozen statistics it is nn.BatchNorm, and nobody is waited for."""
    if renorm and backend == "portable":
        return  # which has none: see below
    fact = fact_of(site, group_size, renorm, num_devices, count)
    if use != "training" and (site == "symbol" or "num_devices" not in fact):
        fact = "alone"
    options = {"group_size": group_size, "renorm": renorm, "num_devices": num_devices}
    options["timeout"] = 60 if fact == "together" else 0.3
    own = {"frozen": use != "training", "group_size": 1 if fact == "alone" else None, "renorm": renorm}
    own["mean_is_rounded"] = backend == "portable" or (fact == "alone" and not renorm)
    train = step_of(site, own, count, use_global_stats=use == "frozen", **options)
    shards, heads = shards_and_heads(SHAPES[:count], seed=num_devices or 0)
    if fact not in ("alone", "together"):
        with pytest.raises((ValueError, mx.MXNetError, gluon_syncbn.SyncBatchNormError), match=fact):
            train(shards, heads, train_mode=use != "prediction")
        gluon_syncbn.abandon_step()
        return
    for _ in range(2):
        train(shards, heads, train_mode=use != "prediction")
    if site != "symbol" and fact == "alone" and count == 2:  # the other need not come
        train(shards[:1], heads[:1], cpus(1), used=[0], train_mode=use != "prediction")


def test_a_layer_on_one_device_is_plain_only_for_now(backend):
    """Its symbol may be used on other devices later: nn.BatchNorm on one, and synchronized where it is told to be."""
    layer = SyncBatchNorm(in_channels=4, prefix="bn_", timeout=60, activation="relu", momentum=0.75, epsilon=1e-3)
    layer.initialize(ctx=mx.cpu(0))
    data = mx.sym.var("data")
    symbol = layer(data)
    shards, heads = shards_and_heads(SHAPES)
    norm = norm_of(4, "portable", activation="relu", momentum=0.75, group_size=1)
    check_executors(bind(symbol, shards, {"bn": norm}), norm, shards, heads)
    norm = norm_of(4, backend, activation="relu", momentum=0.75)
    check_executors(bind(convert_symbol(symbol, 2), shards, {"bn": norm}), norm, shards, heads)
    block = initialized(SymbolBlock(symbol, data), 2)
    block(mx.nd.array(shards[0]))
    (inside,) = testing.layers_of(block)
    check_step(block, reference_of(inside, activation="relu"), shards, heads, layer=inside)
    assert testing.options_of(inside)["timeout"] == 60


# Which back end, and what is said


@pytest.fixture
def said(caplog, monkeypatch):
    """The log, with no choice made before."""
    testing.forget_choices()
    caplog.set_level(logging.INFO, logger="gluon_syncbn")
    return caplog


def make_layer(devices=None, **options):
    return initialized(SyncBatchNorm(in_channels=4, prefix="stem_", **{"timeout": 60, **options}), devices or 2)


@pytest.mark.parametrize("options, backend, words", SAID)
def test_a_layer_says_once_which_back_end_it_takes(options, backend, words, said, recwarn, monkeypatch):
    if options is None:
        testing.play_not_compiled(monkeypatch)
        with pytest.raises(RuntimeError, match="SyncBatchNorm 'stem': backend='native' cannot run here.*no compiler"):
            make_layer(backend="native")
    for _ in range(3):
        layer = make_layer(**(options or {}))
        assert layer.backend == backend
        check_step(layer, reference_of(layer), *shards_and_heads(SHAPES))
    assert said.messages == [f"back end {backend}: {words}."]
    assert not [item for item in recwarn if issubclass(item.category, UserWarning)]


def on_gpus(**options):
    """Parameters that wait for their shape tell their devices already."""
    return initialized(SyncBatchNorm(prefix="here_", **options), [mx.gpu(0), mx.gpu(1)])


def test_portable_with_a_warning_where_mxnet_was_built_without_cuda(said, recwarn):
    """But none where it was asked for. What runs on GPUs is in tests/gpu."""
    assert on_gpus(backend="portable").backend == "portable"
    assert said.messages == ["back end portable: it was asked for."] and not recwarn.list
    with pytest.warns(UserWarning, match="SyncBatchNorm runs on the portable back end.*USE_CUDA=1"):
        assert on_gpus().backend == "portable"
    assert "the CUDA kernels cannot run on gpu(0)" in said.text
    with pytest.raises(RuntimeError, match=r"'here': backend='native' cannot run here: .*gpu\(0\)"):
        _ = on_gpus(backend="native").backend


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
def test_the_flags_of_the_block_that_owns_the_graph_count(outer, inner, backend, monkeypatch):
    """What is safe in static graphs only is used in those only; elsewhere values would be overwritten."""
    double, norm = nn.HybridLambda(lambda F, x: 2 * x), SyncBatchNorm(in_channels=4, timeout=60, fuse=False)
    net = initialized(sequential(double, norm, nn.Activation("relu")), 2)
    net.hybridize(**FLAGS[outer])
    if inner is not None:
        net[1].hybridize(**FLAGS[inner])
    norm, operators = reference_of(net[1], activation="relu"), testing.note_what_runs(monkeypatch)
    testing.check_steps(lambda x: net(x / 2), norm, lambda seed: shards_and_heads(SHAPES, seed=seed), 4, layer=net[1])
    if backend == "native":  # where it is not safe, numbers are wrong too seldom to be seen here
        assert ("_copy" in operators[-1]) == (outer == "static")


# What only the native back end does. Several processes are in test_process_ways.py.

LACKING = pytest.mark.parametrize("option, value", [("renorm", (2, 1)), ("in_place", True)])
KVSTORE = "a kvstore was given, and only the portable back end uses one; and "


def refused(words, requested="portable", name="stem"):
    where = f"SyncBatchNorm '{name}': backend='{requested}' cannot run here: "
    return pytest.raises(RuntimeError, match=f"^{where}.*{words}.$")


@pytest.mark.parametrize("given, before", [({"backend": "portable"}, ""), ({"kvstore": "local"}, KVSTORE)])
@LACKING
def test_what_portable_lacks_is_refused_where_a_layer_is_made_or_converted(option, value, given, before):
    """And a net that cannot be converted stays as it is."""
    options, words = {option: value}, f"{before}only the native back end has {option}"
    requested, data = given.get("backend", "auto"), mx.sym.var("data")
    ours = gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **options)
    for make_it in (
        lambda: make_layer(**given, **options),
        lambda: gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **given, **options),
        lambda: convert_symbol(mx.sym.BatchNorm(data, name="stem"), 2, **given, **options),
        lambda: convert_symbol(ours, 2, **given),
    ):
        with refused(words, requested):
            make_it()
    net = sequential(nn.BatchNorm(in_channels=4, prefix="stem_"), nn.Activation("relu"))
    with refused(words, requested, net.name):
        convert_sync_batchnorm(net, **given, **options)
    assert type(net[0]) is nn.BatchNorm and type(net[1]) is nn.Activation
    for own, more in ((options, given), (given, options)):
        net = sequential(nn.BatchNorm(), SyncBatchNorm(prefix="stem_", **own))
        kept = net[1].backend
        with refused(words, requested):
            convert_sync_batchnorm(net, **more)
        assert type(net[0]) is nn.BatchNorm and net[1].backend == kept


@LACKING
def test_what_portable_lacks_is_refused_where_the_layer_trains_and_changes_nothing(option, value, mode, monkeypatch):
    """Where the environment says portable, or nothing was compiled. Predictions in imperative mode need no back end."""
    layer, words = make_layer(**{option: value}), f"only the native back end has {option}"
    norm = reference_of(layer, **({"renorm": value} if option == "renorm" else {"in_place": "float32"}))
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
        testing.play_not_compiled(changed)
        with refused(f"the compiled operator is not available: no compiler; and {words}", "auto"):
            step(layer, *shards_and_heads(SHAPES), cpus(2))
    set_mode(layer, mode)
    check_step(layer, norm, *shards_and_heads(SHAPES))


@LACKING
def test_what_portable_lacks_is_refused_of_files(option, value, tmp_path, monkeypatch):
    data, file, words = mx.sym.var("data"), str(tmp_path / "net.json"), f"only the native back end has {option}"
    gluon_syncbn.symbol.SyncBatchNorm(data, num_devices=2, name="stem", **{option: value}).save(file)
    with refused(words):
        convert_symbol(mx.sym.load(file), 2, backend="portable")
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", "portable")
    with refused(words):
        mx.sym.load(file).simple_bind(mx.cpu(0), data=SHAPES[0])
    block = initialized(SymbolBlock(mx.sym.load(file), data), 2, init=mx.init.One())
    with refused(words):
        step(block, *shards_and_heads(SHAPES), cpus(2))


# Profiles


@pytest.mark.parametrize("site", [*MODES, "symbol"])
def test_no_profile_beside_a_portable_layer_and_no_such_layer_in_a_profile(site):
    train = step_of(site, {"mean_is_rounded": True}, num_devices=2, backend="portable", timeout=60)
    data = shards_and_heads(SHAPES)
    # The second device's pass may begin when the first one has failed.
    errors = (RuntimeError, mx.MXNetError, gluon_syncbn.SyncBatchNormError)
    words = r"'stem': gluon_syncbn.profile\(\) does not see layers on the portable back end"
    with gluon_syncbn.profile() as report:
        with pytest.raises(errors, match=words):
            train(*data)
        gluon_syncbn.abandon_step()
    assert report.rows == []
    train(*data)
    if site == "symbol":
        return
    words = "^gluon_syncbn.profile: stem runs on the portable back end, which keeps no notes.$"
    with pytest.raises(RuntimeError, match=words), gluon_syncbn.profile():
        raise AssertionError("it has begun")
    train(*data)
    del train  # and the layer
    other = make_layer()
    with gluon_syncbn.profile() as report:
        check_step(other, reference_of(other), *data)
    assert [row.calls for row in report.rows] == [1, 1]


# bfloat16, where MXNet's own BatchNorm takes none

BFLOAT16 = """
import contextlib
from test_rounding import *
from testing import *

refused = pytest.raises(ValueError, match="^SyncBatchNorm 'stem': the portable back end is made of MXNet's own "
    "BatchNorm, which takes no bfloat16 on this processor. "
    "Use the native back end, or cast the net to float16 or float32.$")
x = mx.nd.ones((2, 5, 3, 3))

def check_refused(block, layers, is_refused_in_prediction):
    with refused, autograd.record():
        block(x)
    gluon_syncbn.abandon_step()
    with refused if is_refused_in_prediction else contextlib.nullcontext():
        block(x)
    gluon_syncbn.convert_sync_batchnorm(block, backend='native')
    block(x)
    (layer,) = layers(block.net)
    check_low(block, reference_of(layer), *draw_rounded(), layer)
    print('RIGHT')

for mode in MODES:
    for way in ('as it is', 'cast inside'):
        block, _, _ = make_low(way, mode, 2, backend='portable', prefix='stem_')
        check_refused(block, list, mode != 'imperative')  # a graph is made for both
data = mx.sym.var('data')
low = mx.sym.amp_cast(mx.sym.cast(data, dtype='float32'), dtype=bfloat16)
symbol = gluon_syncbn.symbol.SyncBatchNorm(low, num_devices=2, backend='portable', name='stem')
with refused:
    symbol.simple_bind(mx.cpu(0), data=(2, 5, 3, 3))
net = mx.gluon.SymbolBlock([mx.sym.BatchNorm(mx.sym.relu(data), name='stem')], [data])
gluon_syncbn.convert_sync_batchnorm(net, backend='portable').initialize(ctx=cpus(2))
check_refused(Low(net), layers_of, True)
block, layer, norm = make_low('as it is', 'imperative', 1, backend='portable')
check_low(block, norm, *draw_rounded(1), layer)  # on one device it is nn.BatchNorm, in float32
print('RIGHT')
"""


def test_bfloat16_where_mxnet_takes_none():
    done = testing.run_python(BFLOAT16, DNNL_MAX_CPU_ISA="AVX2", GLUON_SYNCBN_MAX_CPU_ISA="avx2")
    assert done.stdout.count("RIGHT") == 2 * len(MODES) + 2


@pytest.mark.parametrize("interface", ["nd", "np", "np before the import"])
def test_where_nothing_was_compiled_every_device_gets_its_error(interface):
    """MXNet has one place for what custom operators raise: of two that fail together it lost one, and NaN was read.

    Also in backward passes. MXNet chooses the class of a custom operator's arrays when the package is imported.
    """
    set_np = "mx.npx.set_np()" if "np" in interface else ""
    code = f"""
{testing.NOT_COMPILED}
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
    done = testing.run_python(code)
    assert done.stdout.splitlines() == (["ERROR"] * 3 + ["ANOTHER"]) * 8, done.stdout


# The portable back end as on GPUs, and its stores


@pytest.mark.parametrize("case, mode", [*((case, "hybridize") for case in CASES), *(("N C", mode) for mode in MODES)])
def test_what_portable_does_on_gpus_is_right_too(case, mode, monkeypatch):
    """Its operators differ in how they sum; vectors go through NDArray's interface instead of its memory."""
    testing.play_gpus(monkeypatch)
    layer, norm = make(*CASES[case], mode=mode, backend="portable")
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    for times in (1, 2):
        check_step(layer, norm, *shards_and_heads(CASES[case][0]), times=times)


@pytest.mark.parametrize("store", ["local", "device", "created"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_vectors_arrive_through_a_store_as_they_were(ranks, store):
    """To the last bit of numbers of any size, and NaN stays in its channel."""
    shapes = [(2 + rank % 3, 7, 3, 2) for rank in range(ranks)]
    results = []
    for kvstore in (None, mx.kv.create("local") if store == "created" else store):
        layer, norm = make(shapes, dtype="float64", backend="portable", kvstore=kvstore)
        check_step(layer, norm, *shards_and_heads(shapes, "float64"))
        sizes = 10.0 ** np.array([-120, -60, -3, 0, 7, 60, 120]).reshape(7, 1, 1)
        shards = [shard * sizes for shard in shards_and_heads(shapes, "float64", 1)[0]]
        shards[0][0, 3, 0, 0], shards[-1][0, 4, 0, 0] = np.nan, np.inf
        seen = testing.observe(layer, shards, shards_and_heads(shapes, "float64", 2)[1], cpus(ranks))
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

    def train(shapes=SHAPES, seeds=(0,)):
        layer, norm = make(shapes, kvstore=store)
        for seed in seeds:
            check_step(layer, norm, *shards_and_heads(shapes, seed=seed))

    for number in range(5):
        train(seeds=(number, number + 10))
    there_and_back = ["gluon_syncbn/cpu(0)/cpu(1)/9", "gluon_syncbn/cpu(0)/cpu(1)/8"]
    assert made == there_and_back  # a count, a mean and an M2 each; two sums each
    assert pushed == there_and_back * 10
    train([*SHAPES, SHAPES[0]])
    assert made[2:] == [f"gluon_syncbn/cpu(0)/cpu(1)/cpu(2)/{length}" for length in (9, 8)]
    store.pull = lambda key, out: out.__setitem__(slice(None), 7)
    with pytest.raises(AssertionError, match="output"):
        train()
    store.pull = pull
    train()


def test_layers_that_meet_at_the_same_time_share_a_store():
    """Vectors of one length have one key, and threads of several devices come at once."""
    store = mx.kv.create("local")

    def train(number):
        layer, norm = make(SHAPES, kvstore=store, prefix=f"layer{number}_")
        testing.check_steps(layer, norm, lambda seed: shards_and_heads(SHAPES, seed=10 * seed + number), 15)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4), timeout=testing.HANG))


# Threads and the portable back end

TURNS = """
import sys, threading
from testing import *

sys.setswitchinterval(1e-6)
net = initialized(sequential(*(SyncBatchNorm(in_channels=5, backend='portable') for _ in range(4))), 2)
net.hybridize()
together, errors = threading.Barrier(2), []

def work(device):
    try:
        for turn in range(300):
            together.wait()
            x = mx.nd.ones((4 + turn % 7, 5, 2), ctx=device)
            with mx.autograd.record():
                y = net(x)
            y.backward()
            y.wait_to_read()
    except Exception as error:
        errors.append(error)
        together.abort()

threads = [threading.Thread(target=work, args=(device,)) for device in cpus(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(errors)
"""


def test_threads_may_ask_for_shapes_of_one_graph_at_a_time():
    """MXNet's Python keeps the shapes that it has returned only until it is asked again."""
    assert testing.run_python(TURNS).stdout == "[]\n"
