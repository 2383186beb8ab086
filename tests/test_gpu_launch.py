"""How many threads a GPU is given for which tensor: plain functions of shape, type and addresses."""

import math

import pytest
from gpu_kernels import H200, launch_for

PACK = {"float32": 4, "float64": 2, "float16": 8}
LAYOUTS = [(1, 1, 1), (2, 2048, 1), (2, 2048, 49), (4, 7, 3), (32, 256, 56 * 56), (2, 64, 800 * 1333), (32, 64, 2)]
LAYOUTS += [(2 * 800 * 1333, 64, 1), (2**31 + 7, 3, 1), (2**20, 2**20, 1), (1, 2**30, 4), (2, 1024, 25 * 42)]
MOST_THREADS, AT_ONCE = 512, 8  # of a block; packs that a thread has under way
dtypes = pytest.mark.parametrize("dtype", list(PACK))


@pytest.mark.parametrize("address, multiprocessors", [(0, H200), (8, H200), (0, 1), (0, 46)])
@dtypes
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_value_has_a_thread_and_the_gpu_has_enough(layout, dtype, address, multiprocessors):
    outer, channels, inner = layout
    launch = launch_for(dtype, layout, address, multiprocessors=multiprocessors)
    tiles, parts, threads = launch.blocks
    # Whole warps; each channel of a tile has a thread. What a block leaves in shared memory has its place there.
    assert threads % 32 == 0 and launch.tile <= 64 <= threads <= MOST_THREADS
    assert 1 <= tiles < 2**31 and 1 <= parts <= 65535
    assert (tiles - 1) * launch.tile < channels <= tiles * launch.tile
    # Three numbers of each block and channel; a tile's are whole cache lines.
    left = tiles * math.ceil(parts * launch.tile / 32) * 32
    assert (launch.partials, launch.counters) == ((3 * left, tiles) if parts > 1 else (0, 0))
    pack = PACK[dtype] if launch.aligned else 1
    if launch.rows:
        assert inner > 1 and launch.tile == 1
        packs = outer * math.ceil(inner / pack)
    else:
        assert launch.width * pack == launch.tile * inner  # whole channels
        assert launch.width * launch.thread_rows <= threads
        assert (launch.width + 1) * launch.thread_rows <= MOST_THREADS * 9 / 8
        packs = outer * launch.width
    takers = threads if launch.rows else launch.width * launch.thread_rows
    # Where blocks share a tile, a thread has half of its packs under way at least.
    assert parts == 1 or parts <= math.ceil(packs / (takers * AT_ONCE / 2))
    # Another number of blocks would not be done much sooner: each costs as much as some packs of a thread.
    places = multiprocessors * MOST_THREADS // threads

    def cost(parts):
        return math.ceil(tiles * parts / places) * (12 + 6 * (parts > 1) + math.ceil(packs / takers / parts))

    most = max(1, min(math.ceil(packs / (takers * AT_ONCE / 2)), 4 * places // tiles))
    assert cost(parts) <= 1.1 * min(cost(other) for other in range(1, most + 1))


# Channels that are no power of two, a few more or less than there are places: none is left for a last turn of its own,
# and none has few threads while others have none.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", [(32, 272, 784), (32, 144, 576), (32 * 784, 272, 1), (2, 1024, 1050)], ids=str)
def test_few_places_stay_empty_at_last(layout, dtype):
    tiles, parts, threads = launch_for(dtype, layout, 0).blocks
    places = H200 * MOST_THREADS // threads
    assert 0.5 <= tiles * parts / places <= 1


@pytest.mark.parametrize("layout", [(32, 256, 3136), (2, 64, 800 * 1333), (25088, 256, 1), (2, 2048, 49)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_of_detectors_fill_a_gpu(layout, dtype):
    """Two blocks for each of 132 multiprocessors, or one of twice as many threads."""
    launch = launch_for(dtype, layout, 0)
    tiles, parts, threads = launch.blocks
    assert launch.aligned and tiles * parts * threads >= 0.9 * H200 * MOST_THREADS


@dtypes
def test_packs_are_read_only_where_all_tensors_allow_it(dtype):
    size, pack = 16 // PACK[dtype], PACK[dtype]
    rows, columns = (2, 4, 8 * 1001), (100, 64, 1)
    taken = [(rows, (0, 0, 0)), (columns, (0, 0, 0)), ((2, 8, 49), (0,))]
    taken += [(rows, (size, size, size)), ((1, 3, 4097), (0,))]  # single values in front make up
    not_taken = [(rows, (0, size, 0)), (rows, (0, 0, size)), ((2, 3, pack - 1), (0,))]
    # The packs of two images lie in other places.
    not_taken += [((2, 3, 4097), (0,)), (columns, (size, size, size)), ((100, 65, 1), (0, 0, 0))]
    assert all(launch_for(dtype, layout, *addresses).aligned for layout, addresses in taken)
    assert not any(launch_for(dtype, layout, *addresses).aligned for layout, addresses in not_taken)


# ResNet-50's maps: how many channels and threads side by side a block has, and how many blocks share them.
MAPS = [
    ("float32", (32, 64, 112 * 112), (1, 0, 4)),
    ("float32", (32, 256, 56 * 56), (1, 0, 1)),
    ("float32", (32, 512, 28 * 28), (1, 0, 1)),
    ("float32", (32, 1024, 14 * 14), (4, 196, 1)),
    ("float32", (32, 2048, 7 * 7), (8, 98, 1)),
    ("float16", (32, 256, 56 * 56), (1, 0, 1)),
    ("float16", (32, 512, 28 * 28), (1, 0, 1)),
    ("float16", (32, 1024, 14 * 14), (4, 98, 1)),
    ("float16", (32, 2048, 7 * 7), (8, 49, 1)),
    ("float32", (32 * 112 * 112, 64, 1), (32, 8, 66)),
    ("float32", (32 * 49, 2048, 1), (32, 8, 2)),
    ("float16", (32 * 49, 2048, 1), (64, 8, 4)),
]


@pytest.mark.parametrize("dtype, layout, expected", MAPS)
def test_blocks_take_whole_channels_where_they_can(dtype, layout, expected):
    """Then nothing is left to be added up by the last of them."""
    launch = launch_for(dtype, layout, 0)
    assert (launch.tile, launch.width, launch.blocks[1]) == expected


def test_what_is_too_large_is_refused():
    with pytest.raises(RuntimeError, match="1 times 1 channels of 2147483655 values are too many for a GPU"):
        launch_for("float32", (1, 1, 2**31 + 7), 0)
