"""Line output without a command: harmless text, tables, errors, progress, streamed Markdown."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.cli.frame.console import Console, error_json, error_text
from localllm.cli.frame.progress import BarProgress, JsonProgress, PlainProgress, Progress
from localllm.cli.markdown import MarkdownStream
from localllm.errors import DoesNotFit, ModelNotFound
from localllm.request import LoadProgress as Told
from localllm.terminal import Cleaner, cell_width, clean, clean_line, fit, gib, json_safe, seconds_short, tokens_short


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    bad = (
        "".join(map(chr, range(32))) + "\x7f" + "".join(map(chr, range(0x80, 0xA0))) + "\u202a\u202e\u2066\u2069\u200f"
    )
    assert clean(f"a{bad}b") == "a\t\nb"
    assert clean_line("one\ntwo\t three\x1b[2J") == "one two three[2J"
    assert clean("a" + "\u0301" * 100_000 + "b").count("\u0301") == 16


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), max_size=8))
def test_pieces_are_cleaned_as_the_whole(pieces: list[str]) -> None:
    cleaner = Cleaner()
    assert "".join(cleaner.push(piece) for piece in pieces) == clean("".join(pieces))


def test_json_hides_what_json_does_not_escape() -> None:
    text = json_safe(json.dumps({"x": "\x9b\u202e\x1b"}, ensure_ascii=False))
    assert json.loads(text) == {"x": "\x9b\u202e\x1b"}
    assert "\x9b" not in text and "\u202e" not in text


def test_widths() -> None:
    assert cell_width("日本") == 4
    assert cell_width("e\u0301") == 1
    assert fit("日本語", 5) == "日本…"
    assert fit("abc", 3) == "abc"
    assert [gib(n) for n in (512, 2048, 98 << 20, 250 << 20, 8_375_186_227)] == [
        "512 B", "2.0 KiB", "98.0 MiB", "250 MiB", "7.8 GiB"
    ]  # fmt: skip
    assert [tokens_short(n) for n in (12, 1532, 32768, 40960, 41000)] == ["12", "1.5k", "32k", "40k", "41k"]
    assert [seconds_short(s) for s in (0.42, 12.9, 163, 3723)] == ["0.4 s", "12 s", "2:43", "1:02:03"]


def test_an_error_is_at_most_eight_lines_with_the_commands_last() -> None:
    error = DoesNotFit(
        "it needs 26.4 GiB, 23.5 GiB are free", "a smaller context fits", why="weights 17.2 + KV 8.0",
        fixes=[(f"localllm chat x --ctx {n}k", "fits") for n in range(9)],
    )  # fmt: skip
    lines = error_text(error).splitlines()
    assert len(lines) == 8
    assert lines[0] == "error: it needs 26.4 GiB, 23.5 GiB are free   [E501]"
    assert lines[1].startswith("  why")
    assert lines[-1].strip().startswith("localllm chat")


def test_sentences_of_an_error_are_wrapped_and_commands_are_not() -> None:
    long, command = "word " * 12 + "end", "localllm run MODEL 'a prompt' --ctx 8192"
    text = error_text(DoesNotFit(long, long, why=long, fixes=[(command, "")]), width=40)
    *sentences, last = text.splitlines()
    assert all(len(line) <= 40 for line in sentences) and last == f"        {command}"
    assert sentences[:3] == [
        "error: word word word word word word",
        "       word word word word word word end",
        "       [E501]",
    ]
    assert f"  try   {command}" in error_text(DoesNotFit("x", command), width=30)
    assert error_text(DoesNotFit("x", f"some words, then `{command}`"), width=30).endswith(f"\n        `{command}`\n")


def test_untrusted_parts_of_an_error_are_harmless() -> None:
    error = ModelNotFound("no \x1b[2Jmodel [red]x[/red]\nsecond line", "localllm pull \x07evil")
    text = error_text(error)
    assert "\x1b" not in text and "\x07" not in text
    assert "[red]x[/red] second line" in text
    assert error_json(error)["error"]["fixes"] == [{"cmd": "localllm pull evil", "note": ""}]


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in Console(stdout=Terminal()).style("x", "red")
    assert Console(stdout=io.StringIO()).style("x", "red") == "x"
    assert Console(stdout=Terminal(), color="never").style("x", "red") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Console(stdout=Terminal()).style("x", "red") == "x"


def test_marks_in_ascii_where_the_stream_has_no_more() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert Console(stdout=out).glyphs("✓ a → b … ━") == "+ a -> b ... ="
    assert Console(stdout=out).glyphs("★ 2 × η 0.7 ± 1 µs −2 87 °C").isascii()
    assert Console(stdout=out).glyphs("★ η −2 87 °C") == "* eta -2 87 deg C"


def test_a_table_lines_up_wide_text_and_cleans_cells() -> None:
    out = io.StringIO()
    Console(stdout=out).table(("NAME", "SIZE"), [("日本", "1"), ("a\x1b[2J", "22")], right=("SIZE",))
    assert out.getvalue().splitlines() == ["NAME  SIZE", "日本     1", "a[2J    22"]


# --- progress --------------------------------------------------------------------------------------------------------


def _download(done: int, total: int = 1000, rate: float = 100.0) -> Told:
    return Told("download", done, total, rate=rate, eta_s=5.0, file="model.gguf")


def test_a_bar_has_no_escapes_never_runs_back_and_is_wiped() -> None:
    err, now = Terminal(), [0.0]
    bar = BarProgress(Console(stderr=err), "org/model", clock=lambda: now[0])
    for done in (100, 500, 300, 900):
        now[0] += 1
        bar.update(_download(done))
    text = err.getvalue()
    assert "\x1b" not in text
    assert [int(part.split("%")[0].split()[-1]) for part in text.split("\r")[1:] if "%" in part] == [10, 50, 50, 90]
    bar.close()
    assert err.getvalue().endswith(" \r")
    assert bar.interrupted() == "paused at 90 %; run the same command to resume"
    for kept, says in ((0, "the same command starts again"), (505, "the same command goes on at 50 %")):
        bar.update(dataclasses.replace(_download(900), kept=kept))
        assert bar.interrupted() == f"stopped at 90 %; {says}: a package index sends whole packages"


def test_a_bar_is_no_wider_than_the_terminal_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(descriptor: int) -> os.terminal_size:
        if descriptor != 2:
            raise OSError("not a terminal")
        return os.terminal_size((40, 12))

    monkeypatch.setattr(os, "get_terminal_size", size)  # stdout goes into a file
    monkeypatch.delenv("COLUMNS", raising=False)
    err = Terminal()
    BarProgress(Console(stderr=err), "a-model-of-a-long-name").update(_download(100))
    assert max(map(cell_width, err.getvalue().split("\r"))) < 40


def test_a_bar_says_that_nothing_moves() -> None:
    err, now = Terminal(), [0.0]
    bar = BarProgress(Console(stderr=err), "m", clock=lambda: now[0])
    bar.update(_download(100))
    now[0] += 12
    bar.tick()
    assert "stalled for 12 s, retrying" in err.getvalue()


def test_a_bar_shows_load_phases() -> None:
    err, now = Terminal(), [0.0]
    bar = BarProgress(Console(stderr=err), "m", clock=lambda: now[0])
    for phase in (
        Told("import"),
        Told("weights", 1, 8),
        Told("weights", 5, 8),
        Told("kv"),
        Told("ready"),
    ):
        bar.update(phase)
        now[0] += 1
    assert "starting up ✓ 1.0 s · weights ✓ 2.0 s · KV cache" in err.getvalue()


def test_a_verification_is_not_called_loading() -> None:
    err, terminal = io.StringIO(), Terminal()
    PlainProgress(Console(stderr=err), "m").update(Told("verify", 0, 8))
    assert err.getvalue() == "checking m\n"
    BarProgress(Console(stderr=terminal), "m").update(Told("verify", 4, 8))
    assert "Checking  m  ━" in terminal.getvalue() and "Loading" not in terminal.getvalue()


def test_plain_lines_tell_what_building_the_kernels_took() -> None:
    err = io.StringIO()
    plain = PlainProgress(Console(stderr=err), "m")
    for phase in (
        Told("import"),
        Told("compile"),
        Told("weights", 1, 8),
        Told("weights", 5, 8),
        Told("ready"),
    ):
        plain.update(phase)
    lines = err.getvalue().splitlines()
    assert lines[:2] == ["loading m", "building the kernels for this CPU (first use only)"]
    assert lines[2].startswith("built the kernels in ") and lines[3:] == ["loading: weights"]


def test_the_time_that_kernels_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    err = io.StringIO()
    plain = PlainProgress(Console(stderr=err), "m")
    plain.update(Told("import"))
    plain.update(Told("compile"))
    clock[0] = 11.0
    plain.tick()
    clock[0] = 13.0
    plain.update(Told("weights", 1, 8))
    assert err.getvalue().splitlines()[-3:] == ["kernels: 11 s so far", "built the kernels in 13 s", "loading: weights"]


def test_plain_lines_come_every_ten_per_cent() -> None:
    err = io.StringIO()
    plain = PlainProgress(Console(stderr=err))
    for done in range(0, 1001, 5):
        plain.update(_download(done))
    lines = err.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[5] == "download 50 % 500/1000 B"


def test_a_resumed_download_says_so() -> None:
    err = io.StringIO()
    PlainProgress(Console(stderr=err)).update(_download(480))
    assert "download resumes at 48 %" in err.getvalue()


def test_json_lines_never_decrease() -> None:
    err = io.StringIO()
    view = JsonProgress(Console(stderr=err))
    for done in (100, 50, 400):
        view.update(_download(done))
    assert [json.loads(line)["done"] for line in err.getvalue().splitlines()] == [100, 100, 400]


def test_a_sentence_of_the_hub_is_no_model() -> None:
    err = io.StringIO()
    view = JsonProgress(Console(stderr=err))
    for detail in ("the hub does not answer", "org/repo"):
        view.update(Told("resolve", detail=detail))
    note, name = map(json.loads, err.getvalue().splitlines())
    assert (note["event"], note["message"]) == ("note", "the hub does not answer")
    assert (name["event"], name["model"]) == ("resolve", "org/repo")


def test_a_sentence_of_the_hub_stays_on_the_screen() -> None:
    err = Terminal()
    BarProgress(Console(stderr=err), "m").update(Told("resolve", detail="the hub does not answer; taking the index"))
    assert err.getvalue() == "the hub does not answer; taking the index\n"


def test_a_download_of_unknown_size_has_nothing_to_resume() -> None:
    progress = Progress(Console())
    progress.update(Told("download", 10, 0))
    assert progress.interrupted() == ""


# --- Markdown as it streams ------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    import re

    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_marks_become_styles() -> None:
    stream = MarkdownStream()
    shown = stream.push("# Head\n\na **bold** `code` *it*\n- item\n") + stream.flush()
    assert _plain(shown) == "Head\n\na bold code it\n• item\n"
    assert "\x1b[1mbold\x1b[0m" in shown and "\x1b[36mcode\x1b[0m" in shown


@pytest.mark.parametrize(
    "text", ["2 ** 3 and 4 * 5\n", "a `tick\n", "**open\n", "f(*args, **kwargs)\n", "snake_case_name\n", "****\n"]
)
def test_what_is_no_markdown_stays(text: str) -> None:
    stream = MarkdownStream()
    assert _plain(stream.push(text) + stream.flush()) == text


def test_backticks_on_one_line_are_no_fence() -> None:
    stream = MarkdownStream()
    assert "\x1b[1mbold" in stream.push("```x``` and\n**bold**\n") + stream.flush()


def test_code_is_left_alone() -> None:
    stream = MarkdownStream()
    text = "```python\nx = a ** b  # `not` **bold**\n- y\n```\nafter **it**\n"
    assert _plain(stream.push(text) + stream.flush()) == text.replace("**it**", "it")


@settings(max_examples=60)
@given(st.text(alphabet="a*`#- \n", max_size=60), st.integers(1, 7))
def test_pieces_are_styled_as_the_whole(text: str, size: int) -> None:
    """How the text is cut must not matter for what is read."""
    whole, cut = MarkdownStream(), MarkdownStream()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    expected = _plain(whole.push(text) + whole.flush())
    assert _plain("".join(cut.push(piece) for piece in pieces) + cut.flush()) == expected


def test_tables_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare columns go in their order, a note is cut; off a terminal nothing is lost."""

    columns = ("NAME", "SIZE", "MODEL", "")
    rows = [("alpha", "1.0 GiB", "some-model-7b", "★ recommended · 18.0 GiB download"), ("b", "2", "c", "漢字 " * 12)]

    def drawn(width: int, tty: bool = True) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        out = io.StringIO()
        console = Console(stdout=out, stderr=io.StringIO(), color="never")
        console.out_tty = tty
        console.table(columns, rows, right=("SIZE",), spare=("MODEL", "SIZE"))
        return out.getvalue().splitlines()

    assert "18.0 GiB download" in drawn(40, tty=False)[1]
    assert "18.0 GiB download" in drawn(120)[1]
    for width in range(24, 120):
        lines = drawn(width)
        assert all(cell_width(line) < width for line in lines), (width, lines)
        assert lines[1].startswith("alpha") and "★" in lines[1]
    assert "MODEL" in drawn(60)[0] and "MODEL" not in drawn(40)[0] and "SIZE" in drawn(40)[0]
    assert drawn(24)[0].rstrip() == "NAME"


