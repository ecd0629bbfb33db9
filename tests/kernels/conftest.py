"""The compiled kernels, one instruction set after the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from localllm.kernels.cpu import build

OTHERS = [isa for isa in build.runnable_isas() if isa not in (build.runnable_isas()[0], "avx2")]
"""tested by `make test-all`: each takes ten seconds to compile"""


def forget() -> None:
    """Let the next call choose and load anew."""
    build.library.cache_clear()
    build.lib.cache_clear()


def load(isa: str) -> build.Library:
    """The kernels of one instruction set, compiled when they are not yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_CPU_ISA", isa)
        forget()
        return build.library()


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compiles what the default run needs side by side: some five seconds each, once per change of the sources."""
    compiler, folder = build._compiler(), build.cache_folder()
    missing = [isa for isa in build.runnable_isas() if isa not in OTHERS and build._find(folder, isa, compiler) is None]
    with ThreadPoolExecutor(len(missing) or 1) as pool:
        for library in pool.map(lambda isa: build._build(folder, isa, compiler), missing):
            assert library.reason is None


@pytest.fixture(
    scope="module",
    params=[pytest.param(isa, marks=pytest.mark.slow if isa in OTHERS else ()) for isa in build.runnable_isas()],
)
def isa(request: pytest.FixtureRequest, compiled: None) -> Iterator[str]:
    """The kernels of one instruction set of this machine, in the place of its best."""
    library = load(request.param)
    assert library.reason is None and library.isa == request.param
    yield request.param
    forget()
