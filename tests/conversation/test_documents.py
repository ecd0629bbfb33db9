"""Documents: what is read of them, what is refused, and what goes with a question when not all of it fits."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from localllm.conversation.documents import MAX_FOLDER_BYTES, PART_CHARS, Document, Part, read_document, select, words
from localllm.errors import ConfigError


def count(text: str) -> int:
    return -(-len(text) // 4)


def pdf(pages: list[bytes]) -> bytes:
    """A PDF whose pages have these content streams, compressed."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, content in enumerate(pages):
        stream = zlib.compress(content)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /Contents {5 + 2 * i} 0 R /MediaBox [0 0 612 792] "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(f"<< /Length {len(stream)} /Filter /FlateDecode >>\nstream\n".encode() + stream + b"\nendstream")
    out = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    out += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n".encode()
    return out + f"startxref\n{len(out)}\n%%EOF\n".encode()


def page(text: str) -> bytes:
    return f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()


def test_a_pdf_is_read_by_pages(tmp_path: Path) -> None:
    file = tmp_path / "manual.pdf"
    file.write_bytes(pdf([page("The pump is blue."), b"", page("The valve is red.")]))
    document = read_document(file)
    assert [(part.place, part.text.strip()) for part in document.parts] == [
        ("page 1", "The pump is blue."),
        ("page 3", "The valve is red."),
    ]
    assert document.notes == ("1 of 3 pages have no text and may be scans (page 2)",)
    assert "[page 3]\nThe valve is red." in document.block


@pytest.mark.slow
def test_a_pdf_bomb_is_refused_in_time(tmp_path: Path) -> None:
    file = tmp_path / "bomb.pdf"
    file.write_bytes(pdf([b"q " * (400 << 20)]))
    assert file.stat().st_size < 1 << 20
    with pytest.raises(ConfigError, match=r"bomb\.pdf"):
        read_document(file)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.pdf", b"%PDF-1.4 nothing", "not a valid PDF"),
        ("a.pdf", pdf([b""]), "no text"),
        ("a.ipynb", b"{}", "not a valid notebook"),
        ("a.ipynb", b'{"cells": 3}', "not a valid notebook"),
        ("a.bin", b"a\0b", "is not text"),
        ("a.iso", b"a\0b" + b"x" * (5 << 20), "is not text"),
        ("paper", b"%PDF-1.4" + b"x" * (5 << 20), "not a valid PDF"),
        ("a.txt", b"x" * (5 << 20), "the limit is 4.0 MiB"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=why):
        read_document(tmp_path / name)


def test_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "fifo", tmp_path / "empty", "/dev/zero", "a\0b"):
        with pytest.raises(ConfigError):
            read_document(path)


def test_a_page_without_its_scripts(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<html><script>evil()</script><h1>Pumps</h1><p>A <b>blue</b> one.</p></html>")
    assert read_document(file).block == "page.html:\n```\n# Pumps\n\nA **blue** one.\n```"
    file.write_text("<div>" * 5_000 + "deep" + "</div>" * 5_000)
    assert "deep" in read_document(file).block


def test_a_notebook_by_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "1 + 1", "outputs": [{"data": {"text/plain": ["2"], "image/png": "AAAA"}}]},
        {"cell_type": "code", "source": "x", "outputs": [{"ename": "NameError", "evalue": "x", "traceback": ["..."]}]},
        "not a cell",
    ]
    file = tmp_path / "work.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    assert [(part.place, part.text) for part in read_document(file).parts] == [
        ("cell 1", "# Title\ntext"),
        ("cell 2", "1 + 1\n# output:\n2"),
        ("cell 3", "x\n# output:\nNameError: x"),
    ]


def test_a_large_file_of_a_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    with open(tmp_path / "a.mp4", "wb") as video:
        video.truncate(MAX_FOLDER_BYTES + 1)
    (tmp_path / "b.py").write_text("x = 1\n")
    document = read_document(tmp_path)
    assert [part.place for part in document.parts] == ["b.py"]
    assert document.notes == ("1 file skipped: the limit for a folder is 2,000 files or 32.0 MiB",)


def test_a_folder_is_its_text_files(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    for name in ("a.py", "sub/b.py", ".hidden", "node_modules/c.js", "sub/d.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\1" if name.endswith("bin") else b"x = 1\n")
    (folder / "link.py").symlink_to("/etc/passwd")
    document = read_document(folder)
    assert document.name == "code/" and [part.place for part in document.parts] == ["a.py", "sub/b.py"]
    assert document.notes == ("1 file skipped: not text, too large or unreadable",)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("sub/\n")
    assert [part.place for part in read_document(folder).parts] == ["a.py"]


def test_long_texts_are_cut_between_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = [f"line {i} " + "x" * (i % 200) for i in range(500)] + ["y" * 5_000]
    file = tmp_path / "long.txt"
    file.write_text("\n".join(lines))
    document = read_document(file)
    assert all(len(part.text) <= PART_CHARS for part in document.parts)
    assert document.text == "\n".join(lines), "sent whole, it is what the file holds"
    assert document.parts[0].place.startswith("lines 1-") and document.parts[-1].place == "line 501"


def sections(topics: list[str]) -> Document:
    parts = tuple(Part("", f"About {topic}: {topic} needs care. " + "filler " * 40, topic) for topic in topics)
    return Document("guide.txt", parts)


TOPICS = ["pumps", "valves", "pipes", "sensors", "cables", "motors", "filters", "tanks"]


def test_what_fits_is_sent_whole() -> None:
    chosen = select([sections(TOPICS)], "anything", 10_000, count)
    assert chosen.notices == () and all(topic in chosen.blocks[0] for topic in TOPICS)
    assert chosen.num_tokens == count(chosen.blocks[0])


@pytest.mark.parametrize("topic", TOPICS)
def test_the_parts_that_suit_the_question_are_sent_and_told(topic: str) -> None:
    chosen = select([sections(TOPICS)], f"How do I clean the {topic}?", 200, count)
    assert f"About {topic}" in chosen.blocks[0] and chosen.num_tokens <= 200
    assert len(chosen.notices) == 1 and "of 8 parts sent" in chosen.notices[0] and topic in chosen.notices[0]


def test_a_question_about_everything_gets_the_beginning_of_each_document() -> None:
    other = Document("notes.txt", tuple(Part("", f"note {i} " + "word " * 60, f"n{i}") for i in range(5)))
    chosen = select([sections(TOPICS), other], "what is this?", 400, count)
    assert "About pumps" in chosen.blocks[0] and "note 0" in chosen.blocks[1] and chosen.num_tokens <= 400
    assert all("no word of the question occurs in it" in notice for notice in chosen.notices)


def test_nothing_is_dropped_without_a_notice() -> None:
    chosen = select([sections(TOPICS)], "pumps", 3, count)
    assert chosen.blocks == [] and chosen.notices == ("guide.txt: not sent, because it does not fit",)


def test_words_of_names_and_of_scripts_without_spaces() -> None:
    assert words("readHTTPHeader max_len X") == ["read", "http", "header", "readhttpheader", "max", "len", "x"]
    assert words("温度計の校正") == ["温度", "度計", "計の", "の校", "校正"]
