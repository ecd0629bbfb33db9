"""Hostile templates and the life of the child that renders them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from localllm.chat.render_child import CPU_S, RenderChild, clean
from localllm.errors import BadModelFile, InvalidRequest, LocalLLMError
from localllm.sandbox import child as child_process

MESSAGES = [{"role": "user", "content": "x" * 1000}]
INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY') }}",
    "{{ joiner.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__['sys'].modules['os'].system('touch CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'|attr('format')(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{% set f = '{0.__class__}'.format_map %}{{ f({'0': 1}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'y'}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__code__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ (range.__self__ or 1).open('CANARY', 'w') }}",
    "{{ tojson.__globals__ }}",
    "{{ ().__reduce__() }}",
    "{{ (messages|map('attr', '__class__'))|list }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
]


@pytest.mark.parametrize("template", INJECTIONS)
def test_the_sandbox_holds(template: str, child: RenderChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A security error or harmless text; the canary is never made."""
    canary = tmp_path / "canary"
    shown = ""
    with contextlib.suppress(LocalLLMError):
        shown = child.render(template.replace("CANARY", str(canary)), {"messages": MESSAGES})
    assert not any(leak in shown for leak in ("<class", "<function", "<module", "builtins", "root:", "<built-in"))
    assert not canary.exists()
    assert child.render("{{ messages[0].content }}", {"messages": MESSAGES}) == MESSAGES[0]["content"]


QUICK_BOMBS = [
    "{{ 'A' * 1000000000 }}",
    "{{ lipsum(n=100000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x'|center(10**9) }}",
    "{{ messages|string * 10**6 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% for i in range(100001) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
    "{{ range(100000)|list|tojson|length }}{% set x = messages|tojson(indent=1000000000) %}",
]
SLOW_BOMBS = [
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{{ 2**(2**40) }}",
    "{{ [[1] * 10000000] * 1000000 }}",
]  # fmt: skip


def bomb(template: str, child: RenderChild) -> None:
    began = time.monotonic()
    with pytest.raises(LocalLLMError) as caught:
        child.render(template, {"messages": MESSAGES})
    assert time.monotonic() - began < 20  # two seconds of a core, which other programs want, too
    assert caught.value.status == 400
    assert "1.8 s" in caught.value.message or "4 MiB" in caught.value.message or "undefined" in caught.value.message


@pytest.mark.parametrize("template", QUICK_BOMBS)
def test_memory_stays_bounded(template: str, child: RenderChild) -> None:
    child.render("warm", {})
    pid = child.pid
    bomb(template, child)
    if child.pid == pid:
        peak_kib = next(int(x.split()[1]) for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in x)
        assert peak_kib <= 256 << 10
    assert child.render("fine", {}) == "fine"


def test_a_wedged_template_is_killed_and_others_go_on(child: RenderChild) -> None:
    """The error is out in time, other threads run on meanwhile, the process is gone, the next rendering works."""
    child.render("warm", {})
    pid, ticks, done = child.pid, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    bomb(SLOW_BOMBS[0], child)
    done.set()
    other.join()
    assert ticks > 30
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert child.render("fine", {}) == "fine"


@pytest.mark.slow
@pytest.mark.parametrize("template", SLOW_BOMBS)
def test_slow_bombs_end_in_time(template: str, child: RenderChild) -> None:
    child.render("warm", {})
    bomb(template, child)
    assert child.render("fine", {}) == "fine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
        "{{ " + "[" * 6000 + "]" * 6000 + " }}",
        "{% if 1 %}" * 6000 + "{% endif %}" * 6000,
        "{% for i in [1] %}" * 300 + "{% endfor %}" * 300,
        "{{ " + "not " * 6000 + "1 }}",
        "{{ 1" + "|string" * 6000 + " }}",
        "{{ 1" + " ~ 1" * 6000 + " }}",
        "{{ " + "-" * 6000 + "1 }}",
        "{{ a" + ".b" * 6000 + " }}",
    ],
    ids=lambda text: text[3:9],
)
def test_deep_nesting_is_an_error(template: str, child: RenderChild) -> None:
    try:
        assert len(child.render(template, {"a": {}})) < 20_000
    except LocalLLMError as error:
        assert error.status == 400
    assert child.render("fine", {}) == "fine"


def test_deep_data_is_an_error(child: RenderChild) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(LocalLLMError):
        child.render("{{ x }}", {"x": deep})
    assert child.render("fine", {}) == "fine"


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ raise_exception('bad\x1b[2J\x07 thing') }}", InvalidRequest, "rejects these messages: bad thing"),
        ("{{ messages[0].nothing.at_all }}", InvalidRequest, "has no attribute 'nothing'"),
        ("{{ missing + 'x' }}", InvalidRequest, "'missing' is undefined"),
        ("{{ 1 + 'x' }}", InvalidRequest, "unsupported operand"),
        ("{% if %}", BadModelFile, "not valid: line 1"),
        ("{% nonsense %}", BadModelFile, "unknown tag 'nonsense'"),
        ("{{ x|nonsense }}", BadModelFile, "No filter named 'nonsense'"),
        ("{{ ''.__class__.x }}", BadModelFile, "that is not allowed"),
    ],
)
def test_what_the_user_is_told(template: str, error: type[LocalLLMError], said: str, child: RenderChild) -> None:
    with pytest.raises(LocalLLMError) as caught:
        child.render(template, {"messages": MESSAGES})
    assert type(caught.value) is error
    assert said in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint


