"""Several CPU devices: no device waits for another one's temporary space or random numbers, and no loop grows.

Few buffers (MXNET_CPU_TEMP_COPY) show soon what many would show after thousands of steps.
"""

import random

import pytest
from testing import LONG, MODES, run_program, run_python

PROGRAMS = {"native": 5, "portable": 2}
BUFFERS = {"native": 1024, "portable": 4096}  # that has many operators: a step of three nets may need 600


def test_random_loops(backend, seed):
    """What users do in a step, drawn at random (tests/loops.py), others in each run; and again, with the same bits."""
    program = ["tests/loops.py", "--seed", seed, "--programs", PROGRAMS[backend], "--steps", 30]
    environment = {"MXNET_CPU_TEMP_COPY": BUFFERS[backend], "GLUON_SYNCBN_TIMEOUT": 300}
    bits = []
    for number in range(2):
        done = run_program(program, merged=True, PYTHONHASHSEED=number, **environment)
        assert "temporary buffers" not in done.stdout, done.stdout[-3000:]
        assert f"RIGHT: {PROGRAMS[backend]} programs" in done.stdout
        bits.append([line for line in done.stdout.splitlines() if line.startswith("BITS")])
    assert bits[0] == bits[1] and len(bits[0]) >= PROGRAMS[backend] // 2


def test_the_ordinary_loop(backend, seed):
    """In a mode that is drawn."""
    check_the_loop(random.Random(f"{seed} {backend}").choice(list(MODES)), 400, backend)


@pytest.mark.long
def test_the_ordinary_loop_for_long(mode, backend):
    check_the_loop(mode, 50000, backend)


def check_the_loop(mode, steps, backend):
    """benchmarks/long_run.py: memory and threads stay as they are, and no device waits."""
    steps //= 1 if backend == "native" else 2
    program = ["benchmarks/long_run.py", "--mode", mode, "--steps", steps]
    done = run_program(program, limit=4 * LONG, MXNET_CPU_TEMP_COPY=256)
    assert f"step {steps}: " in done.stdout
    assert f"{mode}, back end {backend}: memory grew by" in done.stdout
    if backend == "native":  # the other has many operators
        assert "temporary buffers" not in done.stderr, done.stderr


PRELUDE = """
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from testing import *

class Centred(mx.gluon.HybridBlock):
    'Needs temporary space.'
    def hybrid_forward(self, F, x):
        return F.broadcast_sub(x, F.mean(x * 1, axis=(0, 2, 3), keepdims=True)) * 2

def made(mode, *blocks, devices=2):
    return initialized(sequential(*blocks), devices, mode, init=mx.init.Xavier())

def conv(channels=8):
    return nn.Conv2D(channels, 3, padding=1)
"""

