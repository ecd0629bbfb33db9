"""The user's settings: every key with its default and origin, and the file they are stored in.

Precedence, highest first: flag, environment (`LOCALLLM_` + upper-case path), `.localllm.toml` in the working folder
(only with LOCALLLM_PROJECT=1), the user's file, default. A wrong value in a file, or a file that is not valid TOML, is
a warning and the default applies; a wrong flag or variable is a `ConfigError`. Independent of models and devices.
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
