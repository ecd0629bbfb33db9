"""Folders: which files make a model, and what is refused without being opened."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny

from localllm.checkpoint.mapped_file import MappedFile
from localllm.checkpoint.safetensors_file import read_safetensors
from localllm.errors import BadModelFile, LocalLLMError, ModelNotFound, UnsupportedFormat, UnsupportedModel
from localllm.models.architectures import open_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.tiny_safetensors(tmp_path / "model", shards=2)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny.tiny_safetensors(tmp_path / "model")


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refuse(path: Path, words: str, error: type[LocalLLMError] = BadModelFile) -> LocalLLMError:
    begin = time.perf_counter()
    with pytest.raises(error) as caught, open_model(path) as checkpoint:
        _ = checkpoint.facts
    assert time.perf_counter() - begin < 2
    assert words in caught.value.message, caught.value.message
    assert caught.value.hint and caught.value.message.isprintable()
    return caught.value


def test_single_and_sharded_hold_the_same(tmp_path: Path) -> None:
    one = open_model(tiny.tiny_safetensors(tmp_path / "one"))
    three = open_model(tiny.tiny_safetensors(tmp_path / "three", shards=3))
    assert set(one.tensors) == set(three.tensors) and one.kind == three.kind == "safetensors"
    assert one.nbytes == three.nbytes == one.facts.num_params * 4
    for name, info in one.tensors.items():
        assert bytes(one.read(name)) == bytes(three.read(name))
        assert three.tensors[name].shape == info.shape
    assert set(one.tokenizer_files) == {"tokenizer.json", "tokenizer_config.json"}
    assert one.facts.has_chat_template and one.config["model_type"] == "llama"
    shard = tmp_path / "three/model-00002-of-00003.safetensors"
    assert set(open_model(shard).tensors) == set(one.tensors)


def test_tensors_equal_the_safetensors_package(single: Path) -> None:
    from safetensors.numpy import load_file

    theirs = load_file(single / "model.safetensors")
    with open_model(single) as ours:
        assert set(ours.tensors) == set(theirs)
        for name, values in theirs.items():
            assert ours.tensors[name].shape == values.shape
            assert np.array_equal(ours.read(name).view(np.float32).reshape(values.shape), values)


@pytest.mark.parametrize(
    "target",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "a\\..\\b.safetensors",
        "sub/../../x.safetensors",
        "..",
        ".hidden.safetensors",
    ]
    + ["C:x.safetensors", "a\nb.safetensors", "", "modeling_x.py"],
)
def test_names_that_lead_elsewhere(sharded: Path, target: str) -> None:
    change_index(sharded, lambda m: m.update({"lm_head.weight": target}))
    assert refuse(sharded, INDEX).context["key"] == "weight_map.lm_head.weight"


@pytest.mark.parametrize("value", [7, None, ["model.safetensors"], {"a": "b"}])
def test_targets_that_are_no_names(sharded: Path, value: object) -> None:
    change_index(sharded, lambda m: m.update({"lm_head.weight": value}))
    refuse(sharded, "is not the name of a safetensors file")


def test_a_fifo_does_not_block(sharded: Path) -> None:
    os.mkfifo(sharded / "pipe.safetensors")
    change_index(sharded, lambda m: m.update({"lm_head.weight": "pipe.safetensors"}))
    refuse(sharded, "pipe.safetensors: is not a regular file")


def test_a_link_out_of_the_folder_is_not_opened(sharded: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(tiny.safetensors_bytes({"a": ("F32", [1], b"\0" * 4)}))
    outside.chmod(0)
    before = outside.stat().st_atime_ns
    (sharded / "link.safetensors").symlink_to(outside)
    change_index(sharded, lambda m: m.update({"lm_head.weight": "link.safetensors"}))
    refuse(sharded, "link.safetensors: is a link that leaves the folder")
    assert outside.stat().st_atime_ns == before


def test_links_of_other_files_leave_neither(single: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (single / "config.json").unlink()
    (single / "config.json").symlink_to(secret)
    refuse(single, "config.json: is a link that leaves the folder")


def test_a_folder_a_loop_and_a_hole(sharded: Path) -> None:
    (sharded / "folder.safetensors").mkdir()
    change_index(sharded, lambda m: m.update({"lm_head.weight": "folder.safetensors"}))
    refuse(sharded, "folder.safetensors: is a folder")
    (sharded / "loop.safetensors").symlink_to("loop.safetensors")
    change_index(sharded, lambda m: m.update({"lm_head.weight": "loop.safetensors"}))
    refuse(sharded, "loop.safetensors")
    change_index(sharded, lambda m: m.update({"lm_head.weight": "absent.safetensors"}))
    refuse(sharded, "1 of 3 files are missing, first absent.safetensors")


def test_empty_tensors_are_nothing(tmp_path: Path) -> None:
    """The format allows them, and tools write what they have no use for: a bias, the order of inputs."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tiny.tiny_safetensors(tmp_path / "model", shards=2)
    for path in folder.glob("model-*.safetensors"):
        tensors = load_file(path)
        empty = {f"{name.removesuffix('weight')}bias": torch.empty(0) for name in tensors if "proj" in name}
        save_file(tensors | empty, path)
        change_index(folder, lambda m, names=[*empty], file=path.name: m.update(dict.fromkeys(names, file)))
    with open_model(folder) as checkpoint:
        assert not checkpoint.facts.layers[0].mixer.qkv_bias
        assert not any(name.endswith("bias") for name in checkpoint.tensors)


