"""F2: sampling, reasoning and instructions in one panel; an empty field shows its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Input, Select, Static, TextArea

from localllm.config import KEYS, Preset
from localllm.conversation.tree import THINK, Conversation, number, parse_sampling, sampling_keys
from localllm.errors import ConfigError

from .dialogs import Modal


class ParamsScreen(Modal[bool]):
    """Returns True when something was changed."""

    AUTO_FOCUS = "Input"  # not the presets, where Enter would open the list
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2", "leave", "Close"),
        Binding("ctrl+s", "apply", "Apply", priority=True),
    ]

    def __init__(
        self, conversation: Conversation, presets: Mapping[str, Preset], defaults: Mapping[str, tuple[Any, str]]
    ) -> None:
        """`defaults`: the (value, source) that an empty field stands for."""
        super().__init__()
        self._conversation = conversation
        self._presets = presets
        self._fields = {name: Input(id=f"p-{name}", compact=True) for name in sampling_keys()}
        for name, field in self._fields.items():
            field.value = _shown(conversation.sampling, name)
            value, why = defaults.get(name, ("off", ""))
            field.placeholder = f"{number(value)} ({why})" if why else value

    def compose(self) -> ComposeResult:
        talk = self._conversation
        with VerticalScroll(classes="box -tall -wide", can_focus=False) as box:
            box.border_title = "Parameters"
            box.border_subtitle = "⏎/^S apply · esc"
            if self._presets:
                with Horizontal(classes="row"):
                    yield Static("preset", classes="name")
                    yield Select([(n, n) for n in self._presets], prompt="choose one", compact=True, id="preset")
            for name, field in self._fields.items():
                key = KEYS[f"sampling.{name}"]
                with Horizontal(classes="row"):
                    yield Static(name, classes="name")
                    yield field
                    yield Static(f"{key.kind.expects} · {key.meaning}", classes="note")
            with Horizontal(classes="row"):
                yield Static("think", classes="name")
                yield Select(
                    [(one, one) for one in THINK], value=talk.think, allow_blank=False, compact=True, id="think"
                )
            yield Static("instructions (the system message)", classes="name -alone")
            yield TextArea(talk.system, soft_wrap=True, compact=True, id="p-system", tab_behavior="focus")
            yield Static("", id="wrong", markup=False)

    @on(Select.Changed, "#preset")
    def _preset(self, event: Select.Changed) -> None:
        preset = self._presets.get(str(event.value))
        if preset is None:
            return
        given = preset.sampling.given()
        for name, field in self._fields.items():
            field.value = _shown(given, name)
        if preset.system is not None:
            self.query_one("#p-system", TextArea).text = preset.system

    @on(Input.Submitted)
    def action_apply(self) -> None:
        values = {}
        for name, field in self._fields.items():
            if field.value.strip():
                try:
                    values[name] = parse_sampling(name, field.value.strip())
                except ConfigError as error:
                    self.query_one("#wrong", Static).update(f"! {error.message}")
                    field.focus()
                    return
        talk = self._conversation
        talk.sampling.clear()
        talk.sampling.update(values)
        talk.system = self.query_one("#p-system", TextArea).text
        talk.think = str(self.query_one("#think", Select).value)
        self.dismiss(True)


def _shown(values: Mapping[str, Any], name: str) -> str:
    return number(values[name]) if name in values else ""
