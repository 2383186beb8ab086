"""Several CPU devices: no device waits for another one's temporary space or random numbers, and no loop grows.

Few buffers (MXNET_CPU_TEMP_COPY) show soon what many would show after thousands of steps.
"""

import re

import pytest
from harness import LONG, MODES, run_program, run_python

PROGRAMS = {"native": 8, "portable": 3}


def run_right(code, **environment):
    """Run ``code``, which says that it is right where it ends."""
    done = run_python(code, **environment)
    assert done.stdout == "RIGHT\n", done.stdout + done.stderr
    return done


def test_random_loops(backend, seed):
    """What users do in a step, drawn at random (tests/loops.py); others in each run."""
    program = ["tests/loops.py", "--seed", seed, "--programs", PROGRAMS[backend], "--steps", 30]
    done = run_program(program, merged=True, MXNET_CPU_TEMP_COPY=1024, GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"RIGHT: {PROGRAMS[backend]} programs" in done.stdout


@pytest.mark.parametrize(
    "mode, steps", [*((mode, 1000) for mode in MODES), *(pytest.param(m, 50000, marks=pytest.mark.long) for m in MODES)]
)
def test_the_ordinary_loop(mode, steps, backend):
    """benchmarks/long_run.py: memory and threads stay as they are, and no device waits."""
    steps //= 1 if backend == "native" else 2
    program = ["benchmarks/long_run.py", "--mode", mode, "--steps", steps]
    done = run_program(program, limit=4 * LONG, MXNET_CPU_TEMP_COPY=256, GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {steps}: " in done.stdout
    assert f"{mode}, back end {backend}: memory grew by" in done.stdout
    if backend == "native":  # the other has many operators
        assert "temporary buffers" not in done.stderr, done.stderr


GROWTH = """
import gluon_syncbn
from harness import *

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

def make_net(norms=True, frozen=False):
    net = mx.gluon.nn.HybridSequential()
    for _ in range(4):
        for _ in range(3):
            net.add(mx.gluon.nn.Conv2D(16, 3, padding=1))
        learns = {{"center": not frozen, "scale": not frozen}}
        net.add(gluon_syncbn.SyncBatchNorm(timeout=900, **learns) if norms else mx.gluon.nn.BatchNorm())
        net.add(mx.gluon.nn.Activation("relu"))
    net.initialize(mx.init.Xavier(), ctx=cpus(2))
    return set_mode(net, mode)

mode = {mode!r}
net = make_net()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {{"learning_rate": 1e-3}})
images = [mx.nd.random.normal(shape=(8, 3, 64, 64), ctx=device) for device in cpus(2)]

def train(images=images):
    with autograd.record():
        losses = [(net(x) ** 2).mean() for x in images]
    autograd.backward(losses)
    return losses

{loop}

for number in range(8):
    step(number)
mx.nd.waitall()
early = resident()
for number in range(8, 48):
    step(number)
mx.nd.waitall()
print("GREW BY", resident() / early)
"""
LOOPS = {
    "reads the loss": "def step(n): losses = train(); trainer.step(16); [loss.asscalar() for loss in losses]",
    "reads nothing": "def step(n): train(); trainer.step(16)",
    "has no Trainer": """
def step(n):
    train()
    for weight in net.collect_params(".*weight").values():
        for device in cpus(2):
            mx.nd.sgd_update(weight.data(device), weight.grad(device), lr=1e-3, out=weight.data(device))
""",
    "only predicts": "def step(n): [net(x) for x in images]",
    "trains and predicts": """
def step(n):
    losses = train()
    trainer.step(16)
    [net(x) for x in images]
    [loss.asscalar() for loss in losses]
""",
    "has no layer of ours": "net = make_net(False)\ndef step(n): [net(x) for x in images]",
    "has no layer of ours, and changes its shapes": """
net = make_net(False)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
train(images[:1])
trainer.step(8, ignore_stale_grad=True)
def step(n): net(images[0][:, :, : 64 - 4 * (n % 16)]).wait_to_read()
""",
    "calls the net many times": """
def step(n):
    losses = train([x[:1] for x in images for _ in range(12)])
    trainer.step(16)
    [loss.asscalar() for loss in losses]
""",
    "changes its shapes": """
def step(n):
    losses = train([x[:, :, : 64 - 4 * (n % 4)] for x in images])
    trainer.step(16)
    [loss.asscalar() for loss in losses]
""",
    "estimates statistics": """
def step(n):
    with autograd.train_mode():
        [net(x[:, :, : 64 - 4 * (n % 4)]) for x in images]
    mx.nd.waitall()
""",
    "hybridizes anew": """
def step(n):
    if n % 4 == 0:
        set_mode(net, mode)
    losses = train()
    trainer.step(16)
    [loss.asscalar() for loss in losses]
""",
    # Nothing says that the step has ended.
    "trains only once": "train()\ndef step(n): [net(x).wait_to_read() for x in images]",
    "trains frozen layers": """
net = make_net(frozen=True)
def step(n):
    losses = train()
    for weight in net.collect_params(".*weight").values():
        for device in cpus(2):
            mx.nd.sgd_update(weight.data(device), weight.grad(device), lr=1e-3, out=weight.data(device))
    [loss.asscalar() for loss in losses]
""",
}


# What differs between graphs, or does not differ between modes.
NOT_IN = {
    "only predicts": ("imperative", "static"),
    "has no layer of ours, and changes its shapes": ("imperative", "hybridize"),
    "has no layer of ours": ("imperative", "static"),
    "trains only once": ("imperative", "static"),
    **dict.fromkeys(
        (
            "calls the net many times",
            "changes its shapes",
            "estimates statistics",
            "hybridizes anew",
            "trains frozen layers",
        ),
        ("imperative",),
    ),
}


@pytest.mark.parametrize("mode, loop", [(m, item) for m in MODES for item in LOOPS if m not in NOT_IN.get(item, ())])
def test_memory_stays_what_it_is_after_a_few_steps(mode, loop):
    """With one ring of buffers for all devices they took 2 to 4 times as much."""
    done = run_python(GROWTH.format(mode=mode, loop=LOOPS[loop]), GLUON_SYNCBN_BACKEND="native")
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) < 1.3, done.stdout
    assert "temporary buffers" not in done.stderr, done.stderr


RANDOM = """
import mxnet as mx
{imports}
mx.random.seed(7)
numbers = [mx.nd.random.uniform(shape=3).asnumpy() for _ in range(3)]
mx.random.seed(8, ctx=mx.cpu(0))
numbers += [mx.nd.random.normal(shape=3).asnumpy(), mx.nd.random.shuffle(mx.nd.arange(5)).asnumpy()]
net = mx.gluon.nn.Dropout(0.5)
net.hybridize({hybridize})
with mx.autograd.train_mode():
    numbers += [net(mx.nd.ones(9)).asnumpy() for _ in range(2)]
print([list(item) for item in numbers])
"""


@pytest.mark.parametrize("hybridize", ["False", "", "static_alloc=True, static_shape=True"])
def test_a_seed_gives_the_numbers_that_mxnet_gives(hybridize):
    ours, theirs = (
        run_python(RANDOM.format(imports=imports, hybridize=hybridize)) for imports in ("import gluon_syncbn", "")
    )
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert ours.stdout == theirs.stdout


DROPOUT = """
import threading
import gluon_syncbn
from harness import *

devices = cpus(4)
net = mx.gluon.nn.HybridSequential()
for _ in range(10):
    net.add(mx.gluon.nn.Dropout(0.5), gluon_syncbn.SyncBatchNorm(in_channels=8, timeout=900))
net.initialize(ctx=devices)
set_mode(net, {mode!r})

def masks(seed, **where):
    mx.random.seed(seed, **where)
    with autograd.record():
        outputs = [net(mx.nd.ones((2, 8, 4, 4), ctx=device)) for device in devices]
    autograd.backward(outputs)
    return [output.asnumpy() for output in outputs]

masks(1)
first, again, other = masks(2), masks(2), masks(3)
for rank in range(4):
    assert (first[rank] == again[rank]).all() and (first[rank] != other[rank]).any()
assert all((first[a] != first[b]).any() for a in range(4) for b in range(a))

uniform = lambda device: mx.nd.random.uniform(shape=5, ctx=device).asnumpy()
for device in devices:
    mx.random.seed(5, ctx=device)
numbers = [uniform(device) for device in devices]
assert all((numbers[0] == item).all() for item in numbers)
mx.random.seed(5, ctx=devices[2])
assert (uniform(devices[2]) == numbers[2]).all() and (uniform(devices[1]) != numbers[1]).any()

def one(device):
    for _ in range(3):
        net(mx.nd.ones((2, 8, 4, 4), ctx=device)).asnumpy()

for _ in range(3):
    threads = [threading.Thread(target=one, args=(device,)) for device in devices]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
masks(4)
print("RIGHT")
"""


@pytest.mark.parametrize("mode", list(MODES))
def test_dropout(mode, backend):
    """40 Dropouts between synchronized layers: every device has numbers of its own, and the same again for a seed."""
    run_right(DROPOUT.format(mode=mode), GLUON_SYNCBN_BACKEND=backend)


STATIC = """
import gluon_syncbn
from harness import *

net, other = (mx.gluon.nn.HybridSequential() for _ in range(2))
for block in (net, other):
    block.add(mx.gluon.nn.Conv2D(4, 3, padding=1), gluon_syncbn.SyncBatchNorm(timeout=900))
    block.add(mx.gluon.nn.GlobalAvgPool2D())
    block.initialize(ctx=cpus(2))
    set_mode(block, "static")
for number in range(60):
    shape = (2, 3, 6 + number % 7, 6)
    with autograd.record(train_mode=number % 5 > 0):
        outputs = [block(mx.nd.ones(shape, ctx=device)) for block in (net, other) for device in cpus(2)]
    if number % 5:
        autograd.backward(outputs)
    [block(mx.nd.ones((1, *shape[1:]), ctx=cpus(2)[number % 2])) for block in (other, net)]
    if number % 20 == 10:
        net.collect_params().reset_ctx(cpus(2))
    if number % 20 == 15:
        gluon_syncbn.convert_sync_batchnorm(gluon_syncbn.convert_batchnorm(other), timeout=900)
        set_mode(other, "static")
    [output.asnumpy() for output in outputs]
print("RIGHT")
"""


def test_static_graphs_that_are_made_anew():
    """For other shapes, for predictions, after a move, after conversions; two nets in turn."""
    run_right(STATIC, MXNET_CPU_TEMP_COPY=128)


# Needs temporary space.
CENTRED = """
import gluon_syncbn
from harness import *

class Centred(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.broadcast_sub(x, F.mean(x * 1, axis=(0, 2, 3), keepdims=True)) * 2
"""
MANY = (
    CENTRED
    + """
class Net(Centred):
    def __init__(self):
        super().__init__()
        self.norm = gluon_syncbn.SyncBatchNorm(in_channels=8)

    def hybrid_forward(self, F, x):
        return super().hybrid_forward(F, self.norm(x))

centred, nets = Centred(), [Net() for _ in range(12)]
for net in nets:
    net.initialize(ctx=cpus(2))
for net in [centred, *nets]:
    set_mode(net, "static")
for number in range(5):
    outputs = []
    with autograd.record():
        for device in cpus(2):
            x = mx.nd.ones((2, 8, 8, 8))
            with autograd.pause():
                x = centred(x).as_in_context(device) if number else x.as_in_context(device)
            for net in nets:
                x = net(x)
            outputs.append(x)
    autograd.backward(outputs)
    mx.nd.waitall()
print("RIGHT")
"""
)


def test_many_static_graphs():
    """One more graph on cpu(0), which computes for cpu(1), comes when all others have their buffers."""
    done = run_right(MANY, GLUON_SYNCBN_TIMEOUT=60)
    assert "temporary buffers" not in done.stderr, done.stderr


STATES = (
    CENTRED
    + """
centred, net = Centred(), mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(8, 3, padding=1, in_channels=8), gluon_syncbn.SyncBatchNorm(in_channels=8))
net.initialize(ctx=cpus(2))
for block in (centred, net):
    set_mode(block, "static")
trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
for number in range(12):
    centred(mx.nd.ones((5, 8, 8, 8)) if number % 4 < 3 else mx.nd.ones((3, 8, 8, 8))).wait_to_read()
    losses = []
    for device in cpus(2):
        x = centred(mx.nd.ones((2, 8, 8, 8))).as_in_context(device)
        with autograd.record():
            losses.append((centred(net(x)) ** 2).mean())
    autograd.backward(losses)
    trainer.step(1)
    mx.nd.waitall()
print("RIGHT")
"""
)


def test_a_static_net_with_several_states():
    """One before the layers, and one behind them, is in use on cpu(0)."""
    run_right(STATES, GLUON_SYNCBN_TIMEOUT=60)


GATHER = """
import gluon_syncbn
from harness import *
net = mx.gluon.nn.HybridSequential()
for _ in range(3):
    net.add(mx.gluon.nn.Conv2D(8, 3, padding=1, in_channels=8), gluon_syncbn.SyncBatchNorm(in_channels=8))
net.initialize(ctx=cpus(2))
set_mode(net, {mode!r})
for _ in range(4):
    shards = random_shards([(2, 8, 8, 8)] * 2)
    with autograd.record():
        outputs = [net(mx.nd.array(x, ctx=device)).as_in_context(mx.cpu(0)) for x, device in zip(shards, cpus(2))]
        losses = [mx.nd.broadcast_mul(o, mx.nd.softmax(o.mean(axis=(0, 2, 3), keepdims=True))).sum() for o in outputs]
        total = losses[0] + losses[1]
    autograd.backward(losses if {is_listed} else total)
    mx.nd.waitall()
print("RIGHT")
"""


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("mode", list(MODES))
def test_losses_of_all_devices_on_one(mode, is_listed):
    """In one backward pass cpu(0) comes to a layer, and then computes what cpu(1) needs. Bulks are MXNet's."""
    variables = {} if mode == "hybridize" else {"MXNET_EXEC_BULK_EXEC_TRAIN": 0}
    run_right(GATHER.format(mode=mode, is_listed=is_listed), GLUON_SYNCBN_TIMEOUT=60, **variables)


MOVED = """
import time
import gluon_syncbn
from harness import *
net = gluon_syncbn.SyncBatchNorm(in_channels=8, timeout=1)
net.initialize(ctx=cpus(2))
with autograd.record():
    net(mx.nd.ones((2, 8, 4, 4)))
    mx.nd.ones(3).as_in_context(mx.cpu(1))
time.sleep(2)
try:
    with autograd.record():
        pass
except gluon_syncbn.SyncBatchNormError as error:
    print(error)
"""


def test_an_array_that_is_moved_hides_no_error():
    """Whether autograd knows an array, MXNet tells by an error."""
    done = run_python(MOVED)
    assert "A step has failed, and its error was not read." in done.stdout, done.stdout + done.stderr


FEW = """
import gluon_syncbn
from harness import *
net = mx.gluon.nn.HybridSequential()
for _ in range(4):
    net.add(mx.gluon.nn.Conv2D(8, 3, padding=1, in_channels=8), gluon_syncbn.SyncBatchNorm(in_channels=8))
net.initialize(ctx=cpus(2))
shards = random_shards([(1, 8, 8, 8)] * 2)
try:
    for _ in range(3):
        step(net, shards, shards, cpus(2))
    mx.nd.waitall()
    print('RAN')
except mx.MXNetError as error:
    print(error)
"""


@pytest.mark.parametrize("buffers, advised", [(1, 1024), (4, 1024), (900, None)])
def test_too_few_buffers_are_named_with_a_number(buffers, advised):
    done = run_python(FEW, MXNET_CPU_TEMP_COPY=buffers, GLUON_SYNCBN_TIMEOUT=3 if buffers == 1 else LONG)
    words = rf"cpu\([01]\) needs more temporary buffers .* of {buffers}, .* MXNET_CPU_TEMP_COPY={advised} "
    assert bool(re.search(words, done.stderr)) == (advised is not None), done.stderr
    if buffers > 1:
        assert "RAN" in done.stdout, done.stdout


@pytest.mark.parametrize("value", ["0", "-4", "many"])
def test_a_number_of_buffers_that_is_none(value):
    done = run_python("import gluon_syncbn", MXNET_CPU_TEMP_COPY=value)
    assert f"ValueError: MXNET_CPU_TEMP_COPY must be a positive whole number, not '{value}'." in done.stderr


def test_the_environment_stays_as_it_is():
    names = ["MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY"]
    code = f"import gluon_syncbn, os; print([os.environ.get(name) for name in {names}])"
    assert run_python(code).stdout == "[None, None]\n"
    assert run_python(code, MXNET_CPU_TEMP_COPY=70, MXNET_CPU_PARALLEL_RAND_COPY=3).stdout == "['70', '3']\n"


@pytest.mark.parametrize("early", ["mx.nd.ones(3).sum().wait_to_read()", "mx.random.seed(1)", "make_threads()"])
def test_an_import_after_mxnet_has_computed_is_early_enough(early):
    code = """
import threading, mxnet as mx
def make_threads():
    threads = [threading.Thread(target=lambda: mx.nd.random.normal(shape=9).sum().asscalar()) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""
    done = run_python(code + early + FEW)
    assert "RAN" in done.stdout and "Warning" not in done.stderr, done.stdout + done.stderr


FORK = """
import multiprocessing
import gluon_syncbn
from harness import *
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(4, 3), gluon_syncbn.SyncBatchNorm(timeout=900), mx.gluon.nn.Dropout(0.5))
net.initialize(ctx=cpus(2))

