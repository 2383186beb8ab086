"""Scripts that use contrib's layer get ours, unedited, in the networks of GluonCV that take ``norm_layer``."""

import json
import re
import sys
import types
import weakref

import mxnet as mx
import numpy as np
import pytest
import testing
from mxnet.gluon import nn
from testing import cpus, initialized, on_devices, options_of, random_shards, run_python, sequential

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

# Not as names of this module, which install() would replace too.
CONTRIB = {"layer": mx.gluon.contrib.nn.SyncBatchNorm, "symbol": mx.sym.contrib.SyncBatchNorm}


@pytest.fixture
def installed():
    gluon_syncbn.install(convert=True)
    yield
    gluon_syncbn.uninstall()


def test_it_replaces_the_names_wherever_they_are_and_puts_them_back(monkeypatch):
    from gluoncv.model_zoo.rcnn.faster_rcnn import predefined_models
    from gluoncv.nn import feature

    places = [
        (mx.gluon.contrib.nn, "SyncBatchNorm", CONTRIB["layer"]),
        (predefined_models, "SyncBatchNorm", CONTRIB["layer"]),
        (mx.sym.contrib, "SyncBatchNorm", CONTRIB["symbol"]),
        (feature, "SyncBatchNorm", CONTRIB["symbol"]),
    ]
    for _ in range(2):
        gluon_syncbn.install(convert=True)
    now = [getattr(module, name) for module, name, _ in places]
    late = types.ModuleType("late")  # is imported in between
    monkeypatch.setitem(sys.modules, "late", late)
    exec("from mxnet.gluon.contrib.nn import SyncBatchNorm as Theirs", vars(late))
    assert late.Theirs is now[0]
    gluon_syncbn.uninstall()
    assert late.Theirs is CONTRIB["layer"]
    assert all(issubclass(item, SyncBatchNorm) for item in now[:2]) and now[2] is now[3] is not CONTRIB["symbol"]
    assert all(getattr(module, name) is before for module, name, before in places)
    gluon_syncbn.uninstall()


def test_the_layer_takes_what_contribs_takes(installed):
    layer = mx.gluon.contrib.nn.SyncBatchNorm(4, 2, 0.8, 1e-3, True, False)
    assert layer.gamma.shape == (4,) and options_of(layer)["num_devices"] == 2
    testing.random_affine(initialized(layer, 2), 4)
    norm = testing.reference_of(layer, axis=1, epsilon=1e-3, momentum=0.8, scale=False)
    shapes = [(3, 4, 2, 5), (1, 4, 2, 5)]
    testing.check_steps(layer, norm, lambda seed: [random_shards(shapes, seed=number) for number in (seed, seed + 9)])
    assert type(convert_batchnorm(layer)) is mx.gluon.nn.BatchNorm
    assert type(convert_sync_batchnorm(CONTRIB["layer"](4, 2))) is SyncBatchNorm


SCRIPT = """
import sys
from mxnet import gluon
if __name__ == '__main__':
    print('ARGUMENTS', sys.argv[1:], gluon.contrib.nn.SyncBatchNorm.__module__, sys.path[0])
    import helper
"""


# ``python -m gluon_syncbn.run`` with each of these arguments, one after the other in one process.
RUN = """
import logging, os, sys, runpy
import gluon_syncbn
os.chdir({folder!r})
for arguments in {arguments}:
    sys.argv = ['run', *arguments]
    code = 0
    try:
        runpy.run_module('gluon_syncbn.run', run_name='__main__', alter_sys=True)
    except SystemExit as end:
        code = end.code
    print('ENDED', code)
    print('ENDED', file=sys.stderr)
    gluon_syncbn.uninstall()
    logging.getLogger('gluon_syncbn').handlers.clear()
"""


def run(folder, *arguments, **environment):
    """The codes and what follows, the errors of these runs, and all that they have said."""
    done = run_python(RUN.format(folder=str(folder), arguments=arguments), **environment)
    return done.stdout.split("ENDED ")[1:], done.stderr.split("ENDED")[:-1], done.stdout


def test_the_layer_takes_all_arguments_of_contribs_by_place(installed):
    given = (3, 2, 0.9, 1e-5, True, True, True, "ones", "zeros", "ones", "zeros")
    ours, theirs = (initialized(kind(*given), 2) for kind in (mx.gluon.contrib.nn.SyncBatchNorm, CONTRIB["layer"]))
    for name in ("gamma", "beta", "running_mean", "running_var"):
        assert (getattr(ours, name).data(mx.cpu(0)) == getattr(theirs, name).data(mx.cpu(0))).asnumpy().all()
    assert (ours(mx.nd.ones((2, 3))).asnumpy() == 1).all() and type(ours) is not type(theirs)


