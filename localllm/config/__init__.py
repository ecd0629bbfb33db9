"""The user's settings: every key with its default, where a value came from, and the file they live in.

Highest first: flag, environment (`LOCALLLM_` + upper-case path), `.localllm.toml` of the working folder (only with
LOCALLLM_PROJECT=1), the user's file, default. A wrong value in a file, and a file that is not valid TOML, is a warning
and the default holds; a wrong flag or variable is a `ConfigError`. Knows nothing of models, devices or commands.
"""

from .edit import set_key, unset_key
from .keys import KEYS, EngineOptions, Key, Preset, SamplingConfig, UiConfig, UserConfig, environment, find_key
from .kinds import parse_bytes, parse_seconds
from .load import load_config, settings_file
from .reference import reference

__all__ = [
    "KEYS",
    "EngineOptions",
    "Key",
    "Preset",
    "SamplingConfig",
    "UiConfig",
    "UserConfig",
    "environment",
    "find_key",
    "load_config",
    "parse_bytes",
    "parse_seconds",
    "reference",
    "set_key",
    "settings_file",
    "unset_key",
]
