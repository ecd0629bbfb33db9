"""The draft model for speculative decoding: its files, compatibility checks, and loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config import EngineOptions
from localllm.errors import BadModelFile, ConfigError, UnsupportedModel
from localllm.models.architectures import ModelFacts, open_model
from localllm.plan.planner import MOST_MORE

if TYPE_CHECKING:
    from localllm.models.architectures.layers import LayerFacts
    from localllm.models.assistant import AssistantModel
    from localllm.models.dflash import DFlashModel
    from localllm.models.eagle3 import Eagle3Model
    from localllm.models.loader import LoadOptions, Model
    from localllm.tokenizer.tokenizer import Tokenizer


def is_wanted(options: EngineOptions) -> bool:
    """True if a draft model is to be used. Raises ConfigError if speculation is "draft" but no model is named."""
    if options.speculation == "draft" and not options.draft:
        raise ConfigError("speculation is 'draft', but no draft model is named", "--draft MODEL names one")
    return bool(options.draft) and options.speculation in ("auto", "draft")


def check_head(options: EngineOptions, facts: ModelFacts, name: str) -> None:
    """Raise UnsupportedModel if speculation is "mtp" and the model has no usable MTP head."""
    if options.speculation == "mtp" and facts.predictor is None:
        why = facts.predictor_flaw or "it has none"
        hint = "use --speculation auto, or a checkpoint that includes the MTP head"
        raise UnsupportedModel(f"{name} cannot draft tokens with its own MTP head: {why}", hint)


class Draft:
    """A draft model, opened and then loaded. Raises the errors of `open_model`, and ConfigError for an encoder."""

    def __init__(self, name: str, path: Path, pulled_as: str) -> None:
        self.name, self.path, self._pulled_as = name, path, pulled_as
        with self._named_errors():
            self._checkpoint = open_model(path, mmproj="off")
        self.facts = self._checkpoint.facts
        if self.facts.pooling or not self.facts.causal:
            self.close()
            raise ConfigError(
                f"{name} is an embedding model and cannot draft tokens", "give --draft a model that generates text"
            )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the draft model's file to BadModelFile errors."""
        try:
            yield
        except BadModelFile as error:
            from localllm.checkpoint.mapped_file import label

            raise error.about(label(self.path), self._pulled_as) from error

    def check(self, theirs: Tokenizer, model: str) -> None:
        """Raise ConfigError unless the draft's vocabulary matches that of the target `model`.

        A drafter that cannot run alone has no tokenizer: it uses the target's embedding, and the planner has compared
        their sizes.
        """
        from localllm.tokenizer.files import load_tokenizer

        if self.facts.only_drafts:
            return
        with self._named_errors():
            ours = load_tokenizer(self._checkpoint)
        short, long = sorted((ours.vocab_size, theirs.vocab_size))
        pairs = ((i, ours.id_to_token(i), theirs.id_to_token(i)) for i in range(short))
        other = next((pair for pair in pairs if pair[1] != pair[2]), None)
        if other is None and long - short <= MOST_MORE:
            return
        what = f"it has {ours.vocab_size:,} tokens, not {theirs.vocab_size:,}"
        if other is not None:
            what = f"token {other[0]:,} is {other[1]!r} in the draft and {other[2]!r} in {model}"
        raise ConfigError(
            f"{self.name} cannot draft for {model}, which has a different vocabulary: {what}",
            "give --draft a smaller model of the same family, or leave it out",
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with its weights."""
        return tuple(self._checkpoint.files)

    @property
    def drafting(self) -> tuple[LayerFacts, ...]:
        """The layers whose keys and values are kept with the target's."""
        return self.facts.layers if self.facts.follower is not None else ()

    def load(self, options: LoadOptions, target: Model) -> Model | AssistantModel | DFlashModel | Eagle3Model:
        """Load the weights as stored, on the target's device. `options` are those that the target was loaded with."""
        from localllm.models.assistant import load_assistant
        from localllm.models.dflash import load_dflash
        from localllm.models.eagle3 import load_eagle3
        from localllm.models.loader import load_model

        with self._named_errors():
            context = min(options.context, self.facts.max_context)
            own = replace(options, weights="", context=context, host_experts=(), stream_rows=0, predictor=False)
            own = replace(own, packed=None, drafting=())
            if self.facts.assistant is not None:
                return load_assistant(self._checkpoint, own, target.facts)
            if self.facts.dflash is not None:
                return load_dflash(self._checkpoint, own, target)
            if self.facts.eagle3 is not None:
                return load_eagle3(self._checkpoint, replace(own, context=options.context), target)
            return load_model(self._checkpoint, own)

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self._checkpoint.close()
