"""Run by `test_mutants.py`: loads every file named on standard input and generates one token; one line of JSON each."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

LIMIT_S = 10


def _late(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"over {LIMIT_S} s")


def outcome(path: Path) -> str:
    """ "ok", the class and message of the refusal, or "fault: ..." for anything else."""
    from localllm.errors import LocalLLMError
    from localllm.llm.llm import LLM
    from localllm.request import SamplingParams

    signal.alarm(LIMIT_S)
    try:
        with LLM(path, ctx=64) as llm:
            answer = llm.generate("hi there", SamplingParams(max_tokens=1, ignore_eos=True))
        count = len(answer.completions[0].token_ids)
        return "ok" if count == 1 else f"fault: {count} tokens"
    except LocalLLMError as error:
        return f"{type(error).__name__}, exit {error.exit_code}: {error.message}"
    except BaseException as error:
        return f"fault: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def main() -> None:
    """One line for each line."""
    import torch  # noqa: F401  counted to no file

    signal.signal(signal.SIGALRM, _late)
    for line in sys.stdin:
        begin = time.perf_counter()
        result = outcome(Path(line.rstrip("\n")))
        print(json.dumps({"outcome": result, "seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main()