def test_paragraphs_break_at_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    for tty in (True, False):
        err = io.StringIO()
        console = Console(stdout=io.StringIO(), stderr=err, color="never")
        console.err_tty = tty
        console.paragraph("one two three " * 6)
        lines = err.getvalue().splitlines()
        assert (len(lines) > 2) is tty
        assert " ".join(lines).split() == ["one", "two", "three"] * 6
        assert all(len(line) < 30 for line in lines) is tty


def test_a_paragraph_keeps_its_indent_and_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    err = io.StringIO()
    console = Console(stderr=err, color="never")
    console.err_tty = True
    console.paragraph("  note: " + "word " * 9)
    assert len(err.getvalue().splitlines()) > 1
    assert all(line.startswith("  ") for line in err.getvalue().splitlines())
    err.truncate(err.seek(0))
    console.as_events = True
    console.paragraph("word " * 20)
    assert len(err.getvalue().splitlines()) == 1


def test_long_silent_work_is_told_of_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.frame import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    lines = progress.make_progress(Console(stderr=written), "plain", "tiny")
    for at in range(0, 30, 2):
        now[0] = at
        lines.update(Told("weights", at, 30))
        lines.tick()
    now[0] = 45.0
    lines.tick()
    said = written.getvalue().splitlines()
    assert said[0] == "loading tiny" and "weights 6 of 30" in said and said[-1] == "weights: 45 s so far"


