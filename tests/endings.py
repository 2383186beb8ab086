"""One fault, done on purpose to a small net on two CPU devices, in a process of its own, which may end or fork.

    python tests/endings.py FAULT --layer native|portable|contrib --mode imperative|hybridize|static

A fault that the process survives ends with a full step, whose result is compared with `nn.BatchNorm` on the
concatenated batch; then it prints RIGHT AFTERWARDS. test_endings.py says what must happen; benchmarks/reliability.py
measures it, and does the same to the layer that MXNet ships, which is why everything here is done to a net and not to
our layer."""

import argparse
import contextlib
import gc
import os
import signal
import subprocess
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
trouble = {}  # by place in the net: the devices on which the user's operator fails, and the direction
fired = threading.Event()  # it has failed
_acts = []  # what `Calling` calls; an operator knows the number


class _Call(mx.operator.CustomOp):
    def __init__(self, act, device):
        super().__init__()
        self._act, self._device = act, device

    def forward(self, is_train, req, in_data, out_data, aux):
        self._act(self._device, "forward")
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self._act(self._device, "backward")
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("calling")
class _CallProp(mx.operator.CustomOpProp):
    def __init__(self, number):
        super().__init__()
        self._act = _acts[int(number)]

    def create_operator(self, ctx, shapes, dtypes):
        return _Call(self._act, ctx)


class Calling(HybridBlock):
    """Passes its input on, and calls ``act(device, direction)`` on a thread of MXNet's for custom operators."""

    def __init__(self, act):
        super().__init__()
        _acts.append(act)
        self._number = len(_acts) - 1

    def hybrid_forward(self, F, x):
        return F.Custom(x, number=self._number, op_type="calling")


class Passage(Calling):
    """The user's own operator, written in Python; it fails where ``trouble`` says so."""

    def __init__(self, place):
        super().__init__(self._act)
        self._place = place

    def _act(self, device, direction):
        devices, when = trouble.get(self._place, ((), ""))
        if device in devices and when == direction:
            fired.set()
            # MXNet keeps the error of a custom operator in one slot for all, without a lock.
            time.sleep(0.02 * device.device_id)
            raise OSError("the disk is full")


class Late(Calling):
    """Sleeps ``seconds(device)`` in both passes: for tests in which devices must arrive in another order."""

    def __init__(self, seconds):
        super().__init__(lambda device, direction: time.sleep(seconds(device)))


def build(norm, contexts, passages):
    net = nn.HybridSequential()
    for place, name in enumerate(("first", "second", "third")):
        net.add(norm(prefix=name + "_"))
        if passages:
            net.add(Passage(place))
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
    autograd.mark_variables(arrays, [mx.nd.array(np.zeros(SHAPE), ctx=device) for device in DEVICES])
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


def waiting_output(net):
    """What cannot be computed: only one device has been started."""
    return forward(net, inputs()[:1])[0]


def waiting_gradient(net):
    """What cannot be computed: only one backward pass has been started, which waits."""
    arrays = inputs()
    backward(forward(net, arrays)[:1])
    return arrays[0].grad


def say_error(array) -> None:
    """Print the error that reading ``array`` gives."""
    try:
        array.asnumpy()
        print("NO ERROR", flush=True)
    except mx.MXNetError as error:
        print_error(error)


def print_error(error: Exception) -> None:
    print("ERROR:", str(error).split("\nStack trace")[0].strip(), flush=True)


def settle() -> None:
    """What docs/broken_steps.md says to do after an error; for the layer that MXNet ships, what comes closest."""
    if "gluon_syncbn" in sys.modules:
        gluon_syncbn.abandon_step()
    else:
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()


