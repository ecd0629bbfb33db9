"""Variables that only tests may set: invented machines, scripted engines. They are refused without LOCALLLM_TESTING=1.

A user who has one of them in a shell profile must be told, not shown invented numbers: every command first calls
`refuse_outside_tests`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from localllm.errors import ConfigError

# name -> what it does; settings, documentation and checks all read this list
TEST_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "LOCALLLM_FAKE_HW": "name of an invented machine for plan, doctor and the choice of models",
        "LOCALLLM_FAULT": "step:N:oom, step:N:raise or step:N:hang: how the engine's step N fails",
        "LOCALLLM_ENGINE": "fake: scripted answers without a model (fake:tps=100:load=0.5 sets the speed)",
    }
)
HANG_S = 30.0  # duration of a `hang`


def in_tests() -> bool:
    """Whether this process runs for tests."""
    return os.environ.get("LOCALLLM_TESTING") == "1"


def only_in_tests(name: str) -> str:
    """The value of a test-only variable, "" when unset. Raises ConfigError when it is set outside tests."""
    value = os.environ.get(name, "")
    if value and not in_tests():
        raise ConfigError(f"{name}={value} is for tests only", f"`unset {name}`")
    return value


def step_fault() -> Callable[[int], None] | None:
    """The fault that LOCALLLM_FAULT configures, called with the number of each step; None without it.

    Raises ConfigError.
    """
    given = only_in_tests("LOCALLLM_FAULT")
    if not given:
        return None
    found = re.fullmatch(r"step:(\d+):(oom|raise|hang)", given)
    if found is None:
        known = "step:N:oom, step:N:raise or step:N:hang"
        raise ConfigError(f"LOCALLLM_FAULT must be {known}, not {given[:40]}", "`unset LOCALLLM_FAULT`")
    number, kind = int(found[1]), found[2]

    def fault(step: int) -> None:
        if step != number:
            return
        if kind == "hang":
            time.sleep(HANG_S)
        elif kind == "oom":
            raise MemoryError(f"LOCALLLM_FAULT: memory runs out in step {step}")
        else:
            raise RuntimeError(f"LOCALLLM_FAULT: step {step} fails")

    return fault


def refuse_outside_tests() -> None:
    """Raise ConfigError when any test-only variable is set outside tests."""
    for name in TEST_ONLY:
        only_in_tests(name)
