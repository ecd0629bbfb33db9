"""Compiling on first use: what is cached under which name, and every way it can fail."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from localllm.kernels import LinearFacts, OpFacts, Weight
from localllm.kernels.cpu import build, ops
from localllm.kernels.cpu.linear import IMPLS
from localllm.kernels.cpu.threads import usable_cores

FACTS = LinearFacts("int4g", (16, 64), 32)
ABI_ONLY = """
long long ll_abi(void) { return 1; }
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    build.library.cache_clear()
    build.lib.cache_clear()
    yield
    build.library.cache_clear()
    build.lib.cache_clear()


def compiler(path: Path, script: str) -> str:
    """A program that stands in for the C compiler."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: None) -> Path:
    """A cache folder of its own and a compiler that copies what was compiled before: same steps, no five seconds."""
    isa = build.detect_isa()
    ready = build._find(build.cache_folder(), isa, build._compiler())
    script = f'while [ "$1" != "-o" ]; do shift; done; echo run >> {tmp_path}/runs; cp {ready} "$2"'
    monkeypatch.setenv("CC", compiler(tmp_path / "cc", script))
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def test_built_once_and_found_again(quick: Path) -> None:
    assert not build.is_built()
    first = build.library()
    assert first.reason is None and first.build_s > 0 and first.path is not None
    assert first.path.parent == quick / "cache" / "kernels" and build.is_built()
    assert [p.name for p in first.path.parent.iterdir()] == [first.path.name]  # nothing half made is left
    build.library.cache_clear()
    second = build.library()
    assert second.path == first.path and second.build_s == 0 and runs(quick) == 1


def test_another_compiler_builds_anew_and_none_takes_what_is_there(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.library()
    other = quick / "cc2"
    shutil.copy(quick / "cc", other)
    with other.open("a") as file:
        file.write("# newer\n")
    monkeypatch.setenv("CC", str(other))
    build.library.cache_clear()
    second = build.library()
    assert second.reason is None and second.path != first.path and runs(quick) == 2
    monkeypatch.setenv("CC", str(quick / "gone"))
    build.library.cache_clear()
    assert build.library().reason is None and runs(quick) == 2


def test_the_name_changes_with_source_and_instruction_set(
    quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {build._stem(isa) for isa in build.ISAS}
    assert len(names) == len(build.ISAS)
    copy = tmp_path / "source"
    shutil.copytree(build.FOLDER, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (copy / "vec.h").write_text((copy / "vec.h").read_text() + "/* changed */\n")
    monkeypatch.setattr(build, "FOLDER", copy)
    build._source_hash.cache_clear()
    try:
        assert names.isdisjoint(build._stem(isa) for isa in build.ISAS)
    finally:
        build._source_hash.cache_clear()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.25, 0.5, 0.75, 0.98, -0.5])
def test_a_damaged_file_is_built_anew(quick: Path, share: float) -> None:
    """The loader maps a file that was cut, and the process dies of it at the first touch."""
    path = build.library().path
    assert path is not None and runs(quick) == 1
    data = path.read_bytes()
    kept = int(abs(share) * len(data))
    path.unlink()
    path.write_bytes(data[:kept] + bytes(len(data) - kept if share < 0 else 0))  # cut, or zeros after a power cut
    build.library.cache_clear()
    assert not build.is_built()
    made = build.library()
    assert made.reason is None and made.path == path and runs(quick) == 2 and path.read_bytes() == data


def test_a_compiler_that_knows_less_gets_less_to_do(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each set of instructions; what is left out is said, with what helps."""
    best, lower, *_ = (isa for isa in build.runnable_isas() if isa != "amx")  # without tiles nothing is said
    refuses = 'case "$*" in *-mbest*) echo \'cc1: error: unrecognized command-line option "-mbest"\' >&2;'
    script = (quick / "cc").read_text().partition("\n")[2]
    ready = compiler(quick / "cc3", f"echo asked >> {quick}/asked; {refuses} exit 1;; esac; {script}")
    monkeypatch.setenv("CC", ready)
    monkeypatch.setitem(build.ISAS, best, (*build.ISAS[best], "-mbest"))
    monkeypatch.setattr(build, "runnable_isas", lambda: (best, lower))
    for asked in (2, 2):  # the second start asks nothing
        made = build.library()
        assert (made.isa, made.reason) == (lower, None)
        assert f"does not know the flag -mbest, so the kernels run without {best}" in made.note
        assert "install a newer gcc" in made.note
        assert len((quick / "asked").read_text().split()) == asked and build.is_built()
        build.library.cache_clear()
    monkeypatch.setenv("LOCALLLM_CPU_ISA", best)
    assert "does not know the flag -mbest" in (build.library().reason or ""), "what was asked for, or nothing"


