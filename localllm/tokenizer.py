"""Text to token ids and back: `load_tokenizer` reads tokenizer.json, or rebuilds it from a GGUF file's metadata.

Text of users never becomes control tokens unless `special=True`. No BOS is added here; `chat.encode_chat` and the façade
add it once. Encoding runs through `encode_batch`, which does not hold the interpreter lock while it works. Streaming text
out of ids is `stream.py`'s business.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadModelFile, InvalidRequest, UnsupportedFormat
from .vocabulary import CONTROL, Vocabulary, build_backend, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from .checkpoint.checkpoint import Checkpoint

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_CHARS = 1 << 20
_END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|> <|endoftext|> "
    "<|end_of_text|> <|eom_id|> <end_of_utterance> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
# these are also ordinary markup: they end a turn only where the file says that they are control tokens
_END_TEXTS_IF_CONTROL = frozenset("</s> <EOT> [EOT] [EOS] <eos>".split())
_SURROGATES = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class ControlText:
    """Finds the texts of control tokens in a text: leftmost first, of several the longest."""

    def __init__(self, texts: Mapping[str, int]) -> None:
        """`texts` maps the text of a control token to its id."""
        self.ids = {text: index for text, index in texts.items() if text}
        self._lengths = sorted({len(text) for text in self.ids}, reverse=True)
        firsts = "".join(re.escape(char) for char in sorted({text[0] for text in self.ids}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._heads = {text[:size] for text in self.ids for size in range(1, len(text))}

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """Every (begin, end, token id), in order, none overlapping."""
        found: list[tuple[int, int, int]] = []
        if self._first is None:
            return found
        done = 0
        for match in self._first.finditer(text):
            begin = match.start()
            if begin < done:
                continue
            for length in self._lengths:
                index = self.ids.get(text[begin : begin + length])
                if index is not None and begin + length <= len(text):
                    done = begin + length
                    found.append((begin, done, index))
                    break
        return found

    def open_end(self, text: str) -> int:
        """Length of the longest end of `text` that could begin a control token."""
        longest = self._lengths[0] if self._lengths else 1
        return next((size for size in range(min(longest - 1, len(text)), 0, -1) if text[-size:] in self._heads), 0)


class Tokenizer:
    """One model's vocabulary. Safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        eos_token_ids: Iterable[int] = (),
        unk_token_id: int | None = None,
        pad_token_id: int | None = None,
        vocab_size: int | None = None,
        chat_template: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Made by `load_tokenizer`."""
        self._backend = backend
        self._lock = threading.Lock()
        self._added = dict(backend.get_added_tokens_decoder())
        self.vocab_size: int = vocab_size or max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        """ids are below this; the model's logits may be wider (padding rows)"""
        self.bos_token_id = bos_token_id
        self.unk_token_id = unk_token_id
        self.pad_token_id = pad_token_id
        self.add_bos = add_bos and bos_token_id is not None
        """the model expects the BOS token before every text"""
        self.eos_token_ids = frozenset(eos_token_ids)
        """every token that ends a turn or a text"""
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        """control tokens: never made from users' text, left out of decoded text"""
        self.chat_template = chat_template
        self.chat_templates = dict(chat_templates or {})
        """named templates besides, such as "tool_use" """
        self._byte_level, self._strip_first = _decoder_kind(backend)
        self._prefix = _prefix_kind(backend)
        self._bytes: dict[int, bytes] = {}

    # --- vocabulary --------------------------------------------------------------------------------------------------

    def id_to_token(self, index: int) -> str | None:
        """The vocabulary's own spelling (`Ġthe`, `▁the`), None for an id without a token."""
        added = self._added.get(index)
        if added is not None:
            return str(added.content)
        return self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, None when there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for: possibly part of a character; b"" for an id without a token."""
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._make_bytes(index)
        return known

    def _make_bytes(self, index: int) -> bytes:
        token = self.id_to_token(index)
        if token is None:
            return b""
        if index in self._added:
            return token.replace("▁", " ").encode() if not self._byte_level and not token.strip("▁") else token.encode()
        if self._byte_level:
            table = _byte_level_table()
            try:
                return bytes([table[char] for char in token])
            except KeyError:  # a token that was never byte-encoded
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()

    @property
    def bos_token(self) -> str | None:
        """The text of the BOS token."""
        return None if self.bos_token_id is None else self.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the first end token that the files name."""
        return self.special_tokens_map.get("eos_token")

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """bos_token, eos_token, unk_token, pad_token -> text: what chat templates see."""
        return {}

    @cached_property
    def control_text(self) -> ControlText:
        """Finds the texts of control tokens."""
        return ControlText({self._added[index].content: index for index in self.special_ids})

    @cached_property
    def added_text(self) -> ControlText:
        """Finds the texts of added tokens that are no control tokens and no white space: `<think>`, `<tool_call>`."""
        plain = {token.content: index for index, token in self._added.items() if not token.special}
        return ControlText({text: index for text, index in plain.items() if not text.isspace()})

    # --- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; no BOS is added. `special`: the texts of control tokens become control tokens.

        Raises InvalidRequest for text that cannot be kept from becoming a control token.
        """
        text = _well_formed(text)
        ids = self._encode(text, special=special)
        if special or self.special_ids.isdisjoint(ids):
            return ids
        # a vocabulary whose merges build a control token: cut its text after the first character
        cuts = [begin + 1 for begin, end, _ in self.control_text.find(text) if end - begin > 1]
        ids = self._encode_pieces(_cut(text, cuts), at_start=True)
        if not self.special_ids.isdisjoint(ids):
            raise InvalidRequest("the text holds a control token of this model", "remove it from the text")
        return ids

    def encode_mixed(self, text: str, as_text: Sequence[tuple[int, int]]) -> list[int]:
        """As `encode(text, special=True)`, but what overlaps the (begin, end) spans `as_text` is never a control token.

        Added tokens without control meaning (`<tool_call>`) are kept from forming there too.
        """
        if not as_text:
            return self.encode(text, special=True)
        text = _well_formed(text)
        spans = sorted(as_text)
        control = [match for match in self.control_text.find(text) if not _overlaps(match, spans)]
        guarded = [match for match in self.added_text.find(text) if _overlaps(match, spans)]
        guarded += [
            match for match in self.control_text.find(text) if _overlaps(match, spans) and self._leaks(match[2])
        ]
        cuts = sorted({begin + 1 for begin, end, _ in guarded if end - begin > 1})
        ids: list[int] = []
        at = 0
        for begin, end, index in [*control, (len(text), len(text), -1)]:
            token = self._added.get(index)
            stop = begin
            if token is not None and token.lstrip:
                stop = at + len(text[at:begin].rstrip())
            pieces = _cut(text[at:stop], [cut - at for cut in cuts if at < cut < stop])
            ids += self._encode_pieces(pieces, at_start=at == 0 or self._prefix == "always")
            if token is None:
                break
            ids.append(index)
            at = end
            if token.rstrip:
                at += len(text[end:]) - len(text[end:].lstrip())
        return ids

    def _leaks(self, index: int) -> bool:
        """Whether plain text can become this control token."""
        return index in self._encode(self._added[index].content, special=False)

    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[int]:
        """Pieces of one text, encoded apart, as plain text. Only the first can be at a start."""
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if not piece:
                continue
            if self._prefix == "never" or (at_start and number == 0):
                ids += self._encode(piece, special=False)
                continue
            # a start would get a space put before it: start with a newline, and take its ids away again
            lead, both = self._encode("\n", special=False), self._encode("\n" + piece, special=False)
            ids += both[len(lead) :] if both[: len(lead)] == lead else self._encode(piece, special=False)
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not special
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded[0].ids
        return ids

    # --- ids to text -------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        `continuing`: the ids go on from earlier text, so a leading space that the vocabulary adds to the first word stays.
        """
        skip = self.special_ids if skip_special else frozenset()
        data = b"".join([self.token_bytes(index) for index in ids if index not in skip])
        if self.strips_first_space and not continuing:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @property
    def strips_first_space(self) -> bool:
        """Whether the vocabulary puts a space before the first word of every text (Llama 2 and its kin)."""
        return self._strip_first


def load_tokenizer(ckpt: Checkpoint) -> Tokenizer:
    """The tokenizer of an open checkpoint.

    Raises UnsupportedFormat for vocabulary types this version cannot read, BadModelFile for damaged ones.
    """
    if ckpt.kind == "gguf":
        return _from_gguf(ckpt)
    return _from_folder(ckpt)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(ckpt: Checkpoint) -> Tokenizer:
    metadata = ckpt.metadata
    template, named = _gguf_templates(metadata)
    stored = metadata.get("tokenizer.huggingface.json")
    vocabulary = read_vocabulary(metadata)
    ends = _gguf_ends(vocabulary)
    if stored is not None:
        backend = _parse_backend(_as_text(stored).encode(), "tokenizer.huggingface.json")
    else:
        backend = _guarded(lambda: build_backend(vocabulary, ends), "the vocabulary")
    ids = vocabulary.ids
    tokenizer = Tokenizer(
        backend,
        bos_token_id=ids.get("bos"),
        add_bos=vocabulary.add_bos,
        eos_token_ids=ends,
        unk_token_id=ids.get("unknown"),
        pad_token_id=ids.get("padding"),
        vocab_size=len(vocabulary.tokens),
        chat_template=template,
        chat_templates=named,
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokenizer.special_tokens_map = {name: vocabulary.tokens[ids[key]] for name, key in names.items() if key in ids}
    return tokenizer


def _gguf_ends(vocabulary: Vocabulary) -> list[int]:
    ends = {
        vocabulary.ids[name]
        for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        if name in vocabulary.ids
    }
    texts = set()
    for index, token in enumerate(vocabulary.tokens):
        if token in _END_TEXTS or (token in _END_TEXTS_IF_CONTROL and vocabulary.types[index] == CONTROL):
            ends.add(index)
            texts.add(token)
    have = set(vocabulary.tokens)
    return [index for index in sorted(ends) if not _is_no_end(vocabulary.tokens[index], have)]


def _is_no_end(text: str, have: set[str]) -> bool:
    """Harmony ends a message, not a turn, with `<|end|>`; Gemma 4 has `</s>` as markup."""
    if text == "<|end|>":
        return {"<|return|>", "<|call|>"} <= have
    return text == "</s>" and "<|tool_response>" in have


def _gguf_templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    main = metadata.get("tokenizer.chat_template")
    named = {}
    for name in metadata.get("tokenizer.chat_templates") or ():
        name = _as_text(name)
        text = metadata.get(f"tokenizer.chat_template.{name}")
        if text is not None:
            named[_template_name(name)] = _template(_as_text(text))
    return (None if main is None else _template(_as_text(main))) or named.get("default"), named


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _from_folder(ckpt: Checkpoint) -> Tokenizer:
    files = ckpt.tokenizer_files
    if "tokenizer.json" not in files:
        others = (
            ", ".join(sorted(name for name in files if name.startswith(("tokenizer.", "vocab", "tekken")))) or "nothing"
        )
        raise UnsupportedFormat(
            f"the model has no tokenizer.json (found: {others})",
            "use a version of the model that has tokenizer.json, or a GGUF file",
        )
    backend = _parse_backend(_read(files["tokenizer.json"], MAX_TOKENIZER_BYTES), "tokenizer.json")
    config = _read_json(files.get("tokenizer_config.json"))
    special_map = _read_json(files.get("special_tokens_map.json"))
    _add_configured_tokens(backend, config.get("added_tokens_decoder"))
    texts = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        if (text := _token_text(config.get(name)) or _token_text(special_map.get(name))) is not None
    }
    ids = {name: index for name, text in texts.items() if (index := backend.token_to_id(text)) is not None}
    first = backend.encode_batch([""], add_special_tokens=True)[0].ids
    bos = ids.get("bos_token")
    flag = config.get("add_bos_token")
    adds_bos = flag if isinstance(flag, bool) else bool(first) and first[0] == bos
    template, named = _folder_templates(ckpt, files, config)
    tokenizer = Tokenizer(
        backend,
        bos_token_id=bos,
        add_bos=adds_bos,
        eos_token_ids=_folder_ends(ckpt, backend, ids.get("eos_token")),
        unk_token_id=ids.get("unk_token"),
        pad_token_id=ids.get("pad_token"),
        chat_template=template,
        chat_templates=named,
    )
    tokenizer.special_tokens_map = texts
    return tokenizer


