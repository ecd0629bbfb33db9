"""The OpenAPI document, made of the route table and the request models."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic.json_schema import models_json_schema

from localllm._version import __version__

from .errors import is_anthropic
from .routes import ROUTES, Route

REF = "#/components/schemas/{model}"
TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


EVENT = _object(data=TEXT) | {"properties": {"data": TEXT, "event": TEXT}}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))


def document() -> dict[str, Any]:
    """The whole document (OpenAPI 3.1)."""
    models = {route.body for route in ROUTES if route.body is not None}
    named = sorted(models, key=lambda m: m.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in named], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route)
    components = {**schemas.get("$defs", {}), "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _path(route: Route) -> str:
    return re.sub(r":path}", "}", route.path)


def _operation(route: Route) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{_path(route)}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": (inspect.getdoc(route.endpoint) or "").splitlines()[0],
        "responses": {"200": _success(route), **{code: _failure(route) for code in ("4XX", "5XX")}},
    }
    parameters = re.findall(r"{(\w+)", route.path)
    if parameters:
        operation["parameters"] = [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for one in parameters
        ]
    if route.body is not None:
        schema = {"$ref": REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _success(route: Route) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if route.media == "application/json" else TEXT
    if route.answer:
        schema = {"type": "object", "required": list(route.answer)}
    content = {route.media: {"schema": schema}}
    if route.streams:
        content[route.streams] = {"schema": EVENT if route.streams == "text/event-stream" else {}}
    return {"description": "The answer.", "content": content}


def _failure(route: Route) -> dict[str, Any]:
    name = "AnthropicError" if is_anthropic(route.path) else "Error"
    content = {"application/json": {"schema": {"$ref": REF.format(model=name)}}}
    return {"description": "The refusal.", "content": content}
