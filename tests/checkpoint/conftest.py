"""Lets the tests here (and whoever appends this folder to sys.path) import `tiny_models` and `bad_files` by name."""

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))
