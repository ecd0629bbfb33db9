"""Another engine in a process of its own: the real script over a scripted llama_cpp, and what can go wrong with one."""

from __future__ import annotations

import json
import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest

from localllm.bench.peer import Peer
from localllm.errors import ConfigError

LLAMA_CPP = '''
"""As much of llama-cpp-python as the peer calls; every decoded batch goes to a log."""
import ctypes, json, os

__version__ = "9.9.9"
VOCAB = 5
log = open(os.environ["PEER_LOG"], "a")
llama_log_callback = lambda function: function
llama_log_set = lambda callback, user: None
llama_backend_init = lambda: None
llama_print_system_info = lambda: b"SCRIPTED = 1 "
llama_synchronize = lambda context: None
llama_vocab_n_tokens = lambda vocab: VOCAB
llama_model_get_vocab = lambda model: model
llama_get_memory = lambda context: context
llama_memory_clear = lambda memory, data: log.write("clear\\n")


class Plain:
    pass


class Batch:
    def __init__(self, size):
        self.n_tokens, self.token, self.pos = 0, [0] * size, [0] * size
        self.n_seq_id, self.seq_id, self.logits = [0] * size, [[0] for _ in range(size)], [0] * size


llama_model_default_params = Plain
llama_context_default_params = Plain
llama_batch_init = lambda size, embeddings, sequences: Batch(size)


def llama_model_load_from_file(path, options):
    return None if b"missing" in path else path


def llama_init_from_model(model, settings):
    log.write(json.dumps([settings.n_ctx, settings.n_seq_max, settings.n_threads, settings.n_batch]) + "\\n")
    return [0]


def llama_decode(context, batch):
    n = batch.n_tokens
    rows = [[batch.token[i], batch.pos[i], batch.seq_id[i][0], int(batch.logits[i])] for i in range(n)]
    log.write(json.dumps(rows) + "\\n")
    log.flush()
    context[0] = batch
    if 9999 in batch.token[:n]:
        os._exit(3)
    return 1 if 13 in batch.token[:n] else 0


def llama_get_logits_ith(context, index):
    values = [float(context[0].token[index] * 10 + j) for j in range(VOCAB)]
    return ctypes.cast((ctypes.c_float * VOCAB)(*values), ctypes.POINTER(ctypes.c_float))
'''


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has the scripted llama_cpp."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/llama_cpp.py").write_text(LLAMA_CPP)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPEER_LOG={tmp_path}/log PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_llama_cpp_decodes_what_it_is_asked(python: str, tmp_path: Path) -> None:
    with closing(Peer("llama.cpp", Path("model.gguf"), threads=2, ctx=700, streams=2, python=python)) as peer:
        tps, ttft = peer.prefill([1, 2], list(range(100, 700)))
        assert ttft is not None and tps == pytest.approx(600 / ttft)
        assert peer.decode([[3, 4], [5, 6]], 2) > 0
        assert peer.scores([20, 21, 22], tmp_path / "scores") == 5
        result = peer.result([])
    assert result.versions["llama-cpp-python"] == "9.9.9" and result.peak_rss_bytes > 1 << 20
    lines = [json.loads(line) if line != "clear" else line for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[0] == [1400, 2, 2, 512]
    runs = [line for line in lines[1:] if line != "clear"]
    assert runs[0] == [[1, 0, 0, 0], [2, 1, 0, 1]]
    assert [len(run) for run in runs[1:3]] == [512, 88] and runs[2][-1] == [699, 601, 0, 1]
    assert sum(row[3] for row in runs[1]) == 0
    assert runs[5] == [[3, 2, 0, 1], [5, 2, 1, 1]] and runs[6] == [[4, 3, 0, 1], [6, 3, 1, 1]]
    numbers = struct.unpack("15f", (tmp_path / "scores").read_bytes())
    assert numbers[:6] == (200, 201, 202, 203, 204, 210)


def test_what_goes_wrong_with_a_peer_is_told(python: str) -> None:
    with pytest.raises(ConfigError, match="cannot load missing.gguf"):
        Peer("llama.cpp", Path("missing.gguf"), threads=1, ctx=64, python=python)
    with closing(Peer("llama.cpp", Path("model.gguf"), threads=1, ctx=64, python=python)) as peer:
        with pytest.raises(ConfigError, match="llama_decode failed for 1 tokens"):
            peer.decode([[13]], 1)
        with pytest.raises(ConfigError, match="process ended"):
            peer.decode([[9999]], 1)
        with pytest.raises(ConfigError, match="process ended"):
            peer.decode([[1]], 1)


def test_an_interpreter_without_the_package_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="llama-cpp-python is not installed") as caught:
        Peer("llama.cpp", Path("model.gguf"), threads=1, ctx=64, python=str(bare))
    assert "--peer-python" in caught.value.hint
    with pytest.raises(ConfigError, match="does not start"):
        Peer("llama.cpp", Path("model.gguf"), threads=1, ctx=64, python=str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_transformers_runs_the_same_file(smollm2_path: Path) -> None:
    with closing(Peer("transformers", smollm2_path, threads=2, ctx=64)) as peer:
        assert peer.prefill([1, 2, 3], [4, 5, 6])[0] > 0
        assert peer.decode([[3, 4], [5, 6]], 2) > 0
        assert "torch" in peer.result([]).versions


def test_every_peer_can_be_named() -> None:
    from localllm.bench.peer import PACKAGES
    from localllm.bench.peer_engines import ENGINES

    assert set(PACKAGES) == set(ENGINES)
    help_text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert f"--against {'|'.join(PACKAGES)}|URL" in help_text
