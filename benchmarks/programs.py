"""Savings by prefix sharing in the examples of docs/programs.md: prompt tokens computed with and without the cache.

    python benchmarks/programs.py

Each section of the page runs as written, on smollm2, from an empty cache. The examples set seeds, so both runs generate
the same text.
"""

from __future__ import annotations

import doctest
import re
from functools import partial
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "programs.md"


def main() -> None:
    """Print the table."""
    import localllm
    from localllm.llm.llm import LLM

    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    counts: dict[str, list[tuple[int, int]]] = {}
    for cache in (True, False):
        localllm.LLM = partial(LLM, prefix_cache=cache)  # type: ignore[attr-defined]
        runner = doctest.DocTestRunner(verbose=False)
        names: dict[str, Any] = {}
        for section in sections:
            title = section.splitlines()[0]
            before = _counted(names)
            examples = [one for one in doctest.DocTestParser().get_examples(section) if "llm.close" not in one.source]
            failed, _ = runner.run(doctest.DocTest(examples, names, title, str(PAGE), 0, None), clear_globs=False)
            if failed:
                raise SystemExit(f"{title} does not print what the page says")
            names = runner.test.globs
            after = _counted(names)
            names["llm"].engine.clear_prefix_cache()
            if examples and before is not None and after is not None:
                counts.setdefault(title, []).append((after[0] - before[0], after[1] - before[1]))
        names["llm"].close()
    print("| program | computed | without sharing | |\n| --- | --- | --- | --- |")
    for title, ((shared, made), (alone, again)) in counts.items():
        differs = "" if made == again else f" {made} tokens were generated, without sharing {again}"
        print(f"| {title} | {shared:,} | {alone:,} | {shared / alone:.0%} |{differs}")


def _counted(names: dict[str, Any]) -> tuple[int, int] | None:
    """(computed prompt tokens, output tokens) so far."""
    if "llm" not in names:
        return None
    stats = names["llm"].stats()
    return stats.num_prompt_tokens, stats.num_output_tokens


if __name__ == "__main__":
    main()
