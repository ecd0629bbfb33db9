"""Steps that go wrong on purpose, and invariants that end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localllm import LLM, SamplingParams, testing
from localllm.errors import ConfigError, LocalLLMError, OutOfMemory

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("kind", ["raise", "oom", "hang"])
def test_a_step_that_goes_wrong_harms_that_step_only(
    tiny_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_path, ctx=256) as llm:
        expected = llm.generate([1, 2, 3], GREEDY).completions[0].token_ids
    monkeypatch.setenv("LOCALLLM_FAULT", f"step:3:{kind}")
    monkeypatch.setattr(testing, "HANG_S", 0.01)
    with LLM(tiny_path, ctx=256) as llm:
        if kind != "hang":
            with pytest.raises(OutOfMemory if kind == "oom" else LocalLLMError):
                llm.generate([1, 2, 3], GREEDY)
        else:
            assert llm.generate([1, 2, 3], GREEDY).completions[0].token_ids == expected
        assert llm.generate([1, 2, 3], GREEDY).completions[0].token_ids == expected


@pytest.mark.parametrize("given", ["step:x:oom", "step:3:explode", "3"])
def test_a_fault_that_cannot_be_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_FAULT", given)
    with pytest.raises(ConfigError, match="step:N:oom"):
        testing.step_fault()
    monkeypatch.setenv("LOCALLLM_TESTING", "")
    with pytest.raises(ConfigError, match="for tests only"):
        testing.step_fault()


ENGINE = """\
import sys; from localllm import LLM; from localllm.engine import invariant
llm = LLM(sys.argv[1], ctx=256, debug_invariants=True); llm.generate([1, 2, 3])
invariant.exit_on_violation()
llm.engine.scheduler.pages.pools[0].refs[-1] += 1  # a page that no sequence will take and so mend
llm.generate([4, 5, 6]); print('still here')
"""
POOL = """\
from localllm.engine import invariant; from localllm.engine.page_pool import PagePool
assert False, 'not optimized'
pool = PagePool(3); pool.check_integrity({}); invariant.exit_on_violation()
pool.refs[1] += 1; pool.check_integrity({}); print('still here')
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("options", "program"), [((), ENGINE), (("-O",), POOL)], ids=["engine", "without asserts"])
def test_a_violated_invariant_ends_the_process(options: tuple[str, ...], program: str, tiny_path: Path) -> None:
    """With exit 3, also under `python -O`, which would compile all of torch again."""
    command = [sys.executable, *options, "-c", program, str(tiny_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "invariant violated: " in done.stderr and "still here" not in done.stdout
