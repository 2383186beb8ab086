"""One fault, done on purpose to a small net on two CPU devices, in a process of its own.

    python tests/faults.py FAULT --layer native|portable|contrib --mode imperative|hybridize|static

A fault that the process survives ends with a full step, whose result is compared with `nn.BatchNorm` on the
concatenated batch; then it prints RIGHT AFTERWARDS. test_faults.py says what must happen; benchmarks/reliability.py
measures it, and does the same to the layer that MXNet ships, which is why everything here is done to a net and not to
our layer."""

import argparse
import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time

# Not imported for the layer that MXNet ships: this package would help it, too. It gets many buffers, or it would hang.
if "contrib" not in sys.argv:
    import gluon_syncbn
else:
    os.environ.setdefault("MXNET_CPU_TEMP_COPY", "16384")

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd  # noqa: E402
from mxnet.gluon import HybridBlock, contrib, nn  # noqa: E402

MODES = {"imperative": None, "hybridize": {}, "static": {"static_alloc": True, "static_shape": True}}
DEVICES = [mx.cpu(0), mx.cpu(1)]
SHAPE = (2, 4, 3, 3)
trouble = set()  # the devices on which the operator between the layers fails now


class _Passage(mx.operator.CustomOp):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, is_train, req, in_data, out_data, aux):
        if self.device in trouble:
            raise OSError("the disk is full")
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("passage")
class _PassageProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Passage(ctx)


class Passage(HybridBlock):
    """The user's own operator between two layers; it fails on the devices in ``trouble``."""

    def hybrid_forward(self, F, x):
        return F.Custom(x, op_type="passage")


def build(norm, contexts, passages):
    net = nn.HybridSequential()
    for name in ("first", "second", "third"):
        net.add(norm(prefix=name + "_"))
        if passages:
            net.add(Passage())
    net.initialize(ctx=contexts)
    return net


def synchronized(layer: str):
    if layer == "contrib":
        return lambda prefix: contrib.nn.SyncBatchNorm(in_channels=4, num_devices=len(DEVICES), prefix=prefix)
    return lambda prefix: gluon_syncbn.SyncBatchNorm(in_channels=4, prefix=prefix, backend=layer)


rng = np.random.RandomState(0)
shards, heads = ([rng.standard_normal(SHAPE).astype("float32") for _ in DEVICES] for _ in range(2))


def inputs():
    arrays = [mx.nd.array(shard, ctx=device) for shard, device in zip(shards, DEVICES)]
    # Not attach_grad, which would run a kernel on GPUs.
    gradients = [mx.nd.array(np.zeros(SHAPE), ctx=device) for device in DEVICES]
    autograd.mark_variables(arrays, gradients)
    mx.nd.waitall()
    return arrays


def forward(net, arrays):
    with autograd.record():
        return [net(item) for item in arrays]


def backward(outputs):
    autograd.backward(outputs, [mx.nd.array(head, ctx=output.context) for head, output in zip(heads, outputs)])


def full_step(net):
    arrays = inputs()
    outputs = forward(net, arrays)
    backward(outputs)
    return [np.concatenate([item.asnumpy() for item in items]) for items in (outputs, [item.grad for item in arrays])]


def say_error(array) -> None:
    """Print the error that reading ``array`` gives."""
    try:
        array.asnumpy()
    except mx.MXNetError as error:
        print_error(error)
    else:
        print("NO ERROR", flush=True)


def print_error(error: Exception) -> None:
    print("ERROR:", str(error).split("\nStack trace")[0].strip(), flush=True)


def settle() -> None:
    """What docs/broken_steps.md says to do after an error; for the layer that MXNet ships, what comes closest."""
    if "gluon_syncbn" in sys.modules:
        gluon_syncbn.abandon_step()
    else:
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()


def missing_forward(net):
    """One device never runs the forward pass."""
    say_error(forward(net, inputs()[:1])[0])


def missing_backward(net):
    """All devices run forward, one runs backward."""
    arrays = inputs()
    outputs = forward(net, arrays)
    backward(outputs[:1])
    say_error(arrays[0].grad)


def read_early(net):
    """The output of one device is read before the other has been started."""
    arrays = inputs()
    with autograd.record():
        first = net(arrays[0])
        say_error(first)
        net(arrays[1])