def test_a_compiler_that_cannot_work_side_by_side_works_alone(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = (
        "case \"$*\" in *-flto=*) echo \"cc: error: unsupported argument '2' to option '-flto='\" >&2; exit 1;; esac"
    )
    script = (quick / "cc").read_text().partition("\n")[2]
    monkeypatch.setenv("CC", compiler(quick / "cc4", f"{refuses}; {script}"))
    made = build.library()
    assert (made.reason, made.note) == (None, "") and runs(quick) == 1


def test_a_cache_that_cannot_be_written_is_said(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "cache").write_text("a file, no folder")
    made = build.library()
    assert made.lib is not None and "compiled at every start" in made.note and "LOCALLLM_CACHE" in made.note


def reason() -> str:
    """Why the kernels are not there; nothing may take them then, and nothing fails."""
    said = build.library().reason or ""
    assert said and all(impl.fits(FACTS) == said for impl in IMPLS)
    assert ops.attention_fits(OpFacts()) == said
    with pytest.raises(RuntimeError, match=r"\w"):
        build.lib()
    return said


def test_no_compiler(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(quick / "none"))
    assert "no C compiler" in reason() and "ziglang" in reason()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(quick / "empty"))
    build.library.cache_clear()
    if build.importlib.util.find_spec("ziglang") is None:
        assert "no C compiler" in reason()


