"""Compiles the C sources of this folder on first use and loads the library, or reports why that is not possible.

The library is cached under a name derived from the instruction set, the sources and the compiler, so a change to any of
them triggers a rebuild and an older CPU never loads a newer CPU's code. Files are moved into place with an atomic
rename, so concurrent builds are safe; a process waits for the build of another one. Without a compiler, a library built
earlier is still used. After a build, libraries that have not been loaded for two weeks are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from .threads import usable_cores

FOLDER = Path(__file__).parent
TIMEOUT_S = 600
WAIT_S = 120  # for the build of another process, which may be stopped
# error messages of gcc and clang for an unknown flag
UNKNOWN_FLAG = (
    r"(?:unrecognized command[ -]line option|unknown argument|unsupported (?:option|argument)|invalid feature modifier"
    r"|unknown architecture)[^\n]*?['\u2018\"]([^'\u2019\"\n]+)"
)
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# flags that /proc/cpuinfo must list for each instruction set, best first
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
# /proc/cpuinfo flag -> name under hw.optional.arm on macOS
APPLE = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}
KEPT_S = 14 * 24 * 3600  # libraries not loaded for this long are removed after a build
TOUCHED_S = 24 * 3600  # a library's mtime is updated on load, at most once per day


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded C library, or the reason why it could not be loaded."""

    lib: ctypes.CDLL | None
    isa: str
    reason: str | None
    path: Path | None = None
    build_s: float = 0.0  # compile time in seconds; 0 if the library was cached
    note: str = ""  # a limitation and how to fix it


def runnable_isas() -> tuple[str, ...]:
    """Return the instruction sets this machine supports, best first; always includes "portable"."""
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
    """Return LOCALLLM_CPU_ISA, or the best instruction set of this machine."""
    return os.environ.get("LOCALLLM_CPU_ISA") or runnable_isas()[0]


def cache_folder() -> Path:
    """Return the folder for compiled kernels, in LOCALLLM_CACHE, LOCALLLM_HOME/cache or the user's cache folder."""
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
    """Whether `library()` will find a cached file and not compile (for a progress message)."""
    folder, compiler = cache_folder(), _compiler()
    wanted = (isa for isa in _choices() if isa in ISAS and not _refused(folder, isa, compiler).exists())
    isa = next(wanted, None)
    return isa is not None and _find(folder, isa, compiler) is not None


@cache
def library() -> Library:
    """Return the library for this machine, building it if needed; computed once per process."""
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
            # AMX tiles unavailable (blocked by the OS, wrong results, or no compiler support): the next set is as good
            return replace(made, note=made.note or note)
        if isa == "amx":
            continue
        if made.reason is None or FLAG_REFUSED not in made.reason:
            return made
        note = note or f"{made.reason}, so the kernels run without {isa}, slower; install a newer gcc or clang"
    return made


FLAG_REFUSED = "does not know the flag"


def _choices() -> tuple[str, ...]:
    """Instruction sets to try in order: the requested one, or all that this machine supports."""
    named = os.environ.get("LOCALLLM_CPU_ISA")
    if named:
        return ("amx", "avx512vnni") if named == "amx" else (named,)
    return runnable_isas()


def _refused(folder: Path, isa: str, compiler: tuple[str, ...]) -> Path:
    """Marker file that records that this compiler does not support the instruction set, so it is tried only once."""
    return folder / f"{_stem(isa)}-{_compiler_hash(compiler) if compiler else 'none'}.refused"


