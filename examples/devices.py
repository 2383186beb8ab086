"""The option --devices of the examples."""

import argparse

import mxnet as mx


def parse_devices(text: str) -> list:
    """``cpu:4`` is cpu(0) to cpu(3); ``cpu:0,2`` and ``gpu:0,1`` list devices."""
    kind, _, numbers = text.partition(":")
    try:
        make = {"cpu": mx.cpu, "gpu": mx.gpu}[kind]
        ids = [int(number) for number in numbers.split(",")]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not like cpu:4 or gpu:0,1") from None
    return [make(i) for i in (range(ids[0]) if kind == "cpu" and len(ids) == 1 else ids)]
