"""The OpenAI-compatible endpoint."""

from .app import AppOptions, create_app
from .run import ServeOptions, serve
from .service import Service

__all__ = ["AppOptions", "ServeOptions", "Service", "create_app", "serve"]
