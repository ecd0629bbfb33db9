"""The parent's side of `render.py`: sends requests to the child and maps its errors. Does not import Jinja."""

from __future__ import annotations

import atexit
import json
import re
import signal
from functools import cache
from typing import Any

from localllm.errors import BadModelFile, InvalidRequest, LocalLLMError
from localllm.sandbox.child import Child, ChildDied, ChildLate
from localllm.terminal import spaced

CPU_S = 1.8  # CPU time per rendering; with a free core, an error appears within two seconds
DEADLINE_S = 20.0  # wall time per rendering, for a busy machine
MAX_REQUEST_BYTES = 64 << 20
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")


class RenderChild(Child):
    """The child process: started on first use or by `start`, restarted when it dies. Safe to share between threads."""

    def __init__(self) -> None:
        super().__init__("localllm.chat.render", "the process that renders chat templates")

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render a template.

        Raises BadModelFile for a template that is broken or exceeds 1.8 s of CPU time or 192 MiB, InvalidRequest for
        messages that it rejects or fails on, and for more than 4 MiB of output.
        """
        try:
            body = json.dumps({"template": template, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages are not plain data: {clean(str(error))}", "send JSON values") from error
        if len(body) > MAX_REQUEST_BYTES:
            limit = f"{MAX_REQUEST_BYTES:,}"
            raise InvalidRequest(f"the messages have {len(body):,} bytes; the limit is {limit}", "send less text")
        answer = self._ask(body)
        if "text" in answer:
            return str(answer["text"])
        raise _error(str(answer.get("error")), clean(str(answer.get("message", ""))))

    def _ask(self, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(self.insist(body, DEADLINE_S))
            return answer if isinstance(answer, dict) else {}
        except ChildDied as died:
            why = f"over {CPU_S} s" if died.code == -signal.SIGPROF else "the renderer died"
        except ChildLate:
            why = f"over {DEADLINE_S} s"
        return {"error": "limit", "message": why}


@cache
def shared_child() -> RenderChild:
    """The child shared by all templates in this process; it ends with the process."""
    child = RenderChild()
    atexit.register(child.close)
    return child


def clean(text: str, limit: int = 300) -> str:
    """Make untrusted text safe for an error message: no escape sequences, one line, limited length."""
    text = spaced(_ESCAPES.sub("", text[: 10 * limit]))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _error(kind: str, message: str) -> LocalLLMError:
    again = "download it again (`localllm pull NAME --repair`), or use another template"
    change = "change the messages"
    match kind:
        case "raised":
            return InvalidRequest(f"the chat template rejects these messages: {message}", change)
        case "syntax":
            return BadModelFile(f"the chat template is not valid: {message}", again)
        case "security":
            return BadModelFile(f"the chat template does something that is not allowed: {message}", again)
        case "size":
            return InvalidRequest("the chat template writes more than 4 MiB of text", "send fewer or shorter messages")
        case "limit":
            return BadModelFile(f"the chat template exceeds its limits ({CPU_S} s, 192 MiB): {message}", again)
    return InvalidRequest(f"the chat template fails on these messages: {message}", change)
