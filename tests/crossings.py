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
import math
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings

import numpy as np
from executors import bind, run
from mxnet import autograd, gluon
from mxnet.gluon import nn
from reference import UNIT, Norm, Sized, check, check_all, check_tensors, total
from testing import MODES, cpus, initialized, mx, on_devices, set_mode, vector_dtype
from testing import total as added_up

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_batchnorm, convert_sync_batchnorm
from gluon_syncbn.step.steps import steps

CHANNELS = 3
SLOPE = 0.25  # the same in every dtype
# What is behind the norm, and whether it is between the norm and a sum.
BEHIND = ("nothing", "relu", "leaky", "skip", "own relu")
MAKERS = ("made", "converted", "converted twice", "there and back", "symbol block")
STATISTICS = ("mean", "var")
MODES_OF_CALL = (*MODES, "module")


class Case:
    """What is drawn."""

    def __init__(self, seed, number):
        draw = random.Random(f"{seed}/{number}")
        self.name = f"--seed {seed} --only {number}"
        self.backend = draw.choice(("native", "native", "portable"))
        self.devices = draw.choice((1, 2, 2, 3, 4))
        self.everyone = range(self.devices)
        self.dtype = draw.choice(("float64", "float64", "float32", "float16"))
        self.mode = draw.choice(MODES_OF_CALL)
        self.maker = draw.choice(MAKERS)
        self.behind = draw.choice(BEHIND)
        self.axis = draw.choice((1, 1, -1))
        self.calls = draw.choice((1, 1, 2))  # of one layer: a shared head
        self.twins = self.calls == 2 and draw.random() < 0.5  # or of two that share their Parameters
        options = self.options = {}
        for name, values in (
            ("group_size", [size for size in (1, 2) if self.devices % size == 0]),
            ("renorm", [(1.5, 0.5), (3, 2), (1, 0)]),
            ("in_place", [True] if self.backend == "native" else []),
            ("fuse", [False]),
            ("process_group", ["none"]),
            ("num_devices", [self.devices]),
        ):
            if values and draw.random() < 0.25:
                options[name] = draw.choice(values)
        if self.backend == "portable":  # which refuses it
            options.pop("renorm", None)
        self.layer = {"momentum": draw.choice((0.875, 0.5)), "epsilon": draw.choice((1e-5, 1e-3))}
        self.layer["scale"] = draw.random() < 0.8
        self.grad_req = draw.choice(("write", "write", "write", "add", "null"))
        # A gamma near 0 is another function in place, which is documented.
        self.gamma = 1.0 if options.get("in_place") else draw.choice((1.0, 1.0, 0.0))
        self.history = [draw.choice(EVENTS) if draw.random() < 0.7 else None for _ in range(draw.choice((2, 3, 4)))]
        if self.mode == "module":
            self.grad_req = "write"
            self.maker = draw.choice(("converted", "converted twice"))
            options.pop("num_devices", None)
            kept = ("predict", "statistics anew", "abandon nothing")
            self.history = [event if event in kept else None for event in self.history]
        if self.behind == "own relu" and self.maker != "made":
            self.behind = "relu"
        if self.mode == "module" or self.maker == "symbol block":
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
        self.data_seed = draw.randrange(1 << 30)

    def __str__(self):
        told = {name: value for name, value in vars(self).items() if name not in ("name", "everyone", "data_seed")}
        return f"{self.name}: " + ", ".join(f"{name}={value!r}" for name, value in told.items())

    @property
    def is_one_batch(self):
        return self.options.get("group_size") in (None, self.devices)

    def shape(self, images):
        return (images, 4, 5, CHANNELS) if self.axis == -1 else (images, CHANNELS, 4, 5)

    def features(self):
        """By which combinations are counted."""
        names = ("backend", "dtype", "mode", "maker", "behind", "grad_req", "devices", "axis", "calls", "gamma")
        found = {f"{name}={getattr(self, name)}" for name in names}
        found |= {*self.options, *filter(None, self.history)} | ({"twins"} if self.twins else set())
        return found


