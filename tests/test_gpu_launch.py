"""How many threads a GPU is given for which tensor: plain functions of shape, type and addresses."""

import itertools

import pytest
from gpu_kernels import launch_for

PACK = {"float32": 4, "float64": 2, "float16": 8}
LAYOUTS = [(1, 1, 1), (2, 2048, 1), (2, 2048, 49), (4, 7, 3), (32, 256, 56 * 56), (2, 64, 800 * 1333)]
LAYOUTS += [(2 * 800 * 1333, 64, 1), (1, 1, 2**31 + 7), (2**31 + 7, 3, 1), (2**20, 2**20, 1), (1, 2**30, 4)]
dtypes = pytest.mark.parametrize("dtype", list(PACK))


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("address", [0, 8])
@dtypes
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_value_has_a_thread_and_the_gpu_has_enough(layout, dtype, address, reduces):
    outer, channels, inner = layout
    launch = launch_for(dtype, layout, address, reduces=reduces)
    (tiles, parts), (x, y) = launch.grid, launch.block
    assert launch.rows == (inner > 1)
    assert x * y == 256 and x & (x - 1) == 0
    assert 1 <= tiles < 2**31 and 1 <= parts <= 65535
    width = PACK[dtype] if launch.aligned else 1
    channels_of_tile = y if launch.rows else x * width
    assert (tiles - 1) * channels_of_tile < channels <= tiles * channels_of_tile
    assert launch.partials == max(3 * parts, 5) * channels
    assert launch.counters == 2 * tiles + 1 and launch.tickets == tiles
    # No block without work, and enough blocks where there is enough work for them.
    if not launch.rows:
        pieces = -(-outer // (y * 4))
    elif launch.images > 1:
        assert launch.images == 4 and -(-inner // width) <= x
        pieces = -(-outer // 4)
    else:
        pieces = outer * -(-inner // (x * width * 4))
    assert parts <= pieces
    blocks = 396 if reduces and not launch.rows else 1024
    assert tiles * parts >= min(blocks, tiles * pieces)
    assert tiles == 1 or parts == 1 or tiles * parts < blocks + tiles


@pytest.mark.parametrize("layout", [(32, 256, 3136), (2, 64, 800 * 1333), (6272, 256, 1), (2, 2048, 49)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_of_detectors_fill_a_gpu(layout, dtype):
    launch = launch_for(dtype, layout, 0)
    assert launch.aligned and 96 <= launch.grid[0] * launch.grid[1] <= 2048


@dtypes
def test_packs_are_read_only_where_all_tensors_allow_it(dtype):
    size = 16 // PACK[dtype]
    rows, columns = (2, 3, 100), (100, 64, 1)
    taken = [(rows, (0, 0, 0)), (columns, (0, 0, 0)), (rows, (size, size, size))]  # single values in front make up
    not_taken = [(rows, (0, size, 0)), (rows, (0, 0, size)), ((2, 3, PACK[dtype] - 1), (0,))]
    not_taken += [(columns, (size, size, size)), ((100, 65, 1), (0, 0, 0))]
    assert all(launch_for(dtype, layout, *addresses).aligned for layout, addresses in taken)
    assert not any(launch_for(dtype, layout, *addresses).aligned for layout, addresses in not_taken)


@dtypes
def test_single_values_at_the_ends_of_runs_have_a_thread_each(dtype):
    """Up to a pack less one at either end, wherever a run begins."""
    pack = PACK[dtype]
    for inner, shift, channels in itertools.product([*range(2, 70), 121, 169], range(pack), (64, 63)):
        launch = launch_for(dtype, (2, channels, inner), shift * 16 // pack)
        assert not launch.aligned or not (shift or inner % pack) or launch.block[0] >= 2 * (pack - 1), inner


# ResNet-50's maps, and a pyramid's; (threads on a channel, images). float16 has twice as many values in a pack.
SMALL = [
    ("float32", 112 * 112, 256, 1),
    ("float32", 56 * 56, 256, 1),
    ("float32", 28 * 28, 64, 1),
    ("float32", 14 * 14, 16, 1),
    ("float32", 7 * 7, 16, 4),  # 12 packs and single values
    ("float16", 56 * 56, 128, 1),
    ("float16", 28 * 28, 32, 1),
    ("float16", 14 * 14, 32, 4),
    ("float16", 7 * 7, 16, 4),
    ("float32", 4, 1, 4),
    ("float32", 1 << 20, 256, 1),
]


@pytest.mark.parametrize("dtype, inner, threads, images", SMALL)
def test_a_thread_has_several_packs_under_way(dtype, inner, threads, images):
    """Of one image, if each thread finds at least three there; or one of each of several images."""
    launch = launch_for(dtype, (32, 512, inner), 0)
    assert (launch.block[0], launch.images) == (threads, images)
    assert images == 4 or inner // PACK[dtype] >= 3 * threads


ALIKE = [(4, (32, 4, 49), [0]), (1, (32, 3, 49), [0]), (1, (1, 4, 49), [0])]
ALIKE += [(1, (32, 3, 49), [0, 4]), (4, (32, 3, 3), [0, 4])]


@pytest.mark.parametrize("images, layout, addresses", ALIKE)
def test_images_are_taken_together_only_if_their_packs_lie_alike(images, layout, addresses):
    """Or if none is aligned, and there are not many single values."""
    assert launch_for("float32", layout, *addresses).images == images


def test_few_blocks_have_more_threads_on_a_channel():
    """One or two images on each GPU: else most of it would idle."""
    assert launch_for("float32", (32, 512, 196), 0).block[0] == 16
    launch = launch_for("float32", (2, 64, 196), 0)
    assert launch.block[0] == 64 and launch.grid[0] * launch.grid[1] == 32
