"""Compiles grammars for one vocabulary: `Compiler.mask(source)` -> `GrammarMask`.

A source is first tried in a child process (`check.py`) with limits on time, memory and stack. If it passes, it is
compiled again here, which takes as long. Compiled grammars and rejections are kept in LRU caches. Compiling blocks for
up to two seconds: never call it in an event loop. Importing this module does not load llguidance.
"""

from __future__ import annotations

import atexit
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from localllm.errors import InvalidConstraint
from localllm.sandbox.child import Child, ChildDied, ChildLate
from localllm.terminal import spaced
from localllm.tokenizer.tokenizer import ControlText, Tokenizer

from .limits import CHECK_CPU_S, CHECK_MEMORY_BYTES, CHECK_WALL_S, parser_limits
from .mask import GrammarMask, Vocabulary
from .schema import LeavesOut
from .source import Source, inline_schema, quoted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHE_BYTES = 64 << 20
MAX_CACHE_ENTRIES = 256
MAX_REFUSALS = 256
BASE_BYTES = 64 << 10  # size of a small compiled grammar with its first mask
# Slices: kinds of text whose tokens are masked as a group. These are the last three of llguidance's four: with all four
# masks are no faster, and the first, white space, costs 0.1 s at load time for 262k tokens. Without the third of these,
# masks inside strings take a fifth longer; without the second, those inside a string of up to 200 characters take five
# times as long (64 us instead of 13 for 49k tokens).
SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}', r'[^"\\\x00-\x1F\x7F]+')
BREATH_S = 0.02  # enough for a server's event loop to answer the requests of half a second
_FILLERS = re.compile(
    rb"<unused\d+>|\[PAD\d+\]|<\|?reserved_(special_token_)?\d+\|?>|<\|?extra_id_\d+\|?>|\[control_\d+\]"
)
_QUOTED_CHARS = 200


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher  # in its initial state, with the first mask computed; copied for every answer
    nbytes: int
    strips: bool  # remove control tokens, which a user's own grammar could name


class Compiler:
    """Compiles and caches grammars. Safe to share between threads, which take turns."""

    def __init__(self, tokenizer: Tokenizer, width: int, template: str = "") -> None:
        """Build nothing yet.

        width     number of the model's logits
        template  the chat template; added tokens that it writes count as control tokens, never as text of an answer
        """
        self.tokenizer = tokenizer
        self._width = width
        used = {text: index for text, index in tokenizer.added_text.ids.items() if text in template}
        self._control = ControlText({**used, **tokenizer.control_text.ids})
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._cache: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._rejected: OrderedDict[bytes, str] = OrderedDict()
        self._nbytes = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def cached_bytes(self) -> int:
        return self._nbytes

    def prepare(self) -> None:
        """Build what every grammar of this vocabulary needs, and start the child.

        Takes 0.2 s for 49k tokens and 2 s for 262k, during which llguidance holds the GIL twice for 0.5 s.
        """
        shared_child().start()
        with self._lock:
            self._prepared()

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens for llguidance; built on first access."""
        with self._lock:
            return self._prepared()

    def words(self, *, plain: bool = False) -> Words:
        """Spelling of our own "lark" grammars: with control tokens for `run_text`, `plain` for `text`."""
        return Words(ControlText({}) if plain else self._control)

    def mask(self, source: Source) -> GrammarMask:
        """Return a mask at the start of the grammar. Raises InvalidConstraint with the source's `param`."""
        key = source.key
        try:
            mask = self._cached(source, key)
            if mask is None:
                with self._compiling:  # requests with a cached grammar do not wait for this lock
                    mask = self._cached(source, key) or self._compile(source, key)
        except InvalidConstraint:
            if source.looser is None:
                raise
            return self.mask(source.looser)
        return mask

    def _cached(self, source: Source, key: bytes) -> GrammarMask | None:
        """Return a cached mask or None. Raises InvalidConstraint again for a cached rejection."""
        with self._lock:
            why, compiled = self._rejected.get(key), self._cache.get(key)
            if why is not None:
                raise _error(source, why)
            if compiled is None:
                return None
            self._cache.move_to_end(key)
            return GrammarMask(compiled.matcher.deep_copy(), self._prepared(), strips=compiled.strips)

    def _compile(self, source: Source, key: bytes) -> GrammarMask:
        vocabulary = self.vocabulary
        try:
            grammar, nbytes = _check(source)
            matcher = self._matcher(grammar if source.run_text is None else source.run_text, vocabulary)
        except _Rejected as refused:
            with self._lock:
                self._rejected[key] = str(refused)
                while len(self._rejected) > MAX_REFUSALS:
                    self._rejected.popitem(last=False)
            raise _error(source, str(refused)) from None
        compiled = _Compiled(matcher, BASE_BYTES + nbytes, source.kind == "grammar")
        with self._lock:
            self._cache[key] = compiled
            self._nbytes += compiled.nbytes
            while len(self._cache) > 1 and (self._nbytes > MAX_CACHE_BYTES or len(self._cache) > MAX_CACHE_ENTRIES):
                self._nbytes -= self._cache.popitem(last=False)[1].nbytes
            return GrammarMask(matcher.deep_copy(), vocabulary, strips=compiled.strips)

    def _matcher(self, grammar: str, vocabulary: Vocabulary) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary.backend, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _Rejected(matcher.get_error())
        return matcher

    def _prepared(self) -> Vocabulary:
        if self._vocabulary is None:
            tokens = self.tokenizer.vocabulary_bytes()[: self._width]
            tokens += [b""] * (self._width - len(tokens))
            special = set(self._control.ids.values()) | {i for i, data in enumerate(tokens) if _FILLERS.fullmatch(data)}
            ends = frozenset(i for i in self.tokenizer.eos_token_ids if i < self._width)
            self._vocabulary = Vocabulary(
                backend=_backend(self.tokenizer, tokens, sorted(i for i in special if i < self._width), sorted(ends)),
                width=self._width,
                special_ids=frozenset(special),
                end_ids=ends,
                line_end_ids=frozenset(i for i, data in enumerate(tokens) if data and not data.strip(b"\r\n")),
            )
        return self._vocabulary


def _backend(tokenizer: Tokenizer, tokens: list[bytes], special: list[int], ends: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Ours:
        """The interface that llguidance expects of a tokenizer."""

        eos_token_id = ends[0] if ends else len(tokens) - 1
        bos_token_id = tokenizer.bos_token_id
        special_token_ids = special

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode_inside(text.decode() if isinstance(text, bytes) else text)

    wrapper = TokenizerWrapper(Ours())
    # in two steps, each of which holds the GIL throughout; the pause lets waiting threads run in between
    bare = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends or None, slices=[])
    time.sleep(BREATH_S)
    return bare.with_slices(list(SLICES))


class Words:
    """Writes parts of Lark rules for one vocabulary, with control tokens by id."""

    def __init__(self, control: ControlText) -> None:
        self._control = control

    def literal(self, text: str) -> str:
        parts, at = [], 0
        for begin, end, index in [*self._control.find(text), (len(text), len(text), -1)]:
            parts += [quoted(text[at:begin])] if begin > at else []
            parts += [f"<[{index}]>"] if index >= 0 else []
            at = end
        return " ".join(parts)

    def first_control(self, text: str) -> tuple[str, bool]:
        """Return (the text before the first control token, whether there is one)."""
        places = self._control.find(text)
        return (text[: places[0][0]], True) if places else (text, False)

    def schema(self, schema: Mapping[str, Any], leaves_out: LeavesOut = LeavesOut.NOTHING) -> str:
        return inline_schema(schema, leaves_out, "tools")


# --- the check in the child ------------------------------------------------------------------------------------------


class _Rejected(Exception):
    """A source was rejected; the message is the reason."""


@cache
def shared_child() -> Child:
    """The child shared by all compilers in this process; it ends with the process."""
    child = Child("localllm.grammar.check", "the process that checks grammars")
    atexit.register(child.close)
    return child


def _check(source: Source) -> tuple[str, int]:
    """Try a source in the child. Returns (the grammar for llguidance, its size in bytes)."""
    body = json.dumps({"kind": source.kind, "text": source.text, "options": dict(source.options)}).encode()
    try:
        answer: dict[str, Any] = json.loads(shared_child().insist(body, CHECK_WALL_S))
    except ChildLate:
        raise _Rejected(f"it is too complex: checking it takes over {CHECK_WALL_S} s") from None
    except ChildDied:
        limits = f"{CHECK_CPU_S} s, {CHECK_MEMORY_BYTES >> 20} MiB"
        raise _Rejected(f"it is too complex: it exceeds its limits ({limits})") from None
    if "error" in answer:
        raise _Rejected(str(answer["error"]))
    return str(answer["grammar"]), max(int(answer["bytes"]), 0)


def _error(source: Source, why: str) -> InvalidConstraint:
    what = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "list of choices or tools"}
    why = spaced(re.split("<state>|<backtrace>|<non-verbose", why)[0])[:_QUOTED_CHARS]
    error = InvalidConstraint(
        f"the {what.get(source.kind, 'grammar')} cannot be enforced: {why}",
        "leave out the part named in the message, or simplify it",
        param=source.param,
    )
    if source.kind in ("regex", "grammar"):
        error.api_code = "invalid_value"
    return error