def expect(case, norm, shards, heads=None, used=None, seen=None, training=True):
    """What `Norm.step` gives, of the net that `Net` is."""
    outputs, d_inputs, made = [[] for _ in shards], [[] for _ in shards], []
    for call in range(case.calls):
        x = [shard / (1 + call) for shard in shards]
        dy, y = (items and [np.split(item, case.calls)[call] for item in items] for items in (heads, seen))
        skips = x if case.behind == "skip" else None
        made.append(norm.step(x, dy, skips, used=used, training=training, seen=y))
        gradients = made[-1].input_gradients, *([made[-1].skip_gradients] if skips else [])
        for place in range(len(shards)):
            outputs[place].append(made[-1].outputs[place])
            d_inputs[place] += [Sized(item[place].value / (1 + call), item[place].size) for item in gradients]
    return made[0]._replace(
        outputs=[Sized(np.concatenate([y.value for y in ys]), np.max([y.size for y in ys], axis=0)) for ys in outputs],
        input_gradients=[total(parts) for parts in d_inputs],
        gamma_gradient=total([item.gamma_gradient for item in made]),
        beta_gradient=total([item.beta_gradient for item in made]),
    )


def followed(F, behind, z, x):
    """What is behind a norm, with its output and input."""
    made = {"relu": lambda: F.relu(z), "leaky": lambda: F.LeakyReLU(z, slope=SLOPE), "skip": lambda: F.relu(z + x)}
    return made.get(behind, lambda: z)()


class Net(gluon.HybridBlock):
    def __init__(self, case, layer_class=nn.BatchNorm, **options):
        super().__init__(prefix="net_")
        self._behind, self._calls = case.behind, case.calls
        kwargs = {"in_channels": CHANNELS, "axis": case.axis, **case.layer, **options}
        with self.name_scope():
            self.norm = layer_class(**kwargs)
            self.twin = layer_class(params=self.norm.params, **kwargs) if case.twins else self.norm

    def hybrid_forward(self, F, x):
        y = followed(F, self._behind, self.norm(x), x)
        return F.concat(y, followed(F, self._behind, self.twin(x / 2), x / 2), dim=0) if self._calls == 2 else y


class Subject:
    """The net of ours, with what happens to it."""

    def __init__(self, case, norm):
        self.case, self.contexts = case, cpus(case.devices)
        self.convert_options = {"backend": case.backend, "timeout": 30, **case.options}
        own = {"activation": "relu"} if case.behind == "own relu" else {}
        made = {"layer_class": SyncBatchNorm, **self.convert_options, **own}
        self.net = Net(case, **(made if case.maker == "made" else {}))
        if case.maker == "symbol block":
            data = mx.sym.var("data")
            self.net = gluon.SymbolBlock(self.net(data), data, params=self.net.collect_params())
        if case.maker == "there and back":
            convert_sync_batchnorm(self.net, backend=case.backend)
            convert_batchnorm(self.net)
        if case.maker != "made":
            convert_sync_batchnorm(self.net, **self.convert_options)
        if case.maker == "converted twice":
            convert_sync_batchnorm(self.net, timeout=31)
        initialized(self.net, self.contexts, dtype=case.dtype)
        for name, value in (("gamma", norm.gamma), ("beta", norm.beta)):
            parameter = self.parameter(name)
            parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
            if parameter.grad_req != "null":
                parameter.grad_req = case.grad_req
        set_mode(self.net, case.mode)

    def parameter(self, name):
        found = {id(item): item for key, item in self.net.collect_params().items() if key.endswith(name)}
        (parameter,) = found.values()
        return parameter

    def arrays(self, shards, used):
        return on_devices(shards, [self.contexts[device] for device in used], learn=True)

    def step(self, shards, heads, used, train_mode=True, twice=False):
        """Outputs and input gradients, and gradients of γ and β by name."""
        self.zero_gradients()
        inputs = self.arrays(shards, used)
        with autograd.record(train_mode=train_mode):
            outputs = [self.net(x) for x in inputs]
        given = self.arrays(heads, used)
        if twice:
            autograd.backward(outputs, given, retain_graph=True)
            self.zero_gradients()
        autograd.backward(outputs, given, train_mode=train_mode)
        gradients = {}
        for name in ("gamma", "beta"):
            parameter = self.parameter(name)
            if parameter.grad_req != "null":
                gradients[name] = added_up(parameter.grad(x.context) for x in inputs)
        return [y.asnumpy() for y in outputs], [x.grad.asnumpy() for x in inputs], gradients

    def predict(self, shards):
        return [self.net(x).asnumpy() for x in self.arrays(shards, self.case.everyone)]

    def estimate(self, shards):
        """A training pass that nobody records."""
        with autograd.train_mode():
            outputs = [self.net(x) for x in self.arrays(shards, self.case.everyone)]
        mx.nd.waitall()
        return [y.asnumpy() for y in outputs]

    def zero_gradients(self):
        if self.case.grad_req == "add":
            self.net.collect_params().zero_grad()

    def statistics(self):
        return {name: [item.asnumpy() for item in self.parameter(f"running_{name}").list_data()] for name in STATISTICS}


