"""What a user sees of the package: names, help, errors."""

import pydoc
from pathlib import Path

import mxnet as mx
import pytest
from harness import ROOT, cpus, run_python
from mxnet import autograd
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, SyncBatchNormError


def test_dir_shows_what_is_documented():
    names = {name for name in dir(gluon_syncbn) if not name.startswith("_")}
    documented = (Path(ROOT) / "docs" / "reference.md").read_text(encoding="utf-8")
    assert {"SyncBatchNorm", "convert_sync_batchnorm", "devices"} <= names
    assert [name for name in names if f"gluon_syncbn.{name}" not in documented] == []
    shown = {name for name in dir(SyncBatchNorm()) if not name.startswith("_")}
    assert shown - set(dir(nn.BatchNorm())) == {"backend"}


def test_help_is_a_table_of_contents():
    text = pydoc.render_doc(gluon_syncbn, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 80
    names = {name for name in dir(gluon_syncbn) if not name.startswith("_")} - {"symbol"}
    assert [name for name in names if name not in text] == []


def test_repr_shows_the_options_that_were_chosen():
    layer = SyncBatchNorm(in_channels=3, num_devices=2, timeout=9, renorm=(3, 5), fuse=False, prefix="stem_")
    assert repr(layer) == repr(nn.BatchNorm(in_channels=3)).replace("BatchNorm(", "SyncBatchNorm(")[:-1] + (
        ", num_devices=2, timeout=9.0, renorm=((0.0, 3.0, 5.0),), fuse=False)"
    )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "read",
    [
        lambda out: out.asnumpy(),
        lambda out: out.wait_to_read(),
        lambda _: mx.nd.waitall(),
        lambda _: mx.npx.waitall(),
    ],
    ids=["asnumpy", "wait_to_read", "waitall", "npx.waitall"],
)
def test_the_error_of_a_layer_arrives_as_ours(read):
    layer = SyncBatchNorm(in_channels=3, timeout=0.3, prefix="stem_")
    layer.initialize(ctx=cpus(2))
    with autograd.record():
        out = layer(mx.nd.ones((2, 3, 4, 4), ctx=mx.cpu(0)))
    with pytest.raises(SyncBatchNormError, match="SyncBatchNorm 'stem': forward pass waited 0.3 s for 1 of 2 devices"):
        read(out)
    gluon_syncbn.abandon_step()


def test_an_error_of_mxnets_own_stays_what_it_is():
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=cpus(2))
    with autograd.record():
        for device in cpus(2):
            layer(mx.nd.ones((2, 3, 4, 4), ctx=device))
    mx.nd.waitall()
    with pytest.raises(mx.MXNetError) as caught:
        mx.nd.linalg.potrf(-mx.nd.ones((2, 2))).asnumpy()
    assert not isinstance(caught.value, SyncBatchNormError)
    gluon_syncbn.abandon_step()


def test_the_doctor_prints_its_usage():
    done = run_python(
        "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('gluon_syncbn', run_name='__main__')"
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m gluon_syncbn")
