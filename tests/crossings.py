"""Draws what a synchronized layer can meet, two and three at a time, and compares a net with the float64 oracle.

    python tests/crossings.py [--cases 100 | --minutes 60] [--seed N] [--only NUMBER]

A case is a small net (docs/development.md lists what it may have), a way to make it, a way to call it, and a history of
what happens between its steps. After each step outputs, gradients of inputs and parameters, and running statistics are
those of `Reference`, which knows NumPy alone. What happens between steps must change nothing but what it says.

Case K of seed S is drawn by a generator of its own, so ``--seed S --only K`` repeats it.
"""

import argparse
import contextlib
import copy
import itertools
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings

import numpy as np
from harness import MODES, cpus, mx, set_mode
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

CHANNELS = 3
SLOPE = 0.25  # the same in every dtype
# Outputs and statistics, and gradients. MXNet's own layers compute in float32 at times, also in float64.
TOLERANCE = {"float64": 2e-6, "float32": 2e-4, "float16": 3e-2}
# By how much what a ReLU is given may be off, as a share of the largest.
ROUNDING = {"float64": 1e-12, "float32": 2e-5, "float16": 5e-3}

# What is behind the norm, and whether it is between the norm and a sum.
BEHIND = ("nothing", "relu", "leaky", "skip", "own relu")
MAKERS = ("made", "converted", "converted twice", "there and back", "symbol block")
MODES_OF_CALL = (*MODES, "module")
EVENTS = (
    "predict",
    "predict and record",
    "export",
    "optimize_for",
    "save and load",
    "copy",
    "pickle",
    "convert again",
    "there and back",
    "hybridize again",
    "short step",
    "failed step",
    "abandoned step",
    "abandon nothing",
    "statistics anew",
    "freeze and thaw",
    "backward twice",
    "cast there and back",
)


class Case:
    """What is drawn."""

    def __init__(self, seed, number):
        draw = random.Random(f"{seed}/{number}")
        self.name = f"--seed {seed} --only {number}"
        self.backend = draw.choice(("native", "native", "portable"))
        self.devices = draw.choice((1, 2, 2, 3, 4))
        self.dtype = draw.choice(("float64", "float64", "float32", "float16"))
        self.mode = draw.choice(MODES_OF_CALL)
        self.maker = draw.choice(MAKERS)
        self.behind = draw.choice(BEHIND)
        self.axis = draw.choice((1, 1, -1))
        self.calls = draw.choice((1, 1, 2))  # of one layer: a shared head
        self.twins = self.calls == 2 and draw.random() < 0.5  # or of two that share their Parameters
        options = {}
        for name, values in (
            ("group_size", [size for size in (1, 2) if self.devices % size == 0]),
            ("renorm", [(1.5, 0.5), [(0, 1, 0), (6, 3, 2)], (1, 0)]),
            ("in_place", [True] if self.backend == "native" else []),
            ("fuse", [False]),
            ("process_group", ["none"]),
            ("num_devices", [self.devices]),
        ):
            if values and draw.random() < 0.25:
                options[name] = draw.choice(values)
        if self.backend == "portable":  # which refuses it
            options.pop("renorm", None)
        self.options = options
        self.layer = {"momentum": draw.choice((0.9, 0.5)), "epsilon": draw.choice((1e-5, 1e-3))}
        self.layer["scale"] = draw.random() < 0.8
        self.grad_req = draw.choice(("write", "write", "write", "add", "null"))
        # A gamma near 0 is another function in place, which is documented.
        self.gamma = 1.0 if options.get("in_place") else draw.choice((1.0, 1.0, 0.0))
        self.history = [draw.choice(EVENTS) if draw.random() < 0.7 else None for _ in range(draw.choice((2, 3, 4)))]
        if self.mode == "module":
            self.calls, self.twins, self.grad_req = 1, False, "write"
            self.maker = draw.choice(("converted", "converted twice"))
            self.options.pop("num_devices", None)
            self.history = [
                event if event in ("predict", "statistics anew", "abandon nothing") else None for event in self.history
            ]
            self.behind = "relu" if self.behind == "own relu" else self.behind
            self.dtype = "float32" if self.dtype == "float16" else self.dtype
        if self.behind == "own relu" and self.maker != "made":
            self.behind = "relu"
        if self.maker == "symbol block":
            self.calls, self.twins = 1, False
            self.dtype = "float32" if self.dtype == "float16" else self.dtype
        if self.dtype == "float16":
            self.axis = 1
        # `nn.BatchNorm` itself: on a CPU it updates its statistics in the backward pass, if there is one, each time.
        self.is_plain = (self.devices == 1 or options.get("group_size") == 1) and not options.get("renorm")
        if self.is_plain:
            self.calls, self.twins = 1, False
            self.grad_req = "write" if self.grad_req == "null" else self.grad_req
            left_out = ("backward twice", "statistics anew", "abandoned step")
            self.history = [None if event in left_out else event for event in self.history]
        if self.twins and isinstance(options.get("renorm"), list):  # each of them counts its own steps
            options["renorm"] = (1.5, 0.5)
        self.data_seed = draw.randrange(1 << 30)

    def __str__(self):
        told = {name: value for name, value in vars(self).items() if name not in ("name", "data_seed")}
        return f"{self.name}: " + ", ".join(f"{name}={value!r}" for name, value in told.items())

    def features(self):
        """By which combinations are counted."""
        found = {
            f"{name}={getattr(self, name)}" for name in ("backend", "dtype", "mode", "maker", "behind", "grad_req")
        }
        found |= {f"devices={self.devices}", f"axis={self.axis}", f"calls={self.calls}", f"gamma={self.gamma}"}
        found |= {*self.options, *filter(None, self.history)} | ({"twins"} if self.twins else set())
        return found


