"""What to do when the conversation no longer fits the context window: nothing is left out without being asked."""

from __future__ import annotations

from textual import on
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localllm.terminal import clean_line
from localllm.tui.conversation import Conversation, Exchange


class ContextChoices(OptionList):
    """Hidden until `offer`; answers with `Chosen`."""

    class Chosen(Message):
        """`choice` is "forget" (leave out the oldest half), "new" or "edit"."""

        def __init__(self, choice: str) -> None:
            super().__init__()
            self.choice = choice

    def __init__(self) -> None:
        super().__init__(id="choices", markup=False)
        self.display = False
        self.border_title = "The context window is full; nothing was sent"

    def offer(self, conversation: Conversation, exchange: Exchange) -> None:
        """Show what can be done about a question that did not fit."""
        oldest = conversation.oldest_half(exchange)
        self.clear_options()
        if oldest:
            first = clean_line(oldest[0].user)[:40]
            count = f"the oldest {len(oldest)} questions" if len(oldest) > 1 else "the oldest question"
            self.add_option(Option(f"leave out {count} (from “{first}”) and send again", id="forget"))
        if len(conversation.exchanges) > 1:
            self.add_option(Option("start a new chat with this message", id="new"))
        self.add_option(Option("edit the message", id="edit"))
        self.display = True
        self.focus()
        self.highlighted = 0

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(str(event.option_id)))
