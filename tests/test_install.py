"""Scripts that use contrib's layer get ours, unedited, in the networks of GluonCV that take ``norm_layer``."""

import json
import re
import weakref

import mxnet as mx
import pytest
from harness import run_python
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

# Not as names of this module, which install() would replace too.
CONTRIB = {"layer": mx.gluon.contrib.nn.SyncBatchNorm, "symbol": mx.sym.contrib.SyncBatchNorm}


@pytest.fixture
def installed():
    gluon_syncbn.install()
    yield
    gluon_syncbn.uninstall()


def test_it_replaces_the_names_wherever_they_are_and_puts_them_back():
    from gluoncv.model_zoo.rcnn.faster_rcnn import predefined_models
    from gluoncv.nn import feature

    places = [
        (mx.gluon.contrib.nn, "SyncBatchNorm", CONTRIB["layer"]),
        (predefined_models, "SyncBatchNorm", CONTRIB["layer"]),
        (mx.sym.contrib, "SyncBatchNorm", CONTRIB["symbol"]),
        (feature, "SyncBatchNorm", CONTRIB["symbol"]),
    ]
    gluon_syncbn.install()
    gluon_syncbn.install()
    now = [getattr(module, name) for module, name, _ in places]
    gluon_syncbn.uninstall()
    assert all(issubclass(item, SyncBatchNorm) for item in now[:2]) and now[2] is now[3] is not CONTRIB["symbol"]
    assert all(getattr(module, name) is before for module, name, before in places)
    gluon_syncbn.uninstall()


def test_the_layer_takes_what_contribs_takes(installed):
    layer = mx.gluon.contrib.nn.SyncBatchNorm(4, 2, 0.8, 1e-3, True, False)
    assert layer.gamma.shape == (4,) and layer._sync.options.num_devices == 2
    kwargs = {"axis": 1, "eps": 1e-3, "momentum": 0.8, "fix_gamma": True, "use_global_stats": False}
    assert {key: layer._kwargs[key] for key in kwargs} == kwargs
    assert type(convert_batchnorm(layer)) is mx.gluon.nn.BatchNorm
    theirs = convert_sync_batchnorm(CONTRIB["layer"](4, 2))
    assert type(theirs) is SyncBatchNorm and theirs._kwargs["axis"] == 1


SCRIPT = """
import sys
from mxnet import gluon
if __name__ == '__main__':
    print('ARGUMENTS', sys.argv[1:], gluon.contrib.nn.SyncBatchNorm.__module__, sys.path[0])
    import helper
"""