def activate(behind, z, x):
    """What follows the norm, and its gradients by z and x."""
    if behind in ("relu", "own relu"):
        return np.maximum(z, 0), (z > 0) * 1.0, np.zeros_like(x)
    if behind == "leaky":
        return np.where(z > 0, z, SLOPE * z), np.where(z > 0, 1.0, SLOPE), np.zeros_like(x)
    if behind == "skip":
        return np.maximum(z + x, 0), (z + x > 0) * 1.0, (z + x > 0) * 1.0
    return z, np.ones_like(z), np.zeros_like(x)


class Reference:
    """The net in float64: y = behind(norm(x), x), for two calls y(x) + y(x/2)."""

    def __init__(self, case, gamma, beta):
        self.case, self.gamma, self.beta = case, gamma, beta
        self.step_number = 0
        self.nearest = np.inf  # to the edge of a ReLU, in the last step
        self.mean = [np.zeros(CHANNELS) for _ in range(case.devices)]
        self.var = [np.ones(CHANNELS) for _ in range(case.devices)]

    def column(self, vector):
        shape = [1] * 4
        shape[self.case.axis] = CHANNELS
        return np.asarray(vector).reshape(shape)

    def limits(self):
        renorm = self.case.options.get("renorm")
        if renorm is None:
            return None
        points = [(0, *renorm)] if isinstance(renorm, tuple) else renorm
        steps, r_max, d_max = zip(*points)
        return np.interp(self.step_number, steps, r_max), np.interp(self.step_number, steps, d_max)

    def call(self, shards, heads, used, train, advance=True):
        """Outputs, and gradients of x, γ and β summed over devices, of one call on the devices ``used``."""
        case, epsilon = self.case, self.case.layer["epsilon"]
        size = case.options.get("group_size") or case.devices
        momentum = case.layer["momentum"]
        others = tuple(i for i in range(4) if i != case.axis % 4)
        outputs, d_inputs = {}, {}
        d_gamma, d_beta = {}, {}
        limits = self.limits()
        for first in range(0, case.devices, size):
            members = [device for device in range(first, first + size) if device in used]
            if not members:
                continue
            x = np.concatenate([shards[device] for device in members])
            head = np.concatenate([heads[device] for device in members])
            if train:
                mean, var = x.mean(axis=others), x.var(axis=others)
            else:
                mean, var = self.mean[members[0]], self.var[members[0]]
            std = np.sqrt(var + epsilon)
            r, d = np.ones(CHANNELS), np.zeros(CHANNELS)
            if train and limits is not None:
                running = np.sqrt(self.var[members[0]] + epsilon)
                r = np.clip(std / running, 1 / limits[0], limits[0])
                d = np.clip((mean - self.mean[members[0]]) / running, -limits[1], limits[1])
            hat = (x - self.column(mean)) / self.column(std)
            gamma = self.gamma if case.layer["scale"] else np.ones(CHANNELS)
            z = self.column(gamma) * (hat * self.column(r) + self.column(d)) + self.column(self.beta)
            y, by_z, by_x = activate(case.behind, z, x)
            before = z + x if case.behind == "skip" else z
            self.nearest = min(self.nearest, np.abs(before).min() / max(1.0, np.abs(before).max()))
            dz = head * by_z
            d_hat = dz * self.column(gamma * r)
            if train:
                d_hat = (
                    d_hat
                    - d_hat.mean(axis=others, keepdims=True)
                    - hat * (d_hat * hat).mean(axis=others, keepdims=True)
                )
            dx = d_hat / self.column(std) + head * by_x
            borders = np.cumsum([len(shards[device]) for device in members])[:-1]
            for device, part, gradient in zip(members, np.split(y, borders), np.split(dx, borders)):
                outputs[device], d_inputs[device] = part, gradient
            d_gamma[first] = (dz * (hat * self.column(r) + self.column(d))).sum(axis=others)
            d_beta[first] = dz.sum(axis=others)
            if train and advance:
                for device in range(first, first + size):
                    self.mean[device] = momentum * self.mean[device] + (1 - momentum) * mean
                    self.var[device] = momentum * self.var[device] + (1 - momentum) * var
        if train and advance:
            self.step_number += 1
        return outputs, d_inputs, sum(d_gamma.values()), sum(d_beta.values())

    def net(self, shards, heads, used, train=True):
        self.nearest = np.inf
        outputs, d_inputs, d_gamma, d_beta = self.call(shards, heads, used, train)
        if self.case.calls == 2:
            half = {device: shards[device] / 2 for device in used}
            more = self.call(half, heads, used, train)
            outputs = {device: outputs[device] + more[0][device] for device in used}
            d_inputs = {device: d_inputs[device] + more[1][device] / 2 for device in used}
            d_gamma, d_beta = d_gamma + more[2], d_beta + more[3]
        return outputs, d_inputs, d_gamma, d_beta


