"""`--kv-store` end to end: processes that end, and what the next ones need not read again."""

import os
import re

import httpx
import pytest
import tiny_models

from tests.cli.test_chat import Line

from .conftest import CHAT, Served, ask
from .test_shutdown import command

LONG = "the town by the sea had seven streets and nine bridges " * 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "kept.gguf", "Q8_0", context=4096)


class Life:
    """One server of a row: asked once, and stopped by the command."""

    def __init__(self, model, folder):
        self.served = Served(model, folder, "--kv-store", "64M", "--ctx", "4096")
        try:
            self.served.wait(120)
            headers = {"authorization": f"Bearer {self.served.KEY}"}
            sent = ask(messages=[{"role": "user", "content": LONG}])
            answer = httpx.post(self.served.url + CHAT, json=sent, headers=headers, timeout=60).json()
            code, _, error = command(self.served, "stop")
            assert code == 0, error
            assert self.served.process.wait(40) == 0
        finally:
            if self.served.process.poll() is None:
                self.served.process.kill()
                self.served.process.wait()
        self.text = answer["choices"][0]["message"]["content"]
        self.read = answer["usage"]["prompt_tokens"]
        self.cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.said = self.served.log.read_text().count("a stored page is")


def pages(folder):
    return sorted(path for path in (folder / "home").glob("cache/kv/**/*") if path.is_file())


def test_a_server_begins_where_the_stopped_one_ended_and_drops_what_is_damaged(model, tmp_path):
    first = Life(model, tmp_path)
    assert first.cached == first.said == 0 and first.read > 100 and pages(tmp_path)
    second = Life(model, tmp_path)
    assert second.text == first.text and second.cached > first.read - 33 and second.said == 0
    for number, path in enumerate(pages(tmp_path)):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[-3] ^= 1  # damaged
        elif number % 3 == 1:
            data[8:12] = bytes(4)  # of an older version
        else:
            data[:6] = b"GIF89a"  # foreign
        path.write_bytes(data)
    third = Life(model, tmp_path)
    assert third.text == first.text and third.cached == 0 and third.said == 1
    fourth = Life(model, tmp_path)
    assert fourth.text == first.text and fourth.cached == second.cached and fourth.said == 0


def chatted(model, folder, text, *words):
    """(tokens of the prompt, cached ones) of one turn of a chat in a process of its own."""
    env = {"LOCALLLM_ENGINE": "", "LOCALLLM_HOME": str(folder / "home"), "COLUMNS": "200"}
    line = Line(folder, "--kv-store", "64M", "--ctx", "4096", "--max-tokens", "16", *words, env=env, model=str(model))
    try:
        line.wait_for("> ", 120)
        line.send(text + "\n")
        line.wait_for("tok/s", 60)
        said = line.seen + line.errors.read_text()
        line.wait_for("> ", 20, times=2)
        line.send("/quit\n")
        assert line.end() == 0
    finally:
        if line.child.poll() is None:
            line.child.kill()
            line.child.wait()
    found = re.findall(r"prompt ([\d,]+)(?: \(cached ([\d,]+)\))?", said)[-1]
    return tuple(int((number or "0").replace(",", "")) for number in found)


def test_a_chat_that_is_continued_reads_only_what_is_new(model, tmp_path):
    before, cached = chatted(model, tmp_path, LONG)
    assert before > 100 and cached == 0
    after, cached = chatted(model, tmp_path, "and then?", "-c")
    assert after > before + 16 and cached > before - 33
    for path in pages(tmp_path):
        os.truncate(path, 40)
    later, cached = chatted(model, tmp_path, "and then?", "-c")
    assert later > after and cached == 0
