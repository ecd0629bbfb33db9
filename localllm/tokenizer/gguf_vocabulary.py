"""Builds `tokenizers` back ends from GGUF vocabularies: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`), `gemma4`.

`gguf_documents.py` handles Unigram (`t5`) and WordPiece (`bert`); `tiktoken_model.py` reads Moonshot's files, which are
byte-level BPE with ranks (`tiktoken`).

SentencePiece files hold scores instead of merges, and tiktoken's hold ranks: the merges are derived once (two to three
seconds for 262k tokens) and cached below `paths.cache_dir()`, keyed by the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.checkpoint.fields import Fields
from localllm.checkpoint.mapped_file import shown
from localllm.checkpoint.vocabulary import TOKEN_IDS, check_vocabulary, special_ids
from localllm.errors import REPAIR, BadModelFile, UnsupportedFormat
from localllm.paths import cache_dir, read_json, replace_file
from localllm.tokenizer.regex import ADD_BOS, IGNORE_MERGES, NFC, PRE_TOKENIZERS
from localllm.tokenizer.tokenizer_json import PIECE, Patient, no_collection

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

log = logging.getLogger(__name__)

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_UNSUPPORTED = {"rwkv": "RWKV", "plamo2": "PLaMo 2", "none": "no vocabulary"}
_ID_NAMES = (*TOKEN_IDS, "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
# tokens of Phi-3 that strip the white space after them, as its tokenizer.json says; GGUF cannot express it
_PHI3_STRIPS = frozenset(["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "</s>"])
_CACHE_VERSION = 1
MAX_MERGE_WORK = 1 << 26  # sum of squared token lengths: Gemma's 262,144 tokens have 12 million and take three seconds
MAX_CACHE_BYTES = 64 << 20  # Gemma's half a million merges take 7 MB


@dataclass(frozen=True)
class Vocabulary:
    """The checked tokenizer keys of a GGUF file: every id is in range, every list has one entry per token."""

    model: str
    pre: str
    tokens: list[str]
    token_ids: dict[str, int]  # token -> id; duplicates map to the first id
    types: np.ndarray  # [num_tokens] int32: NORMAL, CONTROL, ...
    scores: np.ndarray  # [num_tokens] float64, or empty
    merges: list[bytes]  # `left right`; empty for SentencePiece, which has scores
    # bos, eos, eot, eom, unknown, seperator, padding, mask, fim_pad, fim_rep, fim_sep -> token id, if present
    ids: dict[str, int]
    add_bos: bool
    around: tuple[tuple[int, ...], tuple[int, ...]]  # ids before and after a whole text
    add_space_prefix: bool
    strips: frozenset[str]  # tokens that strip the white space after them
    key: str  # SHA-256 over tokens, scores and types


def read_vocabulary(path: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the `tokenizer.ggml.*` keys, checked by `check_vocabulary`. `path` names the file in errors.

    Raises UnsupportedFormat naming an unknown vocabulary type or pre-tokenizer, and BadModelFile for keys that are
    missing, have the wrong type or length, or refer to ids outside the vocabulary.
    """
    fields = Fields(path, metadata, "tokenizer.ggml.")
    check_vocabulary(path, metadata)
    model, pre = vocabulary_kind(path, metadata)
    raw = fields.raw("tokens")
    types, scores = fields.raw("token_type"), fields.raw("scores")
    types = np.full(len(raw), NORMAL, np.int32) if types is None else types.astype(np.int32)
    scores = np.empty(0) if scores is None else scores.astype(np.float64)
    if model in ("llama", "t5") and not len(scores):
        raise fields.fail("scores", "is missing: a SentencePiece vocabulary has one for each token")
    general = Fields(path, metadata)
    ids = {name: found[0] for name in _ID_NAMES if (found := special_ids(general, len(raw), name))}
    if model == "llama" and len(raw) > 2:
        ids = {"bos": 1, "eos": 2, "unknown": 0} | ids
    tokens = _strings(raw)
    if model != "gpt2":
        _respell_spaces(tokens, types)
    if model == "bert":  # files omit the ids that all such vocabularies have
        have = _first_ids(tokens)
        ids = {name: have[text] for name, text in (("bos", "[CLS]"), ("seperator", "[SEP]")) if text in have} | ids
    add_bos = fields.flag("add_bos_token", model not in ("gpt2", "t5") or pre in ADD_BOS)
    add_bos |= model == "gemma4"  # the first files wrongly say no
    ends = ("seperator", "eos") if model == "bert" else ("eos",)  # spelled like the GGUF key
    behind = [ids[name] for name in ends if name in ids][: fields.flag("add_eos_token", model in ("bert", "t5"))]
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        token_ids=_first_ids(tokens),
        types=types,
        scores=scores,
        merges=fields.raw("merges") or [],
        ids=ids,
        add_bos=add_bos,
        around=((ids["bos"],) if add_bos and "bos" in ids else (), tuple(behind)),
        add_space_prefix=fields.flag("add_space_prefix", model == "llama"),
        strips=_PHI3_STRIPS if model == "llama" and general.text("general.architecture") == "phi3" else frozenset(),
        key=hashlib.sha256(b"\0".join(raw) + types.tobytes() + scores.tobytes()).hexdigest(),
    )


