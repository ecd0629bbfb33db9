"""GET /v1/models and /v1/models/{id}: what can be asked for."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localllm.server.pool import Offer
from localllm.server.service import Service


async def models(request: Request) -> Response:
    """Every model, and its aliases."""
    service: Service = request.app.state.service
    offers = await service.offers()
    return JSONResponse({"object": "list", "data": [_json(service, o, name) for o in offers for name in ids(o)]})


async def model(request: Request) -> Response:
    """One model by its id, slashes and all."""
    service: Service = request.app.state.service
    name = request.path_params["model_id"]
    return JSONResponse(_json(service, await service.find(name), name))


def ids(offer: Offer) -> tuple[str, ...]:
    """What a client may call it."""
    return offer.name, *offer.aliases


def _json(service: Service, offer: Offer, name: str) -> dict[str, Any]:
    loaded = next((r.llm for r in service.residents.loaded() if r.name == offer.name and r.llm is not None), None)
    return {
        "id": name,
        "object": "model",
        "created": int(offer.modified) or service.created,
        "owned_by": "localllm",
        "root": offer.name,
        "parent": None,
        "max_model_len": loaded.plan.ctx if loaded is not None else offer.max_context or None,
        "meta": {"n_params": offer.params, "size": offer.size_bytes, "n_ctx_train": offer.max_context},
    }
