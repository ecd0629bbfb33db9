"""A large tokenizer.json read in pieces is what `tokenizers` makes of it in one."""

import json
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from localllm.errors import BadModelFile
from localllm.tokenizer import tokenizer_json
from localllm.tokenizer.files import parse_backend
from localllm.tokenizer.tokenizer_json import Patient

TEXTS = ["Hello world, hello!", "  spaces\n\nand <s> marks </s> <x>", "wörld 12345 \u4e16\u754c \U0001f600", ""]
CHARS = sorted({*"helowrd \u0120\u2581 H,!<s>xanm12345k\n/", *(f"<0x{i:02X}>" for i in range(256))})


def made(**options):
    """A small BPE with everything that real files have beside it."""
    merges = [("l", "l"), ("e", "ll"), ("h", "ell"), ("o", " "), ("w", "o"), ("wo", "r")]
    words = [*CHARS, *("".join(pair) for pair in merges)]
    bpe = models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges, **options)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u4e16", "h")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\s+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", lstrip=True)])
    backend.add_tokens([AddedToken("<x>", single_word=True, normalized=True), "hello"])
    backend.add_special_tokens(["<last>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return backend


def read_backend(data):
    return tokenizer_json.read_backend(data, tokenizer_json.parsed(data))


def spelled(document, style):
    """The file's bytes with merges in one of the two spellings."""
    if style == "strings":
        merges = document["model"]["merges"]
        document["model"]["merges"] = [" ".join(pair) for pair in merges if " " not in "".join(pair)]
    return json.dumps(document, ensure_ascii=style == "strings").encode()


@pytest.fixture
def in_pieces(monkeypatch):
    """Small files are read in pieces too, and it is known which were."""
    seen = []
    whole = tokenizer_json._in_pieces

    def spy(document):
        backend = whole(document)
        seen.append(backend is not None)
        return backend

    monkeypatch.setattr(tokenizer_json, "LARGE_BYTES", 0)
    monkeypatch.setattr(tokenizer_json, "_in_pieces", spy)
    return seen


@pytest.mark.parametrize("style", ["pairs", "strings"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unk_token": "H", "fuse_unk": True, "byte_fallback": True},
        {"ignore_merges": True},
        {"dropout": 0.0, "continuing_subword_prefix": "", "end_of_word_suffix": "d"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_same_in_pieces(options, style, in_pieces):
    data = spelled(json.loads(made(**options).to_str()), style)
    whole, mine = Tokenizer.from_buffer(data), read_backend(data)
    assert in_pieces == [True]
    assert json.loads(mine.to_str()) == json.loads(whole.to_str())
    for text in TEXTS:
        assert mine.encode(text).ids == whole.encode(text).ids
        assert mine.decode(mine.encode(text).ids) == whole.decode(whole.encode(text).ids)


def test_a_file_of_too_many_values_is_not_parsed_here(in_pieces, monkeypatch):
    """128 MB of empty lists would be 4 GB of objects."""
    monkeypatch.setattr(tokenizer_json, "MAX_VALUES", 5_000)
    document = json.loads(made().to_str())
    assert read_backend(json.dumps(document).encode()) and in_pieces == [True]
    data = json.dumps(document | {"padding": [[]] * 5_000}).encode()
    with pytest.raises(BadModelFile, match="tokenizer.json is not a usable tokenizer"):
        parse_backend(data, "tokenizer.json")
    assert in_pieces == [True]


def test_many_merges_cross_the_pieces(in_pieces, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "PIECE", 4)
    data = made().to_str().encode()
    assert json.loads(read_backend(data).to_str()) == json.loads(data)
    assert in_pieces == [True]


def test_what_is_not_plain_goes_to_the_library(in_pieces, monkeypatch):
    """Another model, unknown keys, ids that do not fit, control tokens and others in many turns."""
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], 0, False))
    strange = json.loads(made().to_str())
    strange["model"]["cache_capacity"] = 10
    moved = json.loads(made().to_str())
    moved["added_tokens"][-1]["id"] += 5
    turns = made()
    monkeypatch.setattr(tokenizer_json, "MAX_RUNS", 2)
    for document in (json.loads(unigram.to_str()), strange, moved, json.loads(turns.to_str())):
        data = json.dumps(document).encode()
        assert read_backend(data).to_str() == Tokenizer.from_buffer(data).to_str()
    assert not any(in_pieces)


@pytest.mark.parametrize("damage", ["word", "three", "number", "cut", "negative", "yes", "flag", "list"])
def test_damage_is_the_librarys_to_name(damage, in_pieces):
    document = json.loads(made().to_str())
    model = document["model"]
    if damage == "word":
        model["merges"].append(["nobody", "knows"])
    elif damage == "three":
        model["merges"][1] = ["e", "l", "l"]
    elif damage == "number":
        model["merges"][1] = 5
    elif damage == "negative":
        model["vocab"]["h"] = -1
    elif damage == "yes":
        model["vocab"]["h"] = True
    elif damage == "flag":
        model["fuse_unk"] = "yes"
    elif damage == "list":
        model["vocab"] = list(model["vocab"])
    data = json.dumps(document).encode()[: -20 if damage == "cut" else None]
    with pytest.raises(BadModelFile, match="tokenizer.json is not a usable tokenizer"):
        parse_backend(data, "tokenizer.json")
    assert not any(in_pieces)


def test_other_threads_run_while_merges_are_read():
    """Between two pieces the interpreter may change threads; a list would be read in one go."""
    begun = threading.Event()

    class Watched(list):
        def __getitem__(self, part):
            read.append(part)
            return super().__getitem__(part) if len(read) != 25 or begun.wait(5) else []

    read = []
    merges = Patient()
    merges.data = Watched([("l", "l")] * (50 * tokenizer_json.PIECE))
    threading.Timer(0.05, begun.set).start()
    models.BPE(vocab={"l": 0, "ll": 1}, merges=merges)
    assert len(read) == 50 and begun.is_set()
    assert len(list(merges)) == len(merges) == 50 * tokenizer_json.PIECE and merges[3] == ("l", "l")
