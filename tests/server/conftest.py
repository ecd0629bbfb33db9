"""The application over a tiny random model, in process."""

import sys
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from localllm import LLM
from localllm.server import AppOptions, Service, create_app


@pytest.fixture(scope="session")
def tiny_llm(tmp_path_factory):
    import tiny_models

    path = tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0")
    with LLM(path, max_parallel=8, debug_invariants=True) as llm:
        yield llm


@pytest.fixture
def service(tiny_llm):
    return Service(tiny_llm, ("tiny", "org/tiny"))


@pytest.fixture
def make_client(service):
    def make(**options):
        app = create_app(service, AppOptions(**options))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    return make


@pytest.fixture
async def client(make_client):
    async with make_client() as client:
        yield client