def vocabulary_kind(path: Path, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return (vocabulary type, pre-tokenizer name). Raises UnsupportedFormat for unsupported ones."""
    fields = Fields(path, metadata, "tokenizer.ggml.")
    raw, model = fields.raw("tokens"), fields.text("model")
    if not model:
        raise fields.fail("model", "is missing: the file has no tokenizer")
    if model not in ("gpt2", "llama", "gemma4", "t5", "bert"):
        raise UnsupportedFormat(
            f"the tokenizer type {shown(model)!r} ({_UNSUPPORTED.get(model, 'unknown')}) is not supported;"
            " supported: gpt2, llama, gemma4, t5, bert",
            "use a safetensors version of the model, which includes tokenizer.json",
        )
    if not raw:
        raise fields.fail("tokens", "is empty: the file has no vocabulary")
    return model, _pre_name(fields, model, len(raw))


def build_backend(vocabulary: Vocabulary, control_ids: Sequence[int] = ()) -> Backend:
    """Build the `tokenizers` back end of a vocabulary. `control_ids` are control tokens in addition to type 3."""
    from tokenizers import AddedToken

    with no_collection():
        build = {"gpt2": _byte_level, "tiktoken": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
        backend = build[vocabulary.model](vocabulary)
    tokens = vocabulary.tokens
    control = sorted({*np.flatnonzero(vocabulary.types == CONTROL).tolist(), *control_ids})
    plain = sorted(set(np.flatnonzero(vocabulary.types == USER_DEFINED).tolist()) - set(control))
    texts = [tokens[index] for index in plain if vocabulary.model == "gpt2" or tokens[index].strip("▁")]

    def added(text: str, special: bool) -> AddedToken:
        return AddedToken(text, normalized=False, special=special, rstrip=text in vocabulary.strips)

    backend.add_special_tokens([added(tokens[index], True) for index in control if tokens[index]])
    backend.add_tokens([added(text, False) for text in texts if text])
    return backend


def _byte_level(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    is_ranked = vocabulary.model == "tiktoken"
    bpe = models.BPE(
        vocab=vocabulary.token_ids,
        merges=Patient(_derived_merges(vocabulary) if is_ranked else _split_merges(vocabulary)),
        ignore_merges=is_ranked or vocabulary.pre in IGNORE_MERGES,
    )
    backend = Tokenizer(bpe)
    if vocabulary.pre in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(vocabulary.pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of a byte-level vocabulary, by its name in PRE_TOKENIZERS."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    splits = [pre.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[name]]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gemma4(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    backend = _spaced_bpe(vocabulary, _split_merges(vocabulary), prefix=False)
    backend.pre_tokenizer = pre.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Backend:
    return _spaced_bpe(vocabulary, _derived_merges(vocabulary), prefix=vocabulary.add_space_prefix)


def _derived_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges of a vocabulary that has scores instead, as texts."""
    text, pairs = vocabulary.tokens.__getitem__, _cached_merges(vocabulary)
    merges: list[tuple[str, str]] = []
    for at in range(0, len(pairs), 2 * PIECE):
        part = pairs[at : at + 2 * PIECE]
        merges += zip(map(text, part[::2]), map(text, part[1::2]), strict=True)
    return merges


def _spaced_bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, prefix: bool) -> Backend:
    """BPE over text with `▁` for spaces; unknown characters fall back to byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.ids.get("unknown")
    bpe = models.BPE(
        vocab=vocabulary.token_ids,
        merges=Patient(merges),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "▁")
    bracket = vocabulary.token_ids.get("[INST]")
    if prefix and bracket is not None and vocabulary.types[bracket] == CONTROL:
        # Mistral v3: its templates write the space after a control token
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def derive_merges(tokens: Sequence[str], types: np.ndarray, scores: np.ndarray) -> list[int]:
    """Derive the merges of a scored vocabulary as flat pairs of token ids, best first.

    SentencePiece and tiktoken join the adjacent pair with the highest-scoring result, leftmost first. While a token is
    built, no merge crosses its boundaries, so its last two parts are always those left when the token is tokenized
    alone: one merge per token suffices. Runs of spaces are user-defined and come first, as in Hugging Face's files.
    """
    work = sum(len(token) ** 2 for token in tokens)
    if work > MAX_MERGE_WORK:
        longest = max(map(len, tokens))
        what = f"the vocabulary has tokens of up to {longest:,} characters, too many to derive its merges in time"
        raise BadModelFile(what, REPAIR)
    ids = _first_ids(tokens)
    kinds, order = types.tolist(), scores.tolist()
    usable = [
        index
        for token, index in ids.items()
        if kinds[index] == NORMAL or (kinds[index] == USER_DEFINED and token and not token.strip("▁"))
    ]
    usable.sort(key=lambda i: (kinds[i] == NORMAL, -order[i] if kinds[i] == NORMAL else 0.0, i))
    ranks = {tokens[index]: rank for rank, index in enumerate(usable)}
    find = ranks.get
    worst = len(usable)
    flat: list[int] = []
    for index in usable:
        parts = list(tokens[index])
        while len(parts) > 2:
            # ranks of the joined neighbors; index() finds the leftmost minimum
            found = [find(left + right, worst) for left, right in zip(parts, parts[1:], strict=False)]
            best = min(found)
            if best == worst:
                break
            at = found.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2 and parts[0] in ids and parts[1] in ids:
            flat += (ids[parts[0]], ids[parts[1]])
    return flat


def _cached_merges(vocabulary: Vocabulary) -> list[int]:
    """`derive_merges` with a cache file; a damaged file is rebuilt."""
    path, num_tokens = cache_dir() / "tokenizers" / f"{vocabulary.key}.json", len(vocabulary.tokens)
    stored = read_json(path, MAX_CACHE_BYTES)
    merges: Any = stored.get("merges") if stored.get("version") == _CACHE_VERSION else None
    sound = isinstance(merges, list) and len(merges) % 2 == 0 and not set(map(type, merges)) - {int}
    if sound and min(merges, default=0) >= 0 and max(merges, default=0) < num_tokens:
        return list(merges)
    if path.exists():
        log.warning("tokenizer cache %s is damaged; rebuilding it", path)
    merges = derive_merges(vocabulary.tokens, vocabulary.types, vocabulary.scores)
    try:
        replace_file(path, json.dumps({"version": _CACHE_VERSION, "merges": merges}, separators=(",", ":")))
    except OSError as error:  # only slower next time
        log.warning("tokenizer cache %s cannot be written (%s)", path, error)
    return merges


def _split_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Split the stored merges into pairs; `tokenizers` checks that parts and results are tokens."""
    strings = _strings(vocabulary.merges)
    if not strings:
        raise BadModelFile("the BPE vocabulary has no merges (tokenizer.ggml.merges)")
    halves = "\0".join(strings).replace(" ", "\0").split("\0")  # all at once: one by one takes three times as long
    if len(halves) == 2 * len(strings):  # no token starts with a space: each merge has exactly one, as checked before
        return list(zip(halves[::2], halves[1::2], strict=True))
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in strings]
    for number, pair in enumerate(pairs):
        if len(pair) != 2:  # a token may itself start with a space
            at = strings[number].index(" ", 1)
            pairs[number] = (strings[number][:at], strings[number][at + 1 :])
    return pairs


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Map tokens to ids; duplicates map to the first id."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _respell_spaces(tokens: list[str], types: np.ndarray) -> None:
    """Restore `▁` in user-defined runs of spaces, which GGUF stores as spaces."""
    for index in np.flatnonzero(types == USER_DEFINED).tolist():
        if tokens[index] and not tokens[index].strip(" "):
            tokens[index] = "▁" * len(tokens[index])


def _pre_name(fields: Fields, model: str, num_tokens: int) -> str:
    name = fields.text("pre", "default")
    if model != "gpt2":
        return name
    if name == "default":
        # files made before the key existed (llama.cpp issue 7476)
        architecture = str(fields.values.get("general.architecture", ""))
        if architecture == "llama" and num_tokens == 128256:
            return "llama-bpe"
        if architecture in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
            return "qwen2"
        log.warning("the file names no pre-tokenizer; the default may split text differently from the model's own")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedFormat(
            f"the pre-tokenizer {shown(name)!r} is not supported by this version",
            "use a safetensors version of the model, which includes tokenizer.json",
        )
    return name


def _strings(items: Sequence[bytes]) -> list[str]:
    try:
        strings = b"\0".join(items).decode().split("\0")  # all at once: one by one takes longer
        # the count differs if a token holds a zero byte or there are no tokens
        return strings if len(strings) == len(items) else [item.decode() for item in items]
    except UnicodeDecodeError as error:
        raise BadModelFile(f"the vocabulary is not UTF-8 ({error.reason})") from error
