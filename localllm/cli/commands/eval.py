"""Models: Measure what a weight or KV format costs: perplexity and KL"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import one_of
from localllm.cli.frame.options import Model, read_text
from localllm.cli.loading import watched
from localllm.cli.names import local, opened
from localllm.config import KEYS
from localllm.errors import ModelNotFound
from localllm.terminal import clean_line

if TYPE_CHECKING:
    from localllm.hub import Resolved
    from localllm.quality.evaluate import Quality


# column -> (field, number format)
MEASURES = {
    "PERPLEXITY": ("perplexity", ".3f"), "REFERENCE": ("reference_perplexity", ".3f"), "KL MEAN": ("kl_mean", ".5f"),
    "P99": ("kl_p99", ".4f"), "P99.9": ("kl_p999", ".4f"), "SAME TOP TOKEN": ("agreement", ".2%"),
}  # fmt: skip


@command(
    "localllm eval smollm2",
    "localllm eval smollm2 --kv bf16,int8,fp8",
    "localllm eval ./my-model-nvfp4 --against ./my-model --text notes.txt --json",
)
def eval(  # noqa: A001
    env: Env,
    model: Model,
    against: Annotated[
        str | None, Option(metavar="REF", help="Reference model; by default the same model in float32.")
    ] = None,
    text: Annotated[Path | None, Option(metavar="FILE", help="Text that both models read.")] = None,
    tokens: Annotated[int, Option(metavar="N", min=64, help="Tokens of the text to use.")] = 4096,
    quant: Annotated[str, Option(metavar="Q,Q", help="Weight formats; auto keeps the stored one.")] = "auto",
    kv: Annotated[str, Option(metavar="KV,KV", help="KV formats: auto,bf16,fp16,int8,fp8.")] = "auto",
    save: Annotated[bool, Option("--save/--no-save", help="Keep the result for ls, plan and chat.")] = True,
) -> int:
    """Measure quality: perplexity, and the KL divergence from the reference's token distribution, including its tail.

    Without --against the reference is the same model in float32, with float32 keys and values.
    """
    from localllm.plan.memory import TARGET_BYTES
    from localllm.quality.evaluate import save as keep

    for one in _list(kv):
        KEYS["engine.kv"].parse(one, "flag")
    for one in _list(quant):
        one_of("--quant", one, ("auto", *TARGET_BYTES), "--quant auto")
    found = compare(env, model, against, text, tokens, _list(quant), _list(kv))
    try:
        for quality in found if save else ():
            keep(quality)
    except OSError as error:  # the measurement took long: it is printed all the same
        env.console.warn(f"the result could not be saved: {error.strerror or error}")
    if not env.console.emit("eval/1", {"rows": [asdict(quality) for quality in found]}):
        print_table(env, found)
    return 0


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] or ["auto"]


def compare(
    env: Env, model: str, against: str | None, text: Path | None, tokens: int, quants: list[str], kvs: list[str]
) -> list[Quality]:
    """Evaluate every combination of weight and KV format, one row each."""
    from localllm.llm.llm import LLM
    from localllm.quality.evaluate import WINDOW, evaluate, sample_text

    words = sample_text("evaluation") if text is None else read_text(text, "--text")
    models = [local(env, env.config, name, ModelNotFound) for name in (model, against) if name is not None]
    path, base = str(models[0].path), str(models[-1].path)
    ctx = min(WINDOW + 1, *map(_max_context, models))
    options = replace(env.config.engine, ctx=ctx, max_parallel=1)
    # keep the stored weights even if smaller ones fit better: a weaker reference would flatter the model under test
    exact = replace(options, dtype="float32", kv="f32", quant="", activations="auto")

    def work(tell: Any, cancel: Any) -> list[Quality]:
        found = []
        load = partial(LLM, offline=env.offline, on_progress=tell, cancel=cancel)
        name = text.name if text is not None else "sample"
        measure = partial(evaluate, max_tokens=tokens, text_name=name, tell=tell, cancel=cancel)
        with load(base, exact) as reference:
            for quant in quants:
                for kv in kvs:
                    stored = "" if quant == "auto" else quant
                    with load(path, replace(options, quant=stored, kv=kv)) as other:
                        other.name = clean_line(model)
                        reference.name = clean_line(against or f"{model}, exact")
                        found.append(measure(other, reference, words))
        return found

    return watched(env, clean_line(model), work)


def _max_context(resolved: Resolved) -> int:
    with opened(resolved, "off") as checkpoint:
        return checkpoint.facts.max_context


def print_table(env: Env, found: list[Quality]) -> None:
    """Print the rows as a table."""
    rows = []
    for q in found:
        values = [(getattr(q, name), form) for name, form in MEASURES.values()]
        rows.append([q.weights, q.kv, *("–" if value is None else format(value, form) for value, form in values)])
    env.console.table(("WEIGHTS", "KV", *MEASURES), rows, right=tuple(MEASURES))
    if found:
        q = found[0]
        env.console.say(f"{clean_line(q.model)} against {q.reference}, {q.tokens:,} tokens of {clean_line(q.text)}")
