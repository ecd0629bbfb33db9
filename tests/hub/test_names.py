"""What may be a name, a file, a digest; which files make a model. Nothing is asked or opened."""

from __future__ import annotations

import pytest

from localllm.errors import BadModelFile, DownloadError, InvalidRequest, LocalLLMError, ModelNotFound, UnsupportedFormat
from localllm.hub.listing import RepoFile, RepoInfo
from localllm.hub.names import (
    ModelName,
    check_digest,
    check_file_names,
    check_no_collision,
    check_repo_id,
    check_revision,
    parse_name,
    shown,
)
from localllm.hub.selection import GgufSet, choose_gguf, gguf_sets, quant_label, select_files

BAD_NAMES = [
    "../x/y", "a/b/c", "a//b", "-rf/x", "a\\b/c", "~/x", "a/b@../../", "a/b@", "a/b@/etc", "a/b@x/../y", "x" * 10**6,
    "а/b", "ﬁle/x", "a/b\0", "a/..", "../..", "a/.hidden", "a/b.git", "a--b/c", "a/b:", "a/b:x y", "a b/c", "", "a/b\n",
    "hf.co/a/b/c/d/e", "ollama/../x",
    "\\\\srv\\x", "a/b@\x1b[2J", "@main", ":q4", "a/b:..", "/", "a/", "/a", "a" * 200 + "/b",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda n: repr(n[:20]))
