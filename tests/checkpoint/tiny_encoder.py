"""A tiny BERT as sentence-transformers keeps it: weights, WordPiece tokenizer, pooling by the first token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models

HIDDEN, INNER, LAYERS, CONTEXT = 48, 64, 2, 64
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "sea", "sun", "hill", "##s", "is", "blue", *"abcdefghijklmnop"]
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": len(WORDS),
    "max_position_embeddings": CONTEXT,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}


def tensors() -> dict[str, tuple[str, list[int], bytes]]:
    """Random weights under transformers' names, F32."""
    shapes: dict[str, list[int]] = {
        "embeddings.word_embeddings.weight": [len(WORDS), HIDDEN],
        "embeddings.position_embeddings.weight": [CONTEXT, HIDDEN],
        "embeddings.token_type_embeddings.weight": [2, HIDDEN],
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        start = f"encoder.layer.{layer}."
        sizes = {f"attention.self.{name}": [HIDDEN, HIDDEN] for name in ("query", "key", "value")}
        sizes |= {"attention.output.dense": [HIDDEN, HIDDEN], "intermediate.dense": [INNER, HIDDEN]}
        sizes |= {"output.dense": [HIDDEN, INNER]}
        for module, size in sizes.items():
            shapes |= {f"{start}{module}.weight": size, f"{start}{module}.bias": size[:1]}
        norms += [f"{start}attention.output.LayerNorm", f"{start}output.LayerNorm"]
    shapes |= {f"{norm}.{end}": [HIDDEN] for norm in norms for end in ("weight", "bias")}
    draw = np.random.default_rng(5)
    made = {}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape, np.float32) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        values += np.float32(name.endswith("LayerNorm.weight"))
        made[name] = ("F32", shape, values.astype("<f4").tobytes())
    return made


def tokenizer() -> dict[str, Any]:
    """tokenizer.json with [CLS] before a text and [SEP] behind it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = {name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]"))
    text = {"Sequence": {"id": "A", "type_id": 0}}
    normal = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": WORDS[index], **flags} for index in range(4)],
        "normalizer": {"type": "BertNormalizer", **normal},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text, last],
            "pair": [first, text, last],
            "special_tokens": ends,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: index for index, word in enumerate(WORDS)},
        },
    }


def tiny_encoder(folder: Path) -> Path:
    """Write the whole folder."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(tensors()))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder
