"""Compiles the C sources of this folder on first use and loads them; says why where that is not possible.

The library lies in the cache folder under a name made of the instruction set, the sources and the compiler, so a
change of any of them builds anew and an older CPU never loads a newer CPU's code. A file comes into place by an atomic
rename: two processes that build at once both succeed. Without a compiler a library built earlier is still used. After a
build those that nobody has loaded for two weeks are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .interface import declare
from .threads import usable_cores

FOLDER = Path(__file__).parent
TIMEOUT_S = 600
# gcc's and clang's words for a flag they do not know
UNKNOWN_FLAG = (
    r"(?:unrecognized command[ -]line option|unknown argument|unsupported (?:option|argument)|invalid feature modifier"
    r"|unknown architecture)[^\n]*?['\u2018\"]([^'\u2019\"\n]+)"
)
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# what /proc/cpuinfo must name for each instruction set, the best one first
NEEDS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_vnni", "gfni", "amx_tile", "amx_int8", "amx_bf16"),
    "avx512vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "neoni8mm": ("asimddp", "i8mm"),
    "neondot": ("asimddp",),
    "neon": (),
    "portable": (),
}
# compiler flags
ISAS = {
    isa: tuple("-m" + name.replace("amx_", "amx-").replace("_", "") for name in needs) for isa, needs in NEEDS.items()
} | {"neoni8mm": ("-march=armv8.2-a+dotprod+i8mm",), "neondot": ("-march=armv8.2-a+dotprod",)}
# /proc/cpuinfo's names of what macOS tells under hw.optional.arm
APPLE = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}
KEPT_S = 14 * 24 * 3600  # A library that was not loaded for so long is removed after a build.
TOUCHED_S = 24 * 3600  # Its time stamp says when it was loaded, a day at most too early.


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded C library, or the reason why there is none."""

    lib: ctypes.CDLL | None
    isa: str
    reason: str | None
    path: Path | None = None
    build_s: float = 0.0  # Seconds the compiler took; 0 when the library was there.
    note: str = ""  # What is less than it could be, and what helps.


def runnable_isas() -> tuple[str, ...]:
    """The instruction sets this machine has, best first; "portable" is always among them."""
    machine = platform.machine().lower()
    arm, x86 = machine in ("arm64", "aarch64"), machine in ("x86_64", "amd64")
    flags = _flags_of_cpu() if arm or x86 else frozenset()
    there = (isa for isa in ISAS if isa == "portable" or (arm if isa.startswith("neon") else x86))
    return tuple(isa for isa in there if flags.issuperset(NEEDS[isa]))


def _flags_of_cpu() -> frozenset[str]:
    if sys.platform == "darwin":
        return frozenset(flag for flag, name in APPLE.items() if _sysctl(f"hw.optional.arm.{name}") == "1")
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), ":")
    return frozenset(line.split(":", 1)[1].split())


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def detect_isa() -> str:
    """The best instruction set of this machine, or LOCALLLM_CPU_ISA."""
    return os.environ.get("LOCALLLM_CPU_ISA") or runnable_isas()[0]


def cache_folder() -> Path:
    """Where compiled kernels lie: LOCALLLM_CACHE, else LOCALLLM_HOME/cache, else the user's cache folder."""
    chosen = os.environ.get("LOCALLLM_CACHE")
    home = os.environ.get("LOCALLLM_HOME")
    if chosen:
        base = Path(chosen)
    elif home:
        base = Path(home) / "cache"
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Caches/localllm"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localllm"
    return base / "kernels"


def is_built() -> bool:
    """Whether `library()` will find its file and need no compiler (for a progress message)."""
    folder, compiler = cache_folder(), _compiler()
    wanted = (isa for isa in _choices() if isa in ISAS and not _refused(folder, isa, compiler).exists())
    isa = next(wanted, None)
    return isa is not None and _find(folder, isa, compiler) is not None


