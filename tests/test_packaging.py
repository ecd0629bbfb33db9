"""One name in site-packages, and the wheel holds exactly what is tracked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "quant", "models", "tui")
# what lies beside the package in an environment
SHARED = {
    "docs/localllm.1": "share/man/man1/localllm.1",
    "docs/completions/localllm": "share/bash-completion/completions/localllm",
    "docs/completions/_localllm": "share/zsh/site-functions/_localllm",
    "docs/completions/localllm.fish": "share/fish/vendor_completions.d/localllm.fish",
}
FOLDERS = {"localllm": "localllm", **{n: f"localllm/{n}" for n in LINKED}}


def tracked(*under: str) -> list[str]:
    """Files and links git knows below `under`, as they are in the checkout."""
    run = subprocess.run(["git", "ls-files", "-z", "--", *under], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel from it, of the tracked files: an old `build/` in the checkout would leak into them."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked("pyproject.toml", "README.md", "LICENSE", *SHARED, *FOLDERS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    for name in LINKED:
        (source / "localllm" / name).symlink_to(f"../{name}")
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (made,) = built.glob("*.whl")
    return made


EXPECTED = sorted(FOLDERS[name.split("/")[0]] + "/" + name.split("/", 1)[1] for name in tracked(*FOLDERS))


def test_wheel_holds_every_tracked_file_once(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert sorted(n for n in names if ".data/data/" not in n) == EXPECTED
    assert sorted(n.partition(".data/data/")[2] for n in names if ".data/data/" in n) == sorted(SHARED.values())


def test_sdist_holds_every_tracked_file_once(built: Path) -> None:
    (made,) = built.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = [m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()]
    assert sorted(n for n in names if n.split("/")[0] in FOLDERS) == EXPECTED


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str) -> None:
    """Editors, type checkers and `python -m localllm` in a plain checkout find the folders through them."""
    assert os.readlink(ROOT / "localllm" / name) == f"../{name}"


def test_wheel_claims_one_name(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (top_level,) = [n for n in archive.namelist() if n.endswith("top_level.txt")]
    assert archive.read(top_level).decode().split() == ["localllm"]


@pytest.mark.slow
def test_wheel_alone_runs(wheel: Path, tmp_path: Path) -> None:
    """Installed without the checkout, it knows its version."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path),
        str(wheel),
    ]
    run = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    # -S leaves out the editable install of this checkout; what localllm needs from others is then handed in by name.
    code = (
        "import sys; sys.path += sys.argv[1].split(':'); import localllm; print(localllm.__file__)\n"
        "from localllm.cli import main; sys.argv = ['localllm', '--version']; main()"
    )
    others = ":".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code, others], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    where, *said = run.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    from localllm import __version__

    assert __version__ in "\n".join(said)
    assert (tmp_path / "bin/localllm").is_file()
    assert (tmp_path / "share/man/man1/localllm.1").is_file()


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """As `pip install`, `pipx` and `uv tool install` leave it, from the package index alone: it answers."""
    venv.create(tmp_path / "env", with_pip=True)
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/localllm"
    pins = ["-c", str(ROOT / "constraints.txt")]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_NO_INDEX")}
    install = [python, "-m", "pip", "install", "-q", *pins, wheel]
    run = subprocess.run(install, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    asked = [command, "run", "smollm2", "What is the capital of France?", "--temp", "0", "--max-tokens", "24", "-y"]
    said = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert said.returncode == 0 and "Paris" in said.stdout, said.stderr
    plain = subprocess.run(
        [command, "chat", "smollm2", "--plain", "--no-save"], cwd=tmp_path, env=env, capture_output=True, text=True,
        input="Hello!\n",
    )  # fmt: skip
    assert plain.returncode == 0 and plain.stdout.strip(), plain.stderr


@pytest.mark.parametrize("name", LINKED)
def test_bare_names_are_not_ours(name: str) -> None:
    """`import kernels` means somebody else's package, also while the tests run in the checkout."""
    from importlib.util import find_spec

    for spec in [find_spec(name)]:
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        assert not [p for p in places if p and Path(p).is_relative_to(ROOT) and ".venv" not in p]


def test_bare_names_are_not_ours_for_the_installed_command() -> None:
    names = LINKED
    code = f"from importlib.util import find_spec\nprint([n for n in {names} if find_spec(n)])"
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
