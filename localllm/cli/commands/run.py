"""Talk: One prompt in, one answer out (pipes, --json)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from localllm.cli.attach import quant_on, wish_of
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import Console, one_of
from localllm.cli.frame.options import AttachTo, EngineFlags, Model, Preset, SamplingFlags, System, Think, text_or_file
from localllm.cli.loading import within_models
from localllm.cli.names import Choice, placed
from localllm.cli.question import (
    TRUNCATE,
    Job,
    KeptChat,
    code_block,
    constraint_of,
    gather_prompt,
    messages_of,
    shortened,
)
from localllm.cli.run_view import RunEvents, StartTrace, Text, timing_json, usage_json
from localllm.cli.session import Sampling, follow, open_backend, stats_line, wait_ready
from localllm.cli.start import preset_of, template_of, think_of, typed_or_else
from localllm.cli.tools import answered, connect_for_run, toolbox_for_run
from localllm.config import UserConfig
from localllm.conversation.answer import Answer
from localllm.conversation.tools import as_values
from localllm.errors import ConfigError, ConstraintUnmet, LocalLLMError
from localllm.interface import ChatBackend, ChatEvent, Facts
from localllm.request import LoadProgress, Message, Usage, num_images
from localllm.terminal import clean_line, counted, dumb

if TYPE_CHECKING:
    from localllm.conversation.documents import Document

MAX_SAMPLES = 64
MAX_API_TEMPERATURE = 2  # OpenAI's limit


@command(
    'localllm run qwen "Why is the sky blue?"',
    'git diff | localllm run qwen "write a commit message"',
    "localllm run qwen -f notes.txt 'summarize this' --json",
    'localllm run qwen "name three moons" --schema moons.json',
    "localllm run qwen 'what is new in a.txt?' --mcp servers.json --yes-tools read_file",
    "localllm run gemma3-270m 'Once upon a time' --max-tokens 64",
)
def run(
    env: Env,
    model: Model,
    prompt: Annotated[
        list[str] | None, Argument(metavar="[PROMPT...]", help="The prompt; - reads standard input only.")
    ] = None,
    system: System = None,
    file: Annotated[
        list[Path] | None,
        Option(
            "-f",
            "--file",
            "-a",
            "--attach",
            metavar="PATH",
            help="A file, folder or image to put before the prompt; repeatable.",
        ),
    ] = None,
    resume_last: Annotated[bool, Option("-c", "--continue", help="Continue the last saved chat.")] = False,
    keep: Annotated[bool | None, Option("--log/--no-log", help="Save as a chat; off by default without -c.")] = None,
    schema: Annotated[str | None, Option(metavar="FILE|JSON", help="Answer in JSON that matches this schema.")] = None,
    grammar: Annotated[Path | None, Option(metavar="FILE", help="Answer in this grammar (Lark or GBNF).")] = None,
    extract: Annotated[bool, Option("-x", "--extract", help="Print only the first code block.")] = False,
    extract_lang: Annotated[
        str | None, Option(metavar="LANG", help="Print only the first block in this language.")
    ] = None,
    truncate: Annotated[
        str, Option(metavar="never|head|middle", help="Where to truncate a prompt that is too long.")
    ] = "never",
    mcp: Annotated[Path | None, Option(metavar="FILE", help="MCP servers for --yes-tools.")] = None,
    yes_tools: Annotated[
        list[str] | None, Option(metavar="NAME", help="A tool the model may call without asking; repeatable.")
    ] = None,
    samples: Annotated[int, Option("-n", metavar="N", min=1, max=MAX_SAMPLES, help="Number of answers.")] = 1,
    preset: Preset = None,
    think: Think = None,
    attach_to: AttachTo = "auto",
    sampled: SamplingFlags = SamplingFlags(),
    engine: EngineFlags = EngineFlags(),
    stream: Annotated[
        bool | None, Option("--stream/--no-stream", help="Print while generating; with --json, one event per line.")
    ] = None,
    stats: Annotated[bool | None, Option("--stats/--no-stats", help="Print speeds to stderr.")] = None,
    trace: Annotated[bool, Option("--trace", help="Print how long each phase of the start took to stderr.")] = False,
    raw: Annotated[bool, Option("--raw", help="Do not render Markdown on a terminal.")] = False,
    hide_thinking: Annotated[
        bool | None, Option("--hide-thinking/--show-thinking", help="Hide or show the reasoning.")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit 10 if the answer was truncated.")] = False,
) -> int:
    """Answer one prompt and exit: the answer goes to stdout, everything else to stderr.

    Standard input is put before the prompt. A base model, which has no chat template, continues the text instead.
    A running `localllm serve` that has the model answers; with flags that change how it is loaded, it is loaded here.
    """
    config = engine.config(env, sampled.settings(), parallel=min(samples, 4))
    one_of("--truncate", truncate, TRUNCATE, "--truncate middle")
    language = extract_lang if extract_lang is not None else "" if extract else None
    if stream and language is not None:
        raise ConfigError("--extract needs the whole answer and cannot be combined with --stream", "drop one of them")
    constraint = constraint_of(schema, grammar)
    texts, documents = _read(file or [])
    text = gather_prompt(prompt or [], texts)
    console = env.console
    chosen = preset_of(config, preset)
    instructions = text_or_file(system, "--system") or chosen.system
    sampling = Sampling(chosen.sampling.given() | typed_or_else(config, preset), tuple(sampled.stop or ()), samples)
    chat = None
    if keep or resume_last:
        resumed = "last" if resume_last else None
        chat = KeptChat.open(instructions or config.chat.system, text, sampling.given, resumed)
    job = Job(
        messages=chat.messages if chat else messages_of(instructions or config.chat.system, text),
        sampling=sampling,
        template=template_of(think_of(config, think)),
        place=wish_of(env, config, engine, attach_to),
        constraint=constraint,
        truncate=truncate,
        documents=documents,
        tools=toolbox_for_run(env, config, mcp, yes_tools or (), samples),
        extract=language,
        chat=chat if keep is not False else None,
        stream=bool(stream) if stream is not None else console.out_tty and samples == 1 and language is None,
        show_thinking=language is None and (console.out_tty if hide_thinking is None else not hide_thinking),
        stats=stats if stats is not None else console.out_tty,
        trace=trace,
        markdown=console.out_tty and not raw and not dumb() and console.colored(console.stdout),
        strict=strict,
    )
    return answer(env, config, model, job)


def _read(files: list[Path]) -> tuple[list[Path], tuple[Document, ...]]:
    """Split the files into plain text files and documents."""
    if not files:
        return [], ()
    from localllm.conversation.documents import is_document, read_document

    documents = [one for one in files if is_document(one)]
    return [one for one in files if one not in documents], tuple(map(read_document, documents))


def answer(env: Env, config: UserConfig, model: str | None, job: Job) -> int:
    """Find a server that has the model, or load the model; answer and show the result. Returns the exit code."""
    console = env.console
    choice, attached = placed(env, config, _place(env, job), model, job.resumed)
    if attached is None:
        config = within_models(env, config, [choice])
    elif console.as_json:
        choice = replace(choice, quant=quant_on(attached))
    events = RunEvents(console) if console.as_json and job.stream else None
    progress, started = env.progress(choice.shown), StartTrace()

    def on_phase(phase: LoadProgress) -> None:
        started.phase(phase)
        if events is not None:
            events.phase(phase)

    how: dict[str, Any] = {"completes": True, "constraint": job.constraint, "attached": attached}
    with open_backend(env, config, job.sampling, **how) as backend:
        backend.start(choice.name)
        facts, load_s = wait_ready(backend, progress, on_phase)
        if events is not None:
            events.ready(facts)
        for warning in facts.warnings:
            console.warn(warning)
        messages = _fitting(env, backend, facts, job)
        view = events or (Text(console, job) if not console.as_json else None)
        answers = _answers(console, backend, job, messages, view.event if view else lambda event: None)
        if job.chat is not None:
            _keep(env, job.chat, answers, choice.saved)
        shown = answers if job.extract is None else _extracted(answers, job.extract)
        if isinstance(view, Text):
            view.close(shown)
        if job.trace:
            console.say(console.style(f"[{started.line(answers[0].timing)}]", "dim", err=True))
        if console.as_json and events is None:
            console.emit("run/1", envelope(choice, job, facts, shown, load_s))
        elif job.stats and not console.as_json:
            for one in answers:
                console.say(console.style(f"[{stats_line(one, backend.facts())}]", "dim", err=True))
            summary = facts.run_summary if console.verbose else facts.brief
            console.say(console.style(f"[{clean_line(summary)}]", "dim", err=True))
            _say_sampling(console, facts, job)
        cut = any(one.stop == "length" for one in answers)
        if cut and (job.strict or job.constraint is not None):
            limit = job.sampling.given.get("max_tokens")
            if limit is None:
                full = f"the answer was truncated: the context window of {facts.ctx:,} tokens is full"
                raise ConstraintUnmet(full, "use a larger --ctx, or a shorter prompt")
            raise ConstraintUnmet(f"the answer was truncated at {counted(limit, 'token')}", "raise --max-tokens")
    return 0


def _answers(
    console: Console, backend: ChatBackend, job: Job, messages: list[Message], on_event: Callable[[ChatEvent], None]
) -> list[Answer]:
    """Collect the model's answers, running the tool calls that it may make."""
    if job.tools is None:
        return follow(
            backend, [backend.send(messages, None, job.template) for _ in range(job.sampling.num_samples)], on_event
        )
    tools, one = job.tools, Answer()

    def turn() -> None:
        number = backend.send([*messages, *one.round_messages()], None, job.template, tools=tools.offered)
        follow(backend, [number], on_event, {number: one})

    with closing(tools):
        connect_for_run(console, tools)
        on_result = RunEvents(console).result if console.as_json and job.stream else None
        answered(console, tools, one, turn, backend.facts, on_result)
    return [one]


