"""Our own two themes. Their text has a contrast of 4.5 to 1 or more."""

from textual.theme import Theme

DARK = Theme(
    name="localllm-dark",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#ff9e64",
    foreground="#c8d0e8",
    background="#14161f",
    surface="#1a1d29",
    panel="#222637",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    dark=True,
)
LIGHT = Theme(
    name="localllm-light",
    primary="#2a5db0",
    secondary="#6f42a6",
    accent="#a34a00",
    foreground="#1c2333",
    background="#fafbfd",
    surface="#f0f2f7",
    panel="#e3e7f0",
    success="#2f6f1f",
    warning="#8a5a00",
    error="#b3123b",
    dark=False,
)