def _folder_ends(ckpt: Checkpoint, backend: Backend, eos: int | None) -> set[int]:
    ends = set() if eos is None else {eos}
    for source in (ckpt.generation_config, ckpt.config):
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ends |= {index for index in listed if isinstance(index, int) and not isinstance(index, bool) and index >= 0}
        if value is not None:
            break
    special = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    have = set(special)
    named = _END_TEXTS | _END_TEXTS_IF_CONTROL
    return ends | {index for text, index in special.items() if text in named and not _is_no_end(text, have)}


def _add_configured_tokens(backend: Backend, listed: Any) -> None:
    """Tokens that only tokenizer_config.json names, at the ids it gives them."""
    from tokenizers import AddedToken

    if not isinstance(listed, dict):
        return
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0]) if str(item[0]).isdecimal() else -1):
        text = _token_text(entry)
        if not text or backend.token_to_id(text) is not None or str(backend.get_vocab_size()) != str(key):
            continue
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        backend.add_tokens([AddedToken(text, **flags)])


def _folder_templates(
    ckpt: Checkpoint, files: Mapping[str, Path], config: Mapping[str, Any]
) -> tuple[str | None, dict[str, str]]:
    """The main template and the named ones: chat_template.jinja, additional_chat_templates/, then tokenizer_config.json."""
    main: str | None = None
    named: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        main = _template(configured)
    elif isinstance(configured, list | dict):
        entries = configured.items() if isinstance(configured, dict) else _named_entries(configured)
        named = {_template_name(name): _template(text) for name, text in entries}
        main = named.get("default")
    if "chat_template.json" in files:
        stored = _read_json(files["chat_template.json"]).get("chat_template")
        main = _template(stored) if isinstance(stored, str) else main
    if "chat_template.jinja" in files:
        main = _template(_as_text(_read(files["chat_template.jinja"], 4 * MAX_TEMPLATE_CHARS)))
    folder = ckpt.path if ckpt.path.is_dir() else ckpt.path.parent
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        for path in sorted(extra.iterdir()):
            if path.suffix == ".jinja":
                named[_template_name(path.stem)] = _template(
                    _as_text(_read(_inside(folder, path), 4 * MAX_TEMPLATE_CHARS))
                )
    return main or named.get("default"), named


