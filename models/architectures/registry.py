"""The supported architectures, one line each. All lists, error messages and lookups use this table."""

from __future__ import annotations

import re
from dataclasses import replace

from localllm.checkpoint import Checkpoint
from localllm.checkpoint.fields import Fields

from . import gguf, hf
from .afmoe import Afmoe
from .apertus import Apertus
from .arcee import Arcee
from .architecture import Architecture
from .cohere import Cohere, Cohere2, Cohere2Moe
from .config import unsupported
from .deepseek import DeepseekV2, DeepseekV3, Glm4MoeLite, Mistral4, Youtu
from .deepseek_v4 import DeepseekV4
from .dflash import Dflash
from .eagle3 import Eagle3Drafter
from .embedding_gemma2 import EmbeddingGemma2
from .encoders import Bert, ModernBert, NomicBert, XlmRoberta
from .ernie4_5 import Ernie4_5, Ernie4_5Moe
from .exaone4 import Exaone4, ExaoneMoe
from .facts import ModelFacts
from .falcon_h1 import FalconH1
from .flint import Flint
from .gemma import Gemma
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .gemma3n import Gemma3n
from .gemma4 import Gemma4
from .glm4 import Glm, Glm4
from .glm4_moe import Glm4Moe
from .glm5_next import Glm5Next
from .gpt_oss import GptOss
from .granite import Granite, GraniteMoe, HyperClovaX
from .granite_hybrid import GraniteHybrid
from .granite_swa import GraniteSwa
from .hunyuan import HunYuanDense, HunYuanMoe, HyV3
from .k2_horizon import K2Horizon
from .kimi_linear import KimiLinear, Ling3
from .kolibri1 import Kolibri1
from .laguna import Laguna
from .layers import Experts
from .lfm2 import Lfm2, Lfm2Moe, Lfm3
from .ling2 import Ling2
from .llama import Llama
from .llama4 import Llama4
from .mellum import Mellum
from .mimo_v2 import MimoV2
from .minicpm import MiniCpm
from .minimax import MiniMaxM2
from .mistral3 import Mistral3
from .mixtral import Mixtral
from .muse_glimmer import MuseGlimmer
from .names import NameMap
from .nanbeige import Nanbeige
from .nemotron import Nemotron
from .nemotron_h import NemotronH
from .olmo2 import Olmo2
from .olmo_hybrid import OlmoHybrid
from .olmoe import Olmoe
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen2_moe import Qwen2Moe
from .qwen3 import Qwen3
from .qwen3_5 import Qwen3_5, Qwen3_5Moe, Qwen3Next
from .qwen3_moe import Qwen3Moe
from .qwen4_exp import Qwen4Exp
from .seed_oss import SeedOss
from .smollm3 import SmolLM3
from .spark2_5 import Spark2_5
from .stablelm import StableLm
from .step3p5 import Step3p5

ARCHITECTURES: tuple[Architecture, ...] = (
    Llama(),
    Qwen2(),
    Qwen2Moe(),
    Qwen3(),
    Qwen3Moe(),
    Qwen3_5(),
    Qwen3_5Moe(),
    Qwen3Next(),
    Qwen4Exp(),
    Gemma(),
    Gemma2(),
    Gemma3(),
    Gemma3n(),
    Gemma4(),
    Phi3(),
    GptOss(),
    Mixtral(),
    Glm4Moe(),
    Glm5Next(),
    DeepseekV2(),  # the GGUF files of the next three have the same architecture name
    DeepseekV3(),
    DeepseekV4(),
    Glm4MoeLite(),
    Youtu(),
    K2Horizon(),
    KimiLinear(),
    Ling2(),
    Ling3(),
    Lfm2(),
    Lfm2Moe(),
    Lfm3(),
    SmolLM3(),
    Granite(),
    GraniteMoe(),
    HyperClovaX(),
    GraniteHybrid(),
    GraniteSwa(),
    MiniCpm(),
    Nanbeige(),
    Nemotron(),
    NemotronH(),
    Olmo2(),
    OlmoHybrid(),
    Olmoe(),
    SeedOss(),
    Spark2_5(),
    StableLm(),
    Glm(),
    Glm4(),
    Mistral3(),
    Mistral4(),
    MuseGlimmer(),
    Ernie4_5(),
    Ernie4_5Moe(),
    Exaone4(),
    ExaoneMoe(),
    FalconH1(),
    HunYuanDense(),
    HunYuanMoe(),
    HyV3(),
    Llama4(),
    MiniMaxM2(),
    MimoV2(),
    Mellum(),
    Arcee(),
    Apertus(),
    Afmoe(),
    Laguna(),
    Kolibri1(),
    Flint(),
    Step3p5(),
    Cohere(),
    Cohere2(),
    Cohere2Moe(),
    Dflash(),
    Eagle3Drafter(),
    Bert(),
    XlmRoberta(),
    NomicBert(),
    ModernBert(),
    EmbeddingGemma2(),
)


