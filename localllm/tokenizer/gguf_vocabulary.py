"""A GGUF file's vocabulary to a `tokenizers` back end: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`), `gemma4`.

Called by `tokenizer_files.py` only. SentencePiece files hold scores instead of merges: the merges are derived once (two
to three seconds for 262k tokens) and cached below `paths.cache_dir()`, keyed by the vocabulary.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.paths import cache_dir, replace_file
from localllm.tokenizer.regex import ADD_BOS, IGNORE_MERGES, NFC, PRE_TOKENIZERS
from localllm.tokenizer.tokenizer_json import PIECE, Patient

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_REFUSED = {"t5": "unigram", "bert": "WordPiece", "rwkv": "RWKV", "plamo2": "PLaMo 2", "none": "no vocabulary"}
_ID_KEYS = "bos eos eot eom unknown seperator padding mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"
_ID_NAMES = tuple(_ID_KEYS.split())
_CACHE_VERSION = 1


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer keys of a GGUF file, checked: every id is in range, every list has one entry per token."""

    model: str
    pre: str
    tokens: list[str]
    token_ids: dict[str, int]  # token -> id; of equal tokens the first counts
    types: np.ndarray  # [num_tokens] int32: NORMAL, CONTROL, ...
    scores: np.ndarray  # [num_tokens] float64, or empty
    merges: Sequence[Any]
    # bos, eos, eot, eom, unknown, seperator, padding, mask, fim_pad, fim_rep, fim_sep -> token id, where given
    ids: dict[str, int]
    add_bos: bool
    add_space_prefix: bool
    key: str  # SHA-256 over tokens, scores and types


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check and normalise the `tokenizer.ggml.*` keys.

    Raises UnsupportedFormat for vocabulary types and pre-tokenizers this version does not know, by name, and
    BadModelFile for lists that are missing, of different lengths, or ids outside the vocabulary.
    """
    model = _text(metadata, "model", "")
    if not model:
        raise BadModelFile("the file has no tokenizer (tokenizer.ggml.model is missing)")
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedFormat(
            f"the tokenizer type is {model!r} ({_REFUSED.get(model, 'unknown')}); gpt2, llama and gemma4 are read",
            "use a safetensors version of the model, which brings tokenizer.json",
        )
    raw = _list(metadata, "tokens")
    if not raw:
        raise BadModelFile("the vocabulary is empty (tokenizer.ggml.tokens)")
    tokens, digest = _strings(raw)
    types = _numbers(metadata, "token_type", np.int32)
    scores = _numbers(metadata, "scores", np.float64)
    if not len(types):
        types = np.full(len(tokens), NORMAL, np.int32)
    if model == "llama" and not len(scores):
        raise BadModelFile("a SentencePiece vocabulary without scores (tokenizer.ggml.scores)")
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) not in (0, len(tokens)):
            raise BadModelFile(f"tokenizer.ggml.{name} has {len(values):,} entries for {len(tokens):,} tokens")
    pre = _pre_name(metadata, model, len(tokens))
    ids = _special_ids(metadata, len(tokens))
    if model == "llama" and len(tokens) > 2:
        ids = {"bos": 1, "eos": 2, "unknown": 0} | ids
    add_bos, prefix = (metadata.get(f"tokenizer.ggml.add_{name}") for name in ("bos_token", "space_prefix"))
    digest.update(types.tobytes() + scores.tobytes())
    if model != "gpt2":
        _respell_spaces(tokens, types)
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        token_ids=_first_ids(tokens),
        types=types,
        scores=scores,
        merges=_list(metadata, "merges"),
        ids=ids,
        add_bos=model != "gpt2" or pre in ADD_BOS if add_bos is None else bool(add_bos),
        add_space_prefix=model == "llama" if prefix is None else bool(prefix),
        key=digest.hexdigest(),
    )


def build_backend(vocabulary: Vocabulary, control_ids: Sequence[int] = ()) -> Backend:
    """The `tokenizers` back end of a vocabulary. `control_ids` are control tokens besides those of type 3."""
    from tokenizers import AddedToken

    collecting = gc.isenabled()
    gc.disable()  # half a million tuples and strings, none of them garbage: a quarter of the time went into looking
    try:
        backend = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}[vocabulary.model](vocabulary)
    finally:
        if collecting:
            gc.enable()
    tokens = vocabulary.tokens
    control = sorted({*np.flatnonzero(vocabulary.types == CONTROL).tolist(), *control_ids})
    plain = sorted(set(np.flatnonzero(vocabulary.types == USER_DEFINED).tolist()) - set(control))
    texts = [tokens[index] for index in plain if vocabulary.model == "gpt2" or tokens[index].strip("▁")]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in control if tokens[i]])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts if text])
    return backend


def _byte_level(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre

    bpe = models.BPE(
        vocab=vocabulary.token_ids,
        merges=Patient(_split_merges(vocabulary)),
        ignore_merges=vocabulary.pre in IGNORE_MERGES,
    )
    backend = Tokenizer(bpe)
    if vocabulary.pre in NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[vocabulary.pre]]
    backend.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gemma4(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    backend = _over_spaces(vocabulary, _split_merges(vocabulary), prefix=False)
    backend.pre_tokenizer = pre.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Backend:
    text, pairs = vocabulary.tokens.__getitem__, _cached_merges(vocabulary)
    merges: list[tuple[str, str]] = []
    for at in range(0, len(pairs), 2 * PIECE):
        part = pairs[at : at + 2 * PIECE]
        merges += zip(map(text, part[::2]), map(text, part[1::2]), strict=True)
    return _over_spaces(vocabulary, merges, prefix=vocabulary.add_space_prefix)


def _over_spaces(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, prefix: bool) -> Backend:
    """BPE over text whose spaces are written `▁`, unknown characters falling back to byte tokens."""
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
        # Mistral v3: its templates write the space after a control token themselves
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def derive_merges(tokens: Sequence[str], types: np.ndarray, scores: np.ndarray) -> list[int]:
    """Merges of a scored vocabulary as flat pairs of token ids, best first.

    SentencePiece joins the adjacent pair whose result scores highest, leftmost first. Inside the span of a token that
    gets built no merge crosses its border, so its parts are always the two that remain when the token is tokenised
    alone: one merge per token is enough. Runs of spaces are user-defined and come first, as in Hugging Face's files.
    """
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
            # ranks of the joined neighbours; min() takes the leftmost of equals
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
    """`derive_merges` through the cache; a file that cannot be read or does not fit is made again."""
    path = cache_dir() / "tokenizers" / f"{vocabulary.key}.json"
    merges = _read_merges(path, len(vocabulary.tokens))
    if merges is None:
        merges = derive_merges(vocabulary.tokens, vocabulary.types, vocabulary.scores)
        _write_cache(path, json.dumps({"version": _CACHE_VERSION, "merges": merges}, separators=(",", ":")))
    return merges


def _read_merges(path: Path, num_tokens: int) -> list[int] | None:
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("tokenizer cache %s cannot be read (%s): made again", path, error)
        return None
    merges = stored.get("merges") if isinstance(stored, dict) and stored.get("version") == _CACHE_VERSION else None
    if not isinstance(merges, list) or len(merges) % 2 or set(map(type, merges)) - {int}:
        log.warning("tokenizer cache %s is damaged: made again", path)
        return None
    if merges and not (min(merges) >= 0 and max(merges) < num_tokens):
        log.warning("tokenizer cache %s does not fit its vocabulary: made again", path)
        return None
    return merges


def _write_cache(path: Path, text: str) -> None:
    """A cache that cannot be written is only slower next time."""
    try:
        replace_file(path, text)
    except OSError as error:
        log.warning("tokenizer cache %s cannot be written (%s)", path, error)


def _split_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The stored `"a b"` strings as pairs; `tokenizers` checks that halves and joins are tokens."""
    strings, _ = _strings(vocabulary.merges) if vocabulary.merges else ([], None)
    if not strings:
        raise BadModelFile("a BPE vocabulary without merges (tokenizer.ggml.merges)")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in strings]
    for number, merge in enumerate(strings):
        if len(pairs[number]) == 2:
            continue
        at = merge.find(" ", 1)  # a token may itself begin with a space
        if at < 1 or at == len(merge) - 1:
            raise BadModelFile(f"merge {number:,} of the tokenizer is not two tokens: {merge[:40]!r}")
        pairs[number] = (merge[:at], merge[at + 1 :])
    return pairs


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """token -> id; of equal tokens the first counts."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _respell_spaces(tokens: list[str], types: np.ndarray) -> None:
    """GGUF stores user-defined runs of `▁` as spaces; the model's own text has `▁`."""
    for index in np.flatnonzero(types == USER_DEFINED).tolist():
        if tokens[index] and not tokens[index].strip(" "):
            tokens[index] = "▁" * len(tokens[index])