def _named_entries(entries: list[Any]) -> list[tuple[Any, Any]]:
    if not all(isinstance(entry, dict) for entry in entries):
        raise BadModelFile(
            "chat_template in tokenizer_config.json is not a list of objects", "download the model again"
        )
    return [(entry.get("name"), entry.get("template")) for entry in entries]


def _template_name(name: Any) -> str:
    """A template's name is a plain word: it never leads to a file."""
    if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name) or ".." in name:
        raise BadModelFile(f"the chat template name {name!r:.60} is not a plain name", "download the model again")
    return name


def _template(text: Any) -> str:
    if not isinstance(text, str):
        raise BadModelFile("a chat template is not text", "download the model again")
    if len(text) > MAX_TEMPLATE_CHARS:
        raise BadModelFile(
            f"a chat template has {len(text):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}",
            "download the model again",
        )
    return text


def _inside(folder: Path, path: Path) -> Path:
    """`path`, once it is known to lie in the folder, or in the blobs of the same repository of the hub's cache."""
    home, target = folder.resolve(), path.resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(root) for root in roots):
        raise BadModelFile(
            f"{path.name!r:.60} is a link that leaves the model's folder", "copy the file into the folder"
        )
    return path


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise BadModelFile(f"{path.name} has {size:,} bytes, the limit is {limit:,}", "download the model again")
        return path.read_bytes()
    except OSError as error:
        raise BadModelFile(
            f"{path.name} cannot be read: {error.strerror}", "check its owner and permissions"
        ) from error


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(_read(path, MAX_TOKENIZER_BYTES))
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path.name} is not JSON ({str(error)[:80]})", "download the model again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path.name} is not a JSON object", "download the model again")
    return value


def _parse_backend(data: bytes, name: str) -> Backend:
    from tokenizers import Tokenizer as BackendClass

    backend = _guarded(lambda: BackendClass.from_buffer(data), name)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _guarded(build: Any, name: str) -> Any:
    """Run a constructor of `tokenizers`: it raises bare Exceptions, and panics, for what it cannot accept."""
    try:
        return build()
    except BadModelFile:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadModelFile(
            f"{name} is not a usable tokenizer: {str(error)[:120]}", "download the model again"
        ) from error


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _decoder_kind(backend: Backend) -> tuple[bool, bool]:
    """(byte-level, a leading space is stripped). Raises UnsupportedFormat for decoders that are neither kind of BPE."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"WordPiece", "CTC", "BPEDecoder"} or kinds == {None}:
        shown = ", ".join(sorted(str(kind) for kind in kinds))
        raise UnsupportedFormat(
            f"the tokenizer decodes with {shown}; this version reads byte-level and SentencePiece BPE",
            "use a GGUF version of the model",
        )
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
    meta = next((step for step in steps if step.get("type") == "Metaspace"), None)
    return False, strips or (meta is not None and meta.get("prepend_scheme", "always") != "never")


def _prefix_kind(backend: Backend) -> str:
    """Where a space is put before text: "never", "first" (start of the text) or "always" (after control tokens too)."""
    parts: list[dict[str, Any]] = []
    for step in (backend.normalizer, backend.pre_tokenizer):
        state = json.loads(step.__getstate__()) if step is not None else {}
        parts += state.get("normalizers") or state.get("pretokenizers") or [state]
    kind = "never"
    for part in parts:
        if part.get("type") == "Prepend" or (part.get("type") == "ByteLevel" and part.get("add_prefix_space")):
            return "always"
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            kind = str(part.get("prepend_scheme", "always"))
    return kind


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}


def _well_formed(text: str) -> str:
    """Lone surrogates, which no UTF-8 can hold, become U+FFFD; lengths stay."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *cuts, len(text)]
    return [text[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


def _overlaps(match: tuple[int, int, int], spans: Sequence[tuple[int, int]]) -> bool:
    begin, end, _ = match
    return any(start < end and begin < stop for start, stop in spans)
