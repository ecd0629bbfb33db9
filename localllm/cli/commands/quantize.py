"""Models: Write a smaller version of a BF16 model"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from localllm.cli.commands.eval import compare, print_table
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.options import Model, read_text
from localllm.cli.loading import watched
from localllm.cli.names import local, opened
from localllm.errors import ConfigError, ModelNotFound
from localllm.terminal import clean_line, gib, seconds_short

CALIBRATION_TOKENS = 4096  # at most: more changes only the third digit of the error on a small model
CARRIED = ("int4", "int4-sym", "nvfp4", "mxfp4")  # formats whose error is large enough to be worth calibrating


FORMATS = ("int4", "int4-sym", "int8", "fp8", "fp8-block", "nvfp4", "mxfp4")


@command(
    "localllm quantize Qwen/Qwen3-4B --to int4",
    "localllm quantize ./my-model --to nvfp4 -o ./my-model-nvfp4 --eval",
    "localllm quantize ./my-model --to int4 --group 32 --calib notes.txt",
)
def quantize(
    env: Env,
    model: Model,
    to: Annotated[
        str,
        Option(
            metavar="FORMAT",
            help=f"{' | '.join(FORMATS)}.",
            autocompletion=lambda incomplete: [name for name in FORMATS if name.startswith(incomplete)],
        ),
    ],
    out: Annotated[Path | None, Option("-o", "--out", metavar="DIR", help="The new folder.")] = None,
    group: Annotated[
        int, Option(metavar="N", show_default=False, help="int4: weights per scale: 32, 64 (default) or 128.")
    ] = 0,
    calib: Annotated[str, Option(metavar="FILE|auto|none", help="Calibration text.")] = "auto",
    evaluate: Annotated[bool, Option("--eval", help="Measure the result against the source.")] = False,
) -> int:
    """Write a smaller version of a BF16 model, in a layout that vLLM and transformers also read.

    Works layer by layer. After an interruption, the same command continues; at most one layer and two minutes of work
    are lost. The source is not changed.
    """
    import torch

    from localllm import paths
    from localllm.checkpoint.mapped_file import label
    from localllm.quality.quantize import quantize as write
    from localllm.quant.encode import Target

    console = env.console
    resolved = local(env, env.config, model, ModelNotFound)
    source = Path(str(resolved.path))
    try:
        target = Target(to, group)
    except ValueError as error:
        again = f"localllm quantize {clean_line(shlex.quote(model))} --to {to if to in FORMATS else 'int4'}"
        raise ConfigError(str(error), again) from None
    if to not in CARRIED and calib not in ("auto", "none"):
        raise ConfigError(f"--calib is for {', '.join(CARRIED)}; {to} is not calibrated", "drop --calib")
    with opened(resolved, "off"):  # damage is named before anything is written, with a hint that fits the source
        pass
    name = label(source).rpartition("/")[2].removesuffix(".safetensors")
    folder = (out or paths.models_dir() / f"{name}-{to}").expanduser()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sequences = _sequences(source, calib) if to in CARRIED else []
    made = partial(write, source, folder, target, calibration=sequences, device=device)
    stopped = "stopped; the same command continues"
    report = watched(env, label(source), lambda tell, cancel: made(tell=tell, cancel=cancel), stopped)
    name, worst = report.worst
    kind = "of layer outputs" if report.calibration_tokens else "of weights"
    console.say(
        f"{clean_line(str(folder))}: {gib(report.bytes_before)} → {gib(report.bytes_after)}, "
        f"{report.quantised} modules as {to}, in {seconds_short(report.seconds)}"
    )
    console.say(f"relative error {kind}: mean {report.mean_error:.3%}, largest {worst:.3%} ({clean_line(name)})")
    for module, why in report.kept:
        console.say(f"  not quantized: {clean_line(module)} ({why})")
    found = compare(env, str(folder), str(source), None, CALIBRATION_TOKENS, ["auto"], ["auto"]) if evaluate else []
    row = asdict(report) | {"path": str(folder), "source": str(source), "mean_error": report.mean_error}
    kept = [{"module": module, "why": why} for module, why in report.kept]
    if not console.emit("quantize/1", row | {"kept": kept, "quality": list(map(asdict, found))}) and found:
        print_table(env, found)
    console.say(f"Next: localllm chat {clean_line(shlex.quote(str(folder)))}")
    return 0


def _sequences(source: Path, calib: str) -> list[list[int]]:
    from localllm.checkpoint import open_checkpoint
    from localllm.quality.evaluate import sample_text
    from localllm.quality.quantize import calibration_ids
    from localllm.tokenizer.files import load_tokenizer

    if calib == "none":
        return []
    text = sample_text("calibration") if calib == "auto" else read_text(Path(calib), "--calib")
    with open_checkpoint(source) as checkpoint:
        ids = load_tokenizer(checkpoint).encode(text)
    if not ids:
        raise ConfigError(f"--calib {calib} contains no text", "pass a text file, or --calib none")
    return calibration_ids(ids, CALIBRATION_TOKENS)
