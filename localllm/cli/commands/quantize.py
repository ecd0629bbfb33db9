"""`localllm quantize` and `eval`: make a model smaller, and measure what that, or any weight and KV format, costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.commands.pull import watched
from localllm.cli.frame import options as params
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.progress import make_progress
from localllm.cli.names import resolve
from localllm.cli.session import llm_options
from localllm.errors import ConfigError
from localllm.terminal import clean_line, gib, seconds_short

if TYPE_CHECKING:
    from localllm.quality.evaluate import Quality
    from localllm.quant.encode import Target

CALIBRATION_TOKENS = 4096
"""of a calibration text, at most: more changes the third digit of the error on a small model"""
CARRIED = ("int4", "int4-sym", "nvfp4", "mxfp4")
"""the formats whose error is large enough to be worth calibrating"""


@command(
    "localllm quantize Qwen/Qwen3-4B --to int4",
    "localllm quantize ./my-model --to nvfp4 -o ./my-model-nvfp4 --eval",
    "localllm quantize ./my-model --to int4 --group 32 --calib notes.txt",
)
def quantize(
    env: Env,
    model: params.Model,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="int4 | int4-sym | int8 | fp8 | fp8-block | nvfp4 | mxfp4.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="A new folder.")] = None,
    group: Annotated[int, typer.Option("--group", metavar="N", help="int4: weights per scale: 32, 64, 128.")] = 0,
    calib: Annotated[
        str, typer.Option("--calib", metavar="FILE|auto|none", help="Text whose activations weigh the errors.")
    ] = "auto",
    evaluate: Annotated[bool, typer.Option("--eval", help="Measure the result against the source.")] = False,
) -> int:
    """Write a smaller version of a BF16 model, in a layout that vLLM and transformers read, too.

    Works layer by layer and goes on where an interrupted run ended. The source is not changed.
    """
    import torch

    from localllm import paths
    from localllm.checkpoint.mapped_file import label
    from localllm.quality.quantize import quantize as write

    console = env.console
    source = _local(env, model)
    target = _target(to, group)
    name = label(source).rpartition("/")[2].removesuffix(".safetensors")
    folder = (out or paths.models_dir() / f"{name}-{to}").expanduser()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sequences = _sequences(source, calib) if to in CARRIED else []
    progress = make_progress(console, env.options.progress or "auto", label(source))
    report = watched(
        progress,
        lambda tell, cancel: write(
            source, folder, target, calibration=sequences, device=device, tell=tell, cancel=cancel
        ),
    )
    name, error = report.worst
    kind = "of what layers compute" if report.calibration_tokens else "of weights"
    console.say(
        f"{clean_line(str(folder))}: {gib(report.bytes_before)} → {gib(report.bytes_after)}, "
        f"{report.quantised} modules as {to}, in {seconds_short(report.seconds)}"
    )
    console.say(f"relative error {kind}: mean {report.mean_error:.3%}, largest {error:.3%} ({clean_line(name)})")
    for module, why in report.kept:
        console.say(f"  kept as it was: {clean_line(module)} ({why})")
    found = _compare(env, str(folder), str(source), None, CALIBRATION_TOKENS, ["auto"], ["auto"]) if evaluate else []
    if console.as_json:
        row = asdict(report) | {"path": str(folder), "source": str(source), "mean_error": report.mean_error}
        kept = [{"module": module, "why": why} for module, why in report.kept]
        console.emit("quantize/1", row | {"kept": kept, "quality": list(map(asdict, found))})
    elif found:
        _table(env, found)
    console.say(f"Next: localllm chat {clean_line(str(folder))}")
    return 0


@command(
    "localllm eval smollm2",
    "localllm eval smollm2 --kv bf16,int8,fp8",
    "localllm eval ./my-model-nvfp4 --against ./my-model --text notes.txt --json",
)
def eval(  # noqa: A001
    env: Env,
    model: params.Model,
    against: Annotated[
        str | None, typer.Option("--against", metavar="REF", help="The better version; else itself, computed exactly.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="What both read.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=64, help="How much of the text.")] = 4096,
    quant: Annotated[str, typer.Option("--quant", metavar="Q,Q", help="Weight formats: auto is as stored.")] = "auto",
    kv: Annotated[str, typer.Option("--kv", metavar="KV,KV", help="KV formats: auto,bf16,fp16,int8,fp8.")] = "auto",
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the result for ls, plan and chat.")] = True,
) -> int:
    """Measure quality: perplexity, and how far the answers' distribution is from the reference's (KL), tail included.

    Without --against the reference is the same model in float32 with float32 keys and values.
    """
    from localllm.quality.evaluate import save as keep

    found = _compare(env, model, against, text, tokens, _list(quant), _list(kv))
    for quality in found if save else ():
        keep(quality)
    if env.console.as_json:
        env.console.emit("eval/1", {"rows": [asdict(quality) for quality in found]})
    else:
        _table(env, found)
    return 0


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] or ["auto"]


def _target(name: str, group: int) -> Target:
    from localllm.quant.encode import Target

    try:
        return Target(name, group)
    except ValueError as error:
        raise ConfigError(str(error), "localllm quantize MODEL --to int4") from None


def _local(env: Env, name: str) -> Path:
    resolved = resolve(env, env.config, name)
    if resolved.path is None:
        raise ConfigError(f"{clean_line(resolved.name)} is not on this machine", f"localllm pull {clean_line(name)}")
    return Path(resolved.path)


def _sequences(source: Path, calib: str) -> list[list[int]]:
    from localllm.checkpoint import open_checkpoint
    from localllm.quality.evaluate import sample_text
    from localllm.quality.quantize import calibration_ids
    from localllm.tokenizer.tokenizer import load_tokenizer

    if calib == "none":
        return []
    text = sample_text("calibration") if calib == "auto" else params.read_text(Path(calib), "--calib")
    with open_checkpoint(source) as checkpoint:
        ids = load_tokenizer(checkpoint).encode(text)
    if not ids:
        raise ConfigError(f"--calib {calib} holds no text", "name a text file, or --calib none")
    return calibration_ids(ids, CALIBRATION_TOKENS)


def _compare(
    env: Env, model: str, against: str | None, text: Path | None, tokens: int, quants: list[str], kvs: list[str]
) -> list[Quality]:
    """One row per weight and KV format."""
    from localllm.llm.llm import LLM
    from localllm.quality.evaluate import WINDOW, evaluate, sample_text

    words = sample_text("evaluation") if text is None else params.read_text(text, "--text")
    path = str(_local(env, model))
    base = str(_local(env, against)) if against is not None else path
    ctx = min(WINDOW + 1, *(_max_context(name) for name in (path, base)))
    options = llm_options(env, env.config) | {"ctx": ctx, "max_parallel": 1}
    # as stored, whatever fits better: what is measured against something smaller would look better than it is
    exact: dict[str, Any] = options | {"dtype": "float32", "kv": "f32", "quant": ""}
    progress = make_progress(env.console, env.options.progress or "auto", clean_line(model))

    def work(tell: Any, cancel: Any) -> list[Quality]:
        found = []
        with LLM(base, **exact, on_progress=tell, cancel=cancel) as reference:
            for quant in quants:
                for kv in kvs:
                    stored = "" if quant == "auto" else quant
                    with LLM(path, **(options | {"quant": stored, "kv": kv}), on_progress=tell, cancel=cancel) as other:
                        other.name = clean_line(model)
                        reference.name = clean_line(against or f"{model}, exact")
                        name = text.name if text is not None else "sample"
                        found.append(
                            evaluate(
                                other,
                                reference,
                                words,
                                max_tokens=tokens,
                                text_name=name,
                                tell=tell,
                                cancel=cancel,
                            )
                        )
        return found

    return watched(progress, work)


def _max_context(path: str) -> int:
    from localllm.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.facts.max_context


def _table(env: Env, found: list[Quality]) -> None:
    columns = ("WEIGHTS", "KV", "PERPLEXITY", "REFERENCE", "KL MEAN", "P99", "P99.9", "SAME TOP TOKEN")
    rows = [
        (
            q.weights,
            q.kv,
            f"{q.perplexity:.3f}",
            _number(q.reference_perplexity, "{:.3f}"),
            _number(q.kl_mean, "{:.5f}"),
            _number(q.kl_p99, "{:.4f}"),
            _number(q.kl_p999, "{:.4f}"),
            _number(q.agreement, "{:.2%}"),
        )
        for q in found
    ]
    env.console.table(columns, rows, right=columns[2:])
    if found:
        q = found[0]
        env.console.say(f"{clean_line(q.model)} against {q.reference}, {q.tokens:,} tokens of {clean_line(q.text)}")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
