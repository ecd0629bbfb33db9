"""Texts on which tokenizers part ways: white space, digits, scripts, emoji, markup, look-alikes of control tokens."""

# ruff: noqa: E501
# fmt: off
_WORDS = [
    "", "a", " ", "\n", "\t", "  ", "Hello", " Hello", "Hello ", "hello world", "Hello, World!", "I'm", "don't", "we'll",
    "I'M", "DON'T", "they've you're he'd she's it'll", "'tis", " 'tis the season", "rock 'n' roll", "''", "'s", "x's y's",
    "The quick brown fox jumps over the lazy dog.", "naïve café résumé", "ÄÖÜ äöü ß", "Straße", "İstanbul ıI", "ﬁne ﬂow",
    "fi\u0301n e\u0301 o\u0308", "e\u0301" * 5, "Å Å Å", "ñ vs n\u0303", "日本語のテキスト", "中文分词测试。", "漢字かな交じり文",
    "한국어 문장입니다", "안녕하세요", "Привет, мир!", "Ελληνικά κείμενα", "العربية من اليمين", "עברית", "हिन्दी में पाठ",
    "ภาษาไทยไม่มีช่องว่าง", "தமிழ்", "አማርኛ", "ქართული", "Tiếng Việt có dấu", "Zażółć gęślą jaźń", "Ꮳꮃꮹ", "𐍈𐌿", "𝕳𝖊𝖑𝖑𝖔",
    "🙂", "🙂🚀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "❤️", "1️⃣", "🫩", "a🙂b", " 🙂 ", "🤔➡️🌱", "\u200d", "\u200b", "\ufeff", "\ufeffx",
    "\u00a0", "a\u00a0b", "\u3000", "a\u3000b", "\u2028", "a\u2028b\u2029c", "\u0085", "\x00", "a\x00b", "\x01\x02\x1b[31m", "\x7f",
    "\ufffd", "\ufffe", "\ue000", "\U000f0000", "\U0010ffff", "▁", "▁a", "a▁b", "Ġ", "Ġa", "ĊĊ", "<0x41>", "<0x0A>", "<unk>",
]
_SPACES = [
    "  two", "   three", "    four", "a  b", "a   b", "a    b", " a  b ", "a \n b", "a\n\nb", "a\n\n\nb", "a\n \nb", "\n\n", "\n \n",
    "\r\n", "a\r\nb", "\r\n\r\n", "a\r\n\r\nb", "a \r\n", "\r", "a\rb", "\ta", "\t\ta", "a\tb", "a\t\tb", " \t ", "\t \t", "a \tb",
    "  \n  x", "x  \n", "x \n y", "\n\t\tx", "x\n\n  y", "tail  ", "tail\n", "tail \n ", " " * 31, " " * 32, " " * 33, " " * 40 + "x",
    " " * 64, "x" + " " * 100 + "y", "\n" * 31, "\n" * 32, "\n" * 40, "\t" * 31, "\t" * 40, "a" + "\n" * 33 + "b", " \n" * 8,
    "    def f(x):\n        return x\n", "if x:\n\treturn\n", "{\n  \"a\": 1,\n  \"b\": [1, 2]\n}", "for (int i=0;i<10;i++) {\n  x += i;\n}",
]
_NUMBERS = [
    "0", "1", "12", "123", "1234", "12345", "123456", "1234567890", " 1", "  1", "   1", " 12", "  12 34", "a1", "1a", "a1b2c3",
    "3.14159", "-1", "+1", "1e10", "1,234,567.89", "$100", "50%", "1/2", "½", "²", "x²+y²", "Ⅷ", "٣٤", "१२३", "１２３", "2024-01-31",
    "12:34:56", "192.168.0.1", "v1.2.3-rc4", "0xDEADBEEF", "#1", "No.1", "1st 2nd 3rd", "(1)", "1)", "1\n2\n3", "1 \n 2", "007", "10 000",
    "\n1", "\t1", "x  = 1", "[1, 2,  3]", "½ cup", "a  1  b  22",
]
_MARKS = [
    "!", "!!", "!!!", "?!", "...", "…", "....", "--", "---", "—", "–", "=", "==", "===", "=" * 10, "=" * 80, "-" * 40, "*" * 7, "#" * 6,
    "_", "__init__", "snake_case_name", "camelCaseName", "SCREAMING", "kebab-case", "a.b.c", "a/b/c", "C:\\path\\to", "~/x", "@user",
    "#tag", "a&b", "a|b", "a||b", "<", ">", "<>", "<a>", "</a>", "<b>bold</b>", "<table><tr><td>x</td></tr></table>", "<h1>T</h1>",
    "<br/>", "<!-- c -->", "<s>", "</s>", "<strong>x</strong>", "<code>", "`x`", "```python\nprint(1)\n```", "**b** _i_", "[a](b)",
    "\"q\"", "“q”", "‘q’", "«q»", "„q“", "(a)", "[a]", "{a}", "a,b;c:d", "a ,b", "a . b", ".5", "5.", "e.g.", "U.S.A.", "Ph.D.",
    "http://example.com/a?b=c&d=e#f", "mail@example.com", "a->b", "a=>b", "x != y", "x <= y", "i++", "a::b", "//c", "/* c */", "#!/bin/sh",
    "$x", "${x}", "%d", "\\n", "\\u00e9", "&amp;", "&#39;", "^_^", ":-)", "¯\\_(ツ)_/¯", "™®©", "€£¥", "°C", "±5", "×÷", "∑∫√", "→←", "☃", "♥",
]
_CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|>b", " <|im_end|> ", "<|im_end|", "<|im_",
    "<|im_start|><|im_start|>", "<|im_start|>\n\n<|im_end|>", "<bos>", "<eos>", "<pad>", "<start_of_turn>user\nhi<end_of_turn>\n", "<mask>",
    "<unused0>", "<unused98>", "[multimodal]", "<start_of_image>", "<repo_name>x", "<file_sep>", "<jupyter_code>", "<empty_output>", "<|eot_id|>",
    "<think>\nx\n</think>", "<tool_call>{}</tool_call>", "[INST] x [/INST]", "<<SYS>>", "x<bos>y <eos> z", "<bos><bos>",
]
_LONG = [
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit. " * 8, "ab" * 200, "a" * 300, "あ" * 100, "🙂" * 40, "é" * 100,
    "x y " * 100, "word\n" * 60, "1 22 333 4444 " * 20, "The year 1999, the year 2000;\n" * 10, "supercalifragilisticexpialidocious" * 4,
    "Donaudampfschifffahrtsgesellschaftskapitän", "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "ACGT" * 50, "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 " * 10, "import numpy as np\n\n\ndef f(x: int) -> int:\n    \"\"\"Doc.\"\"\"\n    return x ** 2  # square\n\n",
    "SELECT a, COUNT(*) FROM t WHERE x >= 10 AND y LIKE '%z%' GROUP BY a;", "a\tb\tc\n1\t2\t3\n", "A\u0300" * 30, "\u0300\u0301",
    "Mr. O'Neill said: \"It's 5 o'clock -- isn't it?\" (No!)", "مرحبا 123 שלום 456", "x=1;y=2;z=x+y;", "≤ ≥ ≠ ≈ ∞ ∂ ∇ ∈ ∉ ∪ ∩",
]
# fmt: on
TEXTS = list(dict.fromkeys([*_WORDS, *_SPACES, *_NUMBERS, *_MARKS, *_CONTROL, *_LONG]))
