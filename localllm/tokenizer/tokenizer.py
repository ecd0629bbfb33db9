"""`Tokenizer`: text to token ids and back.

Text never becomes control tokens unless `special=True`. No BOS is added here; `encode_chat` and the facade add it once.
Encoding uses `encode_batch_fast`, which releases the GIL. `detokenizer.py` streams text from ids, and `files.py` reads
the files.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from localllm.errors import BadModelFile, InvalidRequest, UnsupportedFormat
from localllm.tokenizer.trial import KNOWN_PATTERNS, growth_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Span = tuple[int, int]
_SURROGATES = re.compile("[\ud800-\udfff]")
# Longer texts are encoded under a time limit. The key is whether all regexes of the tokenizer are published ones: even
# two of those take 2 and 11 s for 50,000 digits, and a malicious one may never end.
UNWATCHED_CHARS = {True: 10_000, False: 16}
LIMIT_S, CHARS_PER_S = 2.0, 50_000  # time limit: 2 s, plus 1 s per 50,000 characters
FREE_GROWTH = 4.0  # growth factor up to which the size is not checked
MAX_GROWN_BYTES = 16 << 20  # limit for a text after growth
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ControlText:
    """Finds the texts of certain tokens in a text: leftmost first, then longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` maps the text of a token to its id."""
        self.ids = {text: index for text, index in ids.items() if text}
        self._lengths = sorted({len(text) for text in self.ids}, reverse=True)
        firsts = "".join(re.escape(char) for char in sorted({text[0] for text in self.ids}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._heads = {text[:size] for text in self.ids for size in range(1, len(text))}

    def find(self, text: str) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        done = 0
        for match in self._first.finditer(text) if self._first else ():
            begin = match.start()
            if begin < done:
                continue
            for length in self._lengths:
                index = self.ids.get(text[begin : begin + length])
                if index is not None:
                    done = min(begin + length, len(text))
                    found.append((begin, done, index))
                    break
        return found

    def open_end(self, text: str) -> int:
        """Length of the longest suffix of `text` that starts one of the tokens."""
        longest = min(self._lengths[0] - 1, len(text)) if self._lengths else 0
        return next((size for size in range(longest, 0, -1) if text[-size:] in self._heads), 0)


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        named_tokens: Mapping[str, str],
        *,
        add_bos: bool,
        eos_token_ids: frozenset[int],
        around: tuple[Sequence[int], Sequence[int]] = ((), ()),
        vocab_size: int | None = None,
        chat_template: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Use `load_tokenizer`. `vocab_size`: None takes it from the back end."""
        self._backend = backend
        self._lock = threading.Lock()  # encode_special_tokens is a flag on the shared back end
        self._unwatched_chars = UNWATCHED_CHARS[_patterns(backend) <= KNOWN_PATTERNS]
        self._growth = growth_of(backend)  # maximum output bytes of its steps per input byte
        self._added = dict(backend.get_added_tokens_decoder())
        # strips_first_space: the vocabulary puts a space before the first word of every text (Llama 2 and relatives)
        self._byte_level, self.strips_first_space = _decoder_kind(backend)
        self._prefix = _prefix_kind(backend)
        step = _steps(backend.decoder)[0]
        self._continuation = str(step.get("prefix", "##")) if step.get("type") == "WordPiece" else None
        self._bytes: dict[int, bytes] = {}
        # ids are below this; the model's logits may be wider (padding rows)
        self.vocab_size: int = vocab_size or max(backend.get_vocab_size(), max(self._added, default=-1) + 1)
        # control tokens: never made from message text, left out of decoded text
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self.eos_token_ids = eos_token_ids  # every token that ends a turn or a text
        self.named_tokens = dict(named_tokens)  # bos_token, eos_token, ... -> text; variables for chat templates
        bos = self.named_tokens.get("bos_token")
        self.bos_token_id = None if bos is None else self.token_to_id(bos)
        # the model expects the BOS token before every text
        self.add_bos = add_bos and self.bos_token_id is not None
        # ids before and after a whole text, for embedding models
        self.around = list(around[0]), list(around[1])
        self.chat_template = chat_template
        self.chat_templates = dict(chat_templates or {})  # additional named templates, such as "tool_use"

    # --- vocabulary --------------------------------------------------------------------------------------------------

    def id_to_token(self, index: int) -> str | None:
        """The token in the vocabulary's own spelling (`Ġthe`, `▁the`), None for an id without a token."""
        added = self._added.get(index)
        if added is not None:
            return str(added.content)
        return self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, None when there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token, possibly part of a character; b"" for an id without a token."""
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._make_bytes(index)
        return known

    def vocabulary_bytes(self) -> list[bytes]:
        """`token_bytes` of every id in order, not cached: 262k tokens take a second and 20 MB."""
        return [self._make_bytes(index) for index in range(self.vocab_size)]

    def _make_bytes(self, index: int) -> bytes:
        token = self.id_to_token(index)
        if token is None:
            return b""
        if index in self._added and (self._byte_level or token.strip("▁")):
            return token.encode()
        if self._continuation is not None:  # WordPiece
            return (
                token.removeprefix(self._continuation) if token.startswith(self._continuation) else " " + token
            ).encode()
        if not self._byte_level:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        table = _byte_level_table()
        data = [table.get(char) for char in token]
        # a token with other characters is not byte-encoded
        return token.encode() if None in data else bytes([byte for byte in data if byte is not None])

    @cached_property
    def control_text(self) -> ControlText:
        return ControlText({self._added[index].content: index for index in self.special_ids})

    @cached_property
    def added_text(self) -> ControlText:
        """Finds the texts of added tokens that are neither control tokens nor white space: `<think>`, `<tool_call>`."""
        plain = {token.content: index for index, token in self._added.items() if not token.special}
        return ControlText({text: index for text, index in plain.items() if not text.isspace() and text.strip("▁")})

    # --- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text without adding BOS. `special`: the texts of control tokens become control tokens.

        Raises InvalidRequest for text that inevitably becomes a control token.
        """
        text = _well_formed(text)
        ids = self._encode(text, special=special)
        return ids if special or self.special_ids.isdisjoint(ids) else self.encode_mixed(text, [(0, len(text))])

    def encode_inside(self, text: str) -> list[int]:
        """Like `encode`, for text inside another text: no space is put before it."""
        return self._encode_pieces([_well_formed(text)], at_start=False)

    def encode_mixed(self, text: str, as_text: Sequence[Span]) -> list[int]:
        """Like `encode(text, special=True)`, except that text overlapping the spans `as_text` stays text.

        as_text  (begin, end) in characters, in order; added tokens such as `<tool_call>` do not form there either

        Raises InvalidRequest for text that inevitably becomes a control token.
        """
        text = _well_formed(text)
        if not as_text:
            return self._encode(text, special=True)
        as_text = sorted(as_text)
        control, cuts = [], set()
        for begin, end, index in self.control_text.find(text):
            if not _overlap(as_text, begin, end):
                control.append((begin, end, index))
            elif self._is_mergeable(index) and end - begin > 1:
                cuts.add(begin + 1)
        cuts |= {begin + 1 for begin, end, _ in self.added_text.find(text) if _overlap(as_text, begin, end)}
        ids: list[int] = []
        at = 0
        for begin, end, index in [*control, (len(text), len(text), -1)]:
            token = self._added.get(index)
            stop = at + len(text[at:begin].rstrip()) if token is not None and token.lstrip else begin
            edges = [at, *sorted(cut for cut in cuts if at < cut < stop), stop]
            pieces = [text[left:right] for left, right in zip(edges, edges[1:], strict=False)]
            plain = self._encode_pieces(pieces, at_start=at == 0 or self._prefix == "always")
            if not self.special_ids.isdisjoint(plain):
                raise InvalidRequest("the text contains a control token of this model", "remove it from the text")
            ids += plain
            if token is not None:
                ids.append(index)
                at = end + (len(text[end:]) - len(text[end:].lstrip()) if token.rstrip else 0)
        return ids

    def _is_mergeable(self, index: int) -> bool:
        """True if plain text can become this token, because the vocabulary's merges build it."""
        return index in self._encode(self._added[index].content, special=False)

    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[int]:
        """Encode the pieces of one text separately, as plain text. Only the first can be at the start."""
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if not piece:
                continue
            if self._prefix == "never" or (at_start and number == 0):
                ids += self._encode(piece, special=False)
                continue
            # a piece at the start would get a space: encode it after a newline, then remove the newline's ids
            lead, both = self._encode("\n", special=False), self._encode("\n" + piece, special=False)
            ids += both[len(lead) :] if both[: len(lead)] == lead else self._encode(piece, special=False)
        return ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        limit = LIMIT_S + len(text) / CHARS_PER_S
        if self._growth > FREE_GROWTH and len(text.encode()) * self._growth > MAX_GROWN_BYTES:
            raise _split_error(text, f"its steps may expand it to over {MAX_GROWN_BYTES >> 20} MiB")
        if len(text) <= self._unwatched_chars:
            return self._encode_now(text, special, limit)
        ids: Future[list[int]] = Future()

        def work() -> None:
            try:
                ids.set_result(self._encode_now(text, special, limit))
            except BaseException as error:
                ids.set_exception(error)

        # The back end cannot be interrupted: a late thread is abandoned and holds the lock until it ends.
        threading.Thread(target=work, name="encode", daemon=True).start()
        try:
            return ids.result(limit)
        except TimeoutError:
            raise _split_error(text, f"it takes over {limit:.0f} s") from None

    def _encode_now(self, text: str, special: bool, limit: float) -> list[int]:
        if not self._lock.acquire(timeout=limit):
            raise _split_error(text, "it is still busy with an earlier text")
        try:
            self._backend.encode_special_tokens = not special
            encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise _split_error(text, ascii(str(error))[1:-1][:120]) from error
        finally:
            self._lock.release()
        ids: list[int] = encoded[0].ids
        return ids

    # --- ids to text -------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """Decode token ids to text; bytes that are not UTF-8 become U+FFFD.

        `continuing`: the ids continue earlier text, so the space before the first word stays.
        """
        skip = self.special_ids if skip_special else frozenset()
        data = b"".join([self.token_bytes(index) for index in ids if index not in skip])
        if self.strips_first_space and not continuing:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def _split_error(text: str, why: str) -> BadModelFile:
    return BadModelFile(
        f"the tokenizer cannot split a text of {len(text):,} characters ({why})",
        "send a shorter text, or use another model",
    )


def _patterns(backend: Backend) -> set[str]:
    """The regular expressions in a back end's normalizer and pre-tokenizer."""
    found: set[str] = set()

    def note(item: dict[str, Any]) -> None:
        if isinstance(item.get("Regex"), str):
            found.add(item["Regex"])

    for part in filter(None, (backend.normalizer, backend.pre_tokenizer)):
        json.loads(part.__getstate__(), object_hook=note)
    return found


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder."""
    state = json.loads(part.__getstate__()) if part is not None else {}
    return next((state[key] for key in ("normalizers", "pretokenizers", "decoders") if state.get(key)), [state])


def _overlap(spans: Sequence[Span], begin: int, end: int) -> bool:
    """True if (begin, end) overlaps one of the ordered spans."""
    last = bisect_left(spans, (end, 0))
    return any(begin < stop for _, stop in spans[max(last - 2, 0) : last])


def _decoder_kind(backend: Backend) -> tuple[bool, bool]:
    """Return (byte-level, leading space is stripped). Raises UnsupportedFormat for other kinds of decoders."""
    steps = _steps(backend.decoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds == {"WordPiece"}:
        return False, True
    if not kinds & {"Replace", "ByteFallback", "Metaspace"}:
        shown = ", ".join(sorted(str(kind) for kind in kinds)) or "nothing"
        raise UnsupportedFormat(
            f"the tokenizer decodes with {shown}; supported: byte-level BPE, SentencePiece BPE, WordPiece",
            "use a GGUF version of the model",
        )
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
    meta = next((step for step in steps if step.get("type") == "Metaspace"), None)
    return False, strips or (meta is not None and meta.get("prepend_scheme", "always") != "never")


def _prefix_kind(backend: Backend) -> str:
    """When a space is put before text: "never", "first" (start of text) or "always" (also after control tokens)."""
    kind = "never"
    for part in _steps(backend.normalizer) + _steps(backend.pre_tokenizer):
        if part.get("type") == "Prepend" or (part.get("type") == "ByteLevel" and part.get("add_prefix_space")):
            return "always"
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            kind = str(part.get("prepend_scheme", "always"))
    return kind


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """GPT-2's mapping from printable characters to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD; the length stays the same."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