class Net(gluon.HybridBlock):
    def __init__(self, case, layer_class, **options):
        super().__init__(prefix="net_")
        self._behind, self._calls = case.behind, case.calls
        kwargs = {"in_channels": CHANNELS, "axis": case.axis, **case.layer, **options}
        with self.name_scope():
            self.norm = layer_class(**kwargs)
            self.twin = layer_class(params=self.norm.params, **kwargs) if case.twins else self.norm

    def hybrid_forward(self, F, x):
        y = self._one(F, self.norm, x)
        return y + self._one(F, self.twin, x / 2) if self._calls == 2 else y

    def _one(self, F, norm, x):
        z = norm(x)
        if self._behind == "relu":
            return F.relu(z)
        if self._behind == "leaky":
            return F.LeakyReLU(z, slope=SLOPE)
        if self._behind == "skip":
            return F.relu(z + x)
        return z


class Subject:
    """The net of ours, with what happens to it."""

    def __init__(self, case, gamma, beta):
        self.case, self.contexts = case, cpus(case.devices)
        self.convert_options = {"backend": case.backend, "timeout": 30, **case.options}
        if case.maker == "made":
            own = {"activation": "relu"} if case.behind == "own relu" else {}
            self.net = Net(case, SyncBatchNorm, **self.convert_options, **own)
        else:
            self.net = Net(case, nn.BatchNorm)
            self.convert(case.maker)
        self.net.cast(case.dtype)
        self.net.initialize(ctx=self.contexts)
        parameters = self.net.collect_params()
        for name, value in (("gamma", gamma), ("beta", beta)):
            for key, parameter in parameters.items():
                if key.endswith(name):
                    parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
                    if parameter.grad_req != "null":
                        parameter.grad_req = case.grad_req
        set_mode(self.net, case.mode)

    def convert(self, how):
        options = dict(self.convert_options)
        if how == "symbol block":
            data = mx.sym.var("data")
            out = self.net(data)
            self.net = gluon.SymbolBlock(out, data, params=self.net.collect_params())
        if how == "there and back":
            convert_sync_batchnorm(self.net, backend=self.case.backend)
            convert_batchnorm(self.net)
        convert_sync_batchnorm(self.net, **options)
        if how == "converted twice":
            convert_sync_batchnorm(self.net, timeout=31)

    def parameter(self, name):
        found = [item for key, item in self.net.collect_params().items() if key.endswith(name)]
        assert len({id(item) for item in found}) == 1
        return found[0]

    def arrays(self, shards, used):
        inputs = {}
        for device in used:
            inputs[device] = mx.nd.array(shards[device], ctx=self.contexts[device], dtype=self.case.dtype)
            inputs[device].attach_grad()
        return inputs

    def step(self, shards, heads, used, train_mode=True, twice=False):
        inputs = self.arrays(shards, used)
        with autograd.record(train_mode=train_mode):
            outputs = {device: self.net(inputs[device]) for device in used}
        given = [mx.nd.array(heads[device], ctx=self.contexts[device], dtype=self.case.dtype) for device in used]
        if twice:
            autograd.backward(list(outputs.values()), given, retain_graph=True)
            if self.case.grad_req == "add":
                for parameter in self.net.collect_params().values():
                    parameter.zero_grad()
        autograd.backward(list(outputs.values()), given, train_mode=train_mode)
        gradients = {}
        for name in ("gamma", "beta"):
            parameter = self.parameter(name)
            if parameter.grad_req != "null":
                gradients[name] = sum(parameter.grad(self.contexts[d]).asnumpy().astype("float64") for d in used)
        d_inputs = {device: inputs[device].grad.asnumpy() for device in used}
        return {device: outputs[device].asnumpy() for device in used}, d_inputs, gradients

    def predict(self, shards):
        return {device: self.net(x).asnumpy() for device, x in self.arrays(shards, range(self.case.devices)).items()}

    def zero_gradients(self):
        if self.case.grad_req == "add":
            for parameter in self.net.collect_params().values():
                if parameter.grad_req != "null":
                    parameter.zero_grad()

    def statistics(self, name):
        return [item.asnumpy().astype("float64") for item in self.parameter(name).list_data()]


