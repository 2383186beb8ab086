"""Numbers cross between Python, MXNet and the compiled core with a decimal point, whatever the locale."""

import subprocess

import pytest
from harness import run_python

# In place of de_DE, which not every machine has.
COMMA = """
LC_NUMERIC
decimal_point ","
thousands_sep "."
grouping 3;3
END LC_NUMERIC
"""

PROGRAM = """
import contextlib, ctypes, locale, os, warnings
import oracle
from harness import *
from mxnet.gluon import nn

locale.setlocale(locale.LC_NUMERIC, 'comma')
libc = ctypes.CDLL(None)
libc.strtod.restype = ctypes.c_double
assert libc.strtod(b'0,5', None) == 0.5

if os.environ['GLUON_SYNCBN_BACKEND'] == 'native':
    options = {'in_place': True, 'renorm': [(0, 1.5, 0.5), (2.5, 1.5, 0.5)]}
    r_max, d_max = 1.5, 0.5
    least_gamma = 0.0  # which in_place moves, and says so
    profile = gluon_syncbn.profile
else:
    options, r_max, d_max, least_gamma, profile = {}, 1.0, 0.0, 2.0**-20, contextlib.nullcontext

net = nn.HybridSequential(prefix='net_')
with net.name_scope():
    net.add(nn.BatchNorm(in_channels=2), nn.LeakyReLU(0.125))
gluon_syncbn.convert_sync_batchnorm(net, **options)
net.initialize(ctx=cpus(2))
net[0].gamma.set_data(mx.nd.array([1.0, least_gamma]))
net.hybridize(static_alloc=True, static_shape=True)
shards, heads = random_shards([(2, 2, 3, 5)] * 2, mean=0, std=1), random_shards([(2, 2, 3, 5)] * 2, seed=1)
with warnings.catch_warnings(record=True) as told, profile() as report:
    warnings.simplefilter('always')
    outputs, inputs = step(net, shards, heads, cpus(2))
    mx.nd.waitall()
print(report)
seen = oracle.batch_norm(shards, np.ones(2), np.zeros(2))
d = np.clip(seen.mean, -d_max, d_max)
r = np.clip(np.sqrt(seen.var + 1e-5) / np.sqrt(1 + 1e-5), 1 / r_max, r_max)
gamma = np.array([1.0, 2.0**-20])
plain = oracle.batch_norm(shards, gamma * r, gamma * d)
passed = [head * np.where(z > 0, 1, 0.125) for head, z in zip(heads, plain.outputs)]
expected = oracle.batch_norm(shards, gamma * r, gamma * d, heads=passed)
print('ERRORS', oracle.distance([item.asnumpy() for item in outputs],
                                [np.where(z > 0, z, 0.125 * z) for z in expected.outputs]),
      oracle.distance([item.grad.asnumpy() for item in inputs], expected.input_gradients))
print('TOLD', *[str(item.message) for item in told])
layer = gluon_syncbn.SyncBatchNorm(in_channels=2, timeout=0.5, prefix='lone_')
layer.initialize(ctx=cpus(2))
with autograd.record():
    out = layer(mx.nd.ones((2, 2, 3, 5)))
try:
    out.wait_to_read()
except mx.MXNetError as error:
    print('TIMEOUT', str(error).split(' s for')[0])
"""


@pytest.fixture
def locales(tmp_path):
    source = tmp_path / "comma.txt"
    source.write_text(COMMA)
    # With warnings, and status 1, about all that it does not say.
    subprocess.run(["localedef", "-c", "-i", str(source), str(tmp_path / "comma")], capture_output=True, check=False)
    assert (tmp_path / "comma" / "LC_NUMERIC").exists()
    return tmp_path


def test_a_decimal_comma_changes_nothing(locales, backend):
    done = run_python(PROGRAM, LOCPATH=locales, GLUON_SYNCBN_BACKEND=backend)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    errors = [float(word) for word in done.stdout.split("ERRORS")[1].split()[:2]]
    assert max(errors) < 1e-5
    assert done.stdout.split("TIMEOUT")[1].strip().endswith("waited 0.5")
    assert backend == "portable" or "9.5e-07" in done.stdout.split("TOLD")[1]
