"""Tries untrusted tokenizers in a child process first, with limits on time and memory.

A tokenizer.json holds steps that rewrite text and regular expressions that split it. A few lines can double a text
forty times or keep an expression busy for days, as soon as the file is opened, because added tokens go through the
steps. A file is opened directly only if all its expressions are published ones and `growth` bounds the output of its
steps. Any other file is first opened and used in the child (`python -P -m localllm.tokenizer.trial`); the result is
cached by the file's digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localllm.errors import BadModelFile
from localllm.paths import cache_dir, read_json, replace_file
from localllm.sandbox.child import Child, ChildDied, ChildLate
from localllm.sandbox.child_loop import confine, serve
from localllm.tokenizer.regex import PRE_TOKENIZERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_GROWTH = 1024.0  # output bytes per input byte: SentencePiece's NFKC tables reach 33, Llama 2's steps 12
MAX_STEPS = 64
MEMORY_BYTES = 2 << 30  # Gemma's 1.4 million strings need 0.9 GB
OPEN_CPU_S, USE_CPU_S, WALL_S = 15.0, 2.0, 40.0
KNOWN_PATTERNS = frozenset(pattern for patterns in PRE_TOKENIZERS.values() for pattern in patterns)
TEXTS = (*(char * 2000 for char in "a1 \n_.é世"), "Grüße, 世界 🙂\n\tdef f(x): return x  # 3.14\n" * 20)

_VERSION = 1
_FIXED = {"ByteLevel": 4.0, "Metaspace": 4.0, "BertNormalizer": 2.0}  # maximum output bytes per input byte
# syntax that may let a regular expression match empty text
_MAY_BE_EMPTY = re.compile(r"^$|[*?|^$]|\(\)|\{0|\{,|\\[bBAzZGKyY]")


def steps(part: Any) -> Iterator[Any]:
    """Yield the steps of a normalizer or pre-tokenizer (as JSON), with sequences flattened."""
    inner = [part[key] for key in ("normalizers", "pretokenizers") if key in part] if isinstance(part, dict) else []
    if not inner:
        yield part
    elif isinstance(inner[0], list):
        for one in inner[0]:
            yield from steps(one)


def growth(*parts: Any) -> float:
    """Maximum output bytes of the steps per input byte. Raises KeyError, TypeError or ValueError for invalid steps."""
    factor = 1.0
    for part in parts:
        for step in steps(part) if part is not None else ():
            factor = min(factor * _growth(step), 1e30)
    return factor


def growth_of(backend: Backend) -> float:
    """`growth` of an open tokenizer."""
    parts = (backend.normalizer, backend.pre_tokenizer)
    return growth(*(json.loads(part.__getstate__()) for part in parts if part is not None))


def _growth(step: Any) -> float:
    kind = step["type"]
    if kind == "Prepend":
        return 1.0 + _width(step["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return float(max(1, *map(len, texts)))
    if kind != "Replace":
        return _FIXED.get(kind, 1.0)
    content, pattern = _width(step["content"]), step["pattern"]
    if pattern.get("String"):
        return max(1.0, content / len(pattern["String"].encode()))
    return max(1.0, content) + bool("String" in pattern or _MAY_BE_EMPTY.search(pattern["Regex"]))


def _width(text: str) -> int:
    """Bytes of a text, at most, after steps that normalize it."""
    forms = (text, unicodedata.normalize("NFKD", text), unicodedata.normalize("NFKD", text.lower()))
    return max(len(form.encode("utf-8", "replace")) for form in forms)


def vet(data: bytes, document: Any, name: str) -> None:
    """Raise BadModelFile for a tokenizer.json that cannot be opened safely.

    document   the parsed file, or None if it cannot be parsed here
    name       the file's name, for the error
    """
    try:
        model, parts = document["model"], [document.get("normalizer"), document.get("pre_tokenizer")]
        found = [step for part in parts if part is not None for step in steps(part)]
        patterns = {str(step["pattern"].get("Regex", "")) for step in found if "pattern" in step} - {""}
        problem = too_much(growth(*parts))
        # `tokenizers` panics on a prefix that the merges lack
        is_strange = model.get("type", "BPE") == "BPE" and model.get("continuing_subword_prefix")
        is_plain = len(found) <= MAX_STEPS and patterns <= KNOWN_PATTERNS and not is_strange
    except (KeyError, TypeError, ValueError, AttributeError):
        problem, is_plain = "", False
    if not problem and not is_plain:
        problem = _trial_problem(data)
    if problem:
        raise BadModelFile(f"{name} is not a usable tokenizer: {problem}")


def too_much(factor: float) -> str:
    """The reason to reject a tokenizer with that growth factor, or ""."""
    what = f"its steps turn one byte into up to {factor:.0e} bytes; the limit is {MAX_GROWTH:,.0f}"
    return what if factor > MAX_GROWTH else ""


def _trial_problem(data: bytes) -> str:
    """Open and use a tokenizer.json in the child, once per file. Returns the problem or ""."""
    from tokenizers import __version__

    digest = hashlib.sha256(data)
    digest.update(f"{_VERSION} {__version__}".encode())
    path = cache_dir() / "tokenizers" / f"{digest.hexdigest()}.trial.json"
    known = read_json(path).get("problem")
    if isinstance(known, str):
        return known
    problem, is_certain = _ask(data)
    if is_certain:
        with suppress(OSError):  # only slower next time
            replace_file(path, json.dumps({"problem": problem}))
    return problem


def _ask(data: bytes) -> tuple[str, bool]:
    """Return (the problem or "", whether the result is reproducible)."""
    child = Child("localllm.tokenizer.trial", "the process that tries tokenizers")
    try:
        return str(json.loads(child.insist(data, WALL_S))["problem"]), True
    except ChildLate:
        return f"opening it took over {WALL_S:.0f} s", False
    except ChildDied as died:
        if died.code == -signal.SIGPROF:
            return f"it takes too long (over {OPEN_CPU_S:.0f} s to open, or {USE_CPU_S:.0f} s for short texts)", True
        certain = died.code == -signal.SIGABRT
        return f"the process that tried it died (limit: {MEMORY_BYTES >> 30} GiB of memory)", certain
    finally:
        child.close()


# --- the child -------------------------------------------------------------------------------------------------------


def _answer(data: bytes) -> bytes:
    from tokenizers import Tokenizer

    problem = ""
    try:
        # only the steps, as the library understands them: old files spell some differently
        steps_only = json.loads(data) | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
        if problem := too_much(growth_of(Tokenizer.from_str(json.dumps(steps_only)))):
            return _reply(problem)
        backend = Tokenizer.from_buffer(data)
        signal.setitimer(signal.ITIMER_PROF, USE_CPU_S)
        for text in TEXTS:
            backend.encode_batch_fast([text], add_special_tokens=False)
        backend.encode("", add_special_tokens=True)
    except BaseException as error:  # a panic is no Exception
        problem = ascii(str(error))[1:-1][:120] or type(error).__name__
    return _reply(problem)


def _reply(problem: str) -> bytes:
    return json.dumps({"problem": problem}).encode()


def main() -> None:
    """Set the limits and serve requests."""
    import tokenizers  # noqa: F401 - before the limits

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads
    confine(MEMORY_BYTES)
    serve(_answer, alarm_s=WALL_S, cpu_s=OPEN_CPU_S)


if __name__ == "__main__":
    main()