def test_quantizing_is_told_in_percent_not_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.frame import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    lines = progress.make_progress(Console(stderr=written), "plain", "tiny")
    for at in range(0, 31, 6):
        now[0] = at
        lines.update(Told("quantize", at << 20, 30 << 20, f"layer {at}/30"))
    said = written.getvalue().splitlines()
    assert said[:2] == ["quantizing tiny", "quantizing: 20 %, layer 6/30"]
    written.truncate(written.seek(0))
    bar = progress.make_progress(Console(stderr=written), "bar", "tiny")
    bar.update(Told("quantize", 15 << 20, 30 << 20, "layer 15/30"))
    assert "Quantizing  tiny  " in written.getvalue() and "layer 15/30" in written.getvalue()


def test_ctrl_c_says_how_to_continue_what_can_be_continued() -> None:
    from localllm.cli.loading import watched
    from localllm.errors import Aborted

    def tick() -> None:
        raise KeyboardInterrupt

    nothing: Any = lambda *words: ""  # noqa: E731
    shown = SimpleNamespace(tick=tick, update=nothing, interrupted=nothing, close=nothing)
    env: Any = SimpleNamespace(progress=lambda title: shown)
    with pytest.raises(Aborted, match="^stopped$"):
        watched(env, "m", lambda tell, cancel: cancel.wait(5))
    with pytest.raises(Aborted, match="the same command continues"):
        watched(env, "m", lambda tell, cancel: cancel.wait(5), "stopped; the same command continues")