@cache
def library() -> Library:
    """The library for this machine, built when needed; asked once per process."""
    isa = detect_isa()
    if isa not in ISAS:
        return Library(None, isa, f"LOCALLLM_CPU_ISA={isa} is not one of {', '.join(ISAS)}")
    if isa not in runnable_isas():
        return Library(None, isa, f"LOCALLLM_CPU_ISA={isa}: this machine has {', '.join(runnable_isas())}")
    folder, compiler = cache_folder(), _compiler()
    note = ""
    for isa in _choices():
        refused = _refused(folder, isa, compiler)
        try:
            made = Library(None, isa, refused.read_text().partition("\n")[0])
        except OSError:
            made = _library(folder, isa, compiler)
        if made.lib is not None and (isa != "amx" or made.lib.ll_amx()):
            # what has no tiles is no worse off: the system keeps them from us, they are wrong, or the compiler has none
            return replace(made, note=made.note or note)
        if isa == "amx":
            continue
        if made.reason is None or FLAG_REFUSED not in made.reason:
            return made
        note = note or f"{made.reason}: instructions for {isa} are left out, slower; install a newer gcc or clang"
    return made


FLAG_REFUSED = "does not know the flag"


def _choices() -> tuple[str, ...]:
    """Instruction sets to try in turns: the one that was asked for, or all that this machine has."""
    named = os.environ.get("LOCALLLM_CPU_ISA")
    if named:
        return ("amx", "avx512vnni") if named == "amx" else (named,)
    return runnable_isas()


def _refused(folder: Path, isa: str, compiler: tuple[str, ...]) -> Path:
    """Where it is noted that this compiler knows no such instructions, so that it is asked once."""
    return folder / f"{_stem(isa)}-{_compiler_hash(compiler) if compiler else 'none'}.refused"


def _library(folder: Path, isa: str, compiler: tuple[str, ...]) -> Library:
    """What is in the cache for an instruction set, else built."""
    found = _find(folder, isa, compiler)
    if found is not None:
        loaded = _load(found, isa)
        if loaded.lib is not None:
            _touch(found)
            return loaded
    if not compiler:
        return Library(None, isa, "no C compiler: install gcc or clang, or `pip install ziglang`")
    return _build(folder, isa, compiler)


@cache
def lib() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError with the reason where there is none."""
    loaded = library()
    if loaded.lib is None:
        raise RuntimeError(loaded.reason)
    return loaded.lib


def layout_name() -> str:
    """Changes with whatever could change how weights lie in memory: instruction set, sources."""
    return f"{library().isa}-{platform.machine().lower()}-{_source_hash()}"


def _compiler() -> tuple[str, ...]:
    """The command of a C compiler: $CC, the system's, or the one in the ziglang wheel; () without one."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return tuple(named) if shutil.which(named[0]) else ()
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    return ()


def name_compiler(folder: Path | None = None) -> None:
    """Set $CC to a program that runs the compiler of the ziglang wheel, where there is no other one.

    Triton builds its launchers with $CC, cc, gcc or clang, and takes $CC for the name of one program. Where the folder
    of the cache cannot be written, nothing is set, and what Triton says then is told by the self-test.
    """
    command = _compiler()
    if os.environ.get("CC") or "ziglang" not in command:
        return
    program = (folder or cache_folder()) / "zig-cc"
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    try:
        if not program.exists() or program.read_text() != text:
            program.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, part = tempfile.mkstemp(dir=program.parent, prefix=program.name)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(part, 0o700)
            os.replace(part, program)
    except OSError:
        return
    os.environ["CC"] = str(program)


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_hash(compiler: tuple[str, ...]) -> str:
    """Changes with the compiler's file; asking it for its version would cost a process per start."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    stat = program.stat()
    return hashlib.sha256(repr((compiler[1:], str(program), stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()[:8]


def _stem(isa: str) -> str:
    flags = hashlib.sha256(" ".join(_flags(isa)).encode()).hexdigest()[:4]
    return f"cpu-{isa}-{platform.machine().lower()}-{_source_hash()}{flags}"


def _find(folder: Path, isa: str, compiler: tuple[str, ...]) -> Path | None:
    """A library whose bytes are those its name tells of: the loader takes a damaged one, and the process dies of it."""
    made_by = _compiler_hash(compiler) if compiler else "*"
    whole = (path for path in sorted(folder.glob(f"{_stem(isa)}-{made_by}-*.so")) if path.stem.endswith(_digest(path)))
    return next(whole, None)


def _digest(path: Path) -> str:
    """Of a file's bytes, 16 hex digits; 350 KB take a millisecond."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "gone"


