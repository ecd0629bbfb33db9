"""Advice for a machine without problems: which model to start with, weight formats, power limit, a second GPU."""

from __future__ import annotations

from dataclasses import dataclass

from localllm import hub
from localllm.config import UserConfig
from localllm.device.gpu_table import table_row
from localllm.plan import fit
from localllm.plan.placement import chosen_device
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.terminal import gib, rate, tokens_short

from .finding import Survey

# (minimum compute capability, the weight formats that suit it); 0 is the CPU
WEIGHTS = (
    (121, "MoE models in NVFP4 or MXFP4, because memory shared by CPU and GPU is large but slow; else W4A16"),
    (100, "FP8 if it fits and is fast enough, else NVFP4 or W4A16"),
    (89, "FP8 if it fits and is fast enough, else W4A16"),
    (80, "W4A16 (AWQ, GPTQ), else GGUF: this GPU has no FP8 arithmetic"),
    (1, "W4A16 or GGUF with float16: this GPU has no BF16"),
    (0, "GGUF in 4 bits (Q4_K_M): on a CPU, the bytes read per token limit the speed"),
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice."""

    id: str
    text: str
    cmd: str = ""  # a command, or "" if the text is enough


def advice(survey: Survey, config: UserConfig) -> list[Advice]:
    """All advice for this machine, in the order to follow it."""
    found = (_unused(survey), _model(survey, config), _format(survey), _power(survey), _second(survey))
    return [one for one in found if one]


def _unused(survey: Survey) -> Advice | None:
    """A note that the GPU cannot be used, so that the other advice is for the CPU."""
    device, _, why = chosen_device(survey.machine, "auto")
    if device != "cpu" or not survey.machine.gpus:
        return None
    reason = why[0].removeprefix("CPU: ") if why else "reason unknown"
    return Advice("first", f"the GPU is not used, so this advice is for the CPU: {reason}")


def _model(survey: Survey, config: UserConfig) -> Advice | None:
    """The recommended model, the same as in `plan` and on the home screen, without contacting the hub."""
    planner = Planner.here(config.engine, survey.machine)
    choice = fit.advised(planner, hub.download_limit(config))
    if choice is None:
        return Advice("model", "smollm2, which runs on any machine", "localllm chat smollm2")
    best, made, _, _ = choice.best
    text = (
        f"{best.name} {best.format}: {gib(made.weight_bytes)} of weights, {tokens_short(made.ctx)} tokens of context"
        f" with a {made.kv} KV cache, {pace(made)}"
    )
    if choice.fast and choice.fast.model.name != best.name:
        text += f"; faster: {choice.fast.model.name}, {pace(choice.fast.plan)}"
    return Advice("model", text, f"localllm chat {best.name}")


def pace(made: Plan) -> str:
    """'≈ 0.7 tok/s'."""
    mark = "measured" if made.basis == "measured" else "≈"
    return f"{mark} {rate(made.decode_tps)} tok/s"


def _format(survey: Survey) -> Advice | None:
    """The weight formats that suit the device."""
    _, gpu, _ = chosen_device(survey.machine, "auto")
    return Advice("weights", next(text for least, text in WEIGHTS if (gpu.capability if gpu else 0) >= least))


def _power(survey: Survey) -> Advice | None:
    """A power limit that hardly costs speed, for GPUs on which it was measured."""
    for number, gpu in enumerate(survey.machine.gpus):
        row = table_row(gpu.name)
        laptop = "laptop" in gpu.name.lower()
        if row and row.knee_w and gpu.power_limit_w > row.knee_w and not laptop:
            text = f"{row.knee_w} W instead of {gpu.power_limit_w:.0f} W: decoding loses less than 5 %, prefill more"
            return Advice("power", text, f"sudo nvidia-smi -i {number} -pl {row.knee_w}")
    return None


def _second(survey: Survey) -> Advice | None:
    if len(survey.machine.gpus) < 2:
        return None
    count = len(survey.machine.gpus)
    text = "run a second model on another GPU, or split one model over all of them; plan compares both ways to split"
    return Advice("gpus", text, f"localllm plan MODEL --tensor-parallel {count}")