def test_the_helpers_are_there(child: RenderChild) -> None:
    def shown(template: str) -> str:
        return child.render(template, {"x": {"b": "é<&>'", "a": [1, None]}})

    assert shown("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))
    assert shown("{{ x|tojson }}") == '{"b": "é<&>\'", "a": [1, null]}'
    assert shown("{{ x|tojson(ensure_ascii=True, sort_keys=true) }}") == '{"a": [1, null], "b": "\\u00e9<&>\'"}'
    assert shown("{{ x.a|tojson(indent=2) }}") == "[\n  1,\n  null\n]"
    assert shown("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert shown("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "02"
    assert shown("a\n  {% if true %}\n b\n  {% endif %}\nc\n") == "a\n b\nc"
    assert shown("{% generation %}g{{ x.a[0] }}{% endgeneration %}") == "g1"
    assert shown("{{ lipsum is defined }} {{ cycler is defined }} {{ joiner is defined }}") == "False False False"
    assert shown("{{ dict(a=1).a }}{{ dict.fromkeys(['k']) }}{{ namespace(self=2).self }}") == "1{'k': None}2"


# --- the child -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_child_is_replaced(child: RenderChild) -> None:
    for _ in range(3):
        assert child.render("{{ a }}", {"a": "b"}) == "b"
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert child.render("{{ a }}", {"a": "b"}) == "b"
    assert child.pid != pid


def test_an_interrupted_exchange_leaves_no_answer_behind(child: RenderChild, monkeypatch: pytest.MonkeyPatch) -> None:
    child.render("warm", {})

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(child, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            child.render("first", {})
    assert child.render("second", {}) == "second"


def test_threads_share_the_child(child: RenderChild) -> None:
    def ask(number: int) -> str:
        return child.render("{{ n }}-{{ s }}", {"n": number, "s": "é" * 1000})

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(100))) == [f"{n}-" + "é" * 1000 for n in range(100)]


def test_large_messages_pass(child: RenderChild) -> None:
    text = "line é 🙂\n" * 200_000
    assert child.render("{{ x[:1000000] }}", {"x": text}) == text[:1_000_000]


def test_a_closed_child_starts_again(child: RenderChild) -> None:
    child.close()
    assert child.pid is None
    child.start()
    assert child.render("fine", {}) == "fine"


def _gone(pid: int, within_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)


PARENT = """
import os, sys, threading, time
from localllm.chat.render_child import RenderChild
child = RenderChild()
child.render("warm", {})
print(child.pid, flush=True)
threading.Thread(target=lambda: child.render(sys.argv[1], {}), daemon=True).start()
time.sleep(0.3)
os._exit(0)
"""


def test_the_child_ends_with_its_parent() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", PARENT, "x"], capture_output=True, text=True, timeout=60)
    assert _gone(int(run.stdout), 5)


@pytest.mark.slow
def test_a_wedged_child_ends_without_its_parent() -> None:
    wedge = SLOW_BOMBS[0]
    run = subprocess.run([sys.executable, "-P", "-c", PARENT, wedge], capture_output=True, text=True, timeout=60)
    assert _gone(int(run.stdout), 10)


def test_the_child_and_its_parent_import_little() -> None:
    """The child starts while torch is being imported; the parent's side needs no Jinja."""
    heavy = "torch transformers textual tokenizers numpy httpx rich huggingface_hub asyncio"
    probe = "import sys, localllm.chat.render{}; print([m for m in '{} {}'.split() if m in sys.modules])"
    for module, more in (("", ""), ("_child", "jinja2")):
        code = probe.format(module, heavy, more)
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
        assert run.stdout.strip() == "[]", run


def test_the_child_sees_no_tokens(child: RenderChild, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fresh = RenderChild()
    fresh.render("warm", {})
    assert b"hf_secret" not in Path(f"/proc/{fresh.pid}/environ").read_bytes()
    fresh.close()


def test_a_child_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "START_S", 0.0)
    fresh = RenderChild()
    with pytest.raises(LocalLLMError, match="did not start"):
        fresh.render("x", {})
    fresh.close()


def test_clean() -> None:
    assert clean("a\x1b[31mb\x1b]0;title\x07c\u202ed\n\te") == "abc d e"
    assert len(clean("x" * 10_000)) == 300


def test_a_machine_that_does_other_things_is_no_reason_to_refuse(child: RenderChild) -> None:
    """The limit is of processor time: a child that was stopped for longer answers."""
    child.render("warm", {})
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(CPU_S + 0.3, os.kill, (child.pid, signal.SIGCONT)).start()
    began = time.monotonic()
    assert child.render("fine", {}) == "fine"
    assert time.monotonic() - began > CPU_S