def test_an_index_of_other_files_beside_the_whole_model(single: Path) -> None:
    """It was copied along from the model that this one was made from; transformers takes the whole file, too."""
    (single / INDEX).write_text('{"weight_map": {"a.weight": "model-00001-of-00009.safetensors"}}')
    with open_model(single) as checkpoint:
        assert [file.name for file in checkpoint.files] == ["model.safetensors"] and checkpoint.facts.num_layers == 2


def test_the_index_and_the_shards_disagree(sharded: Path) -> None:
    change_index(sharded, lambda m: m.update({"extra.weight": "model-00001-of-00002.safetensors"}))
    refuse(sharded, "extra.weight: model.safetensors.index.json lists the tensor")
    change_index(sharded, lambda m: m.pop("extra.weight"))
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "copy.safetensors")
    change_index(sharded, lambda m: m.update({"model.embed_tokens.weight": "copy.safetensors"}))
    refuse(sharded, "the tensor is also in")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 7}', '{"weight_map": {}}', "not json", '{"a": NaN}'])
def test_an_index_that_is_none(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refuse(sharded, INDEX)


def test_a_million_entries_and_twice_the_same(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {' + '"a": "b.safetensors",' * 1_000_000 + '"b": "c"}}')
    refuse(sharded, "JSON values; the limit is")
    (sharded / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    refuse(sharded, "the name 'a' appears twice")


@pytest.mark.parametrize("twice", ["snapshot", "repository"])
def test_snapshots_of_the_hubs_cache_link_to_their_blobs(tmp_path: Path, twice: str) -> None:
    real = tiny.tiny_safetensors(tmp_path / "real")
    repo = tmp_path / "hub/models--org--tiny"
    snapshot, blobs = repo / "snapshots/0123abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(real.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    with open_model(snapshot) as checkpoint:
        assert checkpoint.facts.name == "org/tiny"
        assert checkpoint.tensors["lm_head.weight"].file == snapshot / "model.safetensors"
    # A link into another repository's blobs, or to what is no blob at all, is refused.
    (snapshot / "config.json").unlink()
    other = repo / "refs/main" if twice == "snapshot" else tmp_path / "hub/models--org--other/blobs/0"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (snapshot / "config.json").symlink_to(other)
    refuse(snapshot, "config.json: is a link that leaves the folder")


BAD_CONFIGS: dict[str, str | bytes] = {
    "not_json": "model_type: llama",
    "empty": "",
    "list": "[]",
    "text": '"llama"',
    "nan": '{"rms_norm_eps": NaN}',
    "infinity": '{"rms_norm_eps": -Infinity}',
    "overflow": '{"rms_norm_eps": 1e999}',
    "nested_10000": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "nested_100_arrays": '{"a":' + "[" * 100 + "]" * 100 + "}",
    "a_million_lists": '{"a":[' + "[]," * 1_000_000 + "1]}",
    "digits": '{"hidden_size": ' + "9" * 5000 + "}",
    "not_utf8": b'{"model_type": "\xff\xfe"}',
    "utf16": "{}".encode("utf-16"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_json_that_is_none(single: Path, name: str, file: str) -> None:
    content = BAD_CONFIGS[name]
    (single / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refuse(single, file).message.startswith(f"{file}: ")


def test_half_a_gigabyte_of_config_is_not_read(single: Path) -> None:
    with open(single / "config.json", "r+b") as file:
        file.truncate(500 << 20)
    refuse(single, "config.json: is 524,288,000 bytes long; the limit is 4,194,304")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"hidden_size": 2**40},
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"hidden_size": True},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"head_dim": 32},
        {"vocab_size": 270},
        {"vocab_size": 2**31},
        {"intermediate_size": 127},
        {"max_position_embeddings": 2**63},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": -1e-5},
        {"rope_theta": 0},
        {"rope_theta": []},
        {"rope_scaling": "x"},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear", "factor": -2}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        {"rope_scaling": {"rope_type": ["yarn"], "factor": 8}},
        {"rope_parameters": [1]},
        {"partial_rotary_factor": 0.01},
        {"hidden_act": "os.system"},
        {"hidden_act": 3},
        {"tie_word_embeddings": "yes"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [{}]},
        {"model_type": 5},
        {"eos_token_id": 271},
        {"eos_token_id": [1, "x"]},
        {"bos_token_id": -7},
        {"quantization_config": [1]},
    ],
    ids=str,
)
def test_values_out_of_range(tmp_path: Path, changes: dict[str, Any]) -> None:
    error = refuse(tiny.tiny_safetensors(tmp_path / "model", **changes), "")
    assert error.message.startswith(("config.json: ", "model: ", "model.safetensors: "))


