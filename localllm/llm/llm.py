"""The façade for one model: everything above the engine uses it.

`LLM(name)` finds the files, makes the plan, loads the weights and starts the engine. Importing this module loads no
torch; constructing an `LLM` does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from localllm.config import EngineOptions
from localllm.errors import BadModelFile, ConfigError, InvalidRequest
from localllm.interface import Facts
from localllm.llm.outputs import OutputDelta, OutputProcessor, OutputSpec, RequestOutput, ResponseStream
from localllm.request import (
    Constraint,
    LoadProgress,
    Message,
    OnProgress,
    Request,
    SamplingParams,
    StopCheck,
    TokenEvent,
    ToolUse,
)
from localllm.tokenizer.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import numpy as np

    from localllm.chat.template import ChatTemplate
    from localllm.chat.tools.roundtrip import ToolSupport
    from localllm.device import MachineFacts
    from localllm.engine.engine import Engine
    from localllm.engine.metrics import EngineStats
    from localllm.models.architectures import ModelFacts, OpenModel
    from localllm.models.loader import Model
    from localllm.models.parking import Parked
    from localllm.plan.plan import Plan
    from localllm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]

DEFAULT_TEMPERATURE = 0.7
"""where the model's files recommend nothing"""
SWITCH_INTERVAL_S = 1e-4
"""the interpreter's thread switch: 95 % of engine steps kept beside a busy interface thread, 78 % at Python's 5e-3"""


