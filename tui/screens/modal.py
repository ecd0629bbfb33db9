"""What every screen over the chat has: a way to the frame, and keys that leave it without an answer."""

from __future__ import annotations

from typing import ClassVar, cast

from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, ScreenResultType

from localllm.tui.frame import Frame


class Modal(ModalScreen[ScreenResultType]):
    """Esc leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "leave", "Close")]

    @property
    def frame(self) -> Frame:
        return cast(Frame, self.app)

    def action_leave(self) -> None:
        """No answer."""
        self.dismiss(None)