def test_run_starts_a_script_with_ours(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("print('HELPED')")
    code = "import sys, runpy; sys.argv = {}; runpy.run_module('gluon_syncbn.run', run_name='__main__', alter_sys=True)"
    done = run_python(code.format(["run", str(tmp_path / "script.py"), "--syncbn", "3"]))
    assert f"ARGUMENTS ['--syncbn', '3'] gluon_syncbn._install {tmp_path}" in done.stdout, done.stderr
    assert "HELPED" in done.stdout and done.returncode == 0
    done = run_python(f"import os; os.chdir({str(tmp_path)!r}); " + code.format(["run", "-m", "script", "x"]))
    assert "ARGUMENTS ['x'] gluon_syncbn._install" in done.stdout, done.stderr
    done = run_python(code.format(["run", "missing.py"]))
    assert done.returncode == 1 and "there is no file missing.py" in done.stderr
    done = run_python(code.format(["run"]))
    assert done.returncode == 2 and "usage: python -m gluon_syncbn.run" in done.stdout


# As GluonCV's train_ssd.py in a process with one device: plain layers, and the Trainer before the net is hybridized.
PLAIN_SCRIPT = """
import sys, warnings
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
mean = net[1].running_mean
means = [mean.data(mx.cpu(number)).asnumpy() for number in range(2)]
print('SAME', (means[0] == means[1]).all())
print('KINDS', type(net[1]).__name__, type(untouched[1]).__name__)
again = gluon.Trainer(net.collect_params(), 'sgd', kvstore='local')
print('NONE')
dense = nn.Dense(2, in_units=3)
dense.initialize()
gluon.Trainer(dense.collect_params(), 'sgd')
"""


@pytest.mark.parametrize(
    "parameters",
    ["net.collect_params()", "list(net.collect_params().values())", "net.collect_params('.*weight')"],
    ids=["dictionary", "list", "some"],
)
def test_run_converts_what_a_trainer_is_made_for(parameters, tmp_path):
    (tmp_path / "script.py").write_text(PLAIN_SCRIPT.format(parameters=parameters))
    code = "import sys, runpy; sys.argv = {}; runpy.run_module('gluon_syncbn.run', run_name='__main__', alter_sys=True)"
    done = run_python(code.format(["run", "--convert", str(tmp_path / "script.py")]))
    assert done.returncode == 0 and "SAME True\nKINDS SyncBatchNorm BatchNorm\n" in done.stdout, (
        done.stdout + done.stderr
    )
    assert done.stderr.count("gluon_syncbn.run: 1 BatchNorm layers converted to SyncBatchNorm.") == 1
    assert len(re.findall(r"converted for a Trainer: \w+ \(HybridSequential\)\.", done.stderr)) == 1
    assert done.stderr.count("the blocks that have its parameters (dense0 (Dense)) have no BatchNorm layer") == 1
    done = run_python(code.format(["run", str(tmp_path / "script.py")]))
    assert "SAME False\nKINDS BatchNorm BatchNorm\n" in done.stdout, done.stdout + done.stderr


def test_run_says_that_it_has_converted_nothing(tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    code = f"import sys, runpy; sys.argv = ['run', '--convert', {str(tmp_path / 'script.py')!r}]; "
    done = run_python(code + "runpy.run_module('gluon_syncbn.run', run_name='__main__', alter_sys=True)")
    assert done.returncode == 3 and "made no gluon.Trainer, so --convert has converted nothing." in done.stderr


def test_only_the_first_process_of_a_job_says_so(tmp_path):
    """The others do not count what is logged; a script's own log is not to say that there was no Trainer."""
    script = "import logging; logging.basicConfig()\n" + PLAIN_SCRIPT.format(parameters="net.collect_params()")
    (tmp_path / "script.py").write_text(script)
    code = f"import sys, runpy; sys.argv = ['run', '--convert', {str(tmp_path / 'script.py')!r}]; "
    job = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 1, "GLUON_SYNCBN_PROCESS_GROUP": "none"}
    done = run_python(code + "runpy.run_module('gluon_syncbn.run', run_name='__main__', alter_sys=True)", **job)
    assert done.returncode == 0 and "KINDS SyncBatchNorm BatchNorm" in done.stdout, done.stdout + done.stderr
    assert "gluon_syncbn.run: 1 BatchNorm" not in done.stderr and "made no gluon.Trainer" not in done.stderr, (
        done.stderr
    )


@pytest.fixture
def converting():
    gluon_syncbn.install(convert=True)
    yield
    gluon_syncbn.uninstall()


def make_base():
    base = nn.HybridSequential()
    base.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Activation("relu"))
    return base


def train_and_compare(net, devices):
    """Whether running means are the same on both devices after a step with different data."""
    net.initialize(ctx=devices)
    net.hybridize()
    parts = [mx.nd.random.normal(number, shape=(4, 3), ctx=device) for number, device in enumerate(devices)]
    with mx.autograd.record():
        [net(part) for part in parts]  # the cached graph is made before the Trainer
    mx.gluon.Trainer(net.collect_params(), "sgd")
    with mx.autograd.record():
        losses = [net(part).sum() for part in parts]
    mx.autograd.backward(losses)
    mx.nd.waitall()
    (mean,) = net.collect_params(".*running_mean").values()
    first, second = (mean.data(device).asnumpy() for device in devices)
    return (first == second).all()


def test_nets_that_share_layers_are_converted_together(converting):
    """Neither keeps a graph with plain layers, and a norm computes a ReLU only if it has one in both."""
    base = make_base()
    net = nn.HybridSequential()
    net.add(base[:2], nn.LeakyReLU(0.5), nn.Dense(2, in_units=4))
    x = mx.nd.random.normal(shape=(8, 3))
    assert train_and_compare(net, [mx.cpu(0), mx.cpu(1)])
    assert isinstance(base[1], gluon_syncbn.SyncBatchNorm)
    assert (net[0](x).asnumpy() < 0).any() and (base(x).asnumpy() >= 0).all()


