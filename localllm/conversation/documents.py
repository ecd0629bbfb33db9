"""Attached files and folders: their text in parts, and which parts to send when not all of them fit."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.conversation.extract import SECONDS
from localllm.errors import ConfigError, LocalLLMError
from localllm.request import open_image
from localllm.sandbox.child import Child, ChildDied, ChildLate
from localllm.terminal import clean_line, counted, gib

MAX_TEXT_BYTES = 4 << 20
MAX_BYTES = 64 << 20  # for a PDF or a web page
MAX_PICTURE_BYTES = 8 << 20  # the whole file is saved with the chat
MAX_FOLDER_FILES = 2_000
MAX_FOLDER_BYTES = 32 << 20
COUNTED_CHARS = 300_000  # tokens of a longer text are estimated
PART_CHARS = 1_600  # about 400 tokens: a paragraph or a function with its surroundings
_KINDS = {".pdf": "pdf", ".html": "html", ".htm": "html", ".xhtml": "html", ".ipynb": "notebook"}
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8")
_SKIPPED = {"node_modules", "__pycache__", "venv", "dist", "build", "target"}
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_SPACES = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"  # scripts written without spaces between words


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a document: its page, cell or file ("" when there is only one), its text, its lines."""

    where: str
    text: str
    lines: str = ""
    goes_on: bool = False  # starts within the line that the previous part ends in

    @property
    def place(self) -> str:
        """'page 3', 'a.py, lines 1-40'."""
        return ", ".join(word for word in (self.where, self.lines) if word)


@dataclass(frozen=True, slots=True)
class Document:
    """An attachment: text in parts, or a picture.

    notes    what could not be read
    picture  a data: URL with the file's bytes
    """

    name: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    picture: str = ""

    @property
    def num_chars(self) -> int:
        return sum(len(part.text) for part in self.parts)

    @property
    def label(self) -> str:
        """'manual.pdf · 1.2 MiB', safe to display."""
        return f"{clean_line(self.name)} · {gib(len(self.picture) * 3 // 4 or self.num_chars)}"

    @property
    def text(self) -> str:
        """All parts, each page, cell or file after its name."""
        pieces, before = "", ""
        for part in self.parts:
            name = f"[{part.where}]\n" if part.where != before else ""
            pieces += ("" if part.goes_on or not pieces else "\n") + name + part.text
            before = part.where
        return pieces

    @property
    def block(self) -> str:
        """The document as the model sees it."""
        body, fence = self.text, "```"
        while fence in body:
            fence += "`"
        return f"{self.name}:\n{fence}\n{body.rstrip()}\n{fence}"

    def chosen(self, places: Sequence[int]) -> Document:
        """The document with only these parts, as one text, each part after its place."""
        body = "\n[...]\n".join(f"[{self.parts[i].place}]\n{self.parts[i].text}" for i in places)
        return text_document(f"{self.name} ({len(places)} of {len(self.parts)} parts)", body)


def text_document(name: str, text: str) -> Document:
    """A document with this name and text."""
    return Document(name, tuple(_split("", text)))


def read_document(path: str | Path) -> Document:
    """Read a file or a folder. Raises ConfigError when it is missing, unreadable, too large, or has no text."""
    file = Path(path).expanduser()
    shown = clean_line(str(path))
    try:
        if file.is_dir():
            return _folder(file, shown)
        kind, data = _opened(file, shown)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown} cannot be read: {why}", "check the path") from None
    if kind == "picture":
        return _picture(file.name, shown, data)
    return _extracted(file.name, shown, kind, data) if kind else text_document(file.name, _decoded(data))


def is_document(path: Path) -> bool:
    """Whether a path is more than plain text: a folder, a picture, or a file whose text must be extracted."""
    return path.suffix.lower() in (*_KINDS, *PICTURES) or path.expanduser().is_dir()


def question(documents: Sequence[Document], text: str) -> str | list[dict[str, Any]]:
    """The content of a message: pictures as parts, then the text of the other documents, then `text`."""
    told = "\n\n".join([*(one.block for one in documents if not one.picture), text])
    parts = [{"type": "image_url", "image_url": {"url": one.picture}} for one in documents if one.picture]
    return [*parts, {"type": "text", "text": told}] if parts else told


def _picture(name: str, shown: str, data: bytes) -> Document:
    """A picture, checked to be decodable."""
    try:
        form, _ = open_image(data)
    except LocalLLMError as error:
        raise ConfigError(f"{shown}: {error.message}", error.hint.replace("send", "attach", 1)) from None
    return Document(name, (), picture=f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}")


