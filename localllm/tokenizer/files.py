"""Loads the tokenizer of a checkpoint, for both containers: `load_tokenizer(ckpt)` -> `Tokenizer`.

Reads tokenizer.json or tiktoken.model and the files next to it, or the metadata of a GGUF file. Chat templates are also
found here, only inside the model's own folder and only under plain names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.checkpoint.json_file import read_json_object
from localllm.checkpoint.mapped_file import bad, read_small
from localllm.checkpoint.opening import inside
from localllm.errors import BadModelFile, UnsupportedFormat
from localllm.tokenizer import gguf_documents, tiktoken_model
from localllm.tokenizer.gguf_vocabulary import (
    CONTROL,
    Vocabulary,
    build_backend,
    pre_tokenizer,
    read_vocabulary,
    vocabulary_kind,
)
from localllm.tokenizer.tokenizer import Tokenizer
from localllm.tokenizer.tokenizer_json import MAX_RUNS, TOKEN_FLAGS, parsed, read_backend
from localllm.tokenizer.trial import vet

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from localllm.checkpoint.checkpoint import Checkpoint

T = TypeVar("T")
MAX_TOKENIZER_BYTES = 128 << 20
# quoted strings in tokenizer.json: Gemma 3 has 1.4 million in 33 MB; a million merges take 5 s and 0.9 GB
MAX_TOKENIZER_STRINGS = 2_000_000
MAX_CONFIG_BYTES, MAX_CONFIG_VALUES = 16 << 20, 1 << 20
MAX_TEMPLATE_CHARS = 1 << 20

# tokens that end a turn or a text
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|> <|endoftext|> "
    "<|end_of_text|> <|eom_id|> <end_of_utterance> <|tool_response> <｜end▁of▁sentence｜> [e~["
)
# only if they are control tokens: Gemma 3 has </s> as an HTML tag; GLM ends an answer with the next speaker's token
_ENDS_IF_CONTROL = "</s> <EOT> [EOT] [EOS] <eos> <|user|> <|observation|> <|role_end|>"
END_TEXTS, END_TEXTS_IF_CONTROL = frozenset(_ENDS.split()), frozenset(_ENDS_IF_CONTROL.split())
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# control tokens at ids that identify a Tekken vocabulary
TEKKEN_MARKS = {"[INST]": 3, "[/INST]": 4, "[AVAILABLE_TOOLS]": 5, "[TOOL_CALLS]": 9}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def load_tokenizer(ckpt: Checkpoint) -> Tokenizer:
    """Load the tokenizer of an open checkpoint.

    Raises UnsupportedFormat naming a vocabulary type that this version cannot read, and BadModelFile for a damaged one.
    """
    return _from_gguf(ckpt.path, ckpt.metadata) if ckpt.kind == "gguf" else _from_folder(ckpt)


def check_tokenizer(ckpt: Checkpoint) -> None:
    """Raise the error of `load_tokenizer` for a missing or unsupported tokenizer.

    Takes a millisecond, for listing models; damage inside tokenizer.json is found only on loading.
    """
    if ckpt.kind == "gguf":
        vocabulary_kind(ckpt.path, ckpt.metadata)
    else:
        _tokenizer_file(ckpt)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = read_vocabulary(path, metadata)
    main, named = _gguf_templates(metadata)
    ends = _gguf_ends(vocabulary)
    stored, name = metadata.get("tokenizer.huggingface.json"), "tokenizer.huggingface.json"
    if stored is None and vocabulary.model in gguf_documents.MODELS:
        stored, name = gguf_documents.document(path, metadata, vocabulary), "the vocabulary"
    if stored is None:
        backend = _guarded(lambda: build_backend(vocabulary, ends), "the vocabulary")
    else:
        backend = parse_backend(stored.encode(), name)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return Tokenizer(
        backend,
        {name: vocabulary.tokens[vocabulary.ids[key]] for name, key in names.items() if key in vocabulary.ids},
        add_bos=vocabulary.add_bos,
        around=vocabulary.around,
        eos_token_ids=frozenset(ends),
        vocab_size=len(vocabulary.tokens),
        chat_template=main,
        chat_templates=named,
    )


def _gguf_ends(vocabulary: Vocabulary) -> list[int]:
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ends = {vocabulary.ids[name] for name in names if name in vocabulary.ids}
    have = vocabulary.token_ids
    ends |= {have[text] for text in END_TEXTS if text in have}
    ends |= {have[text] for text in END_TEXTS_IF_CONTROL if text in have and vocabulary.types[have[text]] == CONTROL}
    return [index for index in sorted(ends) if not _is_not_end(vocabulary.tokens[index], have)]


def _is_not_end(text: str, have: Container[str]) -> bool:
    """True for `<|end|>` in Harmony, which ends a message but not a turn, and `</s>` in Gemma 4, which is markup."""
    if text == "<|end|>":
        return "<|return|>" in have and "<|call|>" in have
    return text == "</s>" and "<|tool_response>" in have


def _gguf_templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    names = metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list):
        raise BadModelFile("tokenizer.chat_templates is not a list of names")
    texts = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in map(_as_text, names)}
    named = {_plain_name(name): _template(text) for name, text in texts.items() if text is not None}
    return metadata.get("tokenizer.chat_template") or named.get("default"), named


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _from_folder(ckpt: Checkpoint) -> Tokenizer:
    files, path = ckpt.tokenizer_files, _tokenizer_file(ckpt)
    config = _read_json(files.get("tokenizer_config.json"))
    data = read_small(path, MAX_TOKENIZER_BYTES)
    backend = _from_tiktoken(path, data, config) if path.name == tiktoken_model.NAME else parse_backend(data, path.name)
    if all(backend.token_to_id(text) == index for text, index in TEKKEN_MARKS.items()):
        # Mistral Small 3 and others were published with a regex that does not fit their vocabulary: transformers warns
        # about it; GGUF files and Mistral's own tokenizer have the right one
        backend.pre_tokenizer = pre_tokenizer("tekken")
    special = _read_json(files.get("special_tokens_map.json"))
    texts = {}
    for name in _TOKEN_NAMES:
        text = _token_text(config.get(name)) or _token_text(special.get(name))
        if text is not None:
            texts[name] = text
    control = [*texts.values(), *_additional_special(config), *_additional_special(special)]
    _guarded(lambda: _add_configured_tokens(backend, config, control), "tokenizer_config.json")
    bos = backend.token_to_id(texts.get("bos_token", ""))
    flag = config.get("add_bos_token")
    eos = backend.token_to_id(texts.get("eos_token", ""))
    before, behind = _guarded(lambda: _surrounding_ids(backend), "tokenizer.json")
    if config.get("add_eos_token") is True and eos is not None and eos not in behind:
        behind = [*behind, eos]
    main, named = _folder_templates(ckpt, config)
    return Tokenizer(
        backend,
        texts,
        add_bos=bos is not None and (flag if isinstance(flag, bool) else before[:1] == [bos]),
        around=(before, behind),
        eos_token_ids=_folder_ends(ckpt, backend, eos),
        chat_template=main,
        chat_templates=named,
    )


def _from_tiktoken(path: Path, data: bytes, config: Mapping[str, Any]) -> Backend:
    named = {
        index: text for index, entry in _listed(config.get("added_tokens_decoder")) if (text := _token_text(entry))
    }
    vocabulary = tiktoken_model.read_vocabulary(path, data, named)
    return _guarded(lambda: build_backend(vocabulary), path.name)


def _listed(entries: Any) -> list[tuple[int, Any]]:
    """The tokens of `added_tokens_decoder` by id."""
    items = entries.items() if isinstance(entries, dict) else ()
    return sorted(((int(k), one) for k, one in items if k.isdecimal() and len(k) < 10), key=itemgetter(0))


def _additional_special(config: Mapping[str, Any]) -> list[str]:
    """Texts of additional control tokens, unnamed ones and those with a model-specific name."""
    found: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in found if (text := _token_text(one))]


def _surrounding_ids(backend: Backend) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    plain, whole = (backend.encode_batch(["a"], add_special_tokens=added)[0].ids for added in (False, True))
    size = len(plain)
    at = next((at for at in range(len(whole) - size + 1) if whole[at : at + size] == plain), len(whole))
    return whole[:at], whole[at + size :]


def _tokenizer_file(ckpt: Checkpoint) -> Path:
    files = ckpt.tokenizer_files
    if "tokenizer.json" not in files and tiktoken_model.NAME in files:
        tiktoken_model.check_class(_read_json(files.get("tokenizer_config.json")))
        return files[tiktoken_model.NAME]
    if "tokenizer.json" not in files and (ckpt.path / "tekken.json").is_file():  # of Mistral's repositories
        what = "the model's tokenizer is tekken.json, which is not supported"
        raise UnsupportedFormat(what, "use a GGUF version of the model, or one with a tokenizer.json")
    if "tokenizer.json" not in files:
        raise UnsupportedFormat(
            f"the model has no tokenizer.json (found: {', '.join(sorted(files)) or 'no tokenizer'})",
            "fetch the missing files (`localllm pull NAME --repair`), or use a GGUF version of the model",
        )
    return files["tokenizer.json"]


def _folder_ends(ckpt: Checkpoint, backend: Backend, eos: int | None) -> frozenset[int]:
    """The end-of-text ids in the files, and control tokens with known end-of-text names."""
    ends = set() if eos is None else {eos}
    value = ckpt.generation_config.get("eos_token_id", ckpt.config.get("eos_token_id"))
    for index in value if isinstance(value, list) else [value]:
        if isinstance(index, int) and not isinstance(index, bool) and index >= 0:
            ends.add(index)
    control = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    named = (END_TEXTS | END_TEXTS_IF_CONTROL) & control.keys()
    return frozenset(ends | {control[text] for text in named if not _is_not_end(text, control)})


def _add_configured_tokens(backend: Backend, config: Mapping[str, Any], named: Iterable[str]) -> None:
    """Apply tokenizer_config.json: set the flags of tokens, add new ones whose ids continue those of tokenizer.json,
    and make the `named` ones control tokens.
    """
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    size = backend.get_vocab_size()
    tokens: dict[str, AddedToken] = {}
    for index, entry in _listed(config.get("added_tokens_decoder")):
        text = _token_text(entry)
        stored = backend.token_to_id(text) if text else None
        if text and text not in tokens and index == (size if stored is None else stored):
            size += stored is None
            flags = {name: bool(entry.get(name)) for name in TOKEN_FLAGS}
            tokens[text] = AddedToken(text, special=bool(entry.get("special")), **flags)
    for text in named:
        token = tokens.get(text) or known.get(text)
        # not an ordinary word: padding may be one ("!")
        is_mark = len(text) > 2 and text[0] + text[-1] in ("<>", "[]")
        if token is None and is_mark and backend.token_to_id(text) is not None:
            tokens[text] = AddedToken(text, special=True, normalized=False)
        elif token is not None and not token.special:
            tokens[text] = AddedToken(text, special=True, **{name: getattr(token, name) for name in TOKEN_FLAGS})
    changed = [token for text, token in tokens.items() if text not in known or repr(token) != repr(known[text])]
    # only new tokens must be added in order
    changed.sort(key=lambda token: (backend.token_to_id(token.content) is None) * 2 or token.special)
    runs = [(special, list(run)) for special, run in groupby(changed, lambda token: token.special)]
    if len(runs) > MAX_RUNS:
        raise BadModelFile(f"tokenizer_config.json adds {len(runs):,} runs of tokens; the limit is {MAX_RUNS}")
    for special, run in runs:
        (backend.add_special_tokens if special else backend.add_tokens)(run)


def _folder_templates(ckpt: Checkpoint, config: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The main template and the named ones; .jinja files override tokenizer_config.json."""
    files = ckpt.tokenizer_files
    main: str | None = None
    named: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, list | dict):
        entries = configured.items() if isinstance(configured, dict) else map(_named_entry, configured)
        named = {_plain_name(name): _template(text) for name, text in entries}
        main = named.get("default")
    elif configured is not None:
        main = _template(configured)
    stored = _read_json(files.get("chat_template.json")).get("chat_template")
    if stored is not None:
        main = _template(stored)
    if "chat_template.jinja" in files:
        main = _template_file(files["chat_template.jinja"])
    folder = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        try:
            paths = [path for path in sorted(extra.iterdir()) if path.suffix == ".jinja"]
        except OSError as error:
            raise bad(extra, f"cannot be listed: {error.strerror}") from error
        named |= {_plain_name(path.stem): _template_file(inside(folder, f"{extra.name}/{path.name}")) for path in paths}
    return main or named.get("default"), named


