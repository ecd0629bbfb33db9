"""Grammars of one vocabulary, compiled: `Compiler.mask(source)` -> `GrammarMask`.

A source is first tried in a child process (`check.py`) under limits of time, memory and stack; only what passes there
is compiled here, which takes as long again. Compiled grammars and refusals are kept, least recently used first out.
Blocks for up to two seconds: never call it in an event loop. Importing this loads no llguidance.
"""

from __future__ import annotations

import atexit
import json
import re
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from localllm.errors import InvalidConstraint
from localllm.sandbox.child import Child, ChildDied, ChildLate
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
BASE_BYTES = 64 << 10  # of a small compiled grammar with its first mask
# Kinds of text whose tokens a mask takes as one: the last three of llguidance's own four. Masks take as long with all
# four; without the third of these a string's take a fifth longer, without the second those of one of 200 characters
# five times as long (64 us instead of 13 of 49k tokens). Blanks, llguidance's first, cost 262k tokens 0.1 s at a load.
SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}', r'[^"\\\x00-\x1F\x7F]+')
BREATH_S = 0.02  # enough for a server's loop to answer what came in half a second
_FILLERS = re.compile(
    rb"<unused\d+>|\[PAD\d+\]|<\|?reserved_(special_token_)?\d+\|?>|<\|?extra_id_\d+\|?>|\[control_\d+\]"
)
# how a child ends whose stack, memory or time a grammar used up
_OWN_SIGNALS = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGPROF))
_SPACES = re.compile(r"\s+")
_QUOTED_CHARS = 200


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher  # in its first state, the first mask computed; copied for every answer
    nbytes: int
    strips: bool  # a user's own grammar could name control tokens


class Compiler:
    """Safe to share between threads: they take turns."""

    def __init__(self, tokenizer: Tokenizer, width: int, template: str = "") -> None:
        """Builds nothing yet.

        width     of the model's logits, in ids
        template  the chat template: added tokens that it writes count as control tokens, never as text of an answer
        """
        self.tokenizer = tokenizer
        self._width = width
        used = {text: index for text, index in tokenizer.added_text.ids.items() if text in template}
        self._control = ControlText({**used, **tokenizer.control_text.ids})
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._cache: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._nbytes = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def cached_bytes(self) -> int:
        return self._nbytes

    def prepare(self) -> None:
        """Build what every grammar of this vocabulary needs, and start the child.

        Of 49k tokens 0.2 s; of 262k 2 s, of which llguidance holds the interpreter's lock for twice 0.5 s.
        """
        shared_child().start()
        with self._lock:
            self._prepared()

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens as llguidance knows them; built when first asked for."""
        with self._lock:
            return self._prepared()

    def words(self, *, plain: bool = False) -> Words:
        """How parts of grammars of ours are spelled: kind "lark", `run_text` with control tokens, `text` plain."""
        return Words(ControlText({}) if plain else self._control)

    def mask(self, source: Source) -> GrammarMask:
        """A mask at the beginning of the grammar. Raises InvalidConstraint, its `param` the source's."""
        key = source.key
        try:
            mask = self._kept(source, key)
            if mask is None:
                with self._compiling:  # those whose grammar is known do not wait for those whose grammar is new
                    mask = self._kept(source, key) or self._compile(source, key)
        except InvalidConstraint:
            if source.looser is None:
                raise
            return self.mask(source.looser)
        return mask

    def _kept(self, source: Source, key: bytes) -> GrammarMask | None:
        """From what was compiled before. Raises what was refused before."""
        with self._lock:
            why, compiled = self._refused.get(key), self._cache.get(key)
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
        except _Refused as refused:
            with self._lock:
                self._refused[key] = str(refused)
                while len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
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
            raise _Refused(matcher.get_error())
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
        """What llguidance asks of a tokenizer."""

        eos_token_id = ends[0] if ends else len(tokens) - 1
        bos_token_id = tokenizer.bos_token_id
        special_token_ids = special

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode_inside(text.decode() if isinstance(text, bytes) else text)

    wrapper = TokenizerWrapper(Ours())
    # in two steps, each of which holds the interpreter to its end: who waits for it gets something done in between
    bare = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=ends or None, slices=[])
    time.sleep(BREATH_S)
    return bare.with_slices(list(SLICES))


class Words:
    """Parts of Lark rules for one vocabulary: control tokens by id."""

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
        """What stands before the first control token of a text, and whether there is one."""
        places = self._control.find(text)
        return (text[: places[0][0]], True) if places else (text, False)

    def schema(self, schema: Mapping[str, Any], leaves_out: LeavesOut = LeavesOut.NOTHING) -> str:
        return inline_schema(schema, leaves_out, "tools")


# --- the check in the child ------------------------------------------------------------------------------------------


class _Refused(Exception):
    """Why a source is not compiled."""


@cache
def shared_child() -> Child:
    """The child in which everything in this process is tried first; it ends with the process."""
    child = Child("localllm.grammar.check", "the process that checks grammars")
    atexit.register(child.close)
    return child


def _check(source: Source) -> tuple[str, int]:
    """The grammar for llguidance and its size in bytes."""
    body = json.dumps({"kind": source.kind, "text": source.text, "options": dict(source.options)}).encode()
    limits = f"{CHECK_CPU_S} s, {CHECK_MEMORY_BYTES >> 20} MB"
    for attempt in range(2):
        try:
            answer: dict[str, Any] = json.loads(shared_child().exchange(body, CHECK_WALL_S))
        except ChildLate:
            raise _Refused(f"it is too complex: over {CHECK_WALL_S} s") from None
        except ChildDied as died:
            if -died.code in _OWN_SIGNALS or attempt:  # else it was ended from outside: once more with a new one
                raise _Refused(f"it is too complex: it exceeds its limits ({limits})") from None
            continue
        if "error" in answer:
            raise _Refused(str(answer["error"]))
        return str(answer["grammar"]), max(int(answer["bytes"]), 0)
    raise AssertionError("unreachable")


def _error(source: Source, why: str) -> InvalidConstraint:
    what = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "list of choices or tools"}
    why = "".join(c if c.isprintable() else " " for c in re.split("<state>|<backtrace>|<non-verbose", why)[0])
    why = _SPACES.sub(" ", why).strip()[:_QUOTED_CHARS]
    error = InvalidConstraint(
        f"the {what.get(source.kind, 'grammar')} cannot be enforced: {why}",
        "leave out the part that is named, or simplify it",
        param=source.param,
    )
    if source.kind in ("regex", "grammar"):
        error.api_code = "invalid_value"
    return error