# class names of models that generate text or embeddings; classes for other tasks have an unsupported head
_CLASSES = re.compile(r"\w+For(CausalLM|ConditionalGeneration|MaskedLM)|(?!\w*For[A-Z])\w+Model")


def names() -> tuple[str, ...]:
    """The canonical names of the supported architectures."""
    return tuple(architecture.name for architecture in ARCHITECTURES)


def canonical(source: str) -> str:
    """The canonical name of an architecture named by a hub, config.json or GGUF header; unknown names are unchanged."""
    for one in ARCHITECTURES:
        # Without hf_wrappers: a GGUF file of the same name is a different architecture (mistral3).
        if source in (one.name, *one.hf_types, *one.hf_classes, *one.gguf_types):
            return one.name
    wrapper = source.removesuffix("ForConditionalGeneration").replace("_", "").lower() if "For" in source else ""
    names = ((one.name, name) for one in ARCHITECTURES for name in one.hf_wrappers)
    return next((ours for ours, name in names if name.replace("_", "") == wrapper), source)


def understand(checkpoint: Checkpoint) -> tuple[ModelFacts, NameMap]:
    """The facts and module names of a checkpoint, not yet checked against its tensors.

    Raises UnsupportedModel for unknown architectures, BadModelFile for values out of range.
    """
    return _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)


def _from_gguf(checkpoint: Checkpoint) -> tuple[ModelFacts, NameMap]:
    source = gguf.source_of(checkpoint)
    for one in ARCHITECTURES:
        if source in one.gguf_types:
            found = one.names(checkpoint)
            config = gguf.GgufConfig(checkpoint, found)
            facts = one.from_gguf(config)
            if config.num_experts and not any(isinstance(layer.ffn, Experts) for layer in facts.layers):
                what = f"{source} with {config.num_experts} experts (mixture of experts)"
                raise unsupported(checkpoint.path, what)
            return replace(facts, architecture=one.name), found
    raise unsupported(checkpoint.path, source or "(empty)")


def _from_hf(checkpoint: Checkpoint) -> tuple[ModelFacts, NameMap]:
    top = Fields(checkpoint.path / "config.json", checkpoint.config)
    source, model_type, text = hf.source_of(top), top.text("model_type"), checkpoint.config
    if not source:
        raise top.fail("model_type", "is missing: the file does not say what model this is")
    kind, flat = text.get("speculators_model_type"), source == "LlamaForCausalLM" and "draft_vocab_size" in text
    named = kind is None and "dflash_config" not in text and (flat or source in Eagle3Drafter.hf_classes)
    if named or kind == Eagle3Drafter.name:
        model_type = Eagle3Drafter.name  # the file states that of its layers
    elif top.raw("architectures") and not _CLASSES.fullmatch(source):
        raise unsupported(top.path, f"{source} (no language model head)")
    if "dflash_config" in text or source in Dflash.hf_classes:  # the model type is that of its layers
        if source not in Dflash.hf_classes:
            raise unsupported(top.path, source)
        model_type = model_type if model_type in Dflash.hf_types else Dflash.name
    for one in ARCHITECTURES:
        if model_type in one.hf_wrappers:
            text = top.raw("text_config")
            if text is None and "num_hidden_layers" in checkpoint.config:  # the layout in which Qwen2-VL was published
                text = checkpoint.config | {"model_type": one.hf_wrappers[model_type]}
            if not isinstance(text, dict):
                raise top.fail("text_config", "must be an object")
            model_type = Fields(top.path, text).text("model_type", one.hf_wrappers[model_type])
            break
    for one in ARCHITECTURES:
        if model_type in one.hf_types:
            found = one.names(checkpoint)
            config = hf.HfConfig(checkpoint, one.hf_values(text), model_type, one.hf_types[model_type], found)
            return replace(one.from_hf(config), architecture=one.name), found
    raise unsupported(top.path, f"{source} (model_type {model_type})" if model_type else source)