def operator_fails_between_layers(net):
    """An operator between two layers fails on one device, while the engine runs it."""
    trouble.add(DEVICES[1])
    outputs = forward(net, inputs())
    say_error(outputs[1])
    say_error(outputs[0])
    trouble.clear()


def exception_between_devices(net):
    """Code that runs between the devices' forward passes raises; the program catches it and begins the next step."""
    arrays = inputs()
    try:
        with autograd.record():
            net(arrays[0])
            net(arrays[1] + mx.nd.array([1, 2], ctx=DEVICES[1]))  # shapes that do not fit
    except (mx.MXNetError, ValueError) as error:
        print_error(error)


def exception_between_backward_passes(net):
    """An exception between ``backward()`` of two devices; the program catches it and begins the next step."""
    arrays = inputs()
    for number in range(3):
        try:
            for head, output in zip(heads, forward(net, arrays)):
                output.backward(mx.nd.array(head, ctx=output.context))
                if number == 1:
                    raise ValueError("the log file is full")
        except ValueError as error:
            print_error(error)
    mx.nd.waitall()


def interrupts_between_backward_passes(net):
    """Ctrl-C three times between ``backward()`` of two devices, in the middle of training; caught each time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parameters = {key: item for key, item in net.collect_params().items() if item.grad_req != "null"}
    trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0})
    arrays = inputs()
    for number in range(12):
        try:
            for head, output in zip(heads, forward(net, arrays)):
                output.backward(mx.nd.array(head, ctx=output.context))
                if number % 4 == 2:
                    os.kill(os.getpid(), signal.SIGINT)
            trainer.step(1)
        except KeyboardInterrupt:
            print("INTERRUPTED", flush=True)
    mx.nd.waitall()


def called_twice(net):
    """One device runs the net twice in a step, the other once."""
    arrays = inputs()
    say_error(forward(net, [arrays[0], arrays[0], arrays[1]])[1])


def keyboard_interrupt(net):
    """Ctrl-C while the program waits for an output that cannot come."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    forward(net, inputs()[:1])[0].asnumpy()


def keyboard_interrupt_caught(net):
    """Ctrl-C while the program waits for an output that cannot come; it catches that, saves the net, and goes on."""
    try:
        keyboard_interrupt(net)
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
    settle()
    with tempfile.TemporaryDirectory() as folder:
        net.save_parameters(os.path.join(folder, "net.params"))


def sigterm(net):
    """SIGTERM while the program waits."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    forward(net, inputs()[:1])[0].asnumpy()


def sigterm_with_handler(net):
    """SIGTERM while the program waits; its handler calls sys.exit(3)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    sigterm(net)


def exit_while_waiting(net):
    """The program ends with a wait pending, and has not read anything."""
    forward(net, inputs()[:1])
    sys.exit(5)


def exception_while_waiting(net):
    """The program ends by an exception with a wait pending."""
    forward(net, inputs()[:1])
    raise RuntimeError("something else")


def _loader():
    data = mx.gluon.data.SimpleDataset(list(range(8)))
    return mx.gluon.data.DataLoader(data, batch_size=2, num_workers=2, timeout=120)


def fork_between_devices(net):
    """A DataLoader with workers is made between the forward passes of two devices."""
    arrays = inputs()
    try:
        with autograd.record():
            net(arrays[0])
            _loader()
            net(arrays[1])
    except mx.MXNetError as error:
        print_error(error)


def fork_after_a_failed_step(net):
    """os.fork when a step has failed and no one has read it."""
    forward(net, inputs()[:1])
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8


def fork_while_a_step_runs(net):
    """A DataLoader with workers starts at every step, with forward and backward passes still running."""
    for _ in range(5):
        arrays = inputs()
        backward(forward(net, arrays))
        read = [batch.asnumpy().tolist() for batch in _loader()]
        assert read == [[0, 1], [2, 3], [4, 5], [6, 7]], read


def os_fork(net):
    """os.fork with a step running; the child computes too, and ends as it likes."""
    backward(forward(net, inputs()))
    child = os.fork()
    if child == 0:
        assert (mx.nd.ones(3) + 1).asnumpy().tolist() == [2, 2, 2]
        sys.exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8