def compare(what, seen, expected, tolerance):
    seen, expected = np.asarray(seen, "float64"), np.asarray(expected, "float64")
    assert seen.shape == expected.shape, f"{what}: {seen.shape} in place of {expected.shape}"
    error = np.abs(seen - expected).max() / max(1.0, np.abs(expected).max())
    assert error < tolerance, f"{what}: off by {error:.2g}"


class Trial:
    """One case, from its first step to its last."""

    def __init__(self, case):
        self.case = case
        self.rng = np.random.RandomState(case.data_seed)
        signs = self.rng.choice([-1, 1], CHANNELS)
        gamma, beta = signs * self.rng.uniform(0.5, 2, CHANNELS), self.rng.uniform(-1, 1, CHANNELS)
        gamma[0] *= case.gamma
        if case.dtype == "float16" or case.mode == "module":
            gamma, beta = gamma.astype("float32"), beta.astype("float32")
        self.reference = Reference(case, gamma.astype("float64"), beta.astype("float64"))
        self.gamma, self.beta = gamma, beta
        self.tolerance = TOLERANCE[case.dtype]

    def shards(self, scale=1.0, mean=0.3):
        """Multiples of 1/8, which every dtype has; and none near the edge of a ReLU is asked for."""
        shapes = []
        for _ in range(self.case.devices):
            shape = [int(self.rng.randint(1, 4)), 4, 5, CHANNELS]
            shapes.append(shape if self.case.axis == -1 else [shape[0], CHANNELS, 4, 5])
        return [np.round(8 * (scale * self.rng.standard_normal(shape) + mean)) / 8 for shape in shapes]

    def heads(self, shards):
        return [np.round(8 * self.rng.standard_normal(shard.shape)) / 8 for shard in shards]

    def run(self):
        if self.case.mode == "module":
            return ModuleTrial(self).run()
        self.subject = Subject(self.case, self.gamma, self.beta)
        self.check_step()
        for event in self.case.history:
            if event:
                getattr(self, event.replace(" ", "_"))()
            self.check_step()
        mx.nd.waitall()

    def check_step(self, used=None, twice=False):
        used = list(range(self.case.devices)) if used is None else used
        shards = self.shards()
        heads = self.heads(shards)
        self.subject.zero_gradients()
        seen = self.subject.step(shards, heads, used, twice=twice)
        self.compare_step(seen, self.reference.net(dict(enumerate(shards)), dict(enumerate(heads)), used), used)
        self.compare_statistics()

    def compare_step(self, seen, expected, used):
        outputs, d_inputs, gradients = seen
        loose = self.edge()
        for device in used:
            compare(f"output on {device}", outputs[device], expected[0][device], self.tolerance)
            if not loose:
                compare(f"gradient on {device}", d_inputs[device], expected[1][device], 5 * self.tolerance)
        if not loose:
            for name, value in zip(("gamma", "beta"), expected[2:]):
                if name in gradients and (name == "beta" or self.case.layer["scale"]):
                    compare(f"gradient of {name}", gradients[name], value, 5 * self.tolerance)

    def edge(self):
        """Whether rounding may decide which side of a ReLU a value is on, in any call of the step."""
        return self.case.behind != "nothing" and self.reference.nearest < ROUNDING[self.case.dtype]

    def compare_statistics(self):
        tolerance = self.tolerance if self.case.dtype != "float16" or self.case.is_plain else 1e-4
        for name, expected in (("running_mean", self.reference.mean), ("running_var", self.reference.var)):
            for device, value in enumerate(self.subject.statistics(name)):
                compare(f"{name} on {device}", value, expected[device], tolerance)

    def expected_prediction(self, shards):
        return {d: self.frozen(shards[d], np.zeros_like(shards[d]), d) for d in range(self.case.devices)}

    # What may happen between two steps.

    def predict(self):
        shards = self.shards()
        seen = self.subject.predict(shards)
        for device, (expected, *_) in self.expected_prediction(shards).items():
            compare("prediction", seen[device], expected[0], self.tolerance)

    def predict_and_record(self):
        shards = self.shards()
        heads = self.heads(shards)
        self.subject.zero_gradients()
        everyone = list(range(self.case.devices))
        seen = self.subject.step(shards, heads, everyone, train_mode=False)
        d_gamma = d_beta = 0
        for device in everyone:
            made = self.frozen(shards[device], heads[device], device)
            compare("recorded prediction", seen[0][device], made[0][0], self.tolerance)
            if not self.edge():
                compare("its gradient", seen[1][device], made[1][0], 5 * self.tolerance)
            d_gamma, d_beta = d_gamma + made[2], d_beta + made[3]
        self.compare_statistics()

    def export(self):
        if self.case.mode == "imperative" or self.case.options.get("group_size") not in (None, self.case.devices):
            return  # MXNet writes the mean over all devices of what each has
        shards = self.shards()
        seen = self.subject.predict(shards)[0]
        with tempfile.TemporaryDirectory() as folder:
            self.subject.net.export(os.path.join(folder, "net"))
            symbol = mx.sym.load(os.path.join(folder, "net-symbol.json"))
            assert "Custom" not in symbol.tojson() and "syncbn" not in symbol.tojson()
            block = gluon.SymbolBlock.imports(
                os.path.join(folder, "net-symbol.json"), ["data"], os.path.join(folder, "net-0000.params")
            )
            x = mx.nd.array(shards[0], dtype=self.case.dtype)
            compare("exported net", block(x).asnumpy(), seen, self.tolerance)

    def optimize_for(self):
        if (
            self.case.mode == "imperative"
            or self.case.dtype != "float32"
            or isinstance(self.subject.net, gluon.SymbolBlock)
        ):
            return
        x = mx.nd.array(self.shards()[0], dtype=self.case.dtype)
        self.subject.net.optimize_for(x, backend="MKLDNN", **MODES[self.case.mode])
        self.export()

    def save_and_load(self):
        if isinstance(self.subject.net, gluon.SymbolBlock):
            return  # MXNet cannot load what it has saved of a block that is one symbol
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "net.params")
            self.subject.net.save_parameters(file)
            self.subject.net.load_parameters(file, ctx=self.subject.contexts)
            size = self.case.options.get("group_size") or self.case.devices
            if size != self.case.devices:  # a file has the statistics of one device only
                for name in ("running_mean", "running_var"):
                    values = {"running_mean": self.reference.mean, "running_var": self.reference.var}[name]
                    for array, value in zip(self.subject.parameter(name).list_data(), values):
                        array[:] = mx.nd.array(value, ctx=array.context, dtype=array.dtype)

    def copy(self):
        if self.case.mode == "imperative" and not isinstance(self.subject.net, gluon.SymbolBlock):
            self.replace(copy.deepcopy(self.subject.net))

    def pickle(self):
        if self.case.mode == "imperative" and not isinstance(self.subject.net, gluon.SymbolBlock):
            self.replace(pickle.loads(pickle.dumps(self.subject.net)))

    def replace(self, net):
        """MXNet copies no gradients."""
        self.subject.net = net
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                kept, parameter.grad_req = parameter.grad_req, "null"
                parameter.grad_req = kept

    def convert_again(self):
        convert_sync_batchnorm(self.subject.net, timeout=32)

    def there_and_back(self):
        convert_batchnorm(self.subject.net)
        self.predict()
        convert_sync_batchnorm(self.subject.net, **self.subject.convert_options)
        # The schedule begins anew with a layer that is made anew.
        self.reference.step_number = 0

    def hybridize_again(self):
        set_mode(self.subject.net, self.case.mode)

    def short_step(self):
        used = sorted(
            random.Random(int(self.rng.randint(1 << 30))).sample(
                range(self.case.devices), max(1, self.case.devices - 1)
            )
        )
        with gluon_syncbn.devices([self.subject.contexts[device] for device in used]):
            self.check_short(used)
        self.compare_statistics()

    def check_short(self, used):
        shards = self.shards()
        heads = self.heads(shards)
        self.subject.zero_gradients()
        seen = self.subject.step(shards, heads, used)
        self.compare_step(seen, self.reference.net(dict(enumerate(shards)), dict(enumerate(heads)), used), used)

    def failed_step(self):
        """One device does not come; those that meet without it may have done their pass."""
        size = self.case.options.get("group_size") or self.case.devices
        if size != self.case.devices or self.case.devices == 1:
            return
        shards = self.shards()
        convert_sync_batchnorm(self.subject.net, timeout=0.5)
        before = {name: self.subject.statistics(name) for name in ("running_mean", "running_var")}
        try:
            self.subject.step(shards, self.heads(shards), list(range(self.case.devices - 1)))
        except mx.MXNetError as error:
            assert "waited" in str(error) or "failed" in str(error), error
        else:
            raise AssertionError("nobody noticed that a device did not come")
        gluon_syncbn.abandon_step()
        convert_sync_batchnorm(self.subject.net, timeout=30)
        for name, values in before.items():
            for one, other in zip(values, self.subject.statistics(name)):
                np.testing.assert_array_equal(one, other)

    def abandoned_step(self):
        shards = self.shards()
        inputs = self.subject.arrays(shards, range(self.case.devices))
        with contextlib.suppress(KeyError), autograd.record():
            self.subject.net(inputs[0])
            raise KeyError("a bad label")
        if self.case.devices == 1 or self.case.options.get("group_size") == 1:  # nobody was waited for: it was done
            self.reference.net({0: shards[0]}, {0: np.zeros_like(shards[0])}, [0])

    def abandon_nothing(self):
        gluon_syncbn.abandon_step()

    def statistics_anew(self):
        """Training passes that nobody records."""
        shards = self.shards(scale=2)
        used = list(range(self.case.devices))
        with autograd.train_mode():
            outputs = {device: self.subject.net(x) for device, x in self.subject.arrays(shards, used).items()}
        mx.nd.waitall()
        expected = self.reference.net(dict(enumerate(shards)), {d: np.zeros_like(shards[d]) for d in used}, used)[0]
        for device in used:
            compare("unrecorded output", outputs[device].asnumpy(), expected[device], self.tolerance)
        self.compare_statistics()

    def freeze_and_thaw(self):
        gluon_syncbn.freeze_statistics(self.subject.net)
        shards = self.shards()
        heads = self.heads(shards)
        self.subject.zero_gradients()
        seen = self.subject.step(shards, heads, list(range(self.case.devices)))
        for device, (expected, d_inputs, *_) in (
            (device, self.frozen(shards[device], heads[device], device)) for device in range(self.case.devices)
        ):
            compare("frozen output", seen[0][device], expected[0], self.tolerance)
            if not self.edge():
                compare("frozen gradient", seen[1][device], d_inputs[0], 5 * self.tolerance)
        gluon_syncbn.freeze_statistics(self.subject.net, frozen=False)
        self.compare_statistics()

    def frozen(self, shard, head, device):
        chosen = copy.copy(self.reference)
        chosen.case = copy.copy(self.case)
        chosen.case.devices, chosen.case.options = 1, {}
        chosen.mean, chosen.var = [self.reference.mean[device]], [self.reference.var[device]]
        found = chosen.net({0: shard}, {0: head}, [0], train=False)
        self.reference.nearest = chosen.nearest
        return found

    def backward_twice(self):
        self.check_step(twice=True)

    def cast_there_and_back(self):
        if self.case.dtype == "float32":
            self.subject.net.cast("float64")
            self.subject.net.cast("float32")


