"""The application over a tiny random model: in process, and behind real connections."""

import sys
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from localllm import LLM
from localllm.residents import Residents
from localllm.server import AppOptions, Service, ServiceOptions, create_app


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    import tiny_models

    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0")


@pytest.fixture(scope="session")
def tiny_llm(tiny_path):
    with LLM(tiny_path, max_parallel=8, debug_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def residents(tiny_llm):
    residents = Residents.holding(tiny_llm, ("tiny", "org/tiny"))
    residents.offers()
    yield residents
    residents.close()


@pytest.fixture
def service(residents):
    service = Service(residents, ServiceOptions(parallel=8))
    yield service
    service.close()


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