def one_backward(net):
    """Forward passes on all devices, and one backward pass, which waits; its input, which has the gradient."""
    arrays = inputs()
    backward(forward(net, arrays)[:1])
    return arrays[0]


def exit_in_a_backward_pass(net):
    """The program ends when one device's backward pass waits."""
    one_backward(net)
    sys.exit(5)


def sigint_in_a_backward_pass(net):
    """Ctrl-C while the program waits for a gradient that cannot come; it catches that, and goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting = one_backward(net)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        waiting.grad.asnumpy()
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
    settle()


def fork_in_a_backward_pass(net):
    """os.fork when one device's backward pass waits; the child ends at once."""
    waiting = one_backward(net)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8
    say_error(waiting.grad)
    settle()


def child_trains(net):
    """os.fork after a step; the child trains, and misses a device: what ends its waits is its own."""
    full_step(net)
    child = os.fork()
    if child == 0:
        for _ in range(2):
            say_error(forward(net, inputs()[:1])[0])
            settle()
            full_step(net)
        print("THE CHILD TOO", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def net_dropped_while_waiting(net):
    """The last reference to a net goes when one of its devices waits."""
    layer = next(item for item in ("native", "portable", "contrib") if item in sys.argv)
    other = build(synchronized(layer), DEVICES, passages=False)
    output = forward(other, inputs()[:1])[0]
    del other
    gc.collect()
    say_error(output)
    settle()


def subprocess_while_a_step_runs(net):
    """Another program is started with a step running."""
    import subprocess

    for _ in range(5):
        backward(forward(net, inputs()))
        assert subprocess.run(["echo", "hello"], capture_output=True, encoding="utf-8").stdout == "hello\n"


# After these the program goes on at once.
RIGHT_BY_THEMSELVES = {
    "exception_between_devices",
    "exception_between_backward_passes",
    "interrupts_between_backward_passes",
}
FAULTS = {
    fault.__name__: fault
    for fault in (
        missing_forward,
        missing_backward,
        read_early,
        operator_fails_between_layers,
        exception_between_devices,
        exception_between_backward_passes,
        interrupts_between_backward_passes,
        called_twice,
        keyboard_interrupt,
        keyboard_interrupt_caught,
        sigterm,
        sigterm_with_handler,
        exit_while_waiting,
        exception_while_waiting,
        fork_between_devices,
        fork_after_a_failed_step,
        fork_while_a_step_runs,
        os_fork,
        exit_in_a_backward_pass,
        sigint_in_a_backward_pass,
        fork_in_a_backward_pass,
        child_trains,
        net_dropped_while_waiting,
        subprocess_while_a_step_runs,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("--layer", choices=["native", "portable", "contrib"], required=True)
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--grace", type=float, help="seconds, in place of ours, for devices on their way")
    options = parser.parse_args()
    if options.grace:
        from harness import shorten_grace

        shorten_grace(options.grace)
    # With an operator in Python between its layers, contrib's hangs in the first step; so it gets none without need.
    in_python = options.layer != "contrib" and DEVICES[0].device_type == "cpu"
    passages = in_python or options.fault == operator_fails_between_layers.__name__
    net = build(synchronized(options.layer), DEVICES, passages)
    if MODES[options.mode] is not None:
        net.hybridize(**MODES[options.mode])
    full_step(net)
    mx.nd.waitall()
    started = time.perf_counter()
    print("BEGIN", flush=True)
    FAULTS[options.fault](net)
    if options.fault not in RIGHT_BY_THEMSELVES:
        settle()
    print(f"TOOK {time.perf_counter() - started:.2f} s", flush=True)
    reference = build(lambda prefix: nn.BatchNorm(in_channels=4, prefix=prefix), [mx.cpu(0)], passages)
    whole = mx.nd.array(np.concatenate(shards))
    whole.attach_grad()
    with autograd.record():
        expected = reference(whole)
    autograd.backward([expected], [mx.nd.array(np.concatenate(heads))])
    for seen, right in zip(full_step(net), (expected.asnumpy(), whole.grad.asnumpy())):
        assert np.abs(seen - right).max() < 1e-4 * np.abs(right).max(), "WRONG AFTERWARDS"
    print("RIGHT AFTERWARDS")


if __name__ == "__main__":
    main()
