"""The same seed gives the same bits after many steps on 4 devices, whatever the order in which devices arrive."""

import pytest
from harness import MODES, run_python

TRAIN = """
import hashlib, random
import gluon_syncbn
from delay import Late
from harness import *
from mxnet.gluon import nn

delays = random.Random({order})

def late():
    return Late(lambda device: delays.random() / 1000)

class Net(mx.gluon.HybridBlock):
    '''A head that two branches share, besides layers of their own.'''

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(nn.Conv2D(6, 3, in_channels=3), late(), norm(6), nn.Activation('relu'), late())
            self.head = nn.HybridSequential()
            self.head.add(nn.Conv2D(6, 3, padding=1, in_channels=6), norm(6), late())
            self.last = nn.Dense(4, in_units=6)

    def hybrid_forward(self, F, x):
        x = self.stem(F.cast(x, 'float32'))
        small = F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type='avg')
        levels = [F.mean(self.head(level), axis=(2, 3)) for level in (x, small)]
        return F.cast(self.last(levels[0] + levels[1]), 'float32')

def norm(channels):
    return gluon_syncbn.SyncBatchNorm(in_channels=channels, timeout=30)

mx.random.seed(7)
np.random.seed(7)
devices = cpus(4)
net = Net()
net.initialize(mx.init.Xavier(), ctx=devices)
set_mode(net, {mode!r})
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {{'learning_rate': 0.05, 'momentum': 0.9}})
loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
rng = np.random.RandomState(3)
for _ in range({steps}):
    images, labels = rng.standard_normal((8, 3, 8, 8)), rng.randint(0, 4, 8)
    parts = zip(*(mx.gluon.utils.split_and_load(mx.nd.array(item), devices) for item in (images, labels)))
    with autograd.record():
        losses = [loss_of(net(x), y) for x, y in parts]
    autograd.backward(losses)
    trainer.step(8)
mx.nd.waitall()
digest = hashlib.sha256()
for parameter in net.collect_params().values():
    for device in devices:
        value = parameter.data(device).asnumpy()
        assert np.isfinite(value).all()
        digest.update(value.tobytes())
print('BITS', digest.hexdigest())
"""


# The slower modes stop earlier; each step draws new delays.
STEPS = {"imperative": 20, "hybridize": 30, "static": 60}


@pytest.mark.portable_with(mode="hybridize")
@pytest.mark.parametrize("mode", list(MODES))
def test_the_same_bits_after_many_steps(mode, backend):
    programs = [TRAIN.format(mode=mode, order=order, steps=STEPS[mode]) for order in (1, 2)]
    runs = [run_python(program, PYTHONHASHSEED=number) for number, program in enumerate(programs)]
    assert all(done.returncode == 0 for done in runs), runs
    first, second = (done.stdout.split("BITS")[1] for done in runs)
    assert first == second
