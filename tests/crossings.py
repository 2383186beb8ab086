"""Draws what a synchronized layer can meet, two and three at a time, and compares a net with the float64 reference.

    python tests/crossings.py [--cases 100 | --minutes 60] [--seed N] [--only NUMBER]

A case is a small net (docs/development.md lists what it may have), a way to make it, a way to call it, and a history of
what happens between its steps. After each step outputs, gradients of inputs and parameters, and running statistics are
those of reference.py, channel by channel. What happens between steps must change nothing but what it says.

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
from mxnet import autograd, gluon
from mxnet.gluon import nn
from reference import UNIT, Norm, Sized, check
from testing import MODES, cpus, mx, set_mode, vector_dtype

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm

CHANNELS = 3
SLOPE = 0.25  # the same in every dtype
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
        self.layer = {"momentum": draw.choice((0.875, 0.5)), "epsilon": draw.choice((1e-5, 1e-3))}
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


def reference_of(case, gamma, beta) -> Norm:
    activation = {"nothing": None, "leaky": "leaky"}.get(case.behind, "relu")
    return Norm(
        gamma,
        beta,
        axis=case.axis,
        activation=activation,
        slope=SLOPE,
        group_size=case.options.get("group_size"),
        renorm=case.options.get("renorm"),
        in_place=case.dtype if case.options.get("in_place") else None,
        mean_is_rounded=case.is_plain or case.backend == "portable" or case.dtype == "float64",
        **case.layer,
    )


def total(parts):
    """Of items that are `Sized`."""
    return Sized(sum(part.value for part in parts), sum(part.size for part in parts))


def expect(case, norm, shards, heads, used, seen=None, training=True):
    """Outputs and input gradients of the devices ``used``, and gradients of γ and β, of the net that `Net` is."""
    outputs, d_inputs, d_affine = [[] for _ in used], [[] for _ in used], []
    for call in range(case.calls):
        x = [shards[device] / (1 + call) for device in used]
        dy, y = (
            None if items is None else [np.split(items[device], case.calls)[call] for device in used]
            for items in (heads, seen)
        )
        made = norm.step(x, dy, x if case.behind == "skip" else None, used=used, training=training, seen=y)
        for place in range(len(used)):
            outputs[place].append(made.outputs[place])
            parts = [made.input_gradients[place], *([made.skip_gradients[place]] if case.behind == "skip" else [])]
            d_inputs[place] += [Sized(part.value / (1 + call), part.size) for part in parts]
        d_affine.append((made.gamma_gradient, made.beta_gradient))
    joined = [Sized(np.concatenate([y.value for y in ys]), np.max([y.size for y in ys], axis=0)) for ys in outputs]
    inputs = [total(parts) for parts in d_inputs]
    return dict(zip(used, joined)), dict(zip(used, inputs)), *(total(parts) for parts in zip(*d_affine))


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
        return F.concat(y, self._one(F, self.twin, x / 2), dim=0) if self._calls == 2 else y

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
        self.norm = reference_of(case, gamma, beta)
        self.gamma, self.beta = gamma, beta

    def shards(self, scale=1.0, mean=0.3):
        """Multiples of 1/8, which every dtype has."""
        shapes = []
        for _ in range(self.case.devices):
            shape = [int(self.rng.randint(1, 4)), 4, 5, CHANNELS]
            shapes.append(shape if self.case.axis == -1 else [shape[0], CHANNELS, 4, 5])
        return [np.round(8 * (scale * self.rng.standard_normal(shape) + mean)) / 8 for shape in shapes]

    def heads(self, shards):
        shapes = [(self.case.calls * len(shard), *shard.shape[1:]) for shard in shards]
        return [np.round(8 * self.rng.standard_normal(shape)) / 8 for shape in shapes]

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
        self.compare_step(self.subject.step(shards, heads, used, twice=twice), shards, heads, used)
        self.compare_statistics()

    def precision(self, is_prediction=False):
        """What `check` allows tensors. What is behind the norm rounds again where it is not computed with it."""
        case = self.case
        is_native = case.backend == "native" and not case.is_plain and not is_prediction
        is_one_pass = is_native and case.behind == "nothing" and case.calls == 1
        # MXNet's own leaky ReLU computes in float32, whatever the dtype.
        real = "float32" if case.dtype != "float64" or case.behind == "leaky" else "float64"
        how = {"units": 32 if is_native else 64, "roundings": 1 if is_one_pass else 4, "real": real}
        return {"dtype": case.dtype, "axis": case.axis, **how}

    def compare_step(self, seen, shards, heads, used, training=True):
        outputs, d_inputs, gradients = seen
        expected = expect(
            self.case, self.norm, shards, heads, used, outputs if self.norm.activation else None, training
        )
        how = self.precision(is_prediction=not training)
        for device in used:
            check(f"output on {device}", outputs[device], expected[0][device], **how)
            check(f"input gradient on {device}", d_inputs[device], expected[1][device], **how)
        is_native = self.case.backend == "native" and not self.case.is_plain and training
        # `nn.BatchNorm` rounds x̂, too.
        lost = {"units": 64} if is_native or self.case.dtype != "float16" else {"units": 2, "real": "float16"}
        how = {"dtype": vector_dtype(self.case.dtype), "real": how["real"], **lost}
        for name, wanted in zip(("gamma", "beta"), expected[2:]):
            if name in gradients:
                check(f"gradient of {name}", gradients[name], wanted, **how)

    def compare_statistics(self):
        case, how = self.case, {"dtype": vector_dtype(self.case.dtype), "units": 64}
        if case.is_plain:
            how["real"] = "float16" if case.dtype == "float16" else "float32"  # as `nn.BatchNorm` does
        for number, name in enumerate(("running_mean", "running_var")):
            for device, value in enumerate(self.subject.statistics(name)):
                check(f"{name} on {device}", value, self.norm.running(device)[number], **how)

    def predicted(self, shards):
        """What each device must predict."""
        return expect(self.case, self.norm, shards, None, list(range(self.case.devices)), training=False)[0]

    # What may happen between two steps.

    def predict(self):
        shards = self.shards()
        seen = self.subject.predict(shards)
        for device, expected in self.predicted(shards).items():
            check("prediction", seen[device], expected, **self.precision(is_prediction=True))

    def predict_and_record(self, train_mode=False):
        shards = self.shards()
        heads = self.heads(shards)
        self.subject.zero_gradients()
        everyone = list(range(self.case.devices))
        seen = self.subject.step(shards, heads, everyone, train_mode=train_mode)
        self.compare_step(seen, shards, heads, everyone, training=False)
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
            # MXNet's own leaky ReLU computes in float32, whatever the dtype.
            unit = UNIT["float32" if self.case.behind == "leaky" and self.case.dtype == "float64" else self.case.dtype]
            np.testing.assert_allclose(block(x).asnumpy(), seen, rtol=0, atol=16 * unit * np.abs(seen).max())

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
                    for device, array in enumerate(self.subject.parameter(name).list_data()):
                        value = self.norm.running(device)[name == "running_var"].value
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
        self.norm.passes = 0

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
        self.compare_step(self.subject.step(shards, heads, used), shards, heads, used)

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
            expect(self.case, self.norm, shards, None, [0])

    def abandon_nothing(self):
        gluon_syncbn.abandon_step()

    def statistics_anew(self):
        """Training passes that nobody records."""
        shards = self.shards(scale=2)
        used = list(range(self.case.devices))
        with autograd.train_mode():
            outputs = {device: self.subject.net(x) for device, x in self.subject.arrays(shards, used).items()}
        mx.nd.waitall()
        for device, expected in expect(self.case, self.norm, shards, None, used)[0].items():
            check("unrecorded output", outputs[device].asnumpy(), expected, **self.precision())
        self.compare_statistics()

    def freeze_and_thaw(self):
        gluon_syncbn.freeze_statistics(self.subject.net)
        self.predict_and_record(train_mode=True)
        gluon_syncbn.freeze_statistics(self.subject.net, frozen=False)

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
        trial.subject = self

    def statistics(self, name):
        return [item.aux_dict[f"norm_{name.replace('running', 'moving')}"].asnumpy() for item in self.executors]

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
        executors = self.executors = [
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
                for (device, expected), executor, array in zip(self.trial.predicted(shards).items(), executors, arrays):
                    executor.forward(is_train=False, data=array)
                    executor.outputs[0].wait_to_read()  # or MXNet may run it as what is asked for next
                    if not case.options.get("in_place"):
                        how = self.trial.precision(is_prediction=True)
                        check(f"prediction on {device}", executor.outputs[0].asnumpy(), expected, **how)
            elif event == "abandon nothing":
                gluon_syncbn.abandon_step()
            for executor, array in zip(executors, arrays):
                executor.forward(is_train=True, data=array)
            has_backward = event != "statistics anew"
            if has_backward:
                for executor, head, device in zip(executors, heads, cpus(case.devices)):
                    executor.backward([mx.nd.array(head, ctx=device, dtype=case.dtype)])
            mx.nd.waitall()  # MXNet's own BatchNorm writes its statistics in the backward pass, untold to the engine
            outputs = {device: executor.outputs[0].asnumpy() for device, executor in enumerate(executors)}
            d_inputs, gradients = {}, {}
            if has_backward:
                d_inputs = {device: executor.grad_dict["data"].asnumpy() for device, executor in enumerate(executors)}
                for name in ("gamma", "beta") if case.layer["scale"] else ("beta",):
                    found = [executor.grad_dict[f"norm_{name}"].asnumpy() for executor in executors]
                    gradients[name] = np.sum(found, axis=0, dtype="float64")
                self.trial.compare_step((outputs, d_inputs, gradients), shards, heads, list(outputs))
            else:
                expected = expect(case, self.trial.norm, shards, None, list(outputs))[0]
                for device in outputs:
                    check(f"output on {device}", outputs[device], expected[device], **self.trial.precision())
            self.trial.compare_statistics()
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
