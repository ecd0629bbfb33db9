"""Variables that only tests may set: invented machines, scripted engines. They do nothing without LOCALLLM_TESTING=1.

A user who finds one of them in a shell profile should hear of it, not get invented numbers: `refuse_outside_tests` is
the first thing a command does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from localllm.errors import ConfigError

TEST_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "LOCALLLM_FAKE_HW": "an invented machine by name, for plan, doctor and the choice of models",
        "LOCALLLM_ENGINE": "fake: scripted answers without a model (fake:tps=100:load=0.5 sets its pace)",
    }
)
"""Name -> what it does. The only list: settings, documentation and checks read it."""


def in_tests() -> bool:
    """Whether this process runs for tests."""
    return os.environ.get("LOCALLLM_TESTING") == "1"


def only_in_tests(name: str) -> str:
    """The value of a test-only variable, "" when unset. Raises ConfigError when it is set outside tests."""
    value = os.environ.get(name, "")
    if value and not in_tests():
        raise ConfigError(f"{name}={value} is for tests only", f"`unset {name}`")
    return value


def refuse_outside_tests() -> None:
    """Raise ConfigError when any test-only variable is set outside tests."""
    for name in TEST_ONLY:
        only_in_tests(name)