GROWTH = """
import psutil
process = psutil.Process()

def make_net(norm=SyncBatchNorm, **learns):
    kinds = *[lambda: conv(16)] * 3, lambda: norm(**learns), lambda: nn.Activation("relu")
    return made(mode, *kinds * 4)

net = make_net()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
images = [mx.nd.random.normal(shape=(8, 3, 64, 64), ctx=device) for device in cpus(2)]

def forward_and_backward(images=images):
    with autograd.record():
        losses = [(net(x) ** 2).mean() for x in images]
    autograd.backward(losses)
    return losses

def train(images=images):
    losses = forward_and_backward(images)
    trainer.step(16)
    [loss.asscalar() for loss in losses]

def update_weights():
    for weight in net.collect_params(".*weight").values():
        for device in cpus(2):
            mx.nd.sgd_update(weight.data(device), weight.grad(device), lr=1e-3, out=weight.data(device))

def predict():
    [net(x) for x in images]

def estimate(n):
    with autograd.train_mode():
        [net(x[:, :, : 64 - 4 * (n % 4)]) for x in images]
    mx.nd.waitall()

THE LOOP

for number in range(8):
    step(number)
mx.nd.waitall()
early = process.memory_info().rss
for number in range(8, 48):
    step(number)
    number % 8 == 7 and mx.nd.waitall()  # what is under way takes memory, too: as much as before, on a busy machine
print("GREW BY", process.memory_info().rss / early)
"""
LOOPS = {
    "reads the loss": "def step(n): train()",
    "reads nothing": "def step(n): forward_and_backward(); trainer.step(16)",
    "has no Trainer": "def step(n): forward_and_backward(); update_weights()",
    "only predicts": "def step(n): predict()",
    "trains and predicts": "def step(n): train(); predict()",
    "has no layer of ours": "net = make_net(nn.BatchNorm)\ndef step(n): predict()",
    "has no layer of ours, and changes its shapes": """
net = make_net(nn.BatchNorm)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
forward_and_backward(images[:1])
trainer.step(8, ignore_stale_grad=True)
def step(n): net(images[0][:, :, : 64 - 4 * (n % 16)]).wait_to_read()
""",
    "calls the net many times": "def step(n): train([x[:1] for x in images for _ in range(12)])",
    "changes its shapes": "def step(n): train([x[:, :, : 64 - 4 * (n % 4)] for x in images])",
    "estimates statistics": "def step(n): estimate(n)",
    "hybridizes anew": "def step(n): n % 4 or set_mode(net, mode); train()",
    # Nothing says that the step has ended.
    "trains only once": "forward_and_backward()\ndef step(n): [net(x).wait_to_read() for x in images]",
    "trains frozen layers": """
net = make_net(center=False, scale=False)
def step(n): losses = forward_and_backward(); update_weights(); [loss.asscalar() for loss in losses]
""",
    "adds up all losses on one device, and updates nothing": """
def step(n):
    with autograd.record():
        losses = [(net(x) ** 2).mean().as_in_context(mx.cpu(0)) for x in images]
        loss = losses[0] + losses[1]
    loss.backward()
    loss.wait_to_read()
""",
}
# What differs between graphs, or does not differ between modes; the others run in all.
ONLY_IN = {
    **dict.fromkeys(("only predicts", "has no layer of ours", "trains only once"), ["hybridize"]),
    "has no layer of ours, and changes its shapes": ["static"],
    **dict.fromkeys(list(LOOPS)[7:11] + ["trains frozen layers"], ["hybridize", "static"]),
}


IN_ALL = [pytest.param(loop, mode, marks=pytest.mark.long) for loop in LOOPS for mode in ONLY_IN.get(loop, MODES)]


@pytest.mark.parametrize("place", range(4))
def test_memory_stays_what_it_is_after_a_few_steps(place, seed):
    """In loops and modes that are drawn."""
    loop = random.Random(seed).sample(list(LOOPS), len(LOOPS))[place]
    check_memory(loop, random.Random(f"{seed} {loop}").choice(list(ONLY_IN.get(loop, MODES))))


@pytest.mark.parametrize("loop, mode", IN_ALL)
def test_memory_stays_what_it_is_in_all_loops(loop, mode):
    check_memory(loop, mode)


def check_memory(loop, mode):
    """With one ring of buffers for all devices they took 2 to 4 times as much."""
    program = f"mode = {mode!r}\n{PRELUDE}{GROWTH}".replace("THE LOOP", LOOPS[loop])
    done = run_python(program, GLUON_SYNCBN_BACKEND="native")
    assert float(done.stdout.split()[-1]) < 1.3, f"{loop}, {mode}: {done.stdout}"
    assert "temporary buffers" not in done.stderr, done.stderr


RANDOM = """
import mxnet as mx
mx.random.seed(7)
numbers = [mx.nd.random.uniform(shape=3).asnumpy() for _ in range(3)]
mx.random.seed(8, ctx=mx.cpu(0))
numbers += [mx.nd.random.normal(shape=3).asnumpy(), mx.nd.random.shuffle(mx.nd.arange(5)).asnumpy()]
for options in [{"active": False}, {}, {"static_alloc": True, "static_shape": True}]:
    net = mx.gluon.nn.Dropout(0.5)
    net.hybridize(**options)
    with mx.autograd.train_mode():
        numbers += [net(mx.nd.ones(9)).asnumpy() for _ in range(2)]
print([list(item) for item in numbers])
"""