def test_run_starts_a_script_with_ours(tmp_path):
    for name, text in (("script", SCRIPT), ("helper", "print('HELPED')"), ("exits", "import sys; sys.exit(3)")):
        (tmp_path / f"{name}.py").write_text(text)
    path = str(tmp_path / "script.py")
    runs = [path, "--syncbn", "3"], ["-m", "script", "x"], ["missing.py"], [], ["--convert", "exits.py"]
    codes, errors, out = run(tmp_path, *runs)
    assert f"ARGUMENTS ['--syncbn', '3'] gluon_syncbn._install {tmp_path}" in out
    assert "ARGUMENTS ['x'] gluon_syncbn._install" in out and "HELPED" in out
    assert [code.split()[0] for code in (codes[0], codes[1], codes[3], codes[4])] == ["0", "0", "2", "3"]
    assert "there is no file missing.py" in codes[2] and "usage: python -m gluon_syncbn.run" in out
    assert "made no gluon.Trainer, so --convert has converted nothing." in errors[4]


# As GluonCV's train_ssd.py in a process with one device: plain layers, and the Trainer before the net is hybridized.
PLAIN_SCRIPT = """
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

def make(norm):
    net = nn.HybridSequential(prefix=norm.__name__ + '_')
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), nn.Activation('relu'), nn.Dense(2))
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    return net

net, untouched = make(nn.BatchNorm), make(nn.BatchNorm)
net(mx.nd.zeros((1, 3, 5, 5)))
trainer = gluon.Trainer({parameters}, 'sgd', {{'learning_rate': 0.1}}, kvstore='local')
net.hybridize(static_alloc=True, static_shape=True)
parts = [mx.nd.arange(150, ctx=mx.cpu(number)).reshape((2, 3, 5, 5)) * (number + 1) / 150 for number in range(2)]
for step in range(2):
    with autograd.record():
        losses = [net(part).sum() for part in parts]
    autograd.backward(losses)
    trainer.step(4)
mx.nd.waitall()  # MXNet's own layer writes its statistics in the backward pass; who reads them does not wait for it
first, second = (net[1].running_mean.data(mx.cpu(number)).asnumpy() for number in range(2))
print('SAME', (first == second).all())
print('KINDS', type(net[1]).__name__, type(untouched[1]).__name__)
again = gluon.Trainer(net.collect_params(), 'sgd', kvstore='local')
dense = nn.Dense(2, in_units=3)
dense.initialize()
gluon.Trainer(dense.collect_params(), 'sgd')
"""


def test_run_converts_what_a_trainer_is_made_for(tmp_path):
    """Whatever the Trainer is given, and nothing without ``--convert``."""
    given = ("net.collect_params()", "list(net.collect_params().values())", "net.collect_params('.*weight')")
    for number, parameters in enumerate(given):
        (tmp_path / f"{number}.py").write_text(PLAIN_SCRIPT.format(parameters=parameters))
    codes, errors, out = run(tmp_path, *[["--convert", f"{number}.py"] for number in range(3)], ["0.py"])
    assert [code.split()[0] for code in codes] == ["0"] * 4
    assert out.count("SAME True\nKINDS SyncBatchNorm BatchNorm\n") == 3
    assert out.count("SAME False\nKINDS BatchNorm BatchNorm\n") == 1
    for text in errors[:3]:
        assert text.count("gluon_syncbn.run: 1 BatchNorm layers converted to SyncBatchNorm on cpu(0)") == 1, text
        assert len(re.findall(r"converted for a Trainer: \w+ \(HybridSequential\)\.", text)) == 1
        assert len(re.findall(r"parameters \(dense\d+ \(Dense\)\) have no BatchNorm layer", text)) == 1


def test_only_the_first_process_of_a_job_says_so(tmp_path):
    """The others do not count what is logged; a script's own log is not to say that there was no Trainer."""
    script = "import logging; logging.basicConfig()\n" + PLAIN_SCRIPT.format(parameters="net.collect_params()")
    (tmp_path / "script.py").write_text(script)
    job = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 1, "GLUON_SYNCBN_PROCESS_GROUP": "none"}
    _, (text,), out = run(tmp_path, ["--convert", "script.py"], **job)
    assert "KINDS SyncBatchNorm BatchNorm" in out
    assert "gluon_syncbn.run: 1 BatchNorm" not in text and "made no gluon.Trainer" not in text


def make_base():
    return sequential(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Activation("relu"))


def train_and_compare(net, *others):
    """Steps after a Trainer was made for ``net``: statistics are those of what all devices give the layer."""
    net.initialize(ctx=cpus(2))
    parts = random_shards([(4, 3), (2, 3)])
    inputs = on_devices(parts)
    for block in (net, *others):
        block.hybridize()
        with mx.autograd.record():
            [block(item) for item in inputs]  # the cached graph is made before the Trainer
    mx.gluon.Trainer(net.collect_params(), "sgd")
    mean, weight = (list(net.collect_params(name).values())[0] for name in (".*running_mean", ".*weight"))
    for block in (net, *others):
        mean.set_data(mx.nd.zeros(4))
        with mx.autograd.record():
            losses = [block(item).sum() for item in inputs]
        mx.autograd.backward(losses)
        seen = np.concatenate(parts) @ weight.data(mx.cpu(0)).asnumpy().T
        for device in cpus(2):
            np.testing.assert_allclose(mean.data(device).asnumpy(), 0.1 * seen.mean(0), rtol=1e-4, atol=1e-6)