def _flags(isa: str) -> tuple[str, ...]:
    plain = "-std=gnu11 -O3 -fPIC -shared -pthread -ffp-contract=off -fno-math-errno -Wno-psabi"
    return (*plain.split(), *ISAS[isa])


def _build(folder: Path, isa: str, compiler: tuple[str, ...]) -> Library:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = tempfile.TemporaryDirectory(dir=folder, prefix="build-")
        keep = True
    except OSError:  # build for this process only
        try:
            place = tempfile.TemporaryDirectory(prefix="localllm-kernels-")
        except OSError as error:
            return Library(None, isa, f"no folder to build in: {folder} ({error})")
        keep = False
    started = time.monotonic()
    with place as temporary:
        output = Path(temporary) / "cpu.so"
        failure = _compile(compiler, isa, output)
        if failure:
            if keep and FLAG_REFUSED in failure:
                with contextlib.suppress(OSError):
                    _refused(folder, isa, compiler).write_text(failure + "\n")
            return Library(None, isa, failure)
        final, why = output, f"{folder} cannot be written"
        if keep:
            final = folder / f"{_stem(isa)}-{_compiler_hash(compiler)}-{_digest(output)}.so"
            try:
                with output.open(
                    "rb"
                ) as file:  # the bytes before the name: after a power cut there may be a name of nothing
                    os.fsync(file.fileno())
                os.replace(output, final)
                _prune(folder, final)
            except OSError as error:
                final, why = output, f"{folder} cannot be written ({error.strerror})"
        note = f"the kernels are compiled at every start: {why}; set LOCALLLM_CACHE to a folder that can be"
        note = note if final == output else ""
        return replace(_load(final, isa, time.monotonic() - started), note=note)


def _touch(path: Path) -> None:
    """Note that a library was used."""
    try:
        if time.time() - path.stat().st_mtime > TOUCHED_S:
            os.utime(path)
    except OSError:
        return  # another user's, or removed meanwhile: it is loaded all the same


def _prune(folder: Path, newest: Path) -> None:
    """Remove libraries nobody loads any more, and what builds that were killed left behind."""
    before = time.time() - KEPT_S
    for path in [*folder.glob("cpu-*.so"), *folder.glob("cpu-*.refused"), *folder.glob("build-*")]:
        try:
            if path == newest or path.stat().st_mtime > before:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:
            continue  # in use by others, or theirs


def _compile(compiler: tuple[str, ...], isa: str, output: Path) -> str | None:
    """None, or why it failed.

    gcc is asked to write the parts of the program side by side (two cores: 15 s instead of 24); a compiler that answers
    with something about that, as clang does, is asked again without.
    """
    command = [*compiler, *_flags(isa), str(FOLDER / "main.c"), "-o", str(output), "-lm"]
    try:
        for more in ((f"-flto={usable_cores()}",), ()):
            done = subprocess.run(
                [*command, *more], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
            if done.returncode == 0 or "lto" not in done.stderr.lower():
                break
    except subprocess.TimeoutExpired:
        return f"the C compiler {compiler[0]} took more than {TIMEOUT_S} s"
    except OSError as error:
        return f"the C compiler {compiler[0]} does not start: {error}"
    if done.returncode != 0 or not output.is_file():
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        unknown = re.search(UNKNOWN_FLAG, done.stderr)
        if unknown:
            return f"the C compiler {compiler[0]} {FLAG_REFUSED} {unknown[1]}"
        return f"the C compiler {compiler[0]} failed (exit {done.returncode}): {lines[0][:200]}"
    return None


def _load(path: Path, isa: str, build_s: float = 0.0) -> Library:
    try:
        lib = ctypes.CDLL(str(path))
        declare(lib)
    except (OSError, AttributeError, ValueError) as error:
        return Library(None, isa, f"the compiled kernels do not load: {error}")
    lib.ll_threads(usable_cores())
    return Library(lib, isa, None, path, build_s)
