"""Serve: Answer a file of requests, resumable"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from localllm.cli.attach import fake_engine
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import picked
from localllm.cli.frame.options import EngineFlags, Parallel
from localllm.cli.loading import within_models
from localllm.errors import Aborted, ConfigError, LocalLLMError
from localllm.request import LoadProgress
from localllm.terminal import clean_line, counted, seconds_short

if TYPE_CHECKING:
    from localllm.server.openai.batch import BatchCounts


@command(
    "localllm batch questions.jsonl -o answers.jsonl",
    "localllm batch questions.jsonl -o answers.jsonl --model qwen --retry-failed",
)
def batch(
    env: Env,
    source: Annotated[Path, Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format, one per line.")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="Append answers to FILE; - is stdout.")],
    model: Annotated[str | None, Option(metavar="NAME", help="For requests that name no model.")] = None,
    retry_failed: Annotated[bool, Option("--retry-failed", help="Send requests that failed again.")] = False,
    parallel: Parallel = None,
    engine: EngineFlags = EngineFlags(),
) -> int:
    """Answer a file of requests. After an interruption, the same command continues where it stopped.

    Each line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Any model that
    `localllm serve` without a name offers can be used; a body without a model gets --model, or the default model.
    """
    if fake_engine():
        raise ConfigError("the scripted engine has no server", "`unset LOCALLLM_ENGINE`")
    if str(output) == "-" and env.console.as_json:
        raise ConfigError("-o - and --json both write to stdout", "drop --json, or name a file: -o FILE")
    config = engine.config(env, {"engine.max_parallel": parallel})
    from localllm.cli.commands.serve import here, new_pool, offered
    from localllm.server import Service, ServiceOptions
    from localllm.server.openai.batch import BatchCounts, Output, check, run_batch

    ids = check(source)
    choices = [here(env, config, model)] if model else []
    within_models(env, config, choices)  # every model has a plan of its own, with a context that it can hold
    default, offers = offered(env, config, choices, (), every=True)
    answers = Output(output, again=retry_failed)
    skipped, failed = (sum(one in those for one in ids) for those in (answers.answered, answers.failed))
    counts = BatchCounts(total=len(ids), skipped=skipped, failed_before=failed)
    progress = env.progress(clean_line(source.name))
    pool = new_pool(env, config, offers, (), None, default)
    side_by_side, adapters = config.engine.max_parallel, config.engine.adapter_paths
    options = ServiceOptions(side_by_side, 4 * side_by_side, default, adapters=adapters, adapted=default)

    def show(now: BatchCounts) -> None:
        progress.update(LoadProgress("batch", now.skipped + now.done, now.total))

    async def run() -> None:
        service = Service(pool, options)
        ticking = asyncio.ensure_future(_tick(progress.tick))
        try:
            await run_batch(service, source, answers, counts, show)
        finally:
            ticking.cancel()
            service.close()

    show(counts)
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        left = f"{counts.skipped + counts.done} of {counts.total} answered; run the same command to continue"
        raise Aborted(f"stopped: {left}") from None
    finally:
        progress.close()
        answers.close()
        pool.close()
    _report(env, counts, output)
    return LocalLLMError.exit_code if counts.failed or counts.failed_before else 0


async def _tick(tick: Callable[[], None]) -> None:
    while True:
        tick()
        await asyncio.sleep(0.1)


def _report(env: Env, counts: BatchCounts, output: Path) -> None:
    seconds = counts.seconds
    told = picked(counts, "total skipped failed failed_before prompt_tokens completion_tokens")
    told |= {"output": str(output), "answered": counts.done}
    if env.console.emit("batch/1", told | {"seconds": round(seconds, 3), "finished": int(time.time())}):
        return
    failed = f", {counts.failed} of them failed" if counts.failed else ""
    before = f", {counts.failed_before} of them with an error" if counts.failed_before else ""
    skipped = f" ({counts.skipped} already answered{before})" if counts.skipped else ""
    rate = f", {counts.completion_tokens / seconds:,.0f} tok/s" if counts.completion_tokens and seconds else ""
    answered = counted(counts.done, "request")
    where = "" if str(output) == "-" else f": {clean_line(str(output))}"
    env.console.say(f"{answered} answered{skipped}{failed} in {seconds_short(seconds)}{rate}{where}")
    if counts.failed or counts.failed_before:
        env.console.say("add --retry-failed to send the failed requests again")