def _say_sampling(console: Console, facts: Facts, job: Job) -> None:
    from localllm.conversation.tree import effective_sampling, sampling_line

    line = sampling_line(effective_sampling(facts, job.sampling.given))
    console.say(console.style(f"[sampling: {clean_line(line)}]", "dim", err=True))


def _place(env: Env, job: Job) -> str:
    """Where to run this job. Sampling that no server accepts runs here, with a notice."""
    if job.place == "auto" and (job.sampling.given.get("temperature") or 0) > MAX_API_TEMPERATURE:
        env.console.say(f"servers accept temperatures up to {MAX_API_TEMPERATURE}: running the model here")
        return "off"
    return job.place


def _fitting(env: Env, backend: ChatBackend, facts: Facts, job: Job) -> list[Message]:
    """The messages, with documents before the last one, truncated to the window if that is allowed and needed."""
    if job.documents:
        _take_documents(env, backend, facts, job)
    if job.truncate == "never" or not facts.ctx:
        return job.messages
    from localllm.conversation.attachments import picture_tokens

    limit, pictures = job.sampling.given.get("max_tokens"), num_images(job.messages) * picture_tokens(facts)
    messages, before, after = shortened(job.messages, facts.ctx, limit, job.truncate, backend.count_tokens, pictures)
    if after < before:
        env.console.warn(f"the prompt was truncated from {before:,} to {after:,} tokens (--truncate {job.truncate})")
    return messages


