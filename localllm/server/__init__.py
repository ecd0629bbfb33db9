"""HTTP server with the OpenAI, Anthropic and Ollama APIs over the models of a `ModelPool`."""

from .app import create_app
from .middleware import AppOptions
from .run import ServeOptions, serve
from .service import Service, ServiceOptions

__all__ = ["AppOptions", "ServeOptions", "Service", "ServiceOptions", "create_app", "serve"]
