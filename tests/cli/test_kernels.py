"""`doctor --kernels` and `tune`: tables of kernels, and tiles where there are none to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.registry import OPS

from .conftest import Invoke, valid


def test_the_kernels_of_this_cpu(invoke: Invoke) -> None:
    result = invoke("doctor", "--kernels", "cpu", "--json")
    assert result.exit_code == 0
    rows = valid(result.stdout, "kernels-1")["kernels"]
    by_op = {row["op"]: row for row in rows}
    assert set(OPS) <= by_op.keys()
    assert by_op["rms_norm"]["impl"] == "c"
    assert by_op["linear fp8"]["impl"] == "c_float32" and "c_int16: " in by_op["linear fp8"]["reason"]
    assert "decoder" in invoke("doctor", "--kernels").stdout


def test_the_kernels_of_a_card_that_is_not_here(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.kernels.triton import aot

    def table(capabilities: list[int], part: tuple[int, int], **options: Any) -> list[dict[str, Any]]:
        assert capabilities == [120] and part[1] == 6
        row = {"op": f"linear {part[0]}", "capability": 120, "impl": "triton", "reason": "", "mma": "mma.sync"}
        row |= {"shared_bytes": 12_345, "registers": 64, "spill_bytes": 0}
        return [row | ({"reason": "does not compile: X"} if part[0] == 5 else {})]

    monkeypatch.setattr(aot, "table", table)
    rows = valid(invoke("doctor", "--kernels", "sm_120", "--json").stdout, "kernels-1")["kernels"]
    assert [row["op"] for row in rows] == [f"linear {n}" for n in range(6)]
    result = invoke("doctor", "--kernels", "12.0")
    assert "12,345" in result.stdout and "mma.sync" in result.stdout
    assert "6 kernels, 1 of them unavailable" in result.stderr


def test_a_card_nobody_makes_kernels_for_is_named(invoke: Invoke) -> None:
    result = invoke("doctor", "--kernels", "sm_61")
    assert result.exit_code == 2
    assert "sm_61" in result.stderr and "sm_75" in result.stderr


def test_a_cpu_has_nothing_to_tune(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "checkpoint")
    import tiny_models

    tiny = tiny_models.tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    value = valid(invoke("tune", str(tiny), "--json").stdout, "tune-1")
    assert (value["device"], value["tuned"], value["waiting"]) == ("cpu", [], 0)
