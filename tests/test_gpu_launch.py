"""How many threads a GPU is given for which tensor: plain functions of shape, type and addresses."""

import pytest
from gpu_kernels import launch_for

PACK = {"float32": 4, "float64": 2, "float16": 8}
LAYOUTS = [
    (1, 1, 1),
    (2, 2048, 1),
    (2, 2048, 49),
    (4, 7, 3),
    (32, 256, 56 * 56),
    (2, 64, 800 * 1333),
    (2 * 800 * 1333, 64, 1),
    (1, 1, 2**31 + 7),
    (2**31 + 7, 3, 1),
    (2**20, 2**20, 1),
    (1, 2**30, 4),
]


@pytest.mark.parametrize("dtype", list(PACK))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("address", [0, 8])
def test_every_value_has_a_thread_and_the_gpu_has_enough(layout, dtype, address):
    outer, channels, inner = layout
    launch = launch_for(dtype, layout, address)
    (tiles, parts), (x, y) = launch.grid, launch.block
    assert launch.rows == (inner > 1)
    assert x * y == 256 and x & (x - 1) == 0
    assert 1 <= tiles < 2**31 and 1 <= parts <= 65535
    width = PACK[dtype] if launch.aligned else 1
    channels_of_tile = y if launch.rows else x * width
    assert (tiles - 1) * channels_of_tile < channels <= tiles * channels_of_tile
    assert launch.partials == 3 * parts * channels and launch.counters == tiles + 1
    # No block without work, and enough blocks where there is enough work for them.
    pieces = outer * -(-inner // (x * width * 4)) if launch.rows else -(-outer // (y * 4))
    assert parts <= pieces
    assert tiles * parts >= min(1024, tiles * pieces)
    assert tiles == 1 or parts == 1 or tiles * parts < 1024 + tiles


@pytest.mark.parametrize("layout", [(32, 256, 3136), (2, 64, 800 * 1333), (6272, 256, 1), (2, 2048, 49)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_of_detectors_fill_a_gpu(layout, dtype):
    launch = launch_for(dtype, layout, 0)
    blocks = launch.grid[0] * launch.grid[1]
    assert 96 <= blocks <= 2048
    assert launch.aligned


@pytest.mark.parametrize("dtype", list(PACK))
def test_packs_are_read_only_where_all_tensors_allow_it(dtype):
    size = 16 // PACK[dtype]
    rows, columns, odd = (2, 3, 100), (100, 64, 1), (100, 65, 1)
    assert launch_for(dtype, rows, 0, 0, 0).aligned
    assert launch_for(dtype, rows, size, size, size).aligned  # single values in front make up for it
    assert not launch_for(dtype, rows, 0, size, 0).aligned
    assert not launch_for(dtype, rows, 0, 0, size).aligned
    assert not launch_for(dtype, (2, 3, PACK[dtype] - 1), 0).aligned
    assert launch_for(dtype, columns, 0, 0, 0).aligned
    assert not launch_for(dtype, columns, size, size, size).aligned
    assert not launch_for(dtype, odd, 0, 0, 0).aligned


@pytest.mark.parametrize("dtype", list(PACK))
@pytest.mark.parametrize("inner", [*range(2, 70), 121, 169])
def test_single_values_at_the_ends_of_runs_have_a_thread_each(dtype, inner):
    """Up to a pack less one, wherever a run begins."""
    pack, size = PACK[dtype], 16 // PACK[dtype]
    for shift in range(pack):
        launch = launch_for(dtype, (2, 64, inner), shift * size)
        if launch.aligned and (shift or inner % pack):
            assert launch.block[0] >= pack - 1


@pytest.mark.parametrize("inner, threads", [(2, 2), (4, 1), (9, 4), (49, 16), (196, 64), (784, 256), (1 << 20, 256)])
def test_small_channels_share_a_block(inner, threads):
    assert launch_for("float32", (2, 512, inner), 0).block[0] == threads
