"""Who waits for whom: the report of gluon_syncbn.profile for a net of step_time.py, its plot, and its cost.

    OMP_NUM_THREADS=1 python benchmarks/waiting.py --net resnet50 --plot docs/waiting.png

With --larger, the last device has twice as many images as the others. The cost is the ratio of steps with the profile
on and off, which take turns.
"""

import argparse
import contextlib

import mxnet as mx
from common import interleaved, machine, ratio
from step_time import NETS, build, step

import gluon_syncbn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=["chain", "resnet50"], default="resnet50")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--larger", action="store_true", help="twice the images on the last device")
    parser.add_argument("--plot", help="file for the picture")
    options = parser.parse_args()
    devices = [mx.cpu(i) for i in range(options.devices)]
    make, make_inputs, shape = NETS[options.net]
    inputs = make_inputs(shape, devices)
    if options.larger:
        inputs[-1] = make_inputs((2 * shape[0], *shape[1:]), devices[-1:])[0]
    net = build(make, devices, backend="native")
    for _ in range(3):
        step(net, inputs)
    with gluon_syncbn.profile() as report:
        for _ in range(options.steps):
            step(net, inputs)
    print(f"{machine()}; {options.net}, {options.devices} CPU contexts")
    print(report)
    if options.plot:
        report.plot(options.plot)

    def run(is_on: bool) -> float:
        with gluon_syncbn.profile() if is_on else contextlib.nullcontext():
            return step(net, inputs)

    seconds = interleaved({"on": lambda: run(True), "off": lambda: run(False)}, options.steps)
    print(f"a step with the profile on takes {1 / ratio(seconds, 'on', 'off'):.3f} of one with it off")


if __name__ == "__main__":
    main()
