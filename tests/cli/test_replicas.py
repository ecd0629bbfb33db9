"""`serve --ray`: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.cli.replicas import address_in
from localllm.errors import ConfigError

from .conftest import Invoke


def test_an_address_is_told_from_a_model() -> None:
    def read(*models: str) -> tuple[list[str], str]:
        return address_in(list(models), "2", {}, ray=True)

    assert read("qwen") == (["qwen"], "local")
    assert read("qwen3:4b", "10.0.0.5:6379") == (["qwen3:4b"], "10.0.0.5:6379")
    assert read("auto", "org/repo:Q4_K_M") == (["org/repo:Q4_K_M"], "auto")
    assert address_in(["a", "b"], None, {"--pin": True}, ray=False) == (["a", "b"], "")
    for models in ((), ("one", "two"), ("one", "auto", "h:6379")):
        with pytest.raises(ConfigError, match="one model"):
            read(*models)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--replicas", "2"), "--replicas needs --ray"),
        (("--ray",), "one model"),
        (("smollm2", "--ray", "--ollama"), "--ollama cannot be combined with --ray"),
        (("smollm2", "--ray", "--pin", "smollm2"), "--pin cannot be combined with --ray"),
        (("smollm2", "--ray", "--kv-events", "tcp://127.0.0.1:5557"), "--kv-events cannot be combined with --ray"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused(
    invoke: Invoke, empty_home: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    result = invoke("serve", *given)
    assert result.exit_code == 2 and said in result.stderr
