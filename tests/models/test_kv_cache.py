"""The cache's memory: which pages of the system it lies in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localllm.models.kv_cache import SMALL_PAGES, CacheGroup, KVCache

SMAPS = Path("/proc/self/smaps")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """`VmFlags` of the map that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no map holds {address:x}")


@pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="needs Linux with transparent huge pages")
def test_long_contexts_lie_in_huge_pages_and_words_do_not() -> None:
    group = CacheGroup("full", None, (0,), 8, 128, 128)
    cache = KVCache([group], [4 * SMALL_PAGES // (8 * 16 * 128 * 2)], 16, "bf16")
    pages = cache.layers[0]
    assert pages is not None
    for part in (pages.k, pages.v):
        assert part is not None and part.nbytes == 4 * SMALL_PAGES
        assert "hg" not in flags_at(part.data_ptr())
        assert "hg" in flags_at(part.data_ptr() + SMALL_PAGES)
    last = len(pages.k) - 1
    cache.touch(0, [0, last])
    cache.forget(0, [last])
    assert bool((pages.k[0] == 1).all()) and not torch.count_nonzero(pages.k[last])