def send(number, seconds=0.5):
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def interrupt_reading(array):
    """Ctrl-C while the program waits for ``array``, which it catches."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    send(signal.SIGINT)
    try:
        array.asnumpy()
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
    settle()


def fork(code, in_child=lambda: None):
    """The child ends with this exit code."""
    child = os.fork()
    if child == 0:
        in_child()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == code << 8


def loader():
    data = mx.gluon.data.SimpleDataset(list(range(8)))
    return mx.gluon.data.DataLoader(data, batch_size=2, num_workers=2, timeout=120)


class Faults:
    """Each is done to a net that has made a step."""

    def missing_forward(net):
        """One device never runs the forward pass."""
        say_error(waiting_output(net))

    def missing_backward(net):
        """All devices run forward, one runs backward."""
        say_error(waiting_gradient(net))

    def read_early(net):
        """The output of one device is read before the other has been started."""
        arrays = inputs()
        with autograd.record():
            say_error(net(arrays[0]))
            net(arrays[1])

    def operator_fails_between_layers(net):
        """An operator between two layers fails on one device, while the engine runs it."""
        trouble[0] = (DEVICES[1:], "forward")
        for output in forward(net, inputs())[::-1]:
            say_error(output)
        trouble.clear()

    def exception_between_devices(net):
        """Code between the devices' forward passes raises; the program catches it and begins the next step."""
        arrays = inputs()
        try:
            with autograd.record():
                net(arrays[0])
                net(arrays[1] + mx.nd.array([1, 2], ctx=DEVICES[1]))  # shapes that do not fit
        except (mx.MXNetError, ValueError) as error:
            print_error(error)

    def exception_between_backward_passes(net):
        """An exception between `backward()` of two devices; the program catches it and begins the next step."""
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
        """Ctrl-C three times between `backward()` of two devices, in the middle of training; caught each time."""
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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        send(signal.SIGINT)
        waiting_output(net).asnumpy()

    def keyboard_interrupt_caught(net):
        """Ctrl-C while the program waits for an output; it catches that, saves the net, and goes on."""
        interrupt_reading(waiting_output(net))
        with tempfile.TemporaryDirectory() as folder:
            net.save_parameters(os.path.join(folder, "net.params"))

    def sigterm(net):
        """SIGTERM while the program waits."""
        send(signal.SIGTERM)
        waiting_output(net).asnumpy()

    def sigterm_with_handler(net):
        """SIGTERM while the program waits; its handler calls sys.exit(3)."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        send(signal.SIGTERM)
        waiting_output(net).asnumpy()

    def exit_while_waiting(net):
        """The program ends with a wait pending, and has not read anything."""
        waiting_output(net)
        sys.exit(5)

    def exception_while_waiting(net):
        """The program ends by an exception with a wait pending."""
        waiting_output(net)
        raise RuntimeError("something else")

    def fork_between_devices(net):
        """A DataLoader with workers is made between the forward passes of two devices."""
        arrays = inputs()
        try:
            with autograd.record():
                net(arrays[0])
                loader()
                net(arrays[1])
        except mx.MXNetError as error:
            print_error(error)

    def fork_after_a_failed_step(net):
        """os.fork when a step has failed and no one has read it."""
        waiting_output(net)
        fork(7)

    def fork_while_a_step_runs(net):
        """A DataLoader with workers starts at every step, with forward and backward passes still running."""
        for _ in range(5):
            backward(forward(net, inputs()))
            read = [batch.asnumpy().tolist() for batch in loader()]
            assert read == [[0, 1], [2, 3], [4, 5], [6, 7]], read

    def os_fork(net):
        """os.fork with a step running; the child computes too, and ends as it likes."""

        def compute():
            assert (mx.nd.ones(3) + 1).asnumpy().tolist() == [2, 2, 2]
            sys.exit(7)

        backward(forward(net, inputs()))
        fork(7, compute)

    def exit_in_a_backward_pass(net):
        """The program ends when one device's backward pass waits."""
        waiting_gradient(net)
        sys.exit(5)

    def sigint_in_a_backward_pass(net):
        """Ctrl-C while the program waits for a gradient that cannot come; it catches that, and goes on."""
        interrupt_reading(waiting_gradient(net))

    def fork_in_a_backward_pass(net):
        """os.fork when one device's backward pass waits; the child ends at once."""
        waiting = waiting_gradient(net)
        fork(7)
        say_error(waiting)
        settle()

    def child_trains(net):
        """os.fork after a step; the child trains, and misses a device: what ends its waits is its own."""

        def train():
            for _ in range(2):
                say_error(waiting_output(net))
                settle()
                full_step(net)
            print("THE CHILD TOO", flush=True)

        full_step(net)
        fork(0, train)

    def net_dropped_while_waiting(net):
        """The last reference to a net goes when one of its devices waits."""
        layer = next(item for item in ("native", "portable", "contrib") if item in sys.argv)
        other = build(synchronized(layer), DEVICES, passages=False)
        output = waiting_output(other)
        del other
        gc.collect()
        say_error(output)
        settle()

    def subprocess_while_a_step_runs(net):
        """Another program is started with a step running."""
        for _ in range(5):
            backward(forward(net, inputs()))
            assert subprocess.run(["echo", "hello"], capture_output=True, encoding="utf-8").stdout == "hello\n"


FAULTS = {name: fault for name, fault in vars(Faults).items() if not name.startswith("_")}
# After these the program goes on at once.
RIGHT_BY_THEMSELVES = [name for name in FAULTS if name.startswith(("exception_between", "interrupts_between"))]


def check_full_step(net, passages):
    reference = build(lambda prefix: nn.BatchNorm(in_channels=4, prefix=prefix), [mx.cpu(0)], passages)
    whole = mx.nd.array(np.concatenate(shards))
    whole.attach_grad()
    with autograd.record():
        expected = reference(whole)
    autograd.backward([expected], [mx.nd.array(np.concatenate(heads))])
    for seen, right in zip(full_step(net), (expected.asnumpy(), whole.grad.asnumpy())):
        size = np.abs(right).max((0, 2, 3), keepdims=True)
        assert (np.abs(seen - right) < 256 * 2.0**-24 * size).all(), "WRONG AFTERWARDS"  # NaN, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("--layer", choices=["native", "portable", "contrib"], required=True)
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--grace", type=float, help="seconds, in place of ours, for devices on their way")
    options = parser.parse_args()
    if options.grace:
        from testing import shorten_grace

        shorten_grace(options.grace)
    # With an operator in Python between its layers, contrib's hangs in the first step; so it gets none without need.
    in_python = options.layer != "contrib" and DEVICES[0].device_type == "cpu"
    passages = in_python or options.fault == "operator_fails_between_layers"
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
    check_full_step(net, passages)
    print("RIGHT AFTERWARDS")


if __name__ == "__main__":
    main()