def _opened(file: Path, shown: str) -> tuple[str, bytes]:
    """A file's kind ("" for text), by name or first bytes, and its contents."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block, a device might never end
    with os.fdopen(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{shown} is neither a file nor a folder", "attach files or folders")
        head, ending = opened.read(8192), file.suffix.lower()
        kind = "picture" if ending in PICTURES or head.startswith(_MAGIC) else _KINDS.get(ending, "")
        if not kind and head.startswith(b"%PDF-"):
            kind = "pdf"
        if not kind and b"\0" in head:
            raise ConfigError(f"{shown} is not text", "attach text, PDF, HTML, notebooks, images or a folder")
        limit = MAX_PICTURE_BYTES if kind == "picture" else MAX_BYTES if kind else MAX_TEXT_BYTES
        if found.st_size > limit:
            raise ConfigError(f"{shown} is {gib(found.st_size)}; the limit is {gib(limit)}", "attach a part of it")
        return kind, head + opened.read(limit + 1 - len(head))


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _extracted(name: str, shown: str, kind: str, data: bytes) -> Document:
    child = Child("localllm.conversation.extract", "the process that reads documents")
    try:
        answer = json.loads(child.exchange(kind.encode() + b"\0" + data, SECONDS))
    except (ChildDied, ChildLate):
        answer = {"error": f"reading it takes too much memory, or longer than {SECONDS:.0f} s"}
    finally:
        child.close()
    if "error" in answer:
        raise ConfigError(f"{shown}: {clean_line(answer['error'])}", "attach another file, or paste its text")
    parts = tuple(part for where, text in answer["parts"] for part in _split(where, text))
    notes = tuple(clean_line(note) for note in answer["notes"])
    if not any(part.text.strip() for part in parts):
        raise ConfigError(f"{shown} has no text" + (f": {notes[0]}" if notes else ""), "attach a file with text")
    return Document(name, parts, notes)


# --- folders ---------------------------------------------------------------------------------------------------------


def _folder(folder: Path, shown: str) -> Document:
    """All text files in a folder; in a git checkout, those that git does not ignore."""
    parts: list[Part] = []
    notes: list[str] = []
    left_out = too_many = num_bytes = num_files = 0
    for file in _files(folder):
        if file.suffix.lower() in PICTURES:  # pictures are attached by name
            left_out += 1
            continue
        try:
            size = file.stat().st_size
            if num_files == MAX_FOLDER_FILES or num_bytes + size > MAX_FOLDER_BYTES:
                too_many += 1
                continue
            one = read_document(file)
        except (ConfigError, OSError):
            left_out += 1
            continue
        num_files, num_bytes = num_files + 1, num_bytes + size
        name = file.relative_to(folder).as_posix()
        parts += (replace(part, where=f"{name}, {part.where}" if part.where else name) for part in one.parts)
    if too_many:
        limits = f"{MAX_FOLDER_FILES:,} files or {gib(MAX_FOLDER_BYTES)}"
        notes.append(f"{counted(too_many, 'file')} skipped: the limit for a folder is {limits}")
    if left_out:
        notes.append(f"{counted(left_out, 'file')} skipped: not text, too large or unreadable")
    if not parts:
        raise ConfigError(f"{shown} has no text files", "attach a folder with text files")
    return Document(f"{folder.resolve().name}/", tuple(parts), tuple(notes))


def _files(folder: Path) -> Iterator[Path]:
    """Regular files in order; no hidden files, no links, nothing generated or installed."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=20, check=True).stdout.decode("utf-8", "replace")
        names = sorted(name for name in listed.split("\0") if name)
    except (OSError, subprocess.SubprocessError):
        names = []
    for name in names or _walked(folder):
        if not any(part.startswith(".") or part in _SKIPPED for part in Path(name).parts):
            file = folder / name
            if file.is_file() and not file.is_symlink():
                yield file