def _library(folder: Path, isa: str, compiler: tuple[str, ...]) -> Library:
    """Load the cached library for an instruction set, or build it."""
    found = _find(folder, isa, compiler)
    if found is not None:
        loaded = _load(found, isa)
        if loaded.lib is not None:
            _touch(found)
            return loaded
    if not compiler:
        return Library(None, isa, "no C compiler: install gcc or clang, or `pip install ziglang`")
    with _alone(folder):
        found = _find(folder, isa, compiler)
        loaded = Library(None, isa, None) if found is None else _load(found, isa)
        return _build(folder, isa, compiler) if loaded.lib is None else loaded


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in this folder, at most `WAIT_S`. Without a writable folder, do not wait."""
    with contextlib.ExitStack() as kept:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(folder, os.O_RDONLY)
            kept.callback(os.close, handle)
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield


def start_build() -> None:
    """If nothing is cached, start to compile in another process, for which `library()` will wait. Needs no torch."""
    if not is_built() and _compiler():
        command = [sys.executable, "-P", "-c", f"from {__name__} import library; library()"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        run = partial(subprocess.run, command, check=False, **quiet)
        threading.Thread(target=run, name="build", daemon=True).start()  # waits for it, so that no zombie is left


@cache
def lib() -> ctypes.CDLL:
    """Return the loaded library. Raises RuntimeError with the reason if there is none."""
    loaded = library()
    if loaded.lib is None:
        raise RuntimeError(loaded.reason)
    return loaded.lib


def layout_name() -> str:
    """Identify the memory layout of prepared weights: instruction set, machine and source hash."""
    return f"{library().isa}-{platform.machine().lower()}-{_source_hash()}"


def _compiler() -> tuple[str, ...]:
    """Command of the C compiler: $CC, the system's, or the one in the ziglang wheel; () if there is none."""
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
    """If the ziglang wheel is the only compiler, set $CC to a wrapper script for it.

    Triton builds its launchers with $CC, cc, gcc or clang, and requires $CC to be a single program. If the cache folder
    is not writable, $CC stays unset, and the self-test reports Triton's error.
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
    """Hash of the compiler's path, size and mtime; asking for its version would cost a process per start."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    stat = program.stat()
    return hashlib.sha256(repr((compiler[1:], str(program), stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()[:8]


def _stem(isa: str) -> str:
    flags = hashlib.sha256(" ".join(_flags(isa)).encode()).hexdigest()[:4]
    return f"cpu-{isa}-{platform.machine().lower()}-{_source_hash()}{flags}"


def _find(folder: Path, isa: str, compiler: tuple[str, ...]) -> Path | None:
    """Find a cached library whose digest matches its name: loading a damaged one would crash the process."""
    made_by = _compiler_hash(compiler) if compiler else "*"
    whole = (path for path in sorted(folder.glob(f"{_stem(isa)}-{made_by}-*.so")) if path.stem.endswith(_digest(path)))
    return next(whole, None)


def _digest(path: Path) -> str:
    """First 16 hex digits of a file's SHA-256; 350 KB take a millisecond."""
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
            return Library(None, isa, f"there is no folder to build in: {folder} ({error})")
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
                ) as file:  # sync before the rename, so that a power failure cannot leave an empty file
                    os.fsync(file.fileno())
                os.replace(output, final)
                _prune(folder, final)
            except OSError as error:
                final, why = output, f"{folder} cannot be written ({error.strerror})"
        note = f"the kernels are compiled at every start, because {why}; set LOCALLLM_CACHE to a writable folder"
        note = note if final == output else ""
        return replace(_load(final, isa, time.monotonic() - started), note=note)


def _touch(path: Path) -> None:
    """Update a library's mtime to record that it is in use."""
    try:
        if time.time() - path.stat().st_mtime > TOUCHED_S:
            os.utime(path)
    except OSError:
        return  # owned by another user, or removed: does not matter


def _prune(folder: Path, newest: Path) -> None:
    """Remove libraries that are no longer loaded, and leftovers of killed builds."""
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
            continue  # in use, or owned by another user


def _compile(compiler: tuple[str, ...], isa: str, output: Path) -> str | None:
    """Compile the library; return None or the reason for the failure.

    Uses gcc's parallel LTO (15 s instead of 24 on two cores); if the compiler complains about the flag, as clang does,
    compiles again without it.
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
    from .interface import declare  # imports torch

    try:
        lib = ctypes.CDLL(str(path))
        declare(lib)
    except (OSError, AttributeError, ValueError) as error:
        return Library(None, isa, f"the compiled kernels do not load: {error}")
    lib.ll_threads(usable_cores())
    return Library(lib, isa, None, path, build_s)
