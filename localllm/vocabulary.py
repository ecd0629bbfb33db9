"""A GGUF file's vocabulary to a `tokenizers` back end: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`), `gemma4`.

Called by `tokenizer.py` only. The pre-tokenizer regexes are the Hugging Face originals (llama.cpp rewrites them for its
own engine); an unknown name is refused, never guessed. SentencePiece files hold scores instead of merges: the merges
are derived once (a second or two for 262k tokens) and cached below `paths.cache_dir()`, keyed by the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadModelFile, UnsupportedFormat
from .paths import cache_dir

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

log = logging.getLogger(__name__)

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # values of tokenizer.ggml.token_type

_C = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
_QWEN2 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
_QWEN35 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WS}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_AFTER_CASED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WS}"
_GPT4O = rf"{_CASED % (_C + '?', _C + '?')}|\p{{N}}{{1,3}}|{_AFTER_CASED}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_AFTER_CASED}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WS}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CJK_RUN = r"[一-龥ࠀ-一가-퟿]+"

# names -> successive isolated splits (formats.md 15.3)
_PRE_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", (_LLAMA3,)),
    ("dbrx smaug-bpe chatglm-bpe glm4", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open kormo f2llmv2 grok-2", (_QWEN2,)),
    ("qwen35", (_QWEN35,)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    (
        "gpt-2 gpt2 phi-2 mpt olmo jais trillion jina-en jina-es jina-de jina-v1-en jina-v2-code jina-v2-es jina-v2-de",
        (_GPT2,),
    ),
    ("gigachat mellum a.x-4.0 modern-bert exaone4 granite-docling", (_GPT2,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("tekken", (_TEKKEN,)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_RUN, r"\p{N}")),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("bloom poro-chat gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    ("bailingmoe", (_BAILING,)),
    ("seed-coder", (rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_WS}",)),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("laguna", (r"[^\n]+|[\n]+", _QWEN2)),
    ("exaone-moe", (_EXAONE_MOE,)),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)
PRE_TOKENIZERS = {name: regexes for names, regexes in _PRE_GROUPS for name in names.split()}
_IGNORE_MERGES = frozenset([*_PRE_GROUPS[0][0].split(), "tekken"])
_ADD_BOS = _IGNORE_MERGES
# Hugging Face's Qwen tokenizers normalise to NFC; llama.cpp does not
_NFC = frozenset(["qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"])

_REFUSED_MODELS = {
    "t5": "unigram",
    "bert": "WordPiece",
    "rwkv": "RWKV",
    "plamo2": "PLaMo 2",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}
_CACHE_VERSION = 1


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer keys of a GGUF file, checked: every id is in range, every list has one entry per token."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: Sequence[Any]
    ids: dict[str, int]
    """bos, eos, eot, eom, unknown, seperator, padding, mask, fim_pad, fim_rep, fim_sep -> token id, where given"""
    add_bos: bool
    add_space_prefix: bool
    key: str
    """SHA-256 over tokens, scores and types"""


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check and normalise the `tokenizer.ggml.*` keys.

    Raises UnsupportedFormat for vocabulary types and pre-tokenizers this version does not know, by name, and
    BadModelFile for lists that are missing, of different lengths, or ids outside the vocabulary.
    """
    model = _text(metadata, "model", "")
    if not model:
        raise BadModelFile("the file has no tokenizer (tokenizer.ggml.model is missing)", "download the model again")
    if model not in ("gpt2", "llama", "gemma4"):
        kind = _REFUSED_MODELS.get(model, "unknown")
        raise UnsupportedFormat(
            f"the tokenizer type is {model!r} ({kind}); this version reads gpt2, llama and gemma4",
            "use a safetensors version of the model, which brings tokenizer.json",
        )
    raw = _list(metadata, "tokens")
    if not raw:
        raise BadModelFile("the vocabulary is empty (tokenizer.ggml.tokens)", "download the model again")
    tokens, digest = _strings(raw)
    types = [int(value) for value in _list(metadata, "token_type")] or [NORMAL] * len(tokens)
    scores = [float(value) for value in _list(metadata, "scores")]
    if model == "llama" and not scores:
        raise BadModelFile(
            "a SentencePiece vocabulary without scores (tokenizer.ggml.scores)", "download the model again"
        )
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise BadModelFile(
                f"tokenizer.ggml.{name} has {len(values):,} entries for {len(tokens):,} tokens",
                "download the model again",
            )
    pre = _pre_name(metadata, model, len(tokens))
    ids = _special_ids(metadata, len(tokens))
    if model == "llama" and len(tokens) > 2:
        ids = {"bos": 1, "eos": 2, "unknown": 0} | ids
    digest.update(array("i", types).tobytes() + array("d", scores).tobytes())
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=_list(metadata, "merges"),
        ids=ids,
        add_bos=_flag(metadata, "add_bos_token", model != "gpt2" or pre in _ADD_BOS),
        add_space_prefix=_flag(metadata, "add_space_prefix", model == "llama"),
        key=digest.hexdigest(),
    )


def build_backend(vocabulary: Vocabulary, control_ids: Sequence[int] = ()) -> Backend:
    """The `tokenizers` back end of a vocabulary. `control_ids` are control tokens besides those of type 3."""
    from tokenizers import AddedToken

    backend = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}[vocabulary.model](vocabulary)
    control = set(control_ids)
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if not token:
            continue
        if kind == CONTROL or index in control:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and not _is_spaces(vocabulary, token):
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    return backend


