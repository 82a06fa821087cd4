"""The DCGM exporter's page: an engine's GPUs among its host's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapters.dcgm import GpuLoad, NoGpu, parse_gpus

PAGE = b"".join(
    b'# HELP DCGM_FI_DEV_%s Something.\n# TYPE DCGM_FI_DEV_%s gauge\n' % (family, family)
    + b"".join(
        b'DCGM_FI_DEV_%s{gpu="%d",UUID="GPU-%d%d",device="nvidia%d",modelName="NVIDIA H100",Hostname="h",pod=""} %d\n'
        % (family, gpu, gpu, gpu, gpu, value)
        for gpu, value in enumerate(values)
    )
    for family, values in [
        (b"GPU_UTIL", (90, 50, 10)),
        (b"MEM_COPY_UTIL", (1, 1, 1)),
        (b"FB_FREE", (20_000, 60_000, 80_000)),
        (b"FB_USED", (60_000, 20_000, 0)),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "load"),
    [
        ((), GpuLoad(3, 0.5, 1 / 3)),
        (("0",), GpuLoad(1, 0.9, 0.75)),
        (("GPU-00", "GPU-11"), GpuLoad(2, 0.7, 0.5)),
        (("2", "GPU-22"), GpuLoad(1, 0.1, 0.0)),
    ],
)
def test_an_engines_gpus_are_told_apart(gpus: tuple[str, ...], load: GpuLoad) -> None:
    """By index or by UUID; all of the host where none is named."""
    read = parse_gpus(PAGE, gpus)
    assert (read.gpus, read.memory_used) == (load.gpus, load.memory_used)
    assert read.used == pytest.approx(load.used)


def test_spaces_between_labels_are_understood() -> None:
    """As older exporters write them."""
    assert parse_gpus(b'DCGM_FI_DEV_GPU_UTIL{gpu="1", UUID="GPU-a",pod=""} 40\n', ("GPU-a",)) == GpuLoad(1, 0.4)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"DCGM_FI_DEV_GPU_UTIL 5\n",
        b'DCGM_FI_DEV_GPU_UTIL{gpu="10"} 5\n',
        b'DCGM_FI_DEV_GPU_UTIL{mygpu="1"} 5\n',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="1"} 9223372036854775794\n',
        b'DCGM_FI_DEV_FB_USED{gpu="1"} 5\n',
    ],
)
def test_another_gpu_is_none(page: bytes) -> None:
    """Nor is a figure that the exporter could not read."""
    with pytest.raises(NoGpu, match="of 1 on"):
        parse_gpus(page, ("1",))


@given(st.binary(max_size=200), st.integers(0, len(PAGE)))
def test_no_page_raises_anything_else(noise: bytes, at: int) -> None:
    """Shares stay shares."""
    try:
        load = parse_gpus(PAGE[:at] + noise + PAGE[at:])
    except NoGpu:
        return
    assert 0 <= load.used <= 1
    assert load.memory_used is None or 0 <= load.memory_used <= 1