class ModuleSubject:
    """The same net as a symbol, bound by a Module on all devices; what happens to it is less."""

    def __init__(self, case, norm):
        self.case = case
        x = mx.sym.var("data")
        kwargs = {"axis": case.axis, "eps": case.layer["epsilon"], "momentum": case.layer["momentum"]}
        z = mx.sym.BatchNorm(x, name="norm", fix_gamma=not case.layer["scale"], **kwargs)
        symbol = followed(mx.sym, case.behind, z, x)
        options = {"backend": case.backend, "timeout": 30, "dtype": case.dtype, **case.options}
        symbol = gluon_syncbn.convert_symbol(symbol, case.devices, **options)
        if case.maker == "converted twice":
            symbol = gluon_syncbn.convert_symbol(mx.sym.load_json(symbol.tojson()), case.devices, backend=case.backend)
        self.executors = bind(symbol, [np.empty(case.shape(2), case.dtype)] * case.devices, {"norm": norm})

    def estimate(self, shards, heads=None, is_train=True):
        outputs = run(self.executors, shards, heads, is_train)
        mx.nd.waitall()  # MXNet's own BatchNorm writes its statistics in the backward pass, untold to the engine
        return [items[0] for items in outputs]

    def step(self, shards, heads, used):
        outputs, found = self.estimate(shards, heads), [executor.grad_dict for executor in self.executors]
        names = ("gamma", "beta") if self.case.layer["scale"] else ("beta",)
        gradients = {name: added_up(item[f"norm_{name}"] for item in found) for name in names}
        return outputs, [item["data"].asnumpy() for item in found], gradients

    def predict(self, shards):
        return self.estimate(shards, is_train=False)

    def statistics(self):
        states = [executor.aux_dict for executor in self.executors]
        return {name: [item[f"norm_moving_{name}"].asnumpy() for item in states] for name in STATISTICS}


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
        self.norm = Norm(
            gamma,
            beta,
            axis=case.axis,
            activation={"nothing": None, "leaky": "leaky"}.get(case.behind, "relu"),
            slope=SLOPE,
            group_size=case.options.get("group_size"),
            renorm=case.options.get("renorm"),
            in_place=case.dtype if case.options.get("in_place") else None,
            mean_is_rounded=case.is_plain or case.backend == "portable" or case.dtype == "float64",
            **case.layer,
        )
        self.subject = (ModuleSubject if case.mode == "module" else Subject)(case, self.norm)

    def shards(self, used=None, scale=1.0):
        """Multiples of 1/8, which every dtype has. Executors are bound to one shape."""
        is_module = self.case.mode == "module"
        images = [2 if is_module else self.rng.randint(1, 4) for _ in used or self.case.everyone]
        return [self.eighths(scale * self.rng.standard_normal(self.case.shape(n)) + 0.3) for n in images]

    def heads(self, shards):
        shapes = [(self.case.calls * len(shard), *shard.shape[1:]) for shard in shards]
        return [self.eighths(self.rng.standard_normal(shape)) for shape in shapes]

    def eighths(self, values):
        return (np.round(8 * values) / 8).astype(self.case.dtype)

    def run(self):
        self.check_step()
        for event in self.case.history:
            if event:
                getattr(self, event.replace(" ", "_"))()
            self.check_step()
        mx.nd.waitall()
        progress = steps.progress
        assert not progress.is_under_way() and progress.half_called() is None, "a step seems to be under way"

    def check_step(self, used=None, training=True, statistics=True, **how):
        used = used or self.case.everyone
        shards = self.shards(used)
        heads = self.heads(shards)
        self.compare_step(self.subject.step(shards, heads, used, **how), shards, heads, used, training)
        if statistics:
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

    def compare_step(self, seen, shards, heads, used, training):
        outputs, d_inputs, gradients = seen
        edges = outputs if self.norm.activation else None
        expected = expect(self.case, self.norm, shards, heads, used, edges, training)
        how = self.precision(is_prediction=not training)
        check_tensors(outputs, d_inputs, expected, **how)
        is_native = self.case.backend == "native" and not self.case.is_plain and training
        # `nn.BatchNorm` rounds x̂, too.
        lost = {"units": 64} if is_native or self.case.dtype != "float16" else {"units": 2, "real": "float16"}
        how = {"dtype": vector_dtype(self.case.dtype), "real": how["real"], **lost}
        for name, gradient in gradients.items():
            check(f"gradient of {name}", gradient, getattr(expected, f"{name}_gradient"), **how)

    def compare_statistics(self):
        case, how = self.case, {"dtype": vector_dtype(self.case.dtype), "units": 64}
        if case.is_plain:
            how["real"] = "float16" if case.dtype == "float16" else "float32"  # as `nn.BatchNorm` does
        for number, (name, seen) in enumerate(self.subject.statistics().items()):
            wanted = [self.norm.running(device)[number] for device in case.everyone]
            check_all(f"running {name}", seen, wanted, **how)