def test_nets_that_share_layers_are_converted_together(installed):
    """Neither keeps a graph with plain layers, and a norm computes a ReLU only if it has one in both."""
    base = make_base()
    net = sequential(base[:2], nn.LeakyReLU(0.5), nn.Dense(2, in_units=4))
    x = mx.nd.random.normal(shape=(8, 3))
    train_and_compare(net, base)
    assert isinstance(base[1], gluon_syncbn.SyncBatchNorm)
    assert (net[0](x).asnumpy() < 0).any() and (base(x).asnumpy() >= 0).all()


def test_objects_that_cannot_be_looked_at(installed):
    """And a child that refers to its net."""

    class Failing(mx.gluon.Block):
        def __init__(self):
            raise RuntimeError("before it is a block")

    kept, dead, net = Failing.__new__(Failing), weakref.proxy(make_base()), make_base()
    net[0].owner = [net]
    train_and_compare(net)
    assert kept is not dead
    with pytest.raises(ValueError, match="list or dict of Parameters"):
        mx.gluon.Trainer(make_base()[0].weight, "sgd")


def test_a_net_that_cannot_be_converted(installed, caplog):
    class Own(nn.BatchNorm):
        def hybrid_forward(self, *args, **kwargs):
            return super().hybrid_forward(*args, **kwargs)

    net = initialized(sequential(Own(in_channels=3)))
    mx.gluon.Trainer(net.collect_params(), "sgd")
    assert "have no BatchNorm layer that can be converted: nothing synchronizes" in caplog.text


# What GluonCV's training scripts build with --syncbn on two devices, in their order: base weights (found by GluonCV's
# own look-up) on cpu(0), what is left is initialized, the move. With the smallest input. Statistics are those of one
# device with the whole batch, and the same on both.
LAYER = "norm_layer=mx.gluon.contrib.nn.SyncBatchNorm, norm_kwargs={'num_devices': 2}"
NETWORKS = {  # SSD's symbol and layers; what the others add takes a minute and a half
    "ssd": ("ssd_300_mobilenet0.25_voc", "mobilenet0.25", 128, 35, LAYER),
    "yolo3": ("yolo3_mobilenet0.25_voc", "mobilenet0.25", 64, 47, LAYER),
    "pspnet": ("psp_resnet50_ade", "resnet50_v1s", 32, 61, LAYER),
    # It is a Faster R-CNN with a mask.
    "mask_rcnn": ("mask_rcnn_fpn_syncbn_resnet18_v1b_coco", "resnet18_v1b", 128, 33, "num_devices=2"),
}
CHEAP, LONG = ("ssd", "yolo3"), ("yolo3", "pspnet", "mask_rcnn")
STEP = """
import gluon_syncbn
gluon_syncbn.install()
import sys
sys.path.insert(0, 'benchmarks')
import json, os, pathlib, mxnet as mx, gluoncv_scripts, zoo
from gluoncv.model_zoo import model_store
os.environ['MXNET_HOME'] = '{folder}'
models = pathlib.Path('{folder}') / 'models'
model_store._model_sha1[{base!r}] = gluoncv_scripts.write_base_weights(models, {base!r})
def with_syncbn(name, size, images):
    net = zoo.build(name, size, images, pretrained_base=True, {options})
    found = [item for item in net.collect_params().values() if item._data is not None]
    print('BASE', len(found), all(item.list_ctx() == [mx.cpu(0)] for item in found))
    for parameter in net.collect_params().values():
        if parameter._data is None:
            parameter.initialize()
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    return net
print('RESULT', json.dumps(zoo.compare({name!r}, {size}, 'float64', with_syncbn, always_both={is_cheap})))
"""


@pytest.mark.parametrize("network", [CHEAP[0], *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_gluoncvs_networks_with_their_own_syncbn_option(network, tmp_path):
    name, base, size, count, options = NETWORKS[network]
    code = STEP.format(name=name, base=base, size=size, options=options, folder=tmp_path, is_cheap=network in CHEAP)
    done = run_python(code, MXNET_MKLDNN_ENABLED=0)  # oneDNN has no float64
    assert "not synchronized" not in done.stderr, done.stderr
    found, result = re.search(r"BASE (\d+) True\n(?s:.*)RESULT (.*)", done.stdout).groups()
    result = json.loads(result)
    assert int(found) > 100 and result["layers"] == count
    assert max(result[kind] for kind in ("outputs", "gradients", "statistics")) < 1e-6
    if network in CHEAP:
        assert result["nn.BatchNorm"] > 0.1  # how far two devices are off that do not synchronize
