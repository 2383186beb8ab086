import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, *(os.path.join(os.path.dirname(HERE), name) for name in ("examples", "benchmarks"))]

import pytest  # noqa: E402
import testing  # noqa: E402  (imports gluon_syncbn before MXNet computes anything)

# What a test may be skipped for; pytest lists it at the end. Any other skip is a failure, as it would hide something.
MAY_BE_MISSING = ("GPU", "stand-in", "NOT RUN: hosts", "MXNet has it since", "this MXNet has no")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="of tests that draw at random; without it another in each run")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis
def pytest_configure(config):
    """Draw the seed. A worker of pytest-xdist has that of the run."""
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(1 << 30)
    config.option.hypothesis_seed = str(config.option.seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["seed"] = node.config.option.seed


@pytest.fixture
def seed(request):
    """For what a test draws at random: in each run another."""
    return request.config.option.seed


def pytest_report_header(config):
    at_most = os.environ.get("DNNL_MAX_CPU_ISA", "what there is")
    kernels = f"kernels: {testing.instruction_set()}; oneDNN: at most {at_most}"
    return [kernels, f"--seed {config.option.seed} draws the same again"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.skipped and not any(words in str(report.longrepr) for words in MAY_BE_MISSING):
        report.outcome, report.longrepr = "failed", f"This test must not be skipped: {report.longrepr[2]}"


@pytest.fixture(params=["native", "portable"])
def backend(request, monkeypatch):
    """What 'auto' means in this test, and in the processes that it starts."""
    monkeypatch.setenv("GLUON_SYNCBN_BACKEND", request.param)
    return request.param


@pytest.fixture(params=list(testing.MODES))
def mode(request):
    """How a net is run; a test of some modes only says which."""
    return request.param