class Events(Trial):
    """What may happen between two steps: an event is a method. Their order is that of what is drawn."""

    def predict(self):
        shards = self.shards()
        expected = expect(self.case, self.norm, shards, training=False)
        check_all("prediction", self.subject.predict(shards), expected.outputs, **self.precision(is_prediction=True))

    def predict_and_record(self):
        self.check_step(training=False, train_mode=False)

    def export(self):
        if self.case.mode == "imperative" or not self.case.is_one_batch:
            return  # MXNet writes the mean over all devices of what each has
        shards = self.shards()
        seen = self.subject.predict(shards)[0]
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "net")
            self.subject.net.export(prefix)
            symbol = mx.sym.load(f"{prefix}-symbol.json").tojson()
            assert "Custom" not in symbol and "syncbn" not in symbol
            block = gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
            x = mx.nd.array(shards[0], dtype=self.case.dtype)
            unit = max(UNIT[self.case.dtype], UNIT[self.precision()["real"]])
            np.testing.assert_allclose(block(x).asnumpy(), seen, rtol=0, atol=16 * unit * np.abs(seen).max())

    def optimize_for(self):
        is_block = isinstance(self.subject.net, gluon.SymbolBlock)
        if self.case.mode == "imperative" or self.case.dtype != "float32" or is_block:
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
            if not self.case.is_one_batch:  # a file has the statistics of one device only
                for number, name in enumerate(STATISTICS):
                    for device, array in enumerate(self.subject.parameter(f"running_{name}").list_data()):
                        array[:] = mx.nd.array(self.norm.running(device)[number].value, dtype=array.dtype)

    def copy(self):
        self._replace(copy.deepcopy)

    def pickle(self):
        self._replace(lambda net: pickle.loads(pickle.dumps(net)))

    def _replace(self, copied):
        """MXNet copies no gradients."""
        if self.case.mode != "imperative" or isinstance(self.subject.net, gluon.SymbolBlock):
            return
        net = self.subject.net = copied(self.subject.net)
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
        self.norm.renorm = self.case.options.get("renorm")

    def hybridize_again(self):
        set_mode(self.subject.net, self.case.mode)

    def short_step(self):
        draw = random.Random(int(self.rng.randint(1 << 30)))
        used = sorted(draw.sample(self.case.everyone, max(1, self.case.devices - 1)))
        with gluon_syncbn.devices([self.subject.contexts[device] for device in used]):
            self.check_step(used, statistics=False)
        self.compare_statistics()

    def failed_step(self):
        """One device does not come; those that meet without it may have done their pass."""
        if not self.case.is_one_batch or self.case.devices == 1:
            return
        some = self.case.everyone[:-1]
        shards = self.shards(some)
        convert_sync_batchnorm(self.subject.net, timeout=0.5)
        before = self.subject.statistics()
        try:
            self.subject.step(shards, self.heads(shards), some)
        except mx.MXNetError as error:
            assert "waited" in str(error) or "failed" in str(error), error
        else:
            raise AssertionError("nobody noticed that a device did not come")
        gluon_syncbn.abandon_step()
        convert_sync_batchnorm(self.subject.net, timeout=30)
        np.testing.assert_equal(before, self.subject.statistics())

    def abandoned_step(self):
        shards = self.shards([0])
        with contextlib.suppress(KeyError), autograd.record():
            self.subject.net(*self.subject.arrays(shards, [0]))
            raise KeyError("a bad label")
        if self.case.devices == 1 or self.case.options.get("group_size") == 1:  # nobody was waited for: it was done
            expect(self.case, self.norm, shards, used=[0])

    def abandon_nothing(self):
        """And set other limits of Batch Renormalization, where there are some."""
        gluon_syncbn.abandon_step()
        if self.norm.renorm and self.case.mode != "module":
            self.norm.renorm = 1 + self.rng.randint(3), self.rng.randint(3) / 2
            gluon_syncbn.set_renorm(self.subject.net, *self.norm.renorm)

    def statistics_anew(self):
        shards = self.shards(scale=2)
        outputs = self.subject.estimate(shards)
        check_all("unrecorded output", outputs, expect(self.case, self.norm, shards).outputs, **self.precision())
        self.compare_statistics()

    def looked_at(self):
        """`check` finds out whether it synchronizes, and changes nothing."""
        case = self.case
        if case.calls == 2:
            return
        result = gluon_syncbn.check(self.subject.net, mx.nd.array(np.concatenate(self.shards()), dtype=case.dtype))
        meets = case.devices > 1 and case.options.get("group_size") != 1
        assert [layer.state for layer in result.layers] == ["synchronized" if meets else "not synchronized"], result
        assert result.is_synchronized == meets, result

    def freeze_and_thaw(self):
        gluon_syncbn.freeze_statistics(self.subject.net)
        self.check_step(training=False)
        gluon_syncbn.freeze_statistics(self.subject.net, frozen=False)

    def backward_twice(self):
        self.check_step(twice=True)

    def cast_there_and_back(self):
        if self.case.dtype == "float32":
            self.subject.net.cast("float64")
            self.subject.net.cast("float32")


EVENTS = tuple(name.replace("_", " ") for name in vars(Events) if not name.startswith("_"))


def try_case(seed, number):
    """The text of what is wrong; empty if nothing is."""
    case = Case(seed, number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Events(case).run()
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
    wrong, done, pairs = 0, 0, set()
    numbers = itertools.count() if options.minutes else range(options.cases)
    end = time.monotonic() + 60 * (options.minutes or math.inf)
    for number in numbers if options.only is None else [options.only]:
        if time.monotonic() > end:
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
