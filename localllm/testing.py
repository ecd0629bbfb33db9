"""Variables that only tests may set: invented machines, scripted engines. They do nothing without LOCALLLM_TESTING=1.

A user who finds one of them in a shell profile should hear of it, not get invented numbers: `refuse_outside_tests` is
the first thing a command does.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from localllm.errors import ConfigError

# Name -> what it does. The only list: settings, documentation and checks read it.
TEST_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "LOCALLLM_FAKE_HW": "an invented machine by name, for plan, doctor and the choice of models",
        "LOCALLLM_FAULT": "step:N:oom, step:N:raise or step:N:hang: the engine's step N goes wrong so",
        "LOCALLLM_ENGINE": "fake: scripted answers without a model (fake:tps=100:load=0.5 sets its pace)",
    }
)
HANG_S = 30.0  # how long a step hangs that is told to


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
    """What goes wrong in which step by LOCALLLM_FAULT, called with the number of each; None without it.

    Raises ConfigError.
    """
    given = only_in_tests("LOCALLLM_FAULT")
    if not given:
        return None
    found = re.fullmatch(r"step:(\d+):(oom|raise|hang)", given)
    if found is None:
        known = "step:N:oom, step:N:raise or step:N:hang"
        raise ConfigError(f"LOCALLLM_FAULT={given[:40]} is not {known}", "`unset LOCALLLM_FAULT`")
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
