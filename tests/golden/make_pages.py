"""Writes the golden pages of doctor and plan for the invented machines: `python tests/golden/make_pages.py`.

Look at the difference before you keep it: a page says what a person should agree with.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
PLANS = ("rtx4090", "rtx5090", "cpu")


@contextmanager
def plain_home() -> Iterator[None]:
    """A user with nothing of his own: no models, no settings, no tokens; a package manager, no root, a large disk."""
    usage = shutil.disk_usage(FOLDER)._replace(free=10**12)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("LOCALLLM_", "HF_", "XDG_", "HUGGING_FACE_"))}
    kept = {n: v for n, v in kept.items() if n.lower() not in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")}
    with (
        tempfile.TemporaryDirectory() as home,
        mock.patch.dict(os.environ, kept | {"HOME": home, "LOCALLLM_TESTING": "1", "COLUMNS": "100"}, clear=True),
        mock.patch("shutil.disk_usage", lambda path: usage),
        mock.patch("localllm.doctor.software.install", lambda apt, *_: f"sudo apt-get install -y {apt}"),
    ):
        yield


def page(*words: str, hw: str) -> str:
    """What a command prints on stdout on an invented machine."""
    from typer.testing import CliRunner

    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    with mock.patch.dict(os.environ, {"LOCALLLM_FAKE_HW": hw}):
        try:
            result = CliRunner().invoke(app, list(words))
        finally:
            logs.stop()
    lines = [f"$ localllm {' '.join(words)}", *result.stdout.splitlines()]
    if result.exit_code not in (0, 11):
        lines += result.stderr.splitlines()
    return "\n".join(line.rstrip() for line in [*lines, f"[{result.exit_code}]", ""]) + "\n"


def doctor_page(hw: str) -> str:
    """Doctor, and the command of another engine, on one machine."""
    engine = "llama.cpp" if hw == "cpu" else "vllm"
    with plain_home():
        return page("doctor", hw=hw) + page("doctor", "--for", engine, hw=hw)


def plan_page(hw: str) -> str:
    """The plan of a family, and of what is here (nothing)."""
    with plain_home():
        return page("plan", "qwen", hw=hw) + page("plan", "--ctx", "8k", hw=hw)


def main() -> None:
    """Write them all."""
    from localllm.device.fake import PROFILES

    for hw in PROFILES:
        (FOLDER / "doctor" / f"{hw}.txt").write_text(doctor_page(hw))
    for hw in PLANS:
        (FOLDER / "plan" / f"{hw}.txt").write_text(plan_page(hw))


if __name__ == "__main__":
    main()
