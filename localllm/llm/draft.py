"""The model that guesses tokens for another one: its files, whether it may, and how it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config import EngineOptions
from localllm.errors import BadModelFile, ConfigError, UnsupportedModel
from localllm.models.architectures import ModelFacts, open_model

if TYPE_CHECKING:
    from localllm.models.assistant import AssistantModel
    from localllm.models.loader import LoadOptions, Model
    from localllm.tokenizer.tokenizer import Tokenizer

MOST_MORE = 512  # tokens that only one of two vocabularies has, at its end: a family's larger models reserve more


def is_wanted(options: EngineOptions) -> bool:
    """Whether a model is to guess. Raises ConfigError where none is named that could."""
    if options.speculation == "draft" and not options.draft:
        raise ConfigError("speculation is 'draft', but no draft model is named", "--draft MODEL names one")
    return bool(options.draft) and options.speculation in ("auto", "draft")


def check_head(options: EngineOptions, facts: ModelFacts, name: str) -> None:
    """Raise UnsupportedModel where the model's own head is to guess and cannot."""
    if options.speculation == "mtp" and facts.predictor is None:
        why = facts.predictor_flaw or "it has none"
        hint = "use --speculation auto, or choose files that kept the head"
        raise UnsupportedModel(f"{name} cannot guess tokens with a head of its own (MTP): {why}", hint)


class Draft:
    """One such model, before and while it is loaded. Raises what `open_model` does, and ConfigError for an encoder."""

    def __init__(self, name: str, path: Path, pulled_as: str) -> None:
        self.name, self.path, self._pulled_as = name, path, pulled_as
        with self._naming():
            self._checkpoint = open_model(path, mmproj="off")
        self.facts = self._checkpoint.facts
        if self.facts.pooling or not self.facts.causal:
            self.close()
            raise ConfigError(f"{name} embeds text: it guesses no tokens", "give --draft a model that generates text")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Damage names the draft's file."""
        try:
            yield
        except BadModelFile as error:
            from localllm.checkpoint.mapped_file import label

            raise error.about(label(self.path), self._pulled_as) from error

    def check(self, theirs: Tokenizer, model: str) -> None:
        """Raise ConfigError unless every token of the model it is to guess for is the same here.

        An assistant has no tokenizer: it reads that model's embedding, and the planner has compared their sizes.
        """
        from localllm.tokenizer.files import load_tokenizer

        if self.facts.assistant is not None:
            return
        with self._naming():
            ours = load_tokenizer(self._checkpoint)
        short, long = sorted((ours.vocab_size, theirs.vocab_size))
        pairs = ((i, ours.id_to_token(i), theirs.id_to_token(i)) for i in range(short))
        other = next((pair for pair in pairs if pair[1] != pair[2]), None)
        if other is None and long - short <= MOST_MORE:
            return
        what = f"it has {ours.vocab_size:,} tokens, not {theirs.vocab_size:,}"
        if other is not None:
            what = f"token {other[0]:,} is {other[1]!r} in the one and {other[2]!r} in the other"
        raise ConfigError(
            f"{self.name} cannot guess for {model}, whose vocabulary is another one: {what}",
            "give --draft a smaller model of the same family, or leave it out",
        )

    def load(self, options: LoadOptions, target: ModelFacts) -> Model | AssistantModel:
        """The weights as they are stored, on the same device. `options` and `target` are those of the other model."""
        from localllm.models.assistant import load_assistant
        from localllm.models.loader import load_model

        with self._naming():
            context = min(options.context, self.facts.max_context)
            own = replace(options, weights="", context=context, host_experts=(), stream_rows=0, predictor=False)
            own = replace(own, packed=None)
            if self.facts.assistant is not None:
                return load_assistant(self._checkpoint, own, target)
            return load_model(self._checkpoint, own)

    def close(self) -> None:
        """Nothing reads the files from here on. Safe to call twice."""
        self._checkpoint.close()