def test_broken_compilers(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script, said in (
        ("echo 'main.c:1: error: no such luck' >&2; exit 1", "failed (exit 1): main.c:1: error: no such luck"),
        ("exit 0", "failed (exit 0): no message"),
        ("kill -9 $$", "failed (exit -9)"),
        ('while [ "$1" != -o ]; do shift; done; echo junk > "$2"', "do not load"),
        ("sleep 5", "took more than"),
    ):
        monkeypatch.setattr(build, "TIMEOUT_S", 0.5 if said.startswith("took") else 60)
        monkeypatch.setenv("CC", compiler(quick / "broken", script))
        build.library.cache_clear()
        assert said in reason()
    monkeypatch.setenv("CC", str(quick / "runs"))
    (quick / "runs").write_text("not a program\n")
    (quick / "runs").chmod(0o755)
    build.library.cache_clear()
    assert "does not start" in reason()


def test_a_library_that_is_not_ours(quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text(ABI_ONLY)
    other = tmp_path / "other.so"
    real = shutil.which("cc") or shutil.which("gcc") or "cc"
    subprocess.run([real, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    script = f'while [ "$1" != "-o" ]; do shift; done; cp {other} "$2"'
    monkeypatch.setenv("CC", compiler(quick / "foreign", script))
    assert "do not load" in reason()


def test_a_cache_that_cannot_be_written(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_CACHE", str(quick / "file"))
    library = build.library()  # built for this process alone
    assert library.reason is None and library.lib is not None and library.lib.ll_threads(0) >= 1
    assert library.path is not None and not library.path.exists()
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", _refuse)
    build.library.cache_clear()
    assert "no folder to build in" in build.library().reason  # type: ignore[operator]


def _refuse(**_: object) -> None:
    raise PermissionError(13, "no")


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CPU_ISA", "mmx")
    assert "mmx is not one of" in (build.library().reason or "")
    assert not build.is_built()
    foreign = next(isa for isa in build.ISAS if isa not in build.runnable_isas())
    monkeypatch.setenv("LOCALLLM_CPU_ISA", foreign)
    build.library.cache_clear()
    assert "this machine has" in (build.library().reason or "")
    monkeypatch.delenv("LOCALLLM_CPU_ISA")
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    for flags, isa in (("", "neon"), ("asimd asimddp", "neondot"), ("asimddp i8mm", "neoni8mm")):
        monkeypatch.setattr(build, "_flags_of_cpu", lambda flags=flags: frozenset(flags.split()))
        assert build.detect_isa() == isa and build.runnable_isas()[-2:] == ("neon", "portable")
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert build.runnable_isas() == ("portable",)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for flags, isa in (
        ("sse2 avx", "portable"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx_vnni", "avxvnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni gfni amx_tile amx_int8 amx_bf16", "amx"),
    ):
        monkeypatch.setattr(build, "_flags_of_cpu", lambda flags=flags: frozenset(flags.split()))
        assert build.detect_isa() == isa and build.runnable_isas()[-1] == "portable"


def test_what_the_cpu_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = {"cpuinfo": "processor : 0\nFeatures\t: fp asimddp\n"}
    monkeypatch.setattr(build.Path, "read_text", lambda path: text[path.name])
    monkeypatch.setattr(build.sys, "platform", "linux")
    assert build._flags_of_cpu() == {"fp", "asimddp"}
    text["cpuinfo"] = "flags : avx2 fma\nflags : none\n"
    assert build._flags_of_cpu() == {"avx2", "fma"}
    text.clear()
    monkeypatch.setattr(build.Path, "read_text", _unreadable)
    assert build._flags_of_cpu() == frozenset()
    monkeypatch.setattr(build.sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._flags_of_cpu() == frozenset()
    compiler(tmp_path / "sysctl", '[ "$2" = hw.optional.arm.FEAT_DotProd ] && echo 1 || echo 0')
    assert build._flags_of_cpu() == {"asimddp"}


def _unreadable(_: Path) -> str:
    raise PermissionError(13, "no")


def test_a_cache_moved_to_an_older_cpu(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = build.library()
    assert newer.path is not None
    monkeypatch.setattr(build, "_flags_of_cpu", frozenset)
    build.library.cache_clear()
    older = build.library()
    assert older.isa in ("portable", "neon") and older.path != newer.path and older.reason is None
    monkeypatch.setenv("CC", str(quick / "none"))
    older.path.unlink()  # type: ignore[union-attr]
    build.library.cache_clear()
    assert "no C compiler" in (build.library().reason or "") and newer.path.is_file()


def test_tiles_that_are_not_there_leave_the_rest(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = build._load

    def load_without_tiles(path: Path, isa: str, build_s: float = 0.0) -> build.Library:
        made = load(path, isa, build_s)
        made.lib.ll_amx = lambda: 0  # as the system says that keeps them from us
        return made

    monkeypatch.setattr(build, "_load", load_without_tiles)
    monkeypatch.setattr(build, "runnable_isas", lambda: ("amx", "avx512vnni"))
    library = build.library()
    assert library.isa == "avx512vnni" and library.reason is None and runs(quick) == 2


def test_old_builds_are_removed(quick: Path) -> None:
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    day = 24 * 3600
    now = time.time()
    for name, days in (("cpu-avx2-x86_64-old-1.so", 15), ("cpu-avx2-x86_64-used-1.so", 13), ("other", 99)):
        (folder / name).write_text("x")
        os.utime(folder / name, (now, now - days * day))
    (folder / "build-killed").mkdir()
    (folder / "build-killed/cpu.so").write_text("x")
    os.utime(folder / "build-killed", (now, now - 15 * day))
    made = build.library().path
    assert made is not None
    assert {path.name for path in folder.iterdir()} == {made.name, "cpu-avx2-x86_64-used-1.so", "other"}
    os.utime(made, (now, now - 13 * day))
    build.library.cache_clear()
    assert build.library().path == made and made.stat().st_mtime > now - day


@pytest.mark.slow
def test_the_wheel_of_zig_is_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang", reason="the ziglang wheel is not installed")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    assert "ziglang" in build._compiler()
    library = build.library()
    assert library.reason is None and library.build_s > 0


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOCALLLM_CACHE")
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "cache" / "kernels"
    monkeypatch.delenv("LOCALLLM_HOME")
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "localllm" / "kernels"


def test_triton_gets_the_compiler_of_the_ziglang_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes $CC for the name of one program."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang/__init__.py").write_text("")
    (tmp_path / "ziglang/__main__.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build.name_compiler(tmp_path / "made")
    assert "CC" not in os.environ, "there is a system's compiler"
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "")  # what is set below goes at the end of the test
    build.name_compiler(tmp_path / "made")
    said = subprocess.run([os.environ["CC"], "-c", "a b.c"], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == "['cc', '-c', 'a b.c']", said.stderr
    chosen = os.environ["CC"]
    build.name_compiler(tmp_path / "other")
    assert os.environ["CC"] == chosen and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_of_two_processes_one_builds_and_one_waits(quick: Path) -> None:
    program = (
        "from localllm.kernels.cpu import build; r = build.library(); assert r.lib is not None, r.reason; "
        "print(r.path, r.lib.ll_threads(0))"
    )
    slow_compiler(quick)
    command = [sys.executable, "-P", "-c", program]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert all(child.returncode == 0 for child in children) and said[0] == said[1]
    assert len(list((quick / "cache" / "kernels").iterdir())) == 1 and runs(quick) == 1


def slow_compiler(folder: Path) -> None:
    script = (folder / "cc").read_text().replace("cp ", "sleep 1; cp ")
    compiler(folder / "cc", script.split("\n", 1)[1])


@pytest.mark.slow
def test_a_build_that_was_started_before_is_waited_for(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_compiler(quick)
    started: list[object] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: started.append(args) or popen(*args, **how))
    build.start_build()
    deadline = time.monotonic() + 60
    while not (quick / "runs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert build.library().build_s == 0 and runs(quick) == 1 and len(started) == 1
    build.start_build()  # nothing is left to build
    assert len(started) == 1


def test_a_build_of_a_stopped_process_is_not_waited_for(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WAIT_S", 0.2)
    with build._alone(build.cache_folder()):
        assert build.library().build_s > 0 and runs(quick) == 1


def test_a_forked_child_has_threads_of_its_own(compiled: None) -> None:
    library = build.lib()
    before = library.ll_threads(0)
    library.ll_threads(3)
    prepared = IMPLS[1].prepare(weight())
    x = torch.ones(40, 64)
    expected = IMPLS[1].run(x, prepared)
    try:
        child = os.fork()
        if child == 0:
            same = torch.equal(IMPLS[1].run(x, prepared), expected)
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(IMPLS[1].run(x, prepared), expected)
    finally:
        library.ll_threads(before)


def weight() -> Weight:
    codes = torch.randint(0, 256, (160, 32), dtype=torch.uint8)
    return Weight("int4g", (160, 64), codes, torch.rand(160, 2), group_size=32)


def test_calls_from_several_threads(compiled: None) -> None:
    prepared = IMPLS[1].prepare(weight())
    inputs = [torch.randn(m, 64) for m in (1, 2, 7, 40)] * 5
    expected = [IMPLS[1].run(x, prepared) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: IMPLS[1].run(x, prepared), inputs * 5))
    assert all(torch.equal(y, expected[i % len(inputs)]) for i, y in enumerate(results))


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8}, raising=False)
    topology = {
        f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}\n" for cpu in range(4)
    }
    sys_root = files(tmp_path / "sys", topology)
    proc = tmp_path / "proc"
    assert usable_cores(sys_root, proc) == 3  # two cores of two threads, and one nobody describes
    files(proc, {"self/cgroup": "0::/user/me\n"})
    files(sys_root, {"fs/cgroup/user/cpu.max": "150000 100000\n", "fs/cgroup/user/me/cpu.max": "max 100000\n"})
    assert usable_cores(sys_root, proc) == 1  # one more would be stopped in each period
    files(sys_root, {"fs/cgroup/user/me/cpu.max": "10000 100000\n"})
    assert usable_cores(sys_root, proc) == 1
    files(proc, {"self/cgroup": "4:cpu,cpuacct:/me\n3:memory:/me\n"})
    files(sys_root, {"fs/cgroup/cpu/me/cpu.cfs_quota_us": "200000", "fs/cgroup/cpu/me/cpu.cfs_period_us": "100000"})
    assert usable_cores(sys_root, proc) == 2
    files(sys_root, {"fs/cgroup/cpu/me/cpu.cfs_quota_us": "-1"})
    assert usable_cores(sys_root, proc) == 3
    assert isinstance(usable_cores(), int)


def test_the_interface_names_what_the_library_has(compiled: None) -> None:
    assert isinstance(build.lib(), ctypes.CDLL) and build.lib().ll_abi() > 0


@pytest.mark.one_in(2)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of this processor alone")
@pytest.mark.parametrize("isa", [isa for isa in build.ISAS if not isa.startswith("neon")])
def test_the_sources_of_every_instruction_set_are_right(isa: str) -> None:
    """Those, too, that this CPU lacks: what differs between them is left to the preprocessor."""
    compiler = build._compiler()
    assert compiler is not None
    command = [*compiler, *build._flags(isa), "-fsyntax-only", str(build.FOLDER / "main.c")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
