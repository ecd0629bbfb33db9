"""GET /v1/models and /v1/models/{id}: what can be asked for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from localllm.server.served_model import ServedModel
from localllm.server.service import Service, service_of


async def models(request: Request) -> dict[str, Any]:
    """Every model, and its aliases."""
    service = service_of(request)
    data = [_json(service, model, name) for model in await service.models() for name in model.ids]
    return {"object": "list", "data": data}


async def model(request: Request) -> dict[str, Any]:
    """One model by its id, slashes and all."""
    service = service_of(request)
    name = request.path_params["model_id"]
    return _json(service, await service.find(name), name)


def _json(service: Service, model: ServedModel, name: str) -> dict[str, Any]:
    llm = service.pool.llm_of(model.name)
    return {
        "id": name,
        "object": "model",
        "created": int(model.modified) or service.created,
        "owned_by": "localllm",
        "root": model.name,
        "parent": None,
        "max_model_len": llm.plan.ctx if llm is not None else model.max_context or None,
        "meta": {
            "n_params": model.params,
            "size": model.size_bytes,
            "n_ctx_train": model.max_context,
            "quant": model.quant,
            "chat": model.chat,
            "loaded": llm is not None,
            "image_tokens": None if llm is None else llm.image_tokens,
            "sampling": llm.sampling if llm is not None else {},
        },
    }