def _pre_name(metadata: Mapping[str, Any], model: str, num_tokens: int) -> str:
    name = _text(metadata, "pre", "default")
    if model != "gpt2":
        return name
    if name == "default":
        # files made before the key existed (llama.cpp issue 7476)
        architecture = str(metadata.get("general.architecture", ""))
        if architecture == "llama" and num_tokens == 128256:
            return "llama-bpe"
        if architecture in ("qwen2", "qwen3", "qwen2moe", "qwen3moe"):
            return "qwen2"
        log.warning("the file names no pre-tokenizer: the default may split text differently from the model's own")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedFormat(
            f"the pre-tokenizer {name!r} is not known to this version",
            "use a safetensors version of the model, which brings tokenizer.json",
        )
    return name


def _special_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    found = {}
    for name in _ID_NAMES:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) and not hasattr(value, "__index__"):
            raise BadModelFile(f"tokenizer.ggml.{name}_token_id is not a number: {value!r:.40}")
        index = int(value)
        if index in (-1, 0xFFFFFFFF):  # how converters write "none"
            continue
        if not 0 <= index < num_tokens:
            raise BadModelFile(f"tokenizer.ggml.{name}_token_id is {index:,}, the vocabulary has {num_tokens:,} tokens")
        found[name] = index
    return found


def _text(metadata: Mapping[str, Any], key: str, default: str) -> str:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return default
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return []
    if isinstance(value, str | bytes | int | float) or not hasattr(value, "__len__"):
        raise BadModelFile(f"tokenizer.ggml.{key} is not a list")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, dtype: type[np.generic]) -> np.ndarray:
    try:
        values = np.asarray(_list(metadata, key))
        if values.ndim != 1 or (len(values) and values.dtype.kind not in "iuf"):
            raise ValueError("not numbers")
        return values.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadModelFile(f"tokenizer.ggml.{key} is not a list of numbers") from error


def _strings(values: Sequence[Any]) -> tuple[list[str], Any]:
    """Strings, and a running SHA-256 over them. The reader hands over bytes or str."""
    items = list(values)
    try:
        joined = b"\0".join(items) if items and isinstance(items[0], bytes) else "\0".join(items).encode()
        strings = joined.decode().split("\0")
        if len(strings) != len(items):  # a token holds a zero byte
            strings = [item.decode() if isinstance(item, bytes) else item for item in items]
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadModelFile(f"the vocabulary is not UTF-8 ({error.reason})") from error
    except (TypeError, AttributeError) as error:
        raise BadModelFile("the vocabulary holds something that is not text") from error
    return (strings if items else []), hashlib.sha256(joined)
