"""A step that breaks off between two ``backward()`` is noticed (test_faults.py), and no other is taken for one."""

import logging

import mxnet as mx
import pytest
from harness import MODES, cpus, random_shards, set_mode
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

modes = pytest.mark.parametrize("mode", list(MODES))
COMPLAINT = "backward() of the last step was called for"


def make(mode, count=2):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(), nn.Activation("relu"), SyncBatchNorm())
    net.initialize(ctx=cpus(count))
    return set_mode(net, mode)


def parts_on(count=2):
    return [mx.nd.array(part, ctx=device) for part, device in zip(random_shards([(2, 3, 8, 8)] * count), cpus(count))]


def in_one_scope(net, parts):
    with autograd.record():
        losses = [net(part) for part in parts]
    for loss in losses:
        loss.backward()


def together(net, parts):
    with autograd.record():
        losses = [net(part) for part in parts]
    autograd.backward(losses)


def one_head_for_all(net, parts):
    with autograd.record():
        total = sum(net(part).sum().as_in_context(mx.cpu(0)) for part in parts)
    total.backward()


def a_scope_per_device(net, parts):
    for part in parts:
        with autograd.record():
            loss = net(part)
        loss.backward()


def in_the_other_order(net, parts):
    in_one_scope(net, parts[::-1])


def several_passes_per_device(net, parts):
    """As adversarial training does: two forward passes and a backward pass, then one of each, device by device."""
    for part in parts:
        with autograd.record():
            loss = net(part) + net(-part)
        loss.backward()
        with autograd.record():
            loss = net(part)
        loss.backward()


def all_forward_passes_first(net, parts):
    with autograd.record():
        losses = [net(factor * part) for factor in (1, 2) for part in parts]
    autograd.backward(losses)


def twice_backward(net, parts):
    with autograd.record():
        losses = [net(part) for part in parts]
    for loss in losses:
        loss.backward(retain_graph=True)
    for loss in losses:
        loss.backward()


def prediction_in_between(net, parts):
    with autograd.record():
        losses = [net(part) for part in parts]
    for loss, part in zip(losses, parts):
        loss.backward()
        net(part)


def not_at_all(net, parts):
    """The forward pass is in training mode, and no backward pass is wanted."""
    with autograd.record():
        for part in parts:
            net(part)


WAYS = [
    in_one_scope,
    together,
    one_head_for_all,
    a_scope_per_device,
    in_the_other_order,
    several_passes_per_device,
    all_forward_passes_first,
    twice_backward,
    prediction_in_between,
    not_at_all,
]


@modes
@pytest.mark.parametrize("way", WAYS)
def test_a_complete_step_is_not_taken_for_one(way, mode, caplog):
    net, parts = make(mode), parts_on()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    for number in range(4):
        way(net, parts)
        if number % 2 and way is not not_at_all:
            trainer.step(1)
    mx.nd.waitall()
    assert COMPLAINT not in caplog.text


@modes
def test_after_a_step_on_some_devices(mode, caplog):
    net, parts = make(mode), parts_on()
    for _ in range(2):
        in_one_scope(net, parts)
        with gluon_syncbn.devices(mx.cpu(0), net):
            in_one_scope(net, parts[:1])
        in_one_scope(net, parts)
    mx.nd.waitall()
    assert COMPLAINT not in caplog.text


@modes
def test_after_a_move_to_more_devices(mode, caplog):
    net = make(mode)
    in_one_scope(net, parts_on())
    net.collect_params().reset_ctx(cpus(3))
    in_one_scope(net, parts_on(3))
    with autograd.record():
        losses = [net(part) for part in parts_on(3)]
    losses[0].backward()
    in_one_scope(net, parts_on(3))
    mx.nd.waitall()
    assert f"{COMPLAINT} cpu(0) only" in caplog.text


@modes
def test_after_a_move_to_one_device_and_back(mode, caplog):
    """Backward passes on one device, where the layer is plain, are none of a step that broke off."""
    net = make(mode)
    for count in (2, 1, 2):
        net.collect_params().reset_ctx(cpus(count))
        in_one_scope(net, parts_on(count))
    mx.nd.waitall()
    assert COMPLAINT not in caplog.text


@modes
def test_what_has_started_is_named(mode, caplog):
    net, parts = make(mode, 3), parts_on(3)
    in_one_scope(net, parts)
    with autograd.record():
        losses = [net(part) for part in parts]
    losses[2].backward()
    losses[0].backward()
    with caplog.at_level(logging.WARNING):
        in_one_scope(net, parts)
    mx.nd.waitall()
    assert f"SyncBatchNorm '{net[1].name}': {COMPLAINT} cpu(0), cpu(2) only, and is given up now." in caplog.text


def test_the_trainer_still_notices_a_gradient_that_is_not_fresh():
    net, parts = make("imperative"), parts_on()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=None)
    in_one_scope(net, parts)
    trainer.step(1)
    mx.nd.waitall()
    with pytest.raises(UserWarning, match="has not been updated by backward since last"):
        trainer.step(1)
    in_one_scope(net, parts)
    x = mx.nd.ones(1)
    x.attach_grad()
    with autograd.record():
        other = x * 2
    other.backward()  # of something else, which leaves the note at the net's parameters
    trainer.step(1)
    mx.nd.waitall()
