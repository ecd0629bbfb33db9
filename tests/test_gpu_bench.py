"""`benchmarks/gpu.py` is ready for a card: all of it is rehearsed, without what a bare machine does not have."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.kernels import LinearFacts, Weight
from localllm.kernels.layer_weights import LinearPart
from localllm.kernels.table import implementations
from localllm.models.loader import LoadOptions

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu.py"
MISSING = (
    *("textual", "gguf", "llguidance", "fastapi", "starlette", "uvicorn", "platformdirs", "tomlkit", "typer", "rich"),
    *("tokenizers", "huggingface_hub", "httpx", "psutil", "transformers", "safetensors", "pydantic", "h11"),
    *("prometheus_client", "pypdf", "markdownify", "bm25s", "xxhash", "pygments"),
)
BARE = f"""
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {MISSING!r}:
            raise ImportError(name + " is not on a bare machine")
sys.meta_path.insert(0, Missing())
"""


def bare(folder: Path, *words: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
    """On a machine with torch, triton and numpy alone; also for the processes it starts."""
    (folder / "sitecustomize.py").write_text(BARE)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "LOCALLLM_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=limit_s, env=env
    )


@pytest.mark.slow
def test_the_plan_of_three_calls_names_parts_that_there_are(tmp_path: Path) -> None:
    said = bare(tmp_path, "--plan")
    assert said.returncode == 0, said.stderr
    calls = re.findall(r"^\d\. python benchmarks/gpu.py (\w+)", said.stdout, re.MULTILINE)
    assert calls == ["check", "speed", "rivals"]
    assert "eager over 64 tokens" in said.stdout and "Qwen3-8B nvfp4" in said.stdout


def test_a_file_travels_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    files = importlib.import_module("gpu_files")
    whole, data = tmp_path / "model.gguf", bytes(range(256)) * 10
    whole.write_bytes(data)
    pieces = files.cut(whole, tmp_path / "pieces", 1000)
    assert [piece.name for piece in pieces] == ["model.gguf.000", "model.gguf.001", "model.gguf.002"]
    assert files.joined(tmp_path / "pieces").read_bytes() == data
    assert files.joined(whole) == whole


@pytest.mark.slow
def test_all_of_it_is_rehearsed_on_a_bare_machine(tmp_path: Path) -> None:
    """Every part, with an H100's facts and Triton's interpreter; exit 1 where something did not run."""
    file = tmp_path / "rows.json"
    done = bare(tmp_path, "--dry", "--workers", "2", "--minutes", "30", "--out", str(file), limit_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    left = re.findall(r"^(.+?): left out: (.*)$", done.stdout, re.MULTILINE)
    assert left == [("transformers", "ImportError: transformers is not on a bare machine")]
    (document,) = json.loads(file.read_text())
    assert document["schema"] == "localllm.gpu-bench/1"
    names = " ".join(row["name"] for row in document["rows"])
    for word in (
        *(
            "check products 1",
            "check mixture bf16",
            "check family",
            "first ever start",
            "kernels cached",
            "copy bandwidth",
            "MBU",
        ),
        *("attention alone", "kernel ", "prefill", "batch 2 over", "without graphs", "peak memory", "decode 2 x"),
        *("checks 2 guesses", "2 guesses, 70 % right", "2 guesses of its head, 70 % right"),
        *("torch over ours: bf16", "torch over ours: attention"),
    ):
        assert word in names, word


def test_drawn_models_load_as_stored_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that asks for more is noticed here, and not on a card."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    drawn = importlib.import_module("gpu_models").RandomLoading
    for name in [name for name in vars(drawn) if not name.startswith("_")]:
        ours, theirs = (inspect.signature(getattr(one, name)).parameters for one in (drawn, drawn.__mro__[1]))
        assert list(ours) == list(theirs), name


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_of_each_family_are_drawn_in_real_sizes(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a family's loader asks for is known before a card is at hand; tensors without data take no memory."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    models = importlib.import_module("gpu_models")
    plain = implementations("linear")[-1]

    def prepare(_: Any, layer_class: str, weight: Weight, bias: Any, key: str = "") -> LinearPart:
        return LinearPart(plain, weight, bias, weight.shape)

    monkeypatch.setattr(models.RandomLoading, "prepare", prepare)
    for family, form, _ in models.FAMILIES:
        if (family in ("gpt-oss-20b", "glm4.7-flash", "gemma4-e2b")) is not quick:
            continue
        whole, facts = models.facts_of(family, form), models.facts_of(family, form, 0)
        options = LoadOptions("meta", "bfloat16", "bf16", predictor=facts.predictor is not None)
        model = models.RandomLoading(facts, form, options).model()
        assert len(model.layers) == facts.num_layers < whole.num_layers
        assert set(facts.layers) == set(whole.layers)
        assert (model.predictor is not None) == (family == models.HEADED)
        drawn = facts.weight_bytes - (0 if model.predictor is None else model.predictor.nbytes)
        assert 0.7 < model.weight_bytes / drawn < 1.3, family


def test_every_product_is_tried_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rows depend on each other, and those that round activations, fit only where that is allowed."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    checks = importlib.import_module("gpu_checks")
    names = []
    for card in (90, 120):
        place = SimpleNamespace(device="cpu", capability=card, sizes=SimpleNamespace(products=((256, 512),)))
        monkeypatch.setattr(
            checks, "LinearFacts", lambda *given, **more: LinearFacts(*given, **more | {"device": "cuda"})
        )
        monkeypatch.setattr(checks, "_product_error", lambda impl, facts, weight: names.append(impl.name) or "")
        assert all(not said for _, said in checks.products(place, "bfloat16", 0, 1))
    assert {"triton", "triton_invariant", "triton_fp8_w8a8", "triton_nvfp4_w4a4"} <= set(names)


@pytest.mark.slow
def test_without_a_card_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--dry rehearses without one" in done.stderr


@pytest.mark.slow
def test_instructions_a_weight_are_counted(tmp_path: Path) -> None:
    # an H100 is fastest with small tiles, where the code before the weights is a larger share (1.3 with large ones)
    file, env = tmp_path / "table.json", {**os.environ, "TRITON_INTERPRET": ""}
    for kernel, most in (
        *(("int4 g128 M=1 norm gated", 2.5), ("e2m1 e4m3 M=1 norm residual", 3.9)),
        *(("int4 g128 M=16 gated", 3.8), ("int4 sub M=8", 4.0)),
    ):
        command = [sys.executable, "-P", str(SCRIPT.with_name("gpu_instructions.py")), "90"]
        subprocess.run([*command, "--only", kernel, "--out", str(file)], env=env, check=True, timeout=600)
        found = [row for row in json.loads(file.read_text())["rows"] if row["kernel"] == kernel]
        assert found and all(1 < row["instructions"] < most and not row["spill_bytes"] for row in found), found


@pytest.mark.slow
def test_the_launches_of_a_step_are_those_of_the_code() -> None:
    command = [sys.executable, "-P", str(SCRIPT.with_name("gpu_launches.py")), "--cards", "h100"]
    env = {**os.environ, "TRITON_INTERPRET": ""}
    how: dict[str, Any] = {"env": env, "check": True, "capture_output": True, "text": True, "timeout": 300}
    said = subprocess.run([*command, "--model", "30b-a3b"], **how).stdout
    kernels = [line.split()[1] for line in said.splitlines() if line.split()[0] == "experts"]
    assert kernels == ["gemv_route_kernel", "gemv_digits_kernel", "gemv_sum_kernel"]
    said = subprocess.run(command, **how).stdout
    layer = [line.split()[:2] for line in said.splitlines() if "x 36" in line]
    assert layer == [
        *(["qkv", "digits_kernel"], ["qkv", "gemv_heads_kernel"]),
        *(["attention", "decode_split"], ["o", "gemv_kernel"]),
        *(["mlp", "digits_kernel"], ["mlp", "gemv_digits_kernel"], ["mlp", "gemv_kernel"]),
    ]
    assert " 258 launches, 0 of them by torch; bytes alone: 1.69 ms" in said
    said = subprocess.run([*command, "--model", "27b"], **how).stdout
    assert [line.split()[:2] for line in said.splitlines() if "x 16" in line] == [
        *(["qkv", "digits_kernel"], ["qkv", "gemv_heads_kernel"]),
        *(["attention", kernel] for kernel in ("decode_split", "merge_splits", "times_gates")),
        ["o", "gemv_kernel"],
    ]
    products = [line.split()[4] for line in said.splitlines() if line.split()[0] == "delta" and "gemv" in line]
    assert products == ["43.25", "0.98", "16.22"], "megabytes"
    assert " 534 launches, 0 of them by torch" in said
    said = subprocess.run([*command, "--model", "glm-flash", "--kv", "bf16"], **how).stdout
    latent = [line.split()[1] for line in said.splitlines() if line.split()[0] == "latent"]
    product = "gemv_kernel"
    attended = "split_latents", "merge_splits"
    assert latent == [product, product, "spread_kernel", product, *attended, product, product]
