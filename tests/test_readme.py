"""The README's usage example runs, on CPU devices."""

import os
import re

from harness import ROOT, run_python

STEP = """
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd')
inputs = [mx.nd.random.normal(shape=(1, 3, 64, 64), ctx=device) for device in devices]
with mx.autograd.record():
    outputs = [net(item) for item in inputs]
mx.autograd.backward(outputs)
trainer.step(2)
a, b = (net.bn1.running_mean.data(device).asnumpy() for device in devices)
assert (a == b).all() and a.any()
print('TRAINED')
"""


def test_usage_example():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
        (code,) = re.findall(r"```python\n(.*?)```", readme.read(), flags=re.DOTALL)
    done = run_python(code.replace("mx.gpu", "mx.cpu") + STEP)
    assert done.stdout.strip().endswith("TRAINED"), done.stdout + done.stderr
