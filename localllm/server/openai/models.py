"""GET /v1/models and /v1/models/{id}: what can be asked for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from localllm.server.adapters import ServedAdapter
from localllm.server.served_model import ServedModel
from localllm.server.service import Service, service_of


async def models(request: Request) -> dict[str, Any]:
    """Every model, its aliases and its adapters."""
    service = service_of(request)
    offers = await service.models()
    data = [_json(service, model, name) for model in offers for name in model.ids]
    by_name = {model.name: model for model in offers}
    known = [adapter for adapter in service.adapters.all() if adapter.model in by_name]
    data += [_adapted(_json(service, by_name[one.model], one.name), one) for one in known]
    return {"object": "list", "data": data}


async def model(request: Request) -> dict[str, Any]:
    """One model by its id, slashes and all."""
    service = service_of(request)
    name = request.path_params["model_id"]
    found, adapter = _json(service, await service.find(name), name), service.adapters.find(name)
    return found if adapter is None else _adapted(found, adapter)


def _adapted(model: dict[str, Any], adapter: ServedAdapter) -> dict[str, Any]:
    """As vLLM lists an adapter: its parent is the model it goes with."""
    return model | {"created": adapter.created, "root": adapter.name, "parent": adapter.model}


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
