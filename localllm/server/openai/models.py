"""GET /v1/models and /v1/models/{id}: the served models and adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from localllm.server.adapters import ServedAdapter
from localllm.server.errors import asks_as_anthropic
from localllm.server.served_model import ServedModel
from localllm.server.service import Service, service_of


async def models(request: Request) -> dict[str, Any]:
    """List the models with their aliases and adapters."""
    service = service_of(request)
    offers = await service.models()
    data = [_json(service, model, name) for model in offers for name in model.ids]
    by_name = {model.name: model for model in offers}
    known = [adapter for adapter in service.adapters.all() if adapter.model in by_name]
    data += [_adapted(_json(service, by_name[one.model], one.name), one) for one in known]
    if not asks_as_anthropic(request.headers.raw):
        return {"object": "list", "data": data}
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": list(map(_as_anthropic, data)), "has_more": False, **ends}


async def model(request: Request) -> dict[str, Any]:
    """Describe one model by its id, which may contain slashes."""
    service = service_of(request)
    name = request.path_params["model_id"]
    found, adapter = _json(service, await service.find(name), name), service.adapters.find(name)
    found = found if adapter is None else _adapted(found, adapter)
    return _as_anthropic(found) if asks_as_anthropic(request.headers.raw) else found


def _as_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that Anthropic clients read."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    own = {"type": "model", "display_name": model["id"], "created_at": created, "lifecycle": "active"}
    return model | own | {"max_input_tokens": model["max_model_len"]}


def _adapted(model: dict[str, Any], adapter: ServedAdapter) -> dict[str, Any]:
    """Describe an adapter as vLLM does: its parent is the base model."""
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