def test_generation_config_out_of_range(single: Path) -> None:
    for text, key in (
        ('{"temperature": "hot"}', "temperature"),
        ('{"top_k": 1.5}', "top_k"),
        ('{"top_p": 7}', "top_p"),
    ):
        (single / "generation_config.json").write_text(text)
        assert refuse(single, "generation_config.json").context["key"] == key


def test_code_of_the_repository_never_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    auto = {name: f"modeling_x.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    folder = tiny.tiny_safetensors(tmp_path / "model", auto_map=auto, torch_dtype="os.system")
    code = f"open({str(canary)!r}, 'w').write('ran')\n"
    for name in ("modeling_x.py", "configuration_x.py", "__init__.py", "sitecustomize.py", "json.py"):
        (folder / name).write_text(code)
    before = set(sys.modules)
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.architecture == "llama"
    assert not canary.exists()
    assert not {name for name in set(sys.modules) - before if "modeling" in name}


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    "name", ["m.bin", "m.pt", "m.pth", "m.ckpt", "m.npy", "m.pkl", "m.safetensors", "m.gguf", "m.zip"]
)
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / name
    path.write_bytes(pickle.dumps(_Canary(canary), protocol=4))
    if name == "m.zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(_Canary(canary)))
    refuse(path, "only safetensors and GGUF", UnsupportedFormat)
    assert not canary.exists()


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    refuse(tmp_path, "pytorch_model.bin: is a pickle or an archive", UnsupportedFormat)


def test_which_file_a_folder_means(tmp_path: Path) -> None:
    refuse(tmp_path, "holds no model", ModelNotFound)
    tiny.tiny_gguf(tmp_path / "a.gguf")
    tiny.tiny_gguf(tmp_path / "mmproj-a.gguf")
    assert open_model(tmp_path).path == tmp_path / "a.gguf"
    tiny.tiny_gguf(tmp_path / "b.gguf")
    refuse(tmp_path, "holds 2 GGUF models: a.gguf, b.gguf", ModelNotFound)
    assert open_model(str(tmp_path / "b.gguf")).kind == "gguf"
    tiny.tiny_safetensors(tmp_path)
    assert open_model(tmp_path).kind == "safetensors"


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    refuse(tmp_path / "absent.gguf", "no such file", ModelNotFound)
    refuse(tmp_path / ("x" * 300), "is not a file name", ModelNotFound)
    refuse(Path("a\0b"), "is not a file name", ModelNotFound)
    os.mkfifo(tmp_path / "pipe.gguf")
    refuse(tmp_path / "pipe.gguf", "is not a regular file")
    refuse(Path("/dev/zero"), "is not a regular file")


def test_folders_of_other_layouts(tmp_path: Path) -> None:
    weights = tiny.safetensors_bytes(tiny.tiny_hf_tensors())
    (tmp_path / "consolidated.safetensors").write_bytes(weights)
    refuse(tmp_path, "config.json: is missing")
    (tmp_path / "params.json").write_text("{}")
    refuse(tmp_path, "Mistral's own layout", UnsupportedFormat)
    (tmp_path / "params.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    refuse(tmp_path, "holds a LoRA adapter", UnsupportedFormat)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_config()))
    assert open_model(tmp_path).facts.num_layers == 2
    (tmp_path / "second.safetensors").write_bytes(weights)
    refuse(tmp_path, f"{INDEX}: is missing next to 2 safetensors files")


def test_a_safetensors_file_alone_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tiny.safetensors_bytes(tiny.tiny_hf_tensors()))
    refuse(path, "config.json: is missing next to it", UnsupportedFormat)
    assert len(read_safetensors(MappedFile(path))) == 21


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba99", "architectures": ["Mamba99ForCausalLM"]}, "Mamba99ForCausalLM (model_type mamba99)"),
        ({"model_type": "dbrx", "architectures": ["DbrxForCausalLM"]}, "DbrxForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no language model head"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "LlamaForCausalLM with rope scaling of type spiral"),
    ],
)
def test_unknown_architectures_are_named_with_what_works(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    error = refuse(tiny.tiny_safetensors(tmp_path / "model", **changes), words, UnsupportedModel)
    assert error.hint.startswith("localllm chat") and "localllm catalog" in error.why


def test_the_license_stands_in_the_model_card(single: Path) -> None:
    card = single / "README.md"
    for text, terms in (
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# x", "apache-2.0"),
        ("---\r\nlicense: 'gemma'\r\n---\r\n", "gemma"),
        ("# no front matter\nlicense: mit", ""),
        ("---\nlicense: \x1b[2Jmit\n---\n", "\\x1b[2Jmit"),
    ):
        card.write_bytes(text.encode())
        assert open_model(single).facts.license == terms
