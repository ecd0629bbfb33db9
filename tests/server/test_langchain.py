"""langchain-tests' tool and structured-output part against the starter model, in an environment of its own.

Its packages are installed beside the project's, never into them: they bring pytest plugins. What a model of 135 million
parameters cannot know (that the argument of magic_function(3) is 3) is left out by name; everything else passes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm import LLM
from localllm.server.pool import ModelPool

from .conftest import live_server

pytestmark = [pytest.mark.slow, pytest.mark.network]
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["langchain-tests>=1.1,<2", "langchain-openai>=1.0,<2"]
FOLDER = ROOT / ".cache" / "langchain-tests"
NEEDS_A_CLEVERER_MODEL = ("test_tool_calling", "test_json_mode", "test_unicode_tool_call", "test_agent_loop")
TEST = """
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestLocal(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    has_tool_choice = True
    supports_json_mode = True
    structured_output_kwargs = {"method": "json_schema"}
    chat_model_params = {
        "model": "smollm2", "base_url": "URL/v1", "api_key": "x", "temperature": 0.7, "seed": 3, "max_tokens": 400,
        "timeout": 120, "max_retries": 0, "extra_body": {"repetition_penalty": 1.2},
    }
"""


def installed():
    """The folder with the packages; skips where they cannot be had."""
    done = FOLDER / "done"
    if not done.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER / "packages")]
        env = {name: value for name, value in os.environ.items() if name != "PIP_NO_INDEX"}
        made = subprocess.run(
            [*command, "-c", str(ROOT / "constraints.txt"), *PACKAGES], env=env, capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"langchain-tests cannot be installed: {made.stderr.strip().splitlines()[-1][:200]}")
        done.touch()
    return FOLDER / "packages"


def test_langchain_tools_and_structured_output(smollm2_path, tmp_path):
    packages = installed()
    with LLM(smollm2_path, ctx=4096) as llm:
        pool = ModelPool.holding(llm, ("smollm2",))
        pool.models()
        with live_server(pool, parallel=4) as live:
            (tmp_path / "test_local.py").write_text(TEST.replace("URL", live.url))
            (tmp_path / "pytest.ini").write_text(
                "[pytest]\nasyncio_mode = auto\nasyncio_default_test_loop_scope = session\n"
                "asyncio_default_fixture_loop_scope = session\n"
            )
            wanted = "(tool or structured or json_mode) and not image and not pdf"
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
            env = os.environ | {"PYTHONPATH": str(packages)}
            run = subprocess.run(
                [*command, "-k", wanted, "-rA", "test_local.py"],
                cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900,
            )  # fmt: skip
        pool.close()
    results = [
        line.split(" - ")[0].split() for line in run.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))
    ]
    passed = [name for status, name in results if status == "PASSED"]
    failed = [name for status, name in results if status == "FAILED"]
    unexpected = [name for name in failed if not any(hard in name for hard in NEEDS_A_CLEVERER_MODEL)]
    assert not unexpected, json.dumps(unexpected) + run.stdout[-6000:]
    assert len(passed) >= 12, run.stdout[-3000:]