class LLM:
    """One loaded model.

    name_or_path   a path, `org/repo[:quant][@revision]`, an alias, part of a local name; downloaded if needed
    options        how it runs; None is the default of every setting (the user's settings file is not read)
    offline        never touch the network
    machine        the facts to plan with; None looks at this machine
    on_progress       called with a `LoadProgress` for everything that takes time
    cancel         an event that stops a download
    settings       fields of `config.EngineOptions` that differ from `options`:
                   device         auto | cpu | cuda:N
                   dtype          activations: auto | float32 | bfloat16 | float16; float32 also asks for exact products
                   activations    what those of long prompts are rounded to: auto (nothing) | fp8 | nvfp4
                   kv             key/value cache: auto | bf16 | fp16 | f32 | int8 | fp8
                   quant          what linear layers become while loading: int4 | int8 | fp8 | nvfp4 | mxfp4; auto: as
                                  stored where that fits
                   ctx            context window in tokens, "auto" (what fits), or "max" (the model's own)
                   gpu_mem        largest share of a GPU's memory to use
                   graphs         replay decode steps as CUDA graphs
                   threads        CPU threads; auto is one per usable core
                   deterministic  same tokens whatever else is in the batch; auto is on for the CPU
                   max_parallel   sequences decoded together
                   prefix_cache   reuse the keys and values of shared prefixes

    Raises the errors of `localllm.errors`. A context manager; `close()` frees everything.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        offline: bool = False,
        machine: MachineFacts | None = None,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        **settings: Any,
    ) -> None:
        self._notify = on_progress or (lambda phase: None)
        self._percent = -1
        self.name = os.fspath(name_or_path)
        from localllm.device import rss_anon_bytes
        from localllm.plan.planner import Planner

        self._start_bytes = rss_anon_bytes()
        self.options = replace(options or EngineOptions(), **settings)
        """as asked for; `plan` has what became of it"""
        self._planner = Planner.here(self.options, machine)
        self.machine: MachineFacts = self._planner.machine
        self.path: Path = self._find(self.name, offline, cancel)
        """the file or folder that was loaded"""
        with self._naming():
            self._checkpoint = self._open()
            self.facts: ModelFacts = self._checkpoint.facts
        self.plan: Plan = self._planner.plan(self.facts, self.path)
        """what runs how, in bytes, with reasons"""
        if not self.plan.fits:
            raise self.plan.error(self.name)
        self.weight_format = self.plan.quant or self.facts.stored_format
        """as stored, or what the linear layers became while loading"""
        self._doubt = self._checkpoint.doubt
        self._template: ChatTemplate | None = None
        self._engine: Engine | None = None
        self._parked: Parked | None = None
        try:
            with self._naming():
                self._start()
        except BaseException:
            self.close()
            raise

    # --- loading -----------------------------------------------------------------------------------------------------

    def _find(self, name: str, offline: bool, cancel: threading.Event | None) -> Path:
        self._notify(LoadProgress("resolve", detail=name))
        self._pulled_as = ""
        if os.sep in name or name.endswith(".gguf") or name.startswith((".", "~")):
            path = Path(name).expanduser()
            if path.exists():
                return path
        from localllm import hub
        from localllm.plan import fit

        resolved = fit.resolve(name, self._planner, offline=offline)
        self._pulled_as = resolved.pulled_as
        if resolved.path is not None:
            return Path(resolved.path)
        return Path(hub.download(resolved, progress=self._notify, cancel=cancel or threading.Event()))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Damage found anywhere while loading or asking names the model's file and the command that repairs it."""
        try:
            yield
        except BadModelFile as error:
            from localllm.checkpoint.mapped_file import label

            raise error.about(label(self.path), self._pulled_as) from error

    def _open(self) -> OpenModel:
        from localllm.models.architectures import open_model

        return open_model(self.path)

    def _start(self) -> None:
        from localllm.tokenizer.tokenizer import load_tokenizer

        started = time.monotonic()
        text = _Background(lambda: load_tokenizer(self._checkpoint))  # beside the imports, which mostly read files
        self._notify(LoadProgress("import"))
        if self.plan.device != "cpu":
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the plan numbers cards
        # in a thread of its own: torch keeps an error of its import, with it the frames of who called, and this model
        _Background(lambda: import_module("torch")).result()
        import torch

        from localllm.boot.boot import first_use  # its imports are not part of loading
        from localllm.boot.threads import kernels_are_built, serve_torch, set_threads
        from localllm.device import rss_anon_bytes
        from localllm.models.loader import LoadOptions, load_model

        sys.setswitchinterval(SWITCH_INTERVAL_S)
        device = torch.device(self.plan.device)
        if device.type == "cpu" and not kernels_are_built():
            self._notify(LoadProgress("compile", detail="kernels for this CPU, once"))
        set_threads(self.plan.threads)
        if device.type == "cuda":
            from localllm.boot.card import check_assembler, check_card, load_with_threads, use_card

            check_card(self.plan.device, self.machine.gpus[device.index or 0])
            check_assembler(self.machine.gpus[device.index or 0].capability)
            use_card(self.plan.device)
            load_with_threads(self.machine.cpu.cores_usable)
        self.tokenizer: Tokenizer = text.result()
        if self.tokenizer.chat_template:
            from localllm.chat.template import ChatTemplate

            self._template = ChatTemplate.for_tokenizer(self.tokenizer)
            self._template.warm_up()
        from localllm.llm.output_rules import OutputRules

        self.output_rules = OutputRules(self.tokenizer, self._template, self.facts.vocab_size)
        self.import_s = time.monotonic() - started
        loading = time.monotonic()
        options = LoadOptions(
            device=str(device),
            dtype=self.plan.dtype,
            kv_format=self.plan.kv,
            page_size=self.plan.page_size,
            exact=self.options.dtype == "float32",
            deterministic=self.plan.deterministic,
            activations=self.plan.activations,
            weights=self.plan.quant,
            selftest=first_use(self.plan, self.machine),
            progress=self._on_weights,
        )
        self._selftest, self._base_bytes = options.selftest, rss_anon_bytes()
        if device.type == "cuda" and self._selftest is not None and not self._selftest.records.items():
            self._notify(LoadProgress("compile", detail="kernels for this card, once; up to a minute"))
        self._model: Model = load_model(self._checkpoint, options)
        serve_torch(self._model.kernels, self.plan.threads)
        self._checkpoint.close()  # nothing reads the files from here on
        self._notify(LoadProgress("kv", detail=f"{self.plan.ctx:,} tokens"))
        self._start_engine()
        self.load_s = time.monotonic() - loading
        """seconds from the end of the imports to ready"""
        self._notify(LoadProgress("ready", detail=self.run_summary))

    def _start_engine(self) -> None:
        """An engine with empty pages over the loaded weights."""
        from localllm.boot.boot import Boot

        assert self._selftest is not None
        self._boot = Boot(
            self._model,
            self.plan,
            self._planner,
            self._selftest,
            base_bytes=self._base_bytes,
            program_bytes=self._base_bytes - self._start_bytes,
        )
        self.plan = self._boot.plan
        self._kv_bytes = self._boot.kv_bytes
        self._engine = self._boot.engine
        self._engine.start()

    def _on_weights(self, done: int, total: int) -> None:
        """Tell of every whole percent, not of every tensor."""
        percent = 100 * done // max(total, 1)
        if percent > self._percent or done == total:
            self._percent = percent
            self._notify(LoadProgress("weights", done, total))

    # --- asking ------------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too: it counts as one prompt
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        constraint: Constraint | None = None,
    ) -> Iterator[OutputDelta]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        constraint: Constraint | None = None,
    ) -> RequestOutput | list[RequestOutput] | Iterator[OutputDelta]:
        """Complete text. A prompt is a string (special tokens in it count, BOS is added) or token ids.

        One prompt gives a `RequestOutput`, a list of prompts a list of them, computed together; `stream=True` takes
        one prompt and gives its `OutputDelta`s. `constraint` is what the text must be.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            turn = self._complete(prompts, params, constraint)  # type: ignore[arg-type]
            return iter(turn) if stream else turn.answer()
        if stream:
            raise InvalidRequest(f"stream=True takes one prompt, not {len(prompts)}", "call generate once per prompt")
        turns: list[ResponseStream] = []
        try:
            for prompt in prompts:
                turns.append(self._complete(prompt, params, constraint))  # type: ignore[arg-type]  # noqa: PERF401
            return [turn.answer() for turn in turns]
        except BaseException:
            for turn in turns:  # one that fails takes the others with it: nobody would read them
                turn.abort()
            raise

    def _complete(self, prompt: Prompt, params: SamplingParams | None, constraint: Constraint | None) -> ResponseStream:
        ids = self.encode_prompt(prompt)
        return self.submit(ids, params, spec=self.output_spec(ids, chat=False, constraint=constraint))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[OutputDelta]: ...
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput | Iterator[OutputDelta]:
        """Answer a conversation. Raises InvalidRequest for a base model, which has no chat template.

        tools       what the model may call, in the OpenAI shape; a `ToolUse` says more
        constraint  what the content must be, such as `Constraint("json_schema", {...})`
        """
        use = tools if tools is None or isinstance(tools, ToolUse) else ToolUse(tuple(tools))
        offered = None if use is None or use.choice == "none" else list(use.tools)
        prompt = self.encode_chat(messages, offered, template_kwargs)
        spec = self.output_spec(prompt, chat=True, constraint=constraint, tool_use=use)
        turn = self.submit(prompt, params, splits_reasoning=True, spec=spec)
        return iter(turn) if stream else turn.answer()

    def score(self, token_ids: Sequence[int], *, chunk: int | None = None) -> np.ndarray | Iterator[np.ndarray]:
        """Log-probabilities float32 [num_tokens, vocab]; row i is the distribution of the token after `token_ids[i]`.

        The prefix cache is not read. `chunk` yields arrays of at most so many rows instead of one array: a row of a
        262k vocabulary is 1 MB.
        """
        import numpy as np

        if chunk is not None and chunk < 1:
            raise InvalidRequest(f"chunk is {chunk}, it must be at least 1", "give chunk=256")
        request = Request(list(token_ids), SamplingParams(max_tokens=1), score=True, score_chunk=chunk or 256)
        pieces = self._scores(request)
        if chunk is None:
            return np.concatenate(list(pieces))
        return (p[at : at + chunk] for p in pieces for at in range(0, len(p), chunk))

    def _scores(self, request: Request) -> Iterator[np.ndarray]:
        stream = self.engine.submit(request)
        try:
            for event in stream:
                if event.error is not None:
                    raise event.error
                if event.scores is not None:
                    yield event.scores
        finally:
            stream.abort()

    def pool(
        self, token_ids: Sequence[int], pooling: Literal["mean", "last"], listener: Callable[[TokenEvent], None]
    ) -> Callable[[], None]:
        """Queue a text for its embedding; the last event, in the engine's thread, has it as `pooled`, or an error.

        Returns what ends the request early. Raises as `check_prompt` does.
        """
        request = Request(list(token_ids), SamplingParams(max_tokens=1), pooling=pooling)
        return self.engine.submit(request, listener).abort

    def check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequest, ContextTooLong or OutOfMemory for a request that could never run."""
        self.engine.check(Request(token_ids, params))

    def pin_prefix(self, token_ids: Sequence[int]) -> None:
        """Keep the pages of this prefix longer than all others once they are computed."""
        self.engine.pin_prefix(token_ids)

    def default_params(self) -> SamplingParams:
        """What the model's files recommend."""
        known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "typical_p"}
        given = {k: v for k, v in self.facts.sampling_defaults.items() if k in known}
        return SamplingParams(**({"temperature": DEFAULT_TEMPERATURE} | given))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Text -> ids, with BOS where the model wants one and the text does not begin with it; ids stay as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        with self._naming():
            ids = self.tokenizer.encode(prompt, special=True)
        bos = self.tokenizer.bos_token_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
        opens_answer: bool = True,
    ) -> list[int]:
        """Messages -> ids through the model's chat template. Text of users never becomes control tokens.

        tools            explained in the system message where the template knows nothing of tools
        continue_final   the last message, the assistant's, is left open: the model goes on with it
        opens_answer     the text ends with what begins an answer
        """
        if self._template is None:
            raise InvalidRequest(
                f"{self.name} is a base model: its files hold no chat template",
                f'localllm run {self.name} "Once upon a time" completes text',
                param="messages",
            )
        from localllm.chat.template import encode_chat

        shaped, tools = self.output_rules.conversation(messages, tools)
        with self._naming():
            begins = opens_answer and not continue_final
            rendered = self._template.render(
                shaped, tools=tools, add_generation_prompt=begins, **(template_kwargs or {})
            )
            if continue_final:
                rendered = rendered.upto(messages[-1].get("content") or "")
            return encode_chat(self.tokenizer, rendered, shaped)

    def output_spec(
        self,
        prompt_token_ids: Sequence[int],
        *,
        chat: bool,
        constraint: Constraint | None = None,
        tool_use: ToolUse | None = None,
    ) -> OutputSpec:
        """What the answer to this prompt must be, and how it is taken apart; compiles for up to two seconds.

        chat  the prompt is a conversation from `encode_chat`

        Raises InvalidConstraint for what cannot be enforced, InvalidRequest for tools that this model cannot use.
        """
        return self.output_rules.spec(prompt_token_ids, chat=chat, constraint=constraint, tool_use=tool_use)

    def prepare_grammars(self) -> None:
        """Build what the first constrained request would wait for: for servers, while they load. 0.2 to 3 s."""
        self.output_rules.prepare()

    @property
    def tool_support(self) -> ToolSupport:
        """What the chat template can do with tools."""
        return self.output_rules.support

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        splits_reasoning: bool = False,
        spec: OutputSpec | None = None,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        listener: Callable[[OutputDelta], None] | None = None,
    ) -> ResponseStream:
        """Queue token ids. With a `listener`, pieces go to it, in the engine's thread, not to the stream.

        spec  from `output_spec()`: what the answer must be
        """
        params = params or self.default_params()
        params.check(self.facts.vocab_size)  # before anything is built from it
        params = self._with_control_stops(params)
        spec = spec or self.output_spec(prompt_token_ids, chat=splits_reasoning)
        request = Request(
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            eos_token_ids=self.tokenizer.eos_token_ids,
            request_id=request_id,
            stop_check=self._stop_check(params, spec),
            token_mask=None if spec.mask is None else spec.mask.fork(),
            cache_salt=cache_salt,
            priority=priority,
        )
        processor = OutputProcessor(self.tokenizer, spec, params.n)
        tell = None
        if listener is not None:
            tell = processor.listener(listener, lambda: self.engine.abort(request.request_id))
        return ResponseStream(self.engine.submit(request, tell), processor)

    def _with_control_stops(self, params: SamplingParams) -> SamplingParams:
        """A stop string that is a control token's text never shows in the text: stop at the token."""
        ids = [i for stop in params.stop if (i := self.tokenizer.control_text.ids.get(stop)) is not None]
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params

    def _stop_check(self, params: SamplingParams, spec: OutputSpec) -> StopCheck | None:
        if not params.stop:
            return None
        stops = params.stop, params.min_tokens, params.include_stop
        return IncrementalDetokenizer(self.tokenizer, *stops, continuing=spec.continuing, keep_ids=spec.keep_ids)

    # --- facts and end -----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The running engine. Raises ConfigError after `close()`."""
        if self._engine is None:
            raise ConfigError("this LLM is closed", "make a new one")
        return self._engine

    @property
    def has_chat_template(self) -> bool:
        """False for base models."""
        return self._template is not None

    @property
    def run_summary(self) -> str:
        """What is running, in one line."""
        kernels, noted = kernel_words(self._model.kernels), self._boot.facts_line
        plan = self.plan
        threads = f" × {plan.threads} threads" if plan.device == "cpu" else ""
        exact = "" if plan.deterministic else " · not batch-invariant"
        return (
            f"{Path(self.name).name} · {self.weight_format} · {plan.device}{threads} · {plan.dtype} activations"
            f" · KV {plan.kv} · ctx {plan.ctx:,} · {kernels}{exact}{f' · {noted}' if noted else ''}"
        )

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        return self.engine.stats()

    def state(self) -> Facts:
        """Plain data for status lines."""
        stats, plan = self.stats(), self.plan
        return Facts(
            model=self.name,
            run_summary=self.run_summary,
            device=plan.device,
            ctx=plan.ctx,
            max_ctx=min(plan.max_ctx, self.facts.max_context),
            used_tokens=stats.used_tokens,
            pages_total=stats.pages_total,
            pages_free=stats.pages_free,
            pages_cached=stats.pages_cached,
            page_size=plan.page_size,
            page_map=self.engine.scheduler.pages.pools[0].states(),
            weight_bytes=self._model.weight_bytes,
            kv_bytes=self._kv_bytes,
            kv=plan.kv,
            plan_parts=tuple(plan.parts().items()),
            have_bytes=plan.have_bytes,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_steps=stats.num_steps,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_preemptions=stats.num_preemptions,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            decode_tps=plan.decode_tps,
            has_chat_template=self.has_chat_template,
            times_kernels=self._boot.is_tuning,
            warnings=(*self.plan.warnings, *((self._doubt,) if self._doubt else ()), *self._boot.warnings),
        )

    def tune(self, seconds: float, told: Callable[[Any], None] = lambda one: None) -> list[Any]:
        """Time the kernels' tile sizes on this card, for the shapes of this model; a list of `tuning.Tuned`.

        told   called with each shape's result; KeyboardInterrupt stops, and what was timed stays
        """
        self._boot.stop_tuning()
        self.engine.clear_prefix_cache()
        length = min(self.plan.prefill_budget + 16, self.plan.ctx - 8)
        quiet = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for count in self.plan.graph_buckets or (1,):  # every kernel is used once, in all its shapes
            self.generate([[1 + i] * (length if i == 0 else 8) for i in range(count)], quiet)
        stopped = threading.Event()
        try:
            return self._boot.tune(seconds, told, stopped.is_set)
        except KeyboardInterrupt:
            stopped.set()
            return list(self._boot.tuned)

    def stop_tuning(self) -> None:
        """End the timing of tile sizes in idle moments; what was timed stays."""
        self._boot.stop_tuning()

    @property
    def num_untuned(self) -> int:
        """Shapes of kernels in use whose tiles were not timed on this card."""
        return self._boot.num_untuned

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def is_awake(self) -> bool:
        """Whether there is an engine: False asleep and after `close`."""
        return self._engine is not None

    @property
    def is_dead(self) -> bool:
        """Whether the engine stopped by itself."""
        return self._engine is not None and self._engine.is_dead

    def is_stalled(self, least_s: float) -> bool:
        """Whether the present step takes longer than `least_s`, and than steps of this model ever take.

        Until one was seen, a full prefill step is taken to last as long as decoding a tenth of its tokens.
        """
        engine = self._engine
        if engine is None or (age := engine.step_age_s) <= least_s:
            return False
        expected = self.plan.prefill_budget / 10 / self.plan.decode_tps if self.plan.decode_tps else 0.0
        return age > 3 * max(expected, engine.stats().longest_step_s)

    @property
    def resident_bytes(self) -> int:
        """What weights and pages take now."""
        return self._model.weight_bytes + (self._kv_bytes if self.is_awake else 0)

    def sleep(self) -> None:
        """Give the pages back, and on a GPU the weights' memory, too: they wait in host memory. Ends all requests."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        self._boot.release()
        if self.plan.device != "cpu" and self._parked is None:
            from localllm.models.parking import park

            self._parked = park(self._model)

    def wake(self) -> None:
        """Be ready again after `sleep`. Raises OutOfMemory when the memory is taken."""
        if self._engine is not None:
            return
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        self._start_engine()

    def close(self) -> None:
        """End all requests and free the weights. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._parked = None
        boot, model = self.__dict__.pop("_boot", None), self.__dict__.pop("_model", None)
        if boot is not None:
            boot.release()
        if model is not None:
            model.forget_layers()
        if model is not None and self.plan.device != "cpu":
            from localllm.models.parking import free_cached

            free_cached()
        self._checkpoint.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kernel_words(kernels: Mapping[str, str]) -> str:
    """Which kernels run, by layer class: equal ones together, plain torch beside others named.

    kernels   layer class, op or fused segment -> names of implementations
    """
    products: dict[str, list[str]] = {}
    for name in ("qkv", "o", "gate_up", "down", "lm_head"):
        products.setdefault(kernels.get(name, "none"), []).append(name)
    if len(products) == 1:
        words = [f"products {next(iter(products))}"]
    else:
        words = [f"{'+'.join(names)} {impl}" for impl, names in products.items()]
    attention = kernels.get("attention") or kernels.get("paged_attention", "none")
    words.append(f"attention {attention}")
    slow = [name for name in ("rms_norm", "rope", "kv_write") if kernels.get(name) == "torch" != attention]
    fused = [name for name in ("step", "decoder", "mlp", "attn_in") if name in kernels]
    if fused:
        words.append(f"fused {fused[0]} {kernels[fused[0]]}")
    return ", ".join([*words, *(f"{name} torch" for name in slow)])


class _Background:
    """A call made in another thread; its result, or its error, when asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value: Any = self._call()
            self._error: BaseException | None = None
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