def train():
    for _ in range(3):
        with autograd.record():
            outputs = [net(mx.nd.ones((2, 3, 8, 8), ctx=device)) for device in cpus(2)]
        autograd.backward(outputs)
        [output.asnumpy() for output in outputs]

class Total(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] + in_data[0].sum())

@mx.operator.register("total")
class TotalProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Total()

class Function(autograd.Function):
    def forward(self, x):
        return x * 1
    def backward(self, gradient):
        return gradient * gradient.sum()

def compute_on_threads_of_mxnets():
    mx.nd.Custom(mx.nd.ones(3), op_type="total").wait_to_read()
    x = mx.nd.ones(3)
    x.attach_grad()
    with autograd.record():
        y = Function()(x)
    y.backward()
    sparse = mx.nd.ones((6, 3)).tostype("row_sparse")
    mx.nd.add_n(sparse, sparse, sparse).wait_to_read()
    mx.nd.waitall()

train()
compute_on_threads_of_mxnets()
loader = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(mx.nd.random.normal(shape=(8, 3))), 2, num_workers=2)
for batch in loader:
    train()
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
train()
child.join()
print("CHILD", child.exitcode)
"""


def test_processes_that_fork():
    """Those of a DataLoader, and one that trains the net by itself; MXNet ends threads that have had buffers."""
    done = run_python(FORK)
    assert done.stdout == "CHILD 0\n", done.stdout + done.stderr