def _byte_level(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre

    ids = _first_ids(vocabulary.tokens)
    bpe = models.BPE(vocab=ids, merges=_split_merges(vocabulary, ids), ignore_merges=vocabulary.pre in _IGNORE_MERGES)
    backend = Tokenizer(bpe)
    if vocabulary.pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[vocabulary.pre]]
    backend.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _gemma4(vocabulary: Vocabulary) -> Backend:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    tokens = [_respell(vocabulary, token) for token in vocabulary.tokens]
    ids = _first_ids(tokens)
    backend = _over_spaces(vocabulary, ids, tokens, _split_merges(vocabulary, ids), prefix=False)
    backend.pre_tokenizer = pre.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Backend:
    tokens = [_respell(vocabulary, token) for token in vocabulary.tokens]
    ids = _first_ids(tokens)
    pairs = _cached_merges(vocabulary, tokens)
    merges = [(tokens[left], tokens[right]) for left, right in zip(pairs[::2], pairs[1::2], strict=True)]
    return _over_spaces(vocabulary, ids, tokens, merges, prefix=vocabulary.add_space_prefix)


def _over_spaces(
    vocabulary: Vocabulary, ids: dict[str, int], tokens: list[str], merges: list[tuple[str, str]], *, prefix: bool
) -> Backend:
    """BPE over text whose spaces are written `▁`, unknown characters falling back to byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.ids.get("unknown")
    bpe = models.BPE(
        vocab=ids,
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def derive_merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[int]:
    """Merges of a scored vocabulary as flat pairs of token ids, best first.

    SentencePiece joins the adjacent pair whose result scores highest, leftmost first. Inside the span of a token that
    gets built no merge crosses its border, so its parts are always the two that remain when the token is tokenised
    alone: one merge per token is enough. Runs of spaces are user-defined and come first, as in Hugging Face's files.
    """
    ids = _first_ids(tokens)
    usable = [index for token, index in ids.items() if types[index] == NORMAL or _is_space_run(token, types[index])]
    usable.sort(key=lambda index: (types[index] == NORMAL, -scores[index] if types[index] == NORMAL else 0.0, index))
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


def _cached_merges(vocabulary: Vocabulary, tokens: list[str]) -> list[int]:
    """`derive_merges` through the cache; a file that cannot be read or does not fit is made again."""
    path = cache_dir() / "tokenizers" / f"{vocabulary.key}.json"
    merges = _read_merges(path, len(tokens))
    if merges is None:
        merges = derive_merges(tokens, vocabulary.types, vocabulary.scores)
        _write_atomically(path, json.dumps({"version": _CACHE_VERSION, "merges": merges}, separators=(",", ":")))
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


def _write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then rename. A cache that cannot be written is only slower next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        log.warning("tokenizer cache %s cannot be written (%s)", path, error)


def _split_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The stored `"a b"` strings as pairs; both halves and their join must be tokens."""
    strings, _ = _strings(vocabulary.merges) if vocabulary.merges else ([], None)
    if not strings:
        raise BadModelFile("a BPE vocabulary without merges (tokenizer.ggml.merges)", "download the model again")
    pairs = []
    for number, merge in enumerate(strings):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 1 or not right or left not in ids or right not in ids or left + right not in ids:
            raise BadModelFile(
                f"merge {number:,} of the tokenizer ({merge[:40]!r}) does not join two tokens of the vocabulary",
                "download the model again",
            )
        pairs.append((left, right))
    return pairs


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """token -> id; of equal tokens the first counts."""
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    return ids if len(ids) == len(tokens) else dict(sorted(ids.items(), key=lambda item: item[1]))


def _respell(vocabulary: Vocabulary, token: str) -> str:
    """GGUF stores user-defined runs of spaces as spaces; the model's own text has `▁`."""
    return "▁" * len(token) if " " in token and _is_spaces(vocabulary, token) else token


def _is_spaces(vocabulary: Vocabulary, token: str) -> bool:
    return vocabulary.model != "gpt2" and bool(token) and not token.strip(" ")


def _is_space_run(token: str, kind: int) -> bool:
    return kind == USER_DEFINED and bool(token) and not token.strip("▁")


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
    names = "bos eos eot eom unknown seperator padding mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep".split()
    found = {}
    for name in names:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) and not hasattr(value, "__index__"):
            raise BadModelFile(
                f"tokenizer.ggml.{name}_token_id is not a number: {value!r:.40}", "download the model again"
            )
        index = int(value)
        if index in (-1, 0xFFFFFFFF):  # how converters write "none"
            continue
        if not 0 <= index < num_tokens:
            raise BadModelFile(
                f"tokenizer.ggml.{name}_token_id is {index:,}, the vocabulary has {num_tokens:,} tokens",
                "download the model again",
            )
        found[name] = index
    return found


def _text(metadata: Mapping[str, Any], key: str, default: str) -> str:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return default if value is None else bool(value)


def _list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return []
    if isinstance(value, str | bytes | int | float) or not hasattr(value, "__len__"):
        raise BadModelFile(f"tokenizer.ggml.{key} is not a list", "download the model again")
    tolist = getattr(value, "tolist", None)
    return tolist() if tolist else value


def _strings(values: Sequence[Any]) -> tuple[list[str], Any]:
    """Strings, and a running SHA-256 over them. The reader hands over bytes or str."""
    items = list(values)
    digest = hashlib.sha256()
    try:
        if items and isinstance(items[0], bytes):
            digest.update(b"\0".join(items))
            items = [item.decode("utf-8") for item in items]
        else:
            digest.update("\0".join(items).encode("utf-8"))
    except UnicodeError as error:
        raise BadModelFile(f"the vocabulary is not UTF-8 ({error.reason})", "download the model again") from error
    except (TypeError, AttributeError) as error:
        raise BadModelFile("the vocabulary holds something that is not text", "download the model again") from error
    return items, digest