def _take_documents(env: Env, backend: ChatBackend, facts: Facts, job: Job) -> None:
    """Put as much of the documents before the question as fits the window, and say how much that is."""
    from localllm.conversation.attachments import fitting, refuse_pictures, room_for
    from localllm.conversation.documents import question

    refuse_pictures(job.documents, facts)
    *before, asked = job.messages
    limit, count = job.sampling.given.get("max_tokens"), backend.count_tokens
    room = room_for(job.messages, facts, limit, count) if facts.ctx and job.truncate == "never" else 0
    sent, said = fitting(job.documents, asked["content"], room, facts, count)
    for line in said:
        env.console.say(line)
    documents = job.documents if sent is None else sent
    job.messages = [*before, Message(role="user", content=question(documents, asked["content"]))]
    if job.chat is not None:
        job.chat.attach(job.documents, sent)


def _keep(env: Env, chat: KeptChat, answers: Sequence[Answer], model: str) -> None:
    """Save the chat. A failure, such as a full disk, is only a warning: the answer has been given."""
    try:
        saved = chat.save(answers, model)
    except LocalLLMError as error:
        env.console.warn(f"the chat was not saved: {error.message}")
    else:
        env.console.say(f"Saved: localllm logs show {saved[:6]}")


def _extracted(answers: Sequence[Answer], language: str) -> list[Answer]:
    """Reduce each answer to its code block. Raises ConstraintUnmet."""
    return [replace(one, text=code_block(one.text, language)) for one in answers]


def envelope(choice: Choice, job: Job, facts: Facts, answers: Sequence[Answer], load_s: float) -> dict[str, Any]:
    """The fields of a run/1 document."""
    used = job.sampling.used(facts)
    shown = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop")
    usage = Usage(
        answers[0].usage.prompt_tokens,
        answers[0].usage.cached_tokens,
        sum(one.usage.completion_tokens for one in answers),
        sum(one.usage.reasoning_tokens for one in answers),
    )
    timing = replace(
        answers[0].timing,
        total_s=max(one.timing.total_s for one in answers),
        draft_tokens=sum(one.timing.draft_tokens for one in answers),
        accepted_tokens=sum(one.timing.accepted_tokens for one in answers),
    )
    return {
        "model": choice.shown,
        "revision": choice.revision,
        "quant": choice.quant,
        "device": facts.device,
        "output": [
            {"text": one.text, "reasoning": one.reasoning, "tool_calls": as_values(one), "stop": one.stop}
            for one in answers
        ],
        "usage": usage_json(usage),
        "timing": {"load_s": round(load_s, 3), **timing_json(timing)},
        "params": {key: value for key, value in asdict(used).items() if key in shown} | {"ctx": facts.ctx},
    }
