"""`LLM`, the facade for one model; all code above the engine uses it.

`LLM(name)` finds the files, makes the plan, loads the weights and starts the engine (`LoadedModel`). Importing this
module does not import torch; constructing an `LLM` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from localllm.errors import Aborted, InvalidRequest
from localllm.llm.loaded_model import LoadedModel
from localllm.llm.outputs import OutputDelta, OutputProcessor, OutputSpec, RequestOutput, ResponseStream
from localllm.request import (
    Constraint,
    Message,
    PromptTokens,
    Request,
    SamplingParams,
    TokenEvent,
    ToolUse,
    embeds_only,
)

if TYPE_CHECKING:
    import numpy as np

Prompt = str | Sequence[int]
Pooling = Literal["mean", "cls", "last"]


@dataclass
class Pooled:
    """Texts that are being embedded.

    one    a single text
    size   elements of a row
    rows   per text
    """

    one: bool
    size: int
    rows: list[Future[np.ndarray]] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)

    def abort(self) -> None:
        """End those that are not done."""
        for end in self.ends:
            end()

    def array(self, rows: Sequence[np.ndarray], normalize: bool) -> np.ndarray:
        """The result of `LLM.embed`, from the results of `rows`."""
        import numpy as np

        if normalize:
            rows = [row / (float(np.linalg.norm(row)) or 1.0) for row in rows]
        return rows[0] if self.one else np.stack(rows) if rows else np.zeros((0, self.size), np.float32)


class LLM(LoadedModel):
    """One loaded model.

    name_or_path   a path, `org/repo[:quant][@revision]`, an alias, or part of a local name; downloaded if needed
    options        engine settings; None uses the default of every setting (the user's settings file is not read)
    offline        never use the network
    machine        the machine facts to plan with; None inspects this machine
    on_progress    called with a `LoadProgress` for every step that takes time
    cancel         an event that stops a download
    settings       fields of `config.EngineOptions` that override `options`, such as device, ctx, kv and max_parallel;
                   dtype="float32" also selects exact products; quant is the format that linear layers are quantized
                   to while loading: int4 | int8 | fp8 | nvfp4 | mxfp4, or auto (as stored if that fits); adapters is
                   {name: folder}

    Raises the errors of `localllm.errors`. A context manager; `close()` frees everything.
    """

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too: it counts as one prompt
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> Iterator[OutputDelta]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> RequestOutput | list[RequestOutput] | Iterator[OutputDelta]:
        """Complete text. A prompt is a string (special tokens are parsed and BOS is added) or token ids.

        One prompt returns a `RequestOutput`; a list of prompts is computed together and returns a list. `stream=True`
        takes one prompt and yields its `OutputDelta`s. `constraint` restricts the text, `adapter` names a loaded one.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            turn = self.begin_completion(prompts, params, constraint, adapter=adapter)  # type: ignore[arg-type]
            return iter(turn) if stream else turn.answer()
        if stream:
            raise InvalidRequest(f"stream=True takes one prompt, not {len(prompts)}", "call generate once per prompt")
        turns: list[ResponseStream] = []
        try:
            for prompt in prompts:
                turns.append(self.begin_completion(prompt, params, constraint, adapter=adapter))  # type: ignore[arg-type]  # noqa: PERF401
            return [turn.answer() for turn in turns]
        except BaseException:
            for turn in turns:  # if one fails, abort the others: nobody would read them
                turn.abort()
            raise

    def begin_completion(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        constraint: Constraint | None = None,
        listener: Callable[[OutputDelta], None] | None = None,
        adapter: str = "",
    ) -> ResponseStream:
        """Queue a completion: arguments as for `generate`, `listener` as for `submit`."""
        ids = self.encode_prompt(prompt)
        spec = self.output_rules.spec(ids, chat=False, constraint=constraint)
        return self.submit(ids, params, spec=spec, listener=listener, adapter=adapter)

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> Iterator[OutputDelta]: ...
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> RequestOutput | Iterator[OutputDelta]:
        """Answer a conversation or a single question. Raises InvalidRequest for a base model (no chat template).

        tools       tools the model may call, in the OpenAI format; a `ToolUse` also sets the tool choice
        constraint  what the content must match, such as `Constraint("json_schema", {...})`
        adapter     the name of a loaded adapter; "" for the model without one
        """
        turn = self.begin_chat(messages, params, tools, constraint, template_kwargs, adapter=adapter)
        return iter(turn) if stream else turn.answer()

    def begin_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        tools: ToolUse | Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        listener: Callable[[OutputDelta], None] | None = None,
        adapter: str = "",
    ) -> ResponseStream:
        """Queue a conversation: arguments as for `chat`, `listener` as for `submit`."""
        use = tools if tools is None or isinstance(tools, ToolUse) else ToolUse(tuple(tools))
        offered = None if use is None or use.choice == "none" else list(use.tools)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = self.encode_chat(messages, offered, template_kwargs)
        spec = self.output_rules.spec(prompt, chat=True, constraint=constraint, tool_use=use)
        return self.submit(prompt, params, splits_reasoning=True, spec=spec, listener=listener, adapter=adapter)

    def score(self, prompt: Prompt, *, chunk: int | None = None) -> np.ndarray | Iterator[np.ndarray]:
        """Return log-probabilities float32 [num_tokens, vocab]; row i is the distribution of the token after token i.

        Text is tokenized with `encode_prompt`. The prefix cache is not used. With `chunk`, yields arrays of up to that
        many rows instead of one array: a row of a 262k vocabulary is 1 MB.
        """
        import numpy as np

        if chunk is not None and chunk < 1:
            raise InvalidRequest(f"chunk must be at least 1, not {chunk}", "use chunk=256")
        request = Request(
            self.encode_prompt(prompt), SamplingParams(max_tokens=1), score=True, score_chunk=chunk or 256
        )
        pieces = self._scores(request)
        if chunk is None:
            return np.concatenate(list(pieces))
        return (p[at : at + chunk] for p in pieces for at in range(0, len(p), chunk))

    def begin_logprobs(
        self, token_ids: Sequence[int], start: int, listener: Callable[[TokenEvent], None]
    ) -> Callable[[], None]:
        """Queue token ids for the log-probabilities of those from `start` (at least 1) on, each given all before it.

        Tokens before `start` may come from the prefix cache. The last event, in the engine's thread, carries them as
        `prompt_logprobs`, after one None, or an error. Returns a function that aborts the request.
        """
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=start)
        return self.engine.submit(Request(list(token_ids), params), listener).abort

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

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> np.ndarray:
        """Embed text by pooling its final hidden states: float32 [size], or [num_texts, size] for a list of texts.

        pooling    the mean over all tokens, the first token (cls) or the last one; None uses `default_pooling`
        normalize  scale to length 1, so a dot product is the cosine similarity
        """
        waiting = self.begin_embed(texts, pooling)
        try:
            return waiting.array([future.result() for future in waiting.rows], normalize)
        except BaseException:
            waiting.abort()
            raise

    def begin_embed(self, texts: Prompt | Sequence[Prompt], pooling: Pooling | None = None) -> Pooled:
        """Queue texts for embedding. Raises the errors of `check_prompt`."""
        one = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        prompts = [self.encode_text(text) for text in ([texts] if one else texts)]  # type: ignore[arg-type,list-item]
        waiting = Pooled(one, self.facts.embedding_size)
        try:
            for ids in prompts:
                waiting.rows.append(Future())
                waiting.rows[-1].set_running_or_notify_cancel()  # else cancelling a task that waits for it would end it
                waiting.ends.append(self.pool(ids, pooling, partial(_pooled, waiting.rows[-1])))
        except BaseException:
            waiting.abort()
            raise
        return waiting

    @property
    def default_pooling(self) -> Pooling:
        """The pooling the model was trained with; "mean" for one that generates text."""
        return self.facts.pooling or "mean"  # type: ignore[return-value]

    def pool(
        self, token_ids: Sequence[int], pooling: Pooling | None, listener: Callable[[TokenEvent], None]
    ) -> Callable[[], None]:
        """Queue a text for embedding; the last event, in the engine's thread, carries it as `pooled`, or an error.

        Returns a function that aborts the request. Raises the errors of `check_prompt`.
        """
        request = Request(list(token_ids), SamplingParams(max_tokens=1), pooling=pooling or self.default_pooling)
        return self.engine.submit(request, listener).abort

    def check_prompt(self, token_ids: Sequence[int], params: SamplingParams, pooling: Pooling | None = None) -> None:
        """Raise InvalidRequest, ContextTooLong or OutOfMemory for a request that could never run."""
        self.engine.check(Request(token_ids, params, pooling=pooling or ""))

    def default_params(self) -> SamplingParams:
        """Sampling parameters recommended by the model's files or its vendor, else the built-in defaults."""
        return SamplingParams(**{name: value for name, (value, _) in self.sampling.items()})

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt and add BOS if the model expects it and it is missing; token ids are returned unchanged."""
        if not isinstance(prompt, str):
            return list(prompt)
        with self._explained_errors():
            ids = self.tokenizer.encode(prompt, special=True)
        bos = self.tokenizer.bos_token_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def encode_text(self, text: Prompt, limit: int | None = None) -> list[int]:
        """Tokenize a text to embed, with the special tokens its model puts around it; token ids are left unchanged.

        limit   maximum number of tokens; longer text is truncated
        """
        if not isinstance(text, str) or not self.facts.pooling:
            return self.encode_prompt(text)[:limit]
        before, behind = self.tokenizer.around
        with self._explained_errors():
            ids = self.tokenizer.encode(text, special=True)
        room = None if limit is None else max(0, limit - len(before) - len(behind))
        return [*before, *ids[:room], *behind]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
        opens_answer: bool = True,
    ) -> list[int]:
        """Tokenize messages with the model's chat template. Message text never becomes control tokens.

        tools            described in the system message if the template does not support tools
        continue_final   leave the last message, the assistant's, open for the model to continue
        opens_answer     end the prompt with the template's start of an answer
        """
        if self.facts.pooling:
            raise embeds_only(self.name)
        if self._template is None:
            raise InvalidRequest(
                f"{self.name} is a base model without a chat template",
                f'`localllm run {self.name} "Once upon a time"` completes text',
                param="messages",
            )
        from localllm.chat.template import encode_chat

        pixels: list[np.ndarray] = []
        if any(not isinstance(message.get("content") or "", str) for message in messages):
            from localllm.llm.pictures import encode_with_images, take_images

            messages, pixels = take_images(messages, self.facts.vision, self.plan.ctx)  # type: ignore[assignment]
        shaped, tools = self.output_rules.conversation(messages, tools)
        with self._explained_errors():
            begins = opens_answer and not continue_final
            rendered = self._template.render(
                shaped,
                tools=tools,
                add_generation_prompt=begins,
                continue_final_message=continue_final,
                **(template_kwargs or {}),
            )
            if pixels and self.facts.vision is not None:
                return encode_with_images(self.tokenizer, rendered, self.facts.vision, pixels)
            return encode_chat(self.tokenizer, rendered)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        splits_reasoning: bool = False,
        spec: OutputSpec | None = None,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
        listener: Callable[[OutputDelta], None] | None = None,
    ) -> ResponseStream:
        """Queue token ids. A `listener` receives the deltas, in the engine's thread, instead of the stream.

        spec     rules for the answer, from `output_rules.spec()`
        adapter  the name of a loaded adapter
        """
        params = params or self.default_params()
        params.check(self.facts.vocab_size)  # before anything is built from them
        # a stop string that is a control token never appears in decoded text: stop at the token instead
        controls = [i for stop in params.stop if (i := self.tokenizer.control_text.ids.get(stop)) is not None]
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *controls))
        spec = spec or self.output_rules.spec(prompt_token_ids, chat=splits_reasoning)
        processor = OutputProcessor(self.tokenizer, spec, params)
        request = Request(
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            eos_token_ids=self.tokenizer.eos_token_ids,
            adapter=adapter,
            stop_check=processor.stop_check,
            token_mask=None if spec.mask is None else spec.mask.fork(),
            cache_salt=cache_salt,
            priority=priority,
            images=prompt_token_ids.images if isinstance(prompt_token_ids, PromptTokens) else (),
        )
        tell = processor.listener(listener, lambda: self.engine.abort(request.request_id)) if listener else None
        return ResponseStream(self.engine.submit(request, tell), processor)

    def tune(self, seconds: float, on_tuned: Callable[[Any], None] = lambda one: None) -> list[Any]:
        """Tune the kernels' tile sizes on this GPU for the shapes of this model; returns a list of `tuning.Tuned`.

        on_tuned  called with each shape's result; KeyboardInterrupt stops and keeps the results so far
        """
        self.boot.stop_tuning()
        self.engine.clear_prefix_cache()
        length = min(self.plan.prefill_budget + 16, self.plan.ctx - 8)
        quiet = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for count in self.plan.graph_buckets or (1,):  # use every kernel once, in all its shapes
            self.generate([[1 + i] * (length if i == 0 else 8) for i in range(count)], quiet)
        return self.boot.tune(seconds, on_tuned)


def _pooled(result: Future[np.ndarray], event: TokenEvent) -> None:
    """Called in the engine's thread."""
    if event.error is not None:
        result.set_exception(event.error)
    elif event.pooled is not None:
        result.set_result(event.pooled)
    elif event.finish_reason is not None:
        result.set_exception(Aborted("the request was stopped"))