def _walked(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        yield from (os.path.relpath(os.path.join(base, name), folder) for name in sorted(files))


# --- parts -----------------------------------------------------------------------------------------------------------


def _split(where: str, text: str) -> Iterator[Part]:
    """Split a text into parts of at most `PART_CHARS`, between lines; a longer line is split too."""
    if len(text) <= PART_CHARS:
        yield Part(where, text)
        return
    held: list[tuple[int, str]] = []
    size, goes_on = 0, False
    for number, line in enumerate(text.split("\n"), 1):
        for at in range(0, len(line) or 1, PART_CHARS):
            piece = line[at : at + PART_CHARS]
            if held and size + len(piece) > PART_CHARS:
                yield _part(where, held, goes_on)
                held, size, goes_on = [], 0, at > 0
            held.append((number, piece))
            size += len(piece) + 1
    yield _part(where, held, goes_on)


def _part(where: str, lines: list[tuple[int, str]], goes_on: bool) -> Part:
    first, last = lines[0][0], lines[-1][0]
    place = f"line {first}" if last == first else f"lines {first}-{last}"
    return Part(where, "\n".join(text for _, text in lines), place, goes_on)


# --- what goes with a question ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen text of some documents, with a notice for each document that is not sent whole."""

    documents: tuple[Document, ...]
    notices: tuple[str, ...]
    num_tokens: int

    @property
    def blocks(self) -> list[str]:
        return [document.block for document in self.documents]


def select(documents: Sequence[Document], question: str, budget: int, count: Callable[[str], int]) -> Selection:
    """Select whole documents if they fit in `budget` tokens, else the parts that match the question best.

    Parts are ranked by BM25 over all documents. If the question shares no word with them ("summarize this"), parts are
    taken from the start of each document in turn.

    count   counts the tokens of a text
    """
    blocks = [document.block for document in documents]
    total = sum(num_tokens(block, count) for block in blocks)
    if total <= budget:
        return Selection(tuple(documents), (), total)
    everything = [(d, p) for d, document in enumerate(documents) for p in range(len(document.parts))]
    order, matched = _ranked(documents, everything, question)
    tokens_per_char = total / max(1, sum(map(len, blocks)))
    chosen: list[tuple[int, int]] = []
    spent = 0.0
    for d, p in order:
        cost = (len(documents[d].parts[p].text) + len(documents[d].parts[p].place) + 12) * tokens_per_char
        if spent + cost <= budget:
            chosen.append((d, p))
            spent += cost
    while True:
        taken = {d: sorted(p for one, p in chosen if one == d) for d in sorted({d for d, _ in chosen})}
        sent = [documents[d].chosen(places) for d, places in taken.items()]
        total = sum(count(document.block) for document in sent)
        if total <= budget or not chosen:
            break
        del chosen[max(len(chosen) * budget // max(1, total), len(chosen) - 8) :]  # tokens are uneven: count again
    notices = tuple(_notice(d, document, chosen, matched) for d, document in enumerate(documents))
    return Selection(tuple(sent), notices, total)


def num_tokens(text: str, count: Callable[[str], int]) -> int:
    """Tokens of a text; for a long text, an estimate from three places in it."""
    if len(text) <= COUNTED_CHARS:
        return count(text)
    third = COUNTED_CHARS // 3
    places = (0, (len(text) - third) // 2, len(text) - third)
    return sum(count(text[at : at + third]) for at in places) * len(text) // (3 * third)


def _ranked(
    documents: Sequence[Document], everything: list[tuple[int, int]], question: str
) -> tuple[list[tuple[int, int]], bool]:
    """Return all parts, best first, and whether any shares a word with the question."""
    import bm25s
    from bm25s.stopwords import STOPWORDS_EN

    index = bm25s.BM25()
    texts = [documents[d].parts[p] for d, p in everything]
    index.index([words(f"{part.place} {part.text}") or [""] for part in texts], show_progress=False)
    asked = dict.fromkeys(word for word in words(question) if word not in STOPWORDS_EN)
    known = [word for word in asked if word in index.vocab_dict]
    scores = index.get_scores(known) if known else [0.0] * len(everything)
    if not max(scores) > 0:
        return sorted(everything, key=lambda place: (place[1], place[0])), False
    ranked = sorted(range(len(everything)), key=lambda i: -scores[i])
    return [everything[i] for i in ranked], True


def words(text: str) -> list[str]:
    """Words in lower case, including those inside namesLikeThis; pairs of characters in scripts without spaces."""
    found: list[str] = []
    for word in _WORD.findall(text):
        if re.search(_NO_SPACES, word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
            continue
        inner = _CAMEL.split(word)
        found += [one.lower() for one in inner]
        if len(inner) > 1:
            found.append(word.lower())
    return found


def _notice(number: int, document: Document, chosen: list[tuple[int, int]], matched: bool) -> str:
    sent = sorted(p for d, p in chosen if d == number)
    name = clean_line(document.name)
    if not sent:
        return f"{name}: not sent, because it does not fit"
    places = [clean_line(document.parts[p].place) for p in sent]
    which = "; ".join(places[:4]) + (f"; {len(places) - 4} more" if len(places) > 4 else "")
    how = "those that match the question best" if matched else "from the start: no word of the question occurs in it"
    return f"{name}: {len(sent)} of {counted(len(document.parts), 'part')} sent, {how} ({which})"