def _named_entry(entry: Any) -> tuple[Any, Any]:
    if not isinstance(entry, dict):
        raise BadModelFile("chat_template in tokenizer_config.json is not a list of objects")
    return entry.get("name"), entry.get("template")


def _plain_name(name: Any) -> str:
    """Check that a template's name is a plain word, which cannot lead to another file."""
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or ".." in name:
        raise BadModelFile(f"{ascii(name)[:60]} is not a valid name for a chat template: use letters, digits, _ - .")
    return name


def _template(text: Any) -> str:
    if not isinstance(text, str):
        raise BadModelFile("a chat template is not text")
    if len(text) > MAX_TEMPLATE_CHARS:
        limit = f"{MAX_TEMPLATE_CHARS:,}"
        raise BadModelFile(f"a chat template has {len(text):,} characters; the limit is {limit}")
    return text


def _template_file(path: Path) -> str:
    text = _template(_as_text(read_small(path, 4 * MAX_TEMPLATE_CHARS)))
    if not text:
        raise bad(path, "the file is empty", offset=0)
    return text


# --- reading ---------------------------------------------------------------------------------------------------------


def parse_backend(data: bytes, name: str) -> Backend:
    """Parse a tokenizer.json into a back end without truncation or padding; `name` is for errors."""
    strings = data.count(b'"') // 2
    if strings > MAX_TOKENIZER_STRINGS:
        raise BadModelFile(f"{name} holds {strings:,} strings; the limit is {MAX_TOKENIZER_STRINGS:,}")
    document = parsed(data)
    vet(data, document, name)
    backend = _guarded(lambda: read_backend(data, document), name)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _guarded(build: Callable[[], T], name: str) -> T:
    """Run a constructor of `tokenizers`, which raises bare Exceptions or panics on invalid input."""
    try:
        return build()
    except BadModelFile:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadModelFile(f"{name} is not a usable tokenizer: {ascii(str(error))[1:-1][:120]}") from error


def _read_json(path: Path | None) -> dict[str, Any]:
    return {} if path is None else read_json_object(path, MAX_CONFIG_BYTES, MAX_CONFIG_VALUES)


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
