"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: add and remove adapters while models run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm.server.adapters import ServedAdapter
from localllm.server.openai.schemas import Body, Name
from localllm.server.other.status import check_owner
from localllm.server.service import service_of

MAX_PATH = 4096


class LoadAdapter(Body):
    """POST /v1/load_lora_adapter; `model`, our extension, names the base model if several are served."""

    lora_name: Name
    lora_path: Annotated[StrictStr, Field(max_length=MAX_PATH)]
    load_inplace: StrictBool | None = None
    model: StrictStr | None = None


class UnloadAdapter(Body):
    """POST /v1/unload_lora_adapter"""

    lora_name: Name


async def load(request: Request, body: LoadAdapter) -> Response:
    """Load an adapter from a folder on the server's machine, and let requests name it."""
    _check_may(request)
    service = service_of(request)
    model = await service.find(body.model)
    service.check_ready()
    lease = await service.lease(model)
    try:
        adapter = ServedAdapter(body.lora_name, model.name, body.lora_path)
        await service.in_thread(lambda: service.adapters.load(lease.llm, adapter, replaces=bool(body.load_inplace)))
    finally:
        lease.release()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(request: Request, body: UnloadAdapter) -> Response:
    """Remove an adapter; running requests finish with it."""
    _check_may(request)
    service_of(request).adapters.remove(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_may(request: Request) -> None:
    """Require the owner's token from other machines, because the request names files to read."""
    if not request.app.state.tells_details:
        check_owner(request)