def test_what_is_not_a_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_name(name)
    assert len(caught.value.message) < 400
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen", ModelName("qwen")),
        ("Qwen/Qwen3-8B", ModelName("Qwen/Qwen3-8B")),
        ("org/repo:Q4_K_M", ModelName("org/repo", "Q4_K_M")),
        ("org/repo@main", ModelName("org/repo", None, "main")),
        ("org/repo:UD-Q4_K_XL@refs/pr/3", ModelName("org/repo", "UD-Q4_K_XL", "refs/pr/3")),
        ("qwen3-0.6b:int4", ModelName("qwen3-0.6b", "int4")),
        ("hf.co/org/repo:Q4_K_M", ModelName("hf.co/org/repo", "Q4_K_M")),
        ("ollama/hf.co/org/repo:Q4_K_M", ModelName("ollama/hf.co/org/repo", "Q4_K_M")),
    ],
)
def test_names_are_taken_apart(text: str, name: ModelName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize("page", ["huggingface.co/org/repo", "hf.co/org/repo/", "huggingface.co/org/repo/tree/main"])
def test_the_page_of_a_model_is_its_name(page: str) -> None:
    assert parse_name(f"https://{page}") == ModelName("org/repo")


@pytest.mark.parametrize("url", ["https://example.com/a/b", "https://huggingface.co/datasets/a/b", "ftp://hf.co/a/b"])
def test_another_page_is_not(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not the page of a model on huggingface\.co"):
        parse_name(url)


def test_a_path_is_not_asked_to_be_one() -> None:
    with pytest.raises(InvalidRequest, match="'./zero.gguf' is a path, not a model name"):
        parse_name("./zero.gguf")


def test_repo_ids_and_revisions_alone() -> None:
    assert check_repo_id("a/b") == "a/b"
    assert check_revision("v1.0") == "v1.0"
    for bad in ("a", "a/b/c", "a/b..c", "_/", "a/b-"):
        with pytest.raises(InvalidRequest):
            check_repo_id(bad)


@pytest.mark.parametrize(
    "name",
    [
        "../../pwn",
        "/abs",
        "..\\..\\p",
        "C:\\x",
        "a/../../b",
        "a//b",
        "./a",
        "evil\x1b[2J",
        "n" * 300,
        "a\nb",
        "",
        "c:x",
    ],
    ids=lambda n: repr(n[:12]),
)
def test_a_listing_with_such_a_file_is_refused(name: str) -> None:
    with pytest.raises(BadModelFile) as caught:
        check_file_names(["config.json", name], "org/repo")
    assert "\x1b" not in caught.value.message


def test_listings_have_a_limit_and_names_differ_by_more_than_case() -> None:
    with pytest.raises(BadModelFile, match="100,000 files"):
        check_file_names([str(i) for i in range(100_000)], "org/repo")
    with pytest.raises(BadModelFile, match="case"):
        check_no_collision(["Model.gguf", "model.GGUF"], "org/repo")
    check_file_names([".gitattributes", ".git/config", "con", "größe.txt"], "org/repo")  # never selected, so harmless


@pytest.mark.parametrize(
    "digest",
    ["sha256-../../x", "a" * 63, "A" * 64, "", "a" * 1_000_000, None, 5, "a" * 64 + "\n", "٠" * 64, "../" + "a" * 61],
    ids=lambda d: repr(d)[:14],
)
def test_what_is_not_a_digest(digest: object) -> None:
    with pytest.raises(DownloadError) as caught:
        check_digest(digest)
    assert len(caught.value.message) < 200


def test_shown_hides_control_characters() -> None:
    assert shown("a\x1b[2J\x07\u202eb") == "a\\x1b[2J\\x07\\u202eb"
    assert len(shown("x" * 1000)) == 80


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("gemma-3-4b-it-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("model-bf16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("llama-F16.gguf", "F16"),
        ("model.gguf", ""),
    ],
)
def test_quant_labels(file: str, label: str) -> None:
    assert quant_label(file) == label


def test_gguf_sets_group_splits_and_leave_projectors_out() -> None:
    names = [
        "m-Q8_0-00002-of-00002.gguf",
        "m-Q8_0-00001-of-00002.gguf",
        "m-Q4_0.gguf",
        "mmproj-F16.gguf",
        "m.imatrix.gguf",
    ]
    sets = gguf_sets(names, "org/repo")
    assert [s.label for s in sets] == ["Q4_0", "Q8_0"]
    assert sets[1].files == ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    with pytest.raises(BadModelFile, match="1 of its 2 parts"):
        gguf_sets(names[:1], "org/repo")


def test_quants_are_chosen_or_refused_with_what_there_is() -> None:
    sets = [GgufSet(q, (f"m-{q}.gguf",)) for q in ("Q2_K", "Q8_0", "Q4_K_M", "UD-Q4_K_XL")]
    assert choose_gguf(sets, None, "r").label == "Q4_K_M"
    assert choose_gguf(sets, "q8_0", "r").label == "Q8_0"
    assert choose_gguf(sets, "Q2_K.gguf", "r").label == "Q2_K"
    with pytest.raises(ModelNotFound, match="it has Q2_K, Q4_K_M, Q8_0"):
        choose_gguf(sets, "Q5_0", "r")
    with pytest.raises(ModelNotFound, match="matches 2 files"):
        choose_gguf(sets, "Q4_K", "r")


def info_of(*names: str) -> RepoInfo:
    return RepoInfo("org/repo", "0" * 40, tuple(RepoFile(n, 5, "0" * 40) for n in names))


def selected(*names: str, quant: str | None = None) -> list[str]:
    return [f.name for f in select_files(info_of(*names), quant)[1]]


def test_only_needed_files_are_selected() -> None:
    base = ["config.json", "tokenizer.json", "chat_template.jinja", "LICENSE", "merges.txt", "tokenizer.model",
            "tiktoken.model"]  # fmt: skip
    other = ["README.md", "pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "onnx/model.onnx",
             ".gitattributes", "consolidated.safetensors", "evil.pt", "a.npy"]  # fmt: skip
    assert sorted(selected("model.safetensors", *base, *other)) == sorted(["model.safetensors", *base])
    assert selected("consolidated.safetensors", "config.json") == ["consolidated.safetensors", "config.json"]
    assert selected("m-Q4_0.gguf", "m-Q8_0.gguf", "config.json", "LICENSE", "x.py", quant="q8_0") == [
        "m-Q8_0.gguf",
        "LICENSE",
    ]
    assert "m-Q4_0.gguf" not in selected("m-Q4_0.gguf", "model.safetensors", "config.json")


@pytest.mark.parametrize(
    ("names", "quant", "error", "text"),
    [
        (["pytorch_model.bin", "config.json"], None, UnsupportedFormat, "pickled"),
        (["config.json", "README.md"], None, ModelNotFound, "no model weights"),
        (["model.safetensors"], None, UnsupportedFormat, "config.json"),
        (["model.safetensors", "config.json"], "int4", ModelNotFound, "has no int4"),
        (["M.gguf", "m.gguf"], "m.gguf", ModelNotFound, "matches 2"),
        (["model.safetensors", "config.json", "CONFIG.json"], None, BadModelFile, "case"),
    ],
)
def test_unusable_repositories_say_why(
    names: list[str], quant: str | None, error: type[LocalLLMError], text: str
) -> None:
    with pytest.raises(error, match=text):
        select_files(info_of(*names), quant)
