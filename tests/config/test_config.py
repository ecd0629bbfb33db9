"""Settings: precedence, origins, warnings instead of crashes, edits that keep comments, and the page made from them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from localllm.config import KEYS, environment, load_config, parse_bytes, parse_seconds, reference, set_key, unset_key
from localllm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(file: Path, **more: object):
    environ = {"LOCALLLM_CONFIG": str(file), **more.pop("environ", {})}
    return load_config(environ=environ, **more)


def test_c11_precedence_and_origins(file: Path, tmp_path: Path) -> None:
    file.write_text("model = 'a'\n[engine]\nctx = 4096\nkv = 'bf16'\nmax_parallel = 2\ndevice = 'cpu'\n")
    (tmp_path / ".localllm.toml").write_text("[engine]\nkv = 'f32'\nmax_parallel = 3\ndevice = 'cuda:0'\n")
    environ = {"LOCALLLM_PROJECT": "1", "LOCALLLM_ENGINE_MAX_PARALLEL": "8", "LOCALLLM_ENGINE_DEVICE": "cuda:1"}
    config = load(file, environ=environ, folder=tmp_path, flags={"engine.device": "cuda:2", "engine.ctx": None})
    engine = config.engine
    assert (engine.ctx, engine.kv, engine.max_parallel, engine.device) == (4096, "f32", 8, "cuda:2")
    assert config.origin("engine.ctx") == f"file {file}"
    assert config.origin("engine.kv") == f"file {tmp_path / '.localllm.toml'}"
    assert config.origin("engine.max_parallel") == "env LOCALLLM_ENGINE_MAX_PARALLEL"
    assert config.origin("engine.device") == "flag"
    assert config.origin("ui.theme") == "default"
    assert config.get("engine.ctx") == 4096
    assert not config.warnings


def test_the_project_file_needs_permission(file: Path, tmp_path: Path) -> None:
    (tmp_path / ".localllm.toml").write_text("model = 'other'\n")
    assert load(file, folder=tmp_path).model == ""


def test_mcp_servers_are_not_taken_from_a_project(file: Path, tmp_path: Path) -> None:
    entry = "[mcp.servers.files]\ncommand = 'x'\n"
    (tmp_path / ".localllm.toml").write_text(entry)
    config = load(file, folder=tmp_path, environ={"LOCALLLM_PROJECT": "1"})
    assert not config.mcp_servers and "your own settings file" in config.warnings[0]
    file.write_text(entry)
    assert load(file).mcp_servers == {"files": {"command": "x"}}
    file.write_text("[mcp]\nfiles = 1")
    assert not load(file).mcp_servers and "must contain only [mcp.servers.NAME]" in load(file).warnings[0]


def test_every_key_can_be_set_by_file_and_environment(file: Path) -> None:
    assert len({key.env for key in KEYS.values()}) == len(KEYS)
    for key in KEYS.values():
        shown = key.kind.show(key.default)
        if shown:
            assert load(file, environ={key.env: shown}).get(key.path) == key.default


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\ncontxt = 1", ["unknown key engine.contxt"]),
        ("[engine]\nctxx = 1", ["unknown key engine.ctxx", "did you mean engine.ctx"]),
        ("ctx = 1", ["unknown key ctx", "did you mean engine.ctx"]),
        ("[engine]\nctx = true", ["engine.ctx must be auto, max, or 16 to 16,777,216 tokens", "not True"]),
        ("[server]\nport = 70000", ["server.port must be", "0 to 65535, not 70000"]),
        ("[sampling]\ntemperature = 'hot'", ["sampling.temperature must be", "not 'hot'"]),
        ("[sampling]\ntemperature = nan", ["sampling.temperature must be", "not nan"]),
        ("[ui]\ncode_theme = 'monokay'", ["ui.code_theme must be", "not 'monokay'", "did you mean monokai?"]),
        ("[ui]\nnotify = 'allways'", ["ui.notify must be never | unfocused | always, not 'allways'"]),
        ("[server]\ncors = ['*']", ["server.cors must be a list of origins such as", "not ['*']"]),
        ("[engine]\nkv = ['a']", ["engine.kv must be", "bf16", "not ['a']"]),
        ("engine = 3", ["engine must be a table"]),
        ("aliases = 3", ["aliases must be a table"]),
        ("[aliases]\nx = 3", ["aliases.x must be a string"]),
        ("[presets.p]\ntemperature = 'x'\nnonsense = 1", ["presets.p.temperature", "presets.p.nonsense"]),
    ],
)
def test_c11_a_wrong_key_or_value_in_a_file_warns(file: Path, text: str, words: list[str]) -> None:
    file.write_text(text)
    config = load(file)
    for word in words:
        assert word in "\n".join(config.warnings)
    assert config.engine == load_config(environ={"LOCALLLM_CONFIG": str(file) + ".none"}).engine


@pytest.mark.parametrize("text", [b"[engine", b"a = ", b"\xff\xfe\x00", b"x = " + b"[" * 5000, b"#" * (2 << 20)])
def test_broken_files_are_one_sentence(file: Path, text: bytes) -> None:
    """A warning, and the defaults hold; an error for whoever asks for the file, or cannot do without it."""
    file.write_bytes(text)
    config = load(file)
    assert str(file) in config.broken
    assert config.warnings == (f"{config.broken}; using the defaults",)
    assert config.engine == load_config(environ={}).engine
    for asked in ({"strict": True}, {"path": file}):
        with pytest.raises(ConfigError, match=re.escape(str(file))) as caught:
            load_config(environ={"LOCALLLM_CONFIG": str(file)}, **asked)  # type: ignore[arg-type]
        assert caught.value.hint
    with pytest.raises(ConfigError):
        set_key("engine.ctx", "4096", file)
    assert file.read_bytes() == text


def test_a_folder_or_unreadable_path_is_one_sentence(tmp_path: Path) -> None:
    assert "cannot be read" in load(tmp_path).broken
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(path=tmp_path / "none.toml", environ={})


def test_wrong_variables_and_flags_stop(file: Path) -> None:
    with pytest.raises(ConfigError, match="LOCALLLM_SERVER_PORT must be .*, not 'many'") as caught:
        load(file, environ={"LOCALLLM_SERVER_PORT": "many"})
    assert caught.value.hint == "`unset LOCALLLM_SERVER_PORT`"
    with pytest.raises(ConfigError, match="--kv must be auto .*, not 'fp4'") as caught:
        load(file, flags={"engine.kv": "fp4"})
    assert caught.value.hint == "drop --kv, or use --kv auto"
    with pytest.raises(ConfigError, match="did you mean engine.ctx"):
        load(file, flags={"engine.ctxt": 1})
    assert "LOCALLLM_ENGINE_CTX" in load(file, environ={"LOCALLLM_ENGINE_CTXT": "1"}).warnings[0]


def test_origins_are_as_browsers_send_them(file: Path) -> None:
    given = ["http://LocalHost:3000/", "null", "chrome-extension://abc"]
    assert load(file, flags={"server.cors": given}).server.cors == ("http://localhost:3000", *given[1:])
    for wrong in ("*", "localhost:3000", "http://a/b", "http://*.example", ""):
        with pytest.raises(ConfigError, match="--cors must be a list of origins.*, not '"):
            load(file, flags={"server.cors": [wrong]})


def test_hub_offline_counts(file: Path) -> None:
    assert load(file, environ={"HF_HUB_OFFLINE": "1"}).offline
    assert not load(file, environ={"HF_HUB_OFFLINE": "1", "LOCALLLM_OFFLINE": "0"}).offline


def test_aliases_and_presets(file: Path) -> None:
    file.write_text("[aliases]\nwork = 'Qwen/X:int4'\n[presets.r]\nsystem = 'You.'\ntemperature = 0.2\ntop_k = 5\n")
    config = load(file)
    assert config.get("aliases.work") == "Qwen/X:int4"
    assert config.presets["r"].system == "You."
    assert config.presets["r"].sampling.given() == {"temperature": 0.2, "top_k": 5}
    with pytest.raises(ConfigError, match=r"aliases\.none is not set"):
        config.get("aliases.none")


def test_c11_set_and_unset_keep_comments(file: Path) -> None:
    before = "# mine\nmodel = 'a' # the good one\n\n[engine]\n# window\nctx = 4096 # enough\nkv = 'bf16'\n"
    file.write_text(before)
    assert set_key("engine.ctx", "32k", file) == 32768
    set_key("server.port", "9000", file)
    set_key("aliases.work", "a/b", file)
    set_key("presets.r.temperature", "0.2", file)
    text = file.read_text()
    for kept in ("# mine", "# the good one", "# window", "# enough", "kv = 'bf16'", 'ctx = "32k"', "port = 9000"):
        assert kept in text
    config = load(file)
    assert (config.engine.ctx, config.server.port, config.aliases["work"]) == (32768, 9000, "a/b")
    assert config.presets["r"].sampling.temperature == 0.2
    for path in ("server.port", "aliases.work", "presets.r.temperature"):
        assert unset_key(path, file)
        assert not unset_key(path, file)
    assert "# enough" in file.read_text()
    assert load(file).server.port == 8000


def test_a_preset_is_gone_with_its_last_value(file: Path) -> None:
    file.write_text("[presets.kept]\n# a note\nsystem = 'x'\n")
    for path, value in (("presets.new.temperature", "0.2"), ("presets.new.system", "be brief")):
        set_key(path, value, file)
    for path in ("presets.new.temperature", "presets.new.system", "presets.kept.system"):
        assert "new" in load_config(path=file).presets or "kept" in path
        unset_key(path, file)
    assert set(load_config(path=file).presets) == {"kept"} and "# a note" in file.read_text()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine.ctx", "lots"),
        ("engine.nope", "1"),
        ("nope", "1"),
        ("engine", "1"),
        ("aliases", "x"),
        ("presets.x", "1"),
    ],
)
def test_a_refused_change_changes_nothing(file: Path, path: str, text: str) -> None:
    file.write_text("# mine\n")
    with pytest.raises(ConfigError):
        set_key(path, text, file)
    assert file.read_text() == "# mine\n"
    assert list(file.parent.iterdir()) == [file]


def test_set_makes_the_file_and_follows_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles/c.toml", tmp_path / "config.toml"
    real.parent.mkdir()
    real.write_text("")
    real.chmod(0o600)
    link.symlink_to(real)
    set_key("model", "smollm2", link)
    assert link.is_symlink()
    assert real.read_text() == 'model = "smollm2"\n'
    assert real.stat().st_mode & 0o777 == 0o600
    fresh = tmp_path / "new/config.toml"
    set_key("engine.graphs", "off", fresh)
    assert fresh.read_text().split() == ["[engine]", "graphs", "=", "false"]


def test_sizes_and_times() -> None:
    assert parse_bytes("32GiB") == parse_bytes("32G") == 32 << 30
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_seconds("30m") == 1800


def test_every_environment_name_in_the_source_is_listed() -> None:
    known = environment()
    for folder in ("localllm", "kernels", "quant", "models", "tui", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"[\"'](LOCALLLM_[A-Z_]+)[\"']", path.read_text()):
                if name != "LOCALLLM_":
                    assert name in known, f"{path.relative_to(ROOT)} reads {name}: list it in localllm/config/keys.py"


def test_the_page_is_what_the_program_says() -> None:
    """`localllm config schema > docs/configuration.md` makes it."""
    assert (ROOT / "docs/configuration.md").read_text() == reference()


def test_a_settings_file_that_is_none_is_an_error_and_never_waits(tmp_path: Path) -> None:
    pipe, loop, long = tmp_path / "pipe.toml", tmp_path / "loop.toml", tmp_path / "long.toml"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    long.write_text(f"[engine]\nctx = {'9' * 5000}\n")
    reasons = {
        pipe: "cannot be read: not a regular file",
        Path("/dev/zero"): "cannot be read: not a regular file",
        loop: "cannot be read: Too many levels of symbolic links",
        long: "is not valid TOML: ValueError",
    }
    for path, reason in reasons.items():
        assert load(path).warnings == (f"{path} {reason}; using the defaults",)
        with pytest.raises(ConfigError, match=reason):
            set_key("engine.ctx", "4096", path)
        with pytest.raises(ConfigError, match=reason):
            unset_key("engine.ctx", path)
    assert pipe.is_fifo() and loop.is_symlink()
