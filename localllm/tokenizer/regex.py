"""Pre-tokenizer regexes of GGUF byte-level vocabularies, by `tokenizer.ggml.pre`.

These are the Hugging Face originals, for Oniguruma; llama.cpp's C++ versions are rewritten for its own engine. Names
whose regexes are not known exactly are omitted on purpose: they are rejected, not guessed.
"""

_C = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
_QWEN2 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
_K2_HORIZON = (
    rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\x{{200C}}\x{{200D}}]+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
)
_QWEN35 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WS}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_AFTER_CASED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WS}"
_GPT4O = rf"{_CASED % (_C + '?', _C + '?')}|\p{{N}}{{1,3}}|{_AFTER_CASED}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_AFTER_CASED}"
_NO_HAN = r"&&[^\p{Han}]]"
_UPPER_NO_HAN, _LOWER_NO_HAN = _UPPER[:-1] + _NO_HAN, _LOWER[:-1] + _NO_HAN
_KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_C}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_C}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
)
_MINICPM5 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WS}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WS}"
)
# Han, kana, Thai, Lao, Khmer, Myanmar, Hangul
_ASIAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E00}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# cased letters of the scripts that had case in Unicode 11, except Nuskhuri, late Latin and mathematical letters
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}"
    r"\x{16E40}-\x{16EDF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}]]"
)
_CJK_RUN = r"[一-龥ࠀ-一가-퟿]+"

_YOUTU = rf"{_CASED % (_C + '?', _C + '?')}|\p{{N}}|{_AFTER_CASED}"
_YOUTU_RUNS = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"

# names -> successive isolated splits
_PRE_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", (_LLAMA3,)),
    ("dbrx smaug-bpe chatglm-bpe glm4 glm5", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open kormo f2llmv2 grok-2", (_QWEN2,)),
    ("qwen35", (_QWEN35,)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    ("gpt-2 gpt2 phi-2 mpt olmo jais trillion jina-v1-en jina-v2-code jina-v2-es jina-v2-de", (_GPT2,)),
    ("gigachat mellum a.x-4.0 modern-bert exaone4 granite-docling", (_GPT2,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("youtu", (_YOUTU_RUNS, _YOUTU)),
    ("tekken", (_TEKKEN,)),
    ("kimi-k2", (_KIMI_K2,)),
    ("k2-horizon", (_K2_HORIZON,)),
    ("minicpm5", (r"\p{N}{1,3}", _MINICPM5)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ("afmoe", (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", rf"[{_ASIAN}]+", _DEEPSEEK3)),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_RUN, r"\p{N}")),
    (
        "deepseek-llm",
        (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK_RUN, r"\p{N}+"),
    ),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("bloom poro-chat gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    ("bailingmoe bailingmoe2 llada-moe", (_BAILING,)),
    ("seed-coder", (rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_WS}",)),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("laguna", (r"[^\n]+|[\n]+", _QWEN2)),
    ("exaone-moe", (_EXAONE_MOE,)),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)
# name -> regexes, each an isolated split of the pieces left by the one before
PRE_TOKENIZERS = {name: regexes for names, regexes in _PRE_GROUPS for name in names.split()}
ADD_BOS = frozenset([*_PRE_GROUPS[0][0].split(), "tekken"])  # BOS is added unless the file says otherwise
IGNORE_MERGES = ADD_BOS | {"glm4", "glm5", "minicpm5", "youtu"}  # a piece that is itself a token is not split
# text is normalized to NFC first: Hugging Face's Qwen tokenizers do so, llama.cpp does not
NFC = frozenset(["qwen2", "qwen35", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"])
