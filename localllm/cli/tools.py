"""MCP tools in line mode and in `run`: finding them, asking before calls, printing results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.frame.command import Env
from localllm.cli.frame.console import Console
from localllm.cli.session import BackendError
from localllm.config import UserConfig
from localllm.conversation import tools as calls
from localllm.conversation.answer import Answer, Call
from localllm.conversation.tools import Toolbox
from localllm.errors import Aborted, ConfigError
from localllm.interface import Facts
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from localllm.chat.mcp.servers import ServerEntry
    from localllm.conversation.tools import Source

RESULT_LINES = 3
QUESTION = "run it? [y]es, once; [a]lways this tool; [n]o; ne[v]er this tool: "


def toolbox(
    env: Env, config: UserConfig, file: Path | None, only: Collection[str] | None = None, *, asks: bool = True
) -> Toolbox | None:
    """The tools of the servers in the settings and in `--mcp FILE`; None without servers. Opens no connection.

    Raises ConfigError for errors in the file; a wrong entry in the settings is only a warning.
    """
    if file is None and not config.mcp_servers:
        return None
    from localllm.chat.mcp.servers import read_servers, servers_of

    entries: dict[str, ServerEntry] = {}
    for name, value in config.mcp_servers.items():
        try:
            entries |= {entry.name: entry for entry in servers_of({name: value}, "mcp.servers")}
        except ConfigError as error:
            env.console.warn(f"{clean_line(error.message)}; skipping this server")
    if file is not None:
        entries |= {entry.name: entry for entry in read_servers(file)}
    if not entries:
        return None

    def opens() -> Source:
        from localllm.chat.mcp.client import McpTools

        return McpTools(list(entries.values()))

    return Toolbox(opens, only, asks=asks)


def answered(
    console: Console, tools: Toolbox | None, answer: Answer, turn: Callable[[], None], facts: Callable[[], Facts],
    on_result: Callable[[Call], None] | None = None,
) -> None:  # fmt: skip
    """Generate an answer, including its rounds of tool calls; `on_result` is called with each result.

    turn  continues `answer`. A BackendError from it ends the answer and is raised, unless a tool's schema caused it
    """
    while True:
        try:
            turn()
        except BackendError as error:
            said = tools.leave_out(error.param or "", error.message) if tools is not None else ""
            if not said:
                raise
            console.warn(said)
            continue
        if tools is None or not answer.wants_results or not _settle(console, tools, answer, facts(), on_result):
            return


def _settle(
    console: Console, tools: Toolbox, answer: Answer, facts: Facts, on_result: Callable[[Call], None] | None
) -> bool:
    """Ask for permission, run the calls of an answer, show the results. Returns whether the model continues."""
    if said := calls.at_limit(answer):
        console.warn(said)
        return False
    used = answer.usage.prompt_tokens + answer.usage.completion_tokens
    room = calls.room_for(facts, used, len(answer.calls))
    try:
        for call in answer.calls:
            console.say(f"call  {calls.shown_call(call)}")
            if tools.must_ask(call) and not _permitted(tools, call):
                calls.refuse(call)
            if call.result is None:
                tools.run(call, room)
            console.say(calls.shown_result(call, RESULT_LINES))
            if on_result is not None:
                on_result(call)
    except (KeyboardInterrupt, EOFError):
        calls.stop(answer)
        if not tools.asks:
            raise  # nobody can continue: the command ends as for a stopped answer
        return False
    answer.end_round()
    return True


def _permitted(tools: Toolbox, call: Call) -> bool:
    """Ask until the answer is valid."""
    while True:
        word = input(QUESTION).strip().lower()[:6]
        if word in ("a", "always", "v", "never"):
            tools.decide(call.name, word[0] == "a")
        if word in ("y", "yes", "a", "always"):
            return True
        if word in ("n", "no", "v", "never"):
            return False


def toolbox_for_run(
    env: Env, config: UserConfig, file: Path | None, only: Collection[str], num_samples: int
) -> Toolbox | None:
    """The tools that `run` may call without asking: `only` those. Without any, no server is started.

    Raises ConfigError.
    """
    if not only:
        if file is None:
            return None
        raise ConfigError(
            "--mcp needs --yes-tools, because `run` never asks", "add --yes-tools NAME, or use `localllm chat`"
        )
    if num_samples > 1:
        raise ConfigError(
            "-n and --yes-tools cannot be combined: every answer would call the tools", "drop one of them"
        )
    tools = toolbox(env, config, file, only, asks=False)
    if tools is None:
        raise ConfigError("--yes-tools needs MCP servers", "add --mcp FILE, or [mcp.servers] in the settings")
    return tools


def connect_for_run(console: Console, tools: Toolbox) -> None:
    """Connect to the servers. Raises ConfigError for an unknown tool."""
    try:
        said = tools.connect()
    except KeyboardInterrupt:
        raise Aborted("stopped") from None
    for line in said:
        if line.startswith("! "):
            console.warn(line[2:])
    if missing := [name for name in tools.only or () if name not in tools.names]:
        known = ", ".join(tools.names) or "none"
        raise ConfigError(f"--yes-tools {clean_line(missing[0])}: unknown tool", f"the tools are: {known}")