class ModuleTrial:
    """The same net as a symbol, bound by a Module on all devices."""

    def __init__(self, trial):
        self.trial, self.case = trial, trial.case

    def run(self):
        case = self.case
        x = mx.sym.var("data")
        kwargs = {"axis": case.axis, "eps": case.layer["epsilon"], "momentum": case.layer["momentum"]}
        z = mx.sym.BatchNorm(x, name="norm", fix_gamma=not case.layer["scale"], **kwargs)
        if case.behind == "relu":
            z = mx.sym.relu(z)
        elif case.behind == "leaky":
            z = mx.sym.LeakyReLU(z, slope=SLOPE)
        elif case.behind == "skip":
            z = mx.sym.relu(z + x)
        dtype = "float64" if case.dtype == "float64" else "float32"
        options = {"backend": case.backend, "timeout": 30, "dtype": dtype, **case.options}
        symbol = gluon_syncbn.convert_symbol(z, case.devices, **options)
        if case.maker == "converted twice":
            symbol = gluon_syncbn.convert_symbol(mx.sym.load_json(symbol.tojson()), case.devices, backend=case.backend)
        shape = (2, 4, 5, CHANNELS) if case.axis == -1 else (2, CHANNELS, 4, 5)
        executors = [
            symbol.simple_bind(device, data=shape, type_dict=dict.fromkeys(symbol.list_inputs(), case.dtype))
            for device in cpus(case.devices)
        ]
        for executor in executors:
            executor.arg_dict["norm_gamma"][:] = mx.nd.array(self.trial.gamma, dtype=dtype)
            executor.arg_dict["norm_beta"][:] = mx.nd.array(self.trial.beta, dtype=dtype)
            executor.aux_dict["norm_moving_mean"][:] = 0
            executor.aux_dict["norm_moving_var"][:] = 1
        for event in (None, *case.history):
            shards = [np.round(8 * self.trial.rng.standard_normal(shape)) / 8 for _ in executors]
            heads = self.trial.heads(shards)
            arrays = [mx.nd.array(shard, ctx=d, dtype=case.dtype) for shard, d in zip(shards, cpus(case.devices))]
            if event == "predict":
                for device, (executor, array) in enumerate(zip(executors, arrays)):
                    executor.forward(is_train=False, data=array)
                    expected = self.trial.frozen(shards[device], heads[device], device)[0][0]
                    executor.outputs[0].wait_to_read()  # or MXNet may run it as what is asked for next
                    if not case.options.get("in_place"):
                        compare("prediction", executor.outputs[0].asnumpy(), expected, self.trial.tolerance)
            elif event == "abandon nothing":
                gluon_syncbn.abandon_step()
            for executor, array in zip(executors, arrays):
                executor.forward(is_train=True, data=array)
            if event != "statistics anew":
                for executor, head, device in zip(executors, heads, cpus(case.devices)):
                    executor.backward([mx.nd.array(head, ctx=device, dtype=case.dtype)])
            used = list(range(case.devices))
            expected = self.trial.reference.net(dict(enumerate(shards)), dict(enumerate(heads)), used)
            loose = self.trial.edge()
            mx.nd.waitall()  # MXNet's own BatchNorm writes its statistics in the backward pass, untold to the engine
            for device, executor in enumerate(executors):
                compare("output", executor.outputs[0].asnumpy(), expected[0][device], self.trial.tolerance)
                if event != "statistics anew" and not loose:
                    seen = executor.grad_dict["data"].asnumpy()
                    compare("gradient", seen, expected[1][device], 5 * self.trial.tolerance)
                for name, values in (("mean", self.trial.reference.mean), ("var", self.trial.reference.var)):
                    seen = executor.aux_dict[f"norm_moving_{name}"].asnumpy()
                    compare(f"moving {name}", seen, values[device], self.trial.tolerance)
        mx.nd.waitall()


def try_case(seed, number):
    """The text of what is wrong; empty if nothing is."""
    case = Case(seed, number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Trial(case).run()
    except Exception:
        with contextlib.suppress(Exception):
            gluon_syncbn.abandon_step()
        return f"{case}\n{traceback.format_exc()[-2500:]}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--minutes", type=float, help="in place of --cases")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", type=int, help="the number of a case")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    began, wrong, done = time.monotonic(), 0, 0
    pairs = set()
    numbers = itertools.count() if options.only is None else [options.only]
    for number in numbers:
        if options.minutes is None and done == options.cases:
            break
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
        found = try_case(seed, number)
        done += 1
        pairs.update(itertools.combinations(sorted(Case(seed, number).features()), 2))
        if found:
            wrong += 1
            print(f"WRONG {found}", flush=True)
    print(f"{done} cases with {len(pairs)} pairs of features, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