def test_a_seed_gives_the_numbers_that_mxnet_gives():
    ours, theirs = (run_python(first + RANDOM).stdout for first in ("import gluon_syncbn", ""))
    assert ours == theirs and len(ours) > 100


DROPOUT = """
devices = cpus(4)
blocks = [block for _ in range(10) for block in (nn.Dropout(0.5), SyncBatchNorm(in_channels=8, timeout=900))]
net = made(mode, *blocks, devices=4)

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
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, devices))
masks(4)
"""
STATIC = """
net, other = (made("static", conv(4), SyncBatchNorm(timeout=900), nn.GlobalAvgPool2D()) for _ in range(2))
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
"""
MANY = """
centred = set_mode(Centred(), "static")
nets = [made("static", SyncBatchNorm(in_channels=8), Centred()) for _ in range(12)]
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
"""
STATES = """
centred, net = set_mode(Centred(), "static"), made("static", conv(), SyncBatchNorm())
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
"""
GATHER = """
net = made(mode, *(block for _ in range(3) for block in (conv(), SyncBatchNorm())))
for number in range(8):
    with autograd.record():
        outputs = [net(x).as_in_context(mx.cpu(0)) for x in on_devices(random_shards([(2, 8, 8, 8)] * 2))]
        losses = [mx.nd.broadcast_mul(o, mx.nd.softmax(o.mean(axis=(0, 2, 3), keepdims=True))).sum() for o in outputs]
        total = losses[0] + losses[1]
    autograd.backward(losses if number % 2 else total)
    mx.nd.waitall()
"""
UNBULKED = {"MXNET_EXEC_BULK_EXEC_TRAIN": 0}  # bulks are MXNet's
NO_WAIT = [
    # 40 Dropouts between layers: every device has numbers of its own, and the same again for a seed.
    *((DROPOUT, mode, {"GLUON_SYNCBN_BACKEND": backend}) for mode in MODES for backend in PROGRAMS),
    # Static graphs that are made anew: for other shapes, predictions, after a move, conversions; two nets in turn.
    (STATIC, "static", {"MXNET_CPU_TEMP_COPY": 128}),
    # One more static graph on cpu(0), which computes for cpu(1), comes when all others have their buffers.
    (MANY, "static", {}),
    # A static net with several states: one before the layers, and one behind them, is in use on cpu(0).
    (STATES, "static", {}),
    # Losses of all devices on one: in a backward pass cpu(0) comes to a layer, then computes what cpu(1) needs.
    *((GATHER, mode, {} if mode == "hybridize" else UNBULKED) for mode in MODES),
]
NAMES = {DROPOUT: "Dropout", STATIC: "static", MANY: "many graphs", STATES: "states", GATHER: "losses on one"}


@pytest.mark.parametrize("code, mode, environment", NO_WAIT, ids=[f"{NAMES[code]}-{m}" for code, m, _ in NO_WAIT])
def test_no_device_waits_in_vain(code, mode, environment):
    program = f"mode = {mode!r}\n{PRELUDE}{code}\nprint('RIGHT')"
    done = run_python(program, **{"GLUON_SYNCBN_TIMEOUT": 60, **environment})
    assert done.stdout == "RIGHT\n", done.stdout + done.stderr
    assert code != MANY or "temporary buffers" not in done.stderr, done.stderr


FORK = """
from endings import Calling
net = made("imperative", nn.Conv2D(4, 3), SyncBatchNorm(timeout=900), nn.Dropout(0.5))

def train():
    for _ in range(3):
        with autograd.record():
            outputs = [net(mx.nd.ones((2, 3, 8, 8), ctx=device)) for device in cpus(2)]
        autograd.backward(outputs)
        [output.asnumpy() for output in outputs]

class Function(autograd.Function):
    def forward(self, x):
        return x * 1
    def backward(self, gradient):
        return gradient * gradient.sum()

def compute_on_threads_of_mxnets():
    Calling(lambda *_: mx.nd.ones(3).sum())(mx.nd.ones(3)).wait_to_read()
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
    done = run_python(PRELUDE + FORK)
    assert done.stdout == "CHILD 0\n", done.stdout + done.stderr
