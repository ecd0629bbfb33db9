"""Extracts text from PDF files, web pages and notebooks, in a confined child process: the files are untrusted.

A request is a kind, a zero byte and the file's bytes. The answer is JSON: {"parts": [[where, text], ...],
"notes": [...]} or {"error": why}.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from localllm.sandbox.child_loop import confine, serve

MEMORY_BYTES = 768 << 20
SECONDS = 60.0  # per file; a text PDF of 500 pages takes 10 to 20
MAX_CHARS = 16 << 20  # extracted from one file
MAX_PAGES = 5_000

Parts = Iterator[tuple[str, str]]


class Refused(Exception):
    """Says why there is no text."""


def pdf(data: bytes, notes: list[str]) -> Parts:
    """Yield one part per page with text."""
    import pypdf
    from pypdf.errors import PyPdfError

    try:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise Refused("it is encrypted: save a copy without a password")
        count = len(reader.pages)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"it is not a valid PDF ({type(error).__name__})") from None
    empty = []
    for number in range(min(count, MAX_PAGES)):
        try:
            text = reader.pages[number].extract_text() or ""
        except Exception as error:  # one damaged page must not hide the others
            notes.append(f"page {number + 1} cannot be read ({type(error).__name__})")
            continue
        if text.strip():
            yield f"page {number + 1}", text
        else:
            empty.append(number + 1)
    if empty:
        which = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        notes.append(f"{len(empty)} of {count} pages have no text and may be scans (page {which})")
    if count > MAX_PAGES:
        notes.append(f"only the first {MAX_PAGES:,} of {count:,} pages were read")


def html(data: bytes, notes: list[str]) -> Parts:
    """Yield the whole page as Markdown, without scripts and styles."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page = BeautifulSoup(data, "html.parser")
    for tag in page(["script", "style", "noscript", "template", "svg", "iframe"]):
        tag.decompose()
    try:
        text = MarkdownConverter(heading_style="ATX", strip=["img"]).convert_soup(page)
    except RecursionError:
        notes.append("its elements are nested too deeply: read as plain text")
        text = "\n".join(page.stripped_strings)
    yield "", text


def notebook(data: bytes, notes: list[str]) -> Parts:
    """Yield one part per cell: its source, and its output if that is text."""
    try:
        cells = json.loads(data)["cells"]
        assert isinstance(cells, list)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise Refused("it is not a valid notebook") from None
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            continue
        source = _joined(cell.get("source"))
        if cell.get("cell_type") != "code":
            yield f"cell {number}", source
            continue
        outputs = [_output(one) for one in cell.get("outputs") or () if isinstance(one, dict)]
        shown = "\n".join(text for text in outputs if text.strip())
        yield f"cell {number}", source + (f"\n# output:\n{shown}" if shown else "")


def _output(output: dict[str, Any]) -> str:
    if "text" in output:
        return _joined(output["text"])
    if "traceback" in output:
        return f"{output.get('ename')}: {output.get('evalue')}"
    data = output.get("data")
    return _joined(data.get("text/plain")) if isinstance(data, dict) else ""


def _joined(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value or "")


KINDS: dict[bytes, Callable[[bytes, list[str]], Parts]] = {b"pdf": pdf, b"html": html, b"notebook": notebook}


def answer(request: bytes) -> bytes:
    """Return one file's text, or why there is none. Too much memory or time ends the process."""
    kind, _, data = request.partition(b"\0")
    notes: list[str] = []
    parts: list[tuple[str, str]] = []
    left = MAX_CHARS
    try:
        for where, text in KINDS[kind](data, notes):
            parts.append((where, text[:left]))
            left -= len(text)
            if left <= 0:
                notes.append(f"only the first {MAX_CHARS >> 20} million characters were read")
                break
    except Refused as error:
        return json.dumps({"error": str(error)}).encode()
    except MemoryError:
        return json.dumps({"error": "reading it takes too much memory"}).encode()
    return json.dumps({"parts": parts, "notes": notes}).encode()


if __name__ == "__main__":
    confine(MEMORY_BYTES)
    serve(answer, alarm_s=SECONDS + 5, cpu_s=SECONDS)
