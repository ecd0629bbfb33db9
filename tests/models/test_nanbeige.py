"""Nanbeige 4.2: layers that run several times with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from localllm.device.fake import MACHINES
from localllm.errors import ConfigError, LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.architectures.facts import kv_bytes_per_token
from localllm.models.architectures.sharding import check_span, check_world
from localllm.models.calibration import hessians
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner
from localllm.quality.quantize import quantize
from localllm.quant.encode import Target

from .test_adapters import Placed, make_adapter, merged_logits, relative_error
from .test_decode_graphs import answers, engine_of, requests
from .test_gguf_models import write_gguf


def looped(model: Any, loops: int = 2, **changes: Any) -> Any:
    """The tiny Llama with the configuration of a looped model."""
    stated = {"model_type": "nanbeige", "architectures": ["NanbeigeForCausalLM"], "num_loops": loops}
    return replace(model, config=model.config | stated | changes)


def logits(model: Any, ids: list[int], loops: int = 2, skips_norm: bool = False) -> Tensor:
    """What transformers' Llama computes whose output is its input again."""
    inner, head = model.reference.model, model.reference.lm_head
    norm, found = inner.norm, inner.embed_tokens(torch.tensor([ids]))
    with torch.no_grad():
        for loop in range(loops):
            inner.norm = torch.nn.Identity() if skips_norm and loop < loops - 1 else norm
            found = inner(inputs_embeds=found, use_cache=False).last_hidden_state
        return head(found)[0]


def prompt(count: int = 40) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize(("loops", "skips_norm"), [(2, False), (3, False), (2, True), (1, False)])
def test_logits_are_those_of_layers_that_run_again(
    loops: int, skips_norm: bool, tiny: Callable, paged: Any, tmp_path: Path
) -> None:
    """Whole, in chunks, and from GGUF."""
    model, ids = tiny("llama"), prompt()
    wanted = logits(model, ids, loops, skips_norm)
    made = looped(model, loops, skip_loop_final_norm=skips_norm)
    path = write_gguf(tmp_path / "looped.gguf", made.config, made.tensors, gguf.GGMLQuantizationType.F32)
    for place in (made.save(tmp_path / "folder"), path):
        with open_model(place) as checkpoint:
            facts = checkpoint.facts
            ours = load_model(checkpoint, LoadOptions(exact=True))
        assert facts.num_layers == 3 * loops and facts.num_params == sum(one.numel() for one in made.tensors.values())
        for chunks in ([40], [17, 1, 22]):
            assert torch.allclose(paged(ours).all_logits(ids, chunks), wanted, atol=2e-4, rtol=1e-4)


def test_the_plan_counts_weights_once_and_reads_them_for_each_loop(tiny: Callable, tmp_path: Path) -> None:
    plain, made = tiny("llama").save(tmp_path / "plain"), looped(tiny("llama")).save(tmp_path / "looped")
    with open_model(plain) as one, open_model(made) as two:
        once, twice = one.facts, two.facts
        loaded = [load_model(checkpoint, LoadOptions(exact=True)).weight_bytes for checkpoint in (one, two)]
    assert once.weight_bytes == twice.weight_bytes and loaded[0] + once.hidden_size * 4 == loaded[1]  # one more norm
    assert kv_bytes_per_token(twice.layers, "bf16") == 2 * kv_bytes_per_token(once.layers, "bf16")
    layers = (twice.active_share - once.active_share) * once.weight_bytes
    table = once.vocab_size * once.hidden_size * 4
    assert layers == pytest.approx(once.weight_bytes - table * (2 - once.tied_embeddings))
    planner = Planner(MACHINES["cpu"])
    assert planner.plan(twice).decode_tps < planner.plan(once).decode_tps


def test_steps_of_the_engine_give_the_same_tokens(tiny: Callable, tmp_path: Path) -> None:
    """Batched, with replayed steps, and token by token as the reference has it."""
    model = tiny("llama")
    with open_model(looped(model).save(tmp_path)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    found = answers(engine_of(ours), requests(1))
    assert answers(engine_of(ours, (1, 2, 4)), requests(1)) == found
    for request, tokens in list(zip(requests(1), found, strict=True))[1::2]:  # the greedy ones
        ids = list(request.prompt_token_ids)
        wanted = logits(model, ids + tokens[:-1])[len(ids) - 1 :].argmax(-1).tolist()
        assert wanted == tokens


def test_quantized_weights_serve_all_loops(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    folder = looped(tiny("llama-packable")).save(tmp_path / "plain")
    quantize(folder, tmp_path / "q", Target("fp8"))
    ids = prompt()
    with open_model(tmp_path / "q") as checkpoint:
        ours = paged(load_model(checkpoint, LoadOptions(exact=True))).all_logits(ids, [40])
    wanted = logits(tiny("llama-packable"), ids)
    assert float((ours - wanted).norm() / wanted.norm()) < 0.2  # rounding twice; with other weights it is above 1


def test_an_adapter_changes_a_layer_each_time_it_runs(tiny: Callable, paged: Any, tmp_path: Path) -> None:
    base, ids = looped(tiny("llama")), prompt()
    merged = make_adapter(tmp_path / "one", base.tensors)
    wanted = merged_logits(base, paged, tmp_path / "merged", merged, ids)
    with open_model(base.save(tmp_path / "base")) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    assert relative_error(Placed(paged, ours, [tmp_path / "one"]).step({0: ids}, {0: 0}), wanted) < 2e-5


def test_what_is_not_supported_is_refused(tiny: Callable, tmp_path: Path) -> None:
    model = tiny("llama")
    cases = {
        "with enable_mhc is not supported": {"enable_mhc": True},
        "with loop_share_kv is not supported": {"loop_share_kv": True},
        "3 layers that run 900 times are more than 1000": {"num_loops": 900},
        "loop_loss_weights.*one entry less than num_loops": {"loop_loss_weights": [0.1, 0.2]},
        "num_loops": {"num_loops": 0},
    }
    for number, (words, changes) in enumerate(cases.items()):
        folder = looped(model).save(tmp_path / str(number), **changes)
        with open_model(folder) as checkpoint, pytest.raises(LocalLLMError, match=words):
            _ = checkpoint.facts
    with open_model(looped(model).save(tmp_path / "good")) as checkpoint:
        with pytest.raises(LocalLLMError, match="run several times, which cannot be calibrated"):
            next(iter(hessians(checkpoint, [prompt()])))
        for check in (lambda: check_world(checkpoint.facts, 2), lambda: check_span(checkpoint.facts, (0, 2))):
            with pytest.raises(ConfigError, match="run several times"):
                check()
