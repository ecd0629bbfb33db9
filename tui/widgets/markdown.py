"""Markdown rendered as it streams: settled blocks are rendered once, the open end is plain text.

`Settler` splits what is passed to `Answer.feed`: every block that can no longer change goes to `Body`, the rest
is the tail. A list is one widget with hanging indents (one widget per item costs seconds at a hundred items), and a
long list settles item by item. `Answer.source` is always exactly what was fed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.highlight import HighlightTheme, highlight
from textual.reactive import Reactive
from textual.widgets import Markdown, Static
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
    MarkdownTable,
)

from localllm.conversation.markdown import Settler, new_parser, opened_fence

from .copying import CopyCode

TAIL_CHUNK = 3000  # characters of the tail laid out at every update; text before them is frozen
LONG_WORD = 20  # cells; a longer word in a table, such as an address, may be broken
LONG_CODE = 20  # lines; a longer block also has a copy line at its end


class _Row(NamedTuple):
    """A paragraph of a list item: its indent, the bullet on its first line, its text."""

    indent: int
    bullet: str
    content: Content

    def lines(self, width: int) -> Iterator[Content]:
        """Wrapped lines, aligned below the text of the first."""
        lead = Content(" " * self.indent) + Content.styled(self.bullet, "$text-primary")
        for line in self.content.wrap(max(8, width - len(lead.plain))):
            yield lead + line.rstrip()
            lead = Content(" " * len(lead.plain))


class _FlatList(MarkdownList):
    """A list drawn by one widget, if its items contain only paragraphs and such lists."""

    _rows: list[_Row] | None = None
    _drawn: tuple[int, Content] | None = None

    def compose(self) -> ComposeResult:
        self._rows = list(_rows_of(self, 0)) if _is_simple(self) else None
        if self._rows is None:
            yield from super().compose()
        else:
            self.add_class("-flat")

    def _text(self, width: int) -> Content:
        if self._drawn is None or self._drawn[0] != width:
            lines = [line for row in self._rows or () for line in row.lines(width)]
            self._drawn = width, Content("\n").join(lines)
        return self._drawn[1]

    def render(self) -> Any:
        return super().render() if self._rows is None else self._text(self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self._rows is None:
            return super().get_content_height(container, viewport, width)
        return self._text(width).plain.count("\n") + 1


class FlatBulletList(_FlatList, MarkdownBulletList):
    """An unordered list."""


class FlatOrderedList(_FlatList, MarkdownOrderedList):
    """A numbered list."""


def _is_simple(block: MarkdownBlock) -> bool:
    return all(
        isinstance(part, MarkdownParagraph) or (isinstance(part, _FlatList) and _is_simple(part))
        for item in block._blocks
        for part in item._blocks
    )


def _rows_of(block: MarkdownBlock, indent: int) -> Iterator[_Row]:
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    ordered = isinstance(block, MarkdownOrderedList)
    start = int(items[0].bullet) if ordered and items and items[0].bullet.isdigit() else 1
    widest = len(str(start + len(items) - 1))
    for number, item in enumerate(items, start):
        bullet = f"{number}. ".rjust(widest + 2) if ordered else item.bullet
        for part in item._blocks:
            if isinstance(part, MarkdownParagraph):
                yield _Row(indent, bullet, part._content)
            else:
                yield from _rows_of(part, indent + len(bullet))
            bullet = " " * len(bullet)
        if not item._blocks:
            yield _Row(indent, bullet, Content(""))


@cache
def code_colours(name: str) -> tuple[type[HighlightTheme], str] | None:
    """(token kind -> Textual style words, background) of a Pygments style; None for "auto" and unknown styles."""
    from pygments.styles import get_style_by_name
    from pygments.util import ClassNotFound

    if name == "auto":
        return None
    try:
        style = get_style_by_name(name)
    except ClassNotFound:
        return None
    words = {}
    for kind, look in style:
        parts = [word for word in ("bold", "italic", "underline") if look[word]]
        parts += [f"#{look['color']}"] if look["color"] else []
        parts += [f"on #{look['bgcolor']}"] if look["bgcolor"] else []
        if parts:
            words[kind] = " ".join(parts)
    return type("PygmentsTheme", (HighlightTheme,), {"STYLES": words}), style.background_color


class Fence(MarkdownFence):
    """A code block with a line above that names the language and copies the code when clicked."""

    def compose(self) -> ComposeResult:
        count = self.code.count("\n") + 1
        language = (self.lexer or "").split(" ")[0] or "text"
        lines = f"{count} line{'s' if count > 1 else ''}"
        yield Static(f"{language} · {lines} · click to copy", classes="head", markup=False)
        yield from super().compose()
        if count > LONG_CODE:
            yield Static(f"{lines} · click to copy", classes="head", markup=False)

    def highlight(  # type: ignore[override]  # needs the settings, which only the widget knows
        self, code: str, language: str, ansi: bool = False, dark: bool = False
    ) -> Content:
        """Highlight in the configured colors; without color, as Textual does."""
        colors = None if ansi else code_colours(getattr(self.app, "code_theme", "auto"))
        if colors is None:
            return MarkdownFence.highlight(code, language, ansi, dark)
        theme, self.styles.background = colors
        return highlight(code, language=language or None, theme=theme)

    def on_click(self, event: Any) -> None:
        """Copy when the line above or below was clicked."""
        if isinstance(event.widget, Static) and event.widget.has_class("head"):
            event.stop()
            self.post_message(CopyCode(self.code))


class Table(MarkdownTable):
    """A table whose columns all keep some width even if a word is wider than the screen."""

    def _get_headers_and_rows(self) -> tuple[list[Content], list[list[Content]]]:
        headers, rows = super()._get_headers_and_rows()
        for cell in chain(headers, *rows):
            cell._minimal_width_cache = min(LONG_WORD, cell.get_minimal_width({}))
        return headers, rows


class Body(Markdown):
    """Blocks that no longer change."""

    _OWN: ClassVar[dict[str, type[MarkdownBlock]]] = {
        "bullet_list_open": FlatBulletList,
        "ordered_list_open": FlatOrderedList,
        "fence": Fence,
        "code_block": Fence,
        "table_open": Table,
    }

    def __init__(self) -> None:
        super().__init__(parser_factory=new_parser, open_links=False)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        return self._OWN.get(block_name) or super().get_block_class(block_name)

    async def settle(self, text: str, inside_list: bool) -> None:
        """Add blocks. `Markdown.append` would parse and draw the previous block again."""
        async with self.lock:
            blocks = self._build_from_source(text)
            self._markdown += text
            if inside_list and blocks:
                blocks[-1].add_class("-goes-on")
            if blocks:
                await self.mount_all(blocks)


class _Live(Static):
    """Growing text. Its size is known once the screen has been laid out, so it needs no second pass."""

    virtual_size = Reactive(Size(0, 0))


class Tail(Vertical):
    """The open end as plain text. Only the last part of a long one is laid out again."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self) -> None:
        super().__init__()
        self._live = _Live("", id="live", markup=False)  # on a slow machine an answer may end before it is mounted
        self._frozen = 0
        self._lines = 0

    def compose(self) -> ComposeResult:
        yield self._live

    async def show(self, text: str) -> None:
        """Replace the text; until `clear` it may only grow."""
        if self.display != bool(text):
            self.display = bool(text)
            self._lines = 0
        if not text:
            return
        head, newline, code = text.partition("\n")
        is_code = bool(newline and opened_fence(head))
        self.set_class(is_code, "-code")
        text = code if is_code else text
        if len(text) - self._frozen > TAIL_CHUNK:
            cut = max(text.rfind("\n", self._frozen), text.rfind(" ", self._frozen)) + 1
            piece = text[self._frozen : cut]
            if piece:
                await self.mount(Static(piece.removesuffix("\n"), markup=False, classes="frozen"), before="#live")
                self._frozen = cut
        self._update(text[self._frozen :])

    def _update(self, text: str) -> None:
        """Lay out the screen again only when a line was added."""
        width = self._live.size.width
        lines = Content(text).get_height({}, width) if width else 0
        self._live.update(text, layout=not width or lines != self._lines)
        self._lines = lines

    async def clear(self) -> None:
        self._frozen = self._lines = 0
        self.display = False
        await asyncio.shield(self.remove_children(".frozen"))
        self._live.update("")


class Answer(Vertical):
    """A growing answer: `feed` any number of times, `flush` about ten times a second, `finish` once."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self) -> None:
        super().__init__()
        self._body = Body()
        self._tail = Tail()
        self._text = ""
        self._settler = Settler()
        self._shown = ""
        self._drawing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield self._body
        yield self._tail

    @property
    def source(self) -> str:
        return self._body.source + self._shown

    def feed(self, text: str) -> None:
        self._text += text

    async def flush(self) -> bool:
        """Draw what is new. False when nothing is."""
        if self._text == self._shown or not self._tail.is_mounted:
            return False
        async with self._drawing:
            await self._draw()
        return True

    async def _draw(self) -> None:
        cut, inside = self._settler.split(self._text)
        with self.app.batch_update():
            if cut:
                settled, self._text = self._text[:cut], self._text[cut:]
                await self._tail.clear()
                await self._body.settle(settled, inside)
            self._shown = self._text
            await self._tail.show(self._text.lstrip("\n"))  # blocks keep their own spacing

    async def finish(self) -> None:
        async with self._drawing:
            with self.app.batch_update():
                await self._tail.clear()
                if self._text:
                    rest, self._text, self._shown = self._text, "", ""
                    await self._body.settle(rest, False)
