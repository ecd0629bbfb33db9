"""Life cycle of a loaded model: find the files, plan, load the weights, start the engine; sleep, wake, close.

`LLM` adds the request methods.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localllm.config import EngineOptions
from localllm.errors import BadModelFile, ConfigError, LocalLLMError, ModelNotFound
from localllm.interface import Facts
from localllm.llm.adapted import AdaptedModel
from localllm.llm.sampling import recommended
from localllm.llm.torch_library import import_fast, load_library
from localllm.request import LoadProgress, OnProgress, cannot_chat
from localllm.terminal import clean_line

if TYPE_CHECKING:
    import torch

    from localllm.chat.template import ChatTemplate
    from localllm.device import GpuFacts, MachineFacts
    from localllm.device.nvml import PowerMeter
    from localllm.engine.engine import Engine
    from localllm.engine.metrics import EngineStats
    from localllm.llm.draft import Draft
    from localllm.models.architectures import ModelFacts
    from localllm.models.loader import Model
    from localllm.models.parallel import SleepingRanks
    from localllm.models.sleep import SleepingWeights
    from localllm.plan.plan import Plan
    from localllm.tokenizer.tokenizer import Tokenizer

# interpreter switch interval: with a busy interface thread the engine keeps 95 % of its steps, 78 % at Python's 5e-3
SWITCH_INTERVAL_S = 1e-4


class LoadedModel(AdaptedModel):
    """One model in memory, with an engine while it is awake. `LLM` documents the arguments."""

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        offline: bool = False,
        machine: MachineFacts | None = None,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        owns_process: bool = False,
        for_chat: bool = False,
        **settings: Any,
    ) -> None:
        """`owns_process`: the process runs only our command, so objects from before the load are frozen for the GC.
        `for_chat`: refuse a model that cannot chat before its weights are loaded.
        """
        from localllm.device import rss_anon_bytes
        from localllm.llm.kept import KeptWeights
        from localllm.plan.planner import Planner

        self._start_bytes = rss_anon_bytes()
        self._notify = on_progress or (lambda progress: None)
        self._percent = -1
        self._owns_process = owns_process
        self.name = os.fspath(name_or_path)
        self.options = replace(options or EngineOptions(), **settings)  # as requested; `plan`: as they apply
        self._planner = Planner.here(self.options, machine)
        self.machine: MachineFacts = self._planner.machine
        # not a daemon, so the process waits for it on exit: loading a library during teardown crashes the process
        threading.Thread(target=load_library, name="torch", daemon=False).start()
        from localllm.models.architectures import open_model  # overlaps with the thread

        self.path, self._pulled_as = self._find(self.name, offline, cancel)  # the file or folder that was loaded
        with self._explained_errors():
            self._checkpoint = open_model(self.path, self.options.mmproj)
            self.facts: ModelFacts = self._checkpoint.facts
        if for_chat and not self.facts.has_chat_template:
            raise cannot_chat(clean_line(self.name), bool(self.facts.pooling))
        self._draft_flaw = ""  # why the drafter next to the model is not used
        self._draft = self._find_draft(offline, cancel)
        self.sampling = recommended(self.facts, self.path)  # default parameters and their sources
        self.plan: Plan = self._planner.plan(self.facts, self.path)
        if not self.plan.fits:
            raise self.plan.error(self.name)
        self._kept = KeptWeights(self._checkpoint, self.plan, self.options.packed_store)
        # as stored, or the format that the linear layers are quantized to while loading
        self.weight_format = self.plan.quant or self.facts.stored_format
        flaw = self.facts.predictor_flaw if self.plan.speculation == "auto" else ""
        self._model_warnings = tuple(
            filter(None, (self._checkpoint.doubt, self._checkpoint.unread, flaw, self._draft_flaw))
        )
        self._template: ChatTemplate | None = None
        self._engine: Engine | None = None
        self._sleeping: SleepingWeights | SleepingRanks | None = None
        self._meter: PowerMeter | None = None
        self.keeps_pace = False  # whether `close` records the decode speed for the next plan
        self.keeps_weights = True  # whether `close` writes repacked weights that no idle time was left for
        try:
            with self._explained_errors():
                self._start()
        except BaseException:
            self.close()
            raise

    # --- loading -----------------------------------------------------------------------------------------------------

    def _find(self, name: str, offline: bool, cancel: threading.Event | None) -> tuple[Path, str]:
        """Return (the model's path, downloaded if needed; its name for `localllm pull`)."""
        self._notify(LoadProgress("resolve", detail=name))
        if os.sep in name or name.endswith(".gguf") or name.startswith((".", "~")):
            path = Path(name).expanduser()
            if path.exists():
                return path, ""
        from localllm import hub
        from localllm.plan import fit

        resolved = fit.resolve(name, self._planner, offline=offline)
        if resolved.path is not None:
            return Path(resolved.path), resolved.pulled_as
        if not self.machine.gpus:
            from localllm.kernels.cpu.build import start_build

            start_build()  # takes 15 s on two cores, while the model is downloaded
        path = hub.download(resolved, progress=self._notify, cancel=cancel or threading.Event())
        return path, resolved.pulled_as

    def _find_draft(self, offline: bool, cancel: threading.Event | None) -> Draft | None:
        """The draft model: the one that the options name, or the drafter next to the model. The plan includes it."""
        from localllm.llm.draft import Draft, check_head, is_wanted
        from localllm.plan.fit import drafter_beside

        check_head(self.options, self.facts, self.name)
        beside = drafter_beside(self._checkpoint.path, self.options, self.facts)
        if beside is not None:
            return self._drafter_beside(beside)
        if not is_wanted(self.options):
            return None
        try:
            where = self._find(self.options.draft, offline, cancel)
        except ModelNotFound as error:
            raise ModelNotFound(f"draft model: {error.message}", error.hint, fixes=error.fixes) from error
        found = Draft(self.options.draft, *where)
        self._planner = replace(self._planner, draft=found.facts)
        return found

    def _drafter_beside(self, path: Path) -> Draft | None:
        """The drafter next to the model; None, with a warning, if it cannot be used. Nobody asked for it."""
        from localllm.llm.draft import Draft
        from localllm.plan.fit import planner_with

        draft, why = None, "there is no room for it"
        try:
            draft = Draft(path.name, path, "")
            if not draft.facts.only_drafts:
                why = "it is a model of its own"
            elif planner := planner_with(self._planner, draft.facts, self.facts, self.path):
                self._planner = planner
                return draft
        except LocalLLMError as error:
            why = error.message
        if draft is not None:
            draft.close()
        self._draft_flaw = f"{path.name} next to the model does not draft for it: {why}"
        return None

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Add the model's file and the repair command to BadModelFile errors, and explain device errors."""
        try:
            yield
        except BadModelFile as error:
            from localllm.checkpoint.mapped_file import label

            raise error.about(label(self.path), self._pulled_as) from error
        except LocalLLMError:
            raise
        except Exception as error:
            if "torch" not in sys.modules:
                raise
            from localllm.boot.claim import out_of_memory
            from localllm.engine.failures import explained, is_device_lost, is_out_of_memory

            if is_out_of_memory(error):
                raise out_of_memory(error, self.plan.device, self.machine) from error
            if not is_device_lost(error):
                raise
            raise explained(error) from error

    def _start(self) -> None:
        from localllm.llm.output_rules import OutputRules
        from localllm.tokenizer.files import load_tokenizer
        from localllm.tokenizer.tokenizer_json import no_collection

        with no_collection():
            text = ThreadPoolExecutor(1).submit(load_tokenizer, self._checkpoint)  # overlaps with imports
            self._notify(LoadProgress("import"))
            device = self._claim_device()
            self.tokenizer: Tokenizer = text.result()
            if self._owns_process:
                gc.freeze()  # imported objects stay for good, and scanning them takes 0.15 s
        if self._draft is not None:
            self._draft.check(self.tokenizer, self.name)
        if self.tokenizer.chat_template and not self.facts.pooling:
            from localllm.chat.template import ChatTemplate

            self._template = ChatTemplate(self.tokenizer)
            self._template.warm_up()
        self.output_rules = OutputRules(self.tokenizer, self._template, self.facts.vocab_size)
        loading = time.monotonic()
        self._load_weights(device)
        self._notify(LoadProgress("kv", detail=f"{self.plan.ctx:,} tokens"))
        self._start_engine()
        self._load_adapters()
        self.load_s = time.monotonic() - loading  # from the end of the imports to ready
        self._notify(LoadProgress("ready", detail=self.run_summary))

    def _claim_device(self) -> torch.device:
        """Import torch and set up the threads and the GPU it uses."""
        if self.plan.device != "cpu":
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the plan numbers GPUs in this order
        # in a separate thread: torch keeps an import error alive, and with it the caller's frames and this model
        fast = self._owns_process and self.plan.device == "cpu"
        ThreadPoolExecutor(1).submit(import_fast if fast else lambda: import_module("torch")).result()
        import torch

        from localllm.boot.claim import check_room, claim_card, set_threads
        from localllm.device import machine
        from localllm.device.trouble import trouble
        from localllm.kernels.cpu.build import is_built

        import_module("localllm.boot.boot")  # its imports are not part of loading
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        device = torch.device(self.plan.device)
        if (device.type == "cpu" or self.plan.host_experts) and not is_built():
            self._notify(LoadProgress("compile", detail="kernels for this CPU, once"))
        set_threads(self.plan.threads)
        if device.type == "cuda":
            now = machine()  # before this process holds memory of the GPU, which the plan counts as its own
            claim_card(self.plan.device, self.machine)
            check_room(self.plan, self.machine, now)
            if said := trouble(*(card.index for card in self._cards)):
                self._model_warnings += (said,)
        return device

    def _load_weights(self, device: torch.device) -> None:
        from localllm.boot.boot import first_use
        from localllm.boot.claim import serve_torch
        from localllm.boot.profile import Neighbours
        from localllm.boot.ranks import load
        from localllm.device import rss_anon_bytes
        from localllm.models.loader import LoadOptions
        from localllm.models.placement import uniform

        packed = self._kept.open()
        drafting = self._draft.drafting if self._draft is not None and self.plan.num_drafts else ()
        options = LoadOptions(
            device=str(device),
            dtype=self.plan.dtype,
            kv_format=self.plan.kv,
            page_size=self.plan.page_size,
            context=self.plan.ctx,
            exact=self.options.dtype == "float32",
            deterministic=self.plan.deterministic,
            activations=self.plan.activations,
            weights=self.plan.quant,
            host_experts=uniform(self.facts, self.plan.host_experts),
            predictor=self.plan.speculation in ("auto", "mtp") and not drafting,
            drafting=drafting,
            stream_rows=self.plan.stream_rows,
            selftest=first_use(self.plan.device, self.machine),
            progress=self._on_weights,
            packed=packed,
        )
        read = 0 if packed is None else packed.read_bytes  # weights already in memory
        Neighbours.changes += 1
        self._since = Neighbours.changes
        self._selftest, self._base_bytes = options.selftest, rss_anon_bytes() - read
        if device.type == "cuda" and self._selftest is not None and not self._selftest.records.items():
            self._notify(LoadProgress("compile", detail="kernels for this GPU, once; up to a minute"))
        self._model: Model = load(self._checkpoint, options, self.plan)
        self.adapters = self._no_adapters()
        self._drafter = (
            self._draft.load(options, self._model) if self._draft is not None and self.plan.num_drafts else None
        )
        serve_torch(self._model.kernels, self.plan.threads)
        if not self.plan.host_experts:  # experts in host memory are read again when their placement changes
            self._checkpoint.close()  # the files are not read again
        if self._draft is not None:
            self._draft.close()

    def _start_engine(self) -> None:
        """Start an engine with empty pages for the loaded weights."""
        from localllm.boot.boot import Boot

        assert self._selftest is not None
        self.boot = Boot(
            self._model,
            self.plan,
            self._planner,
            self._selftest,
            draft=self._drafter,
            adapters=self.adapters,
            base_bytes=self._base_bytes,
            program_bytes=self._base_bytes - self._start_bytes,
            since=self._since,
        )
        self.plan = self.boot.plan
        self._engine = self.boot.engine
        self._kv_bytes = self.boot.kv_bytes
        self._keep_on_disk(self._engine)
        self._engine.when_idle(self._kept.settle, first=True)
        self._engine.when_idle(self._kept.write)
        self.boot.start()

    def _keep_on_disk(self, engine: Engine) -> None:
        """If the options ask for it, keep computed pages on disk for the next process and for after a sleep."""
        if self.options.kv_store and self.plan.prefix_cache and not self.facts.pooling:
            from localllm.llm.kept import page_files

            files = [*self._checkpoint.files]
            if self._draft is not None and self._draft.drafting:  # whose keys and values are in the same pages
                files += self._draft.files
            parts = files, self.facts, self.plan, engine.runner.cache, self.weight_format
            engine.keep_on_disk(page_files(*parts, self.options.kv_store))

    def _on_weights(self, done: int, total: int) -> None:
        """Report progress once per percent, not once per tensor."""
        percent = 100 * done // max(total, 1)
        if percent > self._percent or done == total:
            self._percent = percent
            self._notify(LoadProgress("weights", done, total))

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The running engine. Raises ConfigError while asleep and after `close()`."""
        if self._engine is None and "_model" in self.__dict__:
            raise ConfigError("this LLM is asleep", "call wake() first")
        if self._engine is None:
            raise ConfigError("this LLM is closed", "create a new one")
        return self._engine

    @property
    def has_chat_template(self) -> bool:
        """False for base models."""
        return self._template is not None

    @property
    def run_summary(self) -> str:
        """The run summary, in one line; it begins with why the engine stopped, if it has."""
        from localllm.boot.boot import kernel_words
        from localllm.plan.quality import rounding_words

        kernels, noted, plan = kernel_words(self._model.kernels), self.boot.facts_line, self.plan
        activations = rounding_words(self.path, plan.device, plan.dtype, self.boot.rounded)
        exact = "" if plan.deterministic else " · not batch-invariant"
        stopped = f"stopped: {self.engine.failure} · " if self.is_dead else ""
        return (
            f"{stopped}{Path(self.name).name} · {self.weight_format} · {plan.computed_by} · {activations}"
            f" · KV {plan.kv} · ctx {plan.ctx:,} · {kernels}{exact}{f' · {noted}' if noted else ''}{self._adapted}"
        )

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def image_tokens(self) -> int:
        """Maximum tokens per image; 0 for a text-only model."""
        return 0 if self.facts.vision is None else self.facts.vision.tokens

    def state(self) -> Facts:
        """Plain data for status lines: facts of the plan and the engine's counters."""
        stats, plan, store = self.stats(), self.plan, self.engine.store
        kept = "" if store is None else store.files.note, self._kept.note
        return Facts(
            model=self.name,
            run_summary=self.run_summary,
            device=plan.device,
            ctx=plan.ctx,
            max_ctx=min(plan.max_ctx, self.facts.max_context),
            page_size=plan.page_size,
            page_map=self.engine.scheduler.pages.pools[0].states(),
            weight_bytes=self.boot.weight_bytes,
            kv_bytes=self._kv_bytes,
            kv=plan.kv,
            plan_parts=tuple(plan.parts().items()),
            have_bytes=plan.have_bytes,
            decode_tps=plan.decode_tps,
            has_chat_template=self.has_chat_template,
            image_tokens=self.image_tokens,
            embeds=bool(self.facts.pooling),
            times_kernels=self.boot.is_tuning,
            sampling=tuple((name, value, why) for name, (value, why) in self.sampling.items()),
            warnings=(*plan.warnings, *self._model_warnings, *self.boot.warnings, *filter(None, kept)),
            **{f.name: getattr(stats, f.name) for f in fields(Facts) if hasattr(stats, f.name)},
        )

    def live_state(self) -> Facts:
        """`state` with the memory currently held by the process or on the GPU, and the GPU's power draw."""
        from localllm.device import rss_anon_bytes
        from localllm.device.nvml import PowerMeter

        state = self.state()
        if not state.device.startswith("cuda"):
            return replace(state, held_bytes=rss_anon_bytes())
        import torch

        if self._meter is None:
            self._meter = PowerMeter(self._card.index)
        held = int(torch.cuda.memory_reserved(state.device))
        return replace(state, held_bytes=held, power_w=float(self._meter.watts()))

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def is_awake(self) -> bool:
        """True while there is an engine: False when asleep and after `close`."""
        return self._engine is not None

    @property
    def is_dead(self) -> bool:
        """True if the engine has stopped after a failure."""
        return self._engine is not None and self._engine.is_dead

    @property
    def _card(self) -> GpuFacts:
        return self.machine.gpus[int(self.plan.device.removeprefix("cuda:") or 0)]

    @property
    def _cards(self) -> list[GpuFacts]:
        """The GPUs of all ranks."""
        devices = [rank.device for rank in self.plan.ranks] or [self.plan.device]
        return [self.machine.gpus[int(device.removeprefix("cuda:") or 0)] for device in devices]

    @property
    def why_dead(self) -> str:
        """Why the engine stopped, and any problem the driver reports for its GPUs."""
        from localllm.device.trouble import trouble

        said = "" if self._engine is None else self._engine.failure
        cards = [] if self.plan.device == "cpu" else self._cards
        return "; ".join(filter(None, (said, trouble(*(card.index for card in cards)) if cards else "")))

    def is_stalled(self, least_s: float) -> bool:
        """True if the current step has run for more than `least_s` and three times the longest step seen or expected.

        A full prefill step is expected to take as long as decoding a tenth of its tokens.
        """
        engine = self._engine
        if engine is None or (age := engine.step_age_s) <= least_s:
            return False
        expected = self.plan.prefill_budget / 10 / self.plan.decode_tps if self.plan.decode_tps else 0.0
        return age > 3 * max(expected, engine.stats().longest_step_s)

    @property
    def resident_bytes(self) -> int:
        """Bytes held by weights and pages now."""
        return self.boot.weight_bytes + (self._kv_bytes if self.is_awake else 0)

    def sleep(self) -> None:
        """Free the pages and, on a GPU with memory of its own, move the weights to the host's. Ends all requests.

        With `engine.kv_store`, pages are restored from disk after waking.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        del engine  # its GPU memory is freed below
        self._tell_neighbours()
        self.boot.release()
        self.adapters.clear()
        if self.plan.device != "cpu" and self._sleeping is None:
            from localllm.models.parallel import asleep
            from localllm.models.sleep import free_cached

            if any(gpu.unified for gpu in self.machine.gpus):  # it shares the host's memory: a copy would free nothing
                free_cached()
            else:
                self._sleeping = asleep(self._model, self._drafter)

    @staticmethod
    def _tell_neighbours() -> None:
        """Tell other models in this process that memory was freed."""
        from localllm.boot.profile import Neighbours

        Neighbours.changes += 1

    def wake(self) -> None:
        """Restore the model after `sleep`. Raises OutOfMemory when the memory is no longer free."""
        if self._engine is not None:
            return
        with self._explained_errors():
            if self._sleeping is not None:
                self._sleeping.wake()
                self._sleeping = None
            self._start_engine()

    def close(self) -> None:
        """End all requests and free the weights. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            if self.keeps_pace and (tps := engine.stats().fastest_tps):
                from localllm.plan import speeds

                speeds.remember(self.facts, self.plan, self.machine, tps)
            engine.close()
        has_answered = engine is not None and engine.stats().num_prompt_tokens > 0
        self._kept.close(lambda: has_answered and self.keeps_weights, self._notify)
        self._checkpoint.close()
        self._sleeping = None
        self._notify = lambda progress: None  # may refer to what holds this object
        if "adapters" in self.__dict__:
            self.adapters.detach()
        boot, model = self.__dict__.pop("boot", None), self.__dict__.pop("_model", None)
        if boot is not None:
            boot.release()
        drafter = self.__dict__.pop("_drafter", None)
        for loaded in (model, drafter):
            if loaded is not None:
                loaded.forget_layers()
        had_model, loaded = model is not None, None
        if had_model:
            self._tell_neighbours()
        del engine, boot, model, drafter  # frees their GPU memory
        if had_model and self.plan.device != "cpu":
            from localllm.models.sleep import free_cached

            with suppress(RuntimeError):  # a lost GPU, which has been explained
                free_cached()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.keeps_weights &= error[0] is None
        self.close()