def test_a_child_may_refer_to_its_net(converting):
    net = make_base()
    net[0].owner = [net]
    assert train_and_compare(net, [mx.cpu(0), mx.cpu(1)])


def test_objects_that_cannot_be_looked_at(converting):
    class Failing(mx.gluon.Block):
        def __init__(self):
            raise RuntimeError("before it is a block")

    kept = Failing.__new__(Failing)
    dead = weakref.proxy(make_base())
    assert train_and_compare(make_base(), [mx.cpu(0), mx.cpu(1)])
    assert kept is not dead
    with pytest.raises(ValueError, match="list or dict of Parameters"):
        mx.gluon.Trainer(make_base()[0].weight, "sgd")


def test_a_net_that_cannot_be_converted(converting, caplog):
    class Own(nn.BatchNorm):
        def hybrid_forward(self, F, x, *args, **kwargs):
            return super().hybrid_forward(F, x, *args, **kwargs)

    net = nn.HybridSequential()
    net.add(Own(in_channels=3))
    net.initialize()
    mx.gluon.Trainer(net.collect_params(), "sgd")
    assert "have no BatchNorm layer that can be converted: nothing synchronizes" in caplog.text


def test_install_and_uninstall_of_the_conversion():
    original = mx.gluon.Trainer.__init__
    gluon_syncbn.install(convert=True)
    gluon_syncbn.install(convert=True)
    assert mx.gluon.Trainer.__init__.__wrapped__ is original
    gluon_syncbn.uninstall()
    assert mx.gluon.Trainer.__init__ is original


# What GluonCV's training scripts build with --syncbn on two devices, in their order: base weights (found by GluonCV's
# own look-up) on cpu(0), what is left is initialized, the move. With the smallest input. Statistics are those of one
# device with the whole batch, and the same on both.
LAYER = "norm_layer=mx.gluon.contrib.nn.SyncBatchNorm, norm_kwargs={'num_devices': 2}"
NETWORKS = {
    "ssd": ("ssd_300_mobilenet0.25_voc", "mobilenet0.25", 128, 35, LAYER),
    "yolo3": ("yolo3_mobilenet0.25_voc", "mobilenet0.25", 64, 47, LAYER),
    "pspnet": ("psp_resnet50_ade", "resnet50_v1s", 32, 61, LAYER),
    # It is a Faster R-CNN with a mask.
    "mask_rcnn": ("mask_rcnn_fpn_syncbn_resnet18_v1b_coco", "resnet18_v1b", 128, 33, "num_devices=2"),
}
CHEAP = ("ssd", "yolo3")
STEP = """
import gluon_syncbn
gluon_syncbn.install()
import sys
sys.path.insert(0, 'benchmarks')
import json, os, pathlib, mxnet as mx, gluoncv_scripts, zoo
from gluoncv.model_zoo import model_store
os.environ['MXNET_HOME'] = {folder!r}
models = pathlib.Path({folder!r}) / 'models'
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


@pytest.mark.parametrize("network", list(NETWORKS))
def test_gluoncvs_networks_with_their_own_syncbn_option(network, tmp_path):
    name, base, size, count, options = NETWORKS[network]
    is_cheap = network in CHEAP
    code = STEP.format(name=name, base=base, size=size, options=options, is_cheap=is_cheap, folder=str(tmp_path))
    done = run_python(code, MXNET_MKLDNN_ENABLED=0)  # oneDNN has no float64
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.split("RESULT")[1])
    assert int(done.stdout.split("BASE")[1].split()[0]) > 100 and "True" in done.stdout.split("BASE")[1]
    assert result["layers"] == count
    assert "not synchronized" not in done.stderr
    assert max(result[kind] for kind in ("outputs", "gradients", "statistics")) < 1e-6
    if network in CHEAP:
        assert result["nn.BatchNorm"] > 0.1  # how far two devices are off that do not synchronize
