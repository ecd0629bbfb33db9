"""Pages and states on the disk, under a "model" whose logits are a hash of what lies in its pages and slots: a page
that came back wrong, for other tokens or not at all changes the answer at once."""

import errno
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from localllm.engine import page_files
from localllm.engine.engine import Engine
from localllm.engine.page_files import PAGE, STATE, Name, PageFiles
from localllm.engine.pages import ANSWER_EVERY
from localllm.engine.runner import Runner
from localllm.engine.scheduler import SchedulerLimits
from localllm.request import FinishReason, Request, SamplingParams

VOCAB, SIZE, SLOTS = 50, 4, 8
KINDS = {"full": ([None], False), "window": ([None, 10], False), "states": ([None], True)}


class Cache:
    """Token ids instead of keys and values, a hash instead of a state."""

    page_size, device = SIZE, torch.device("cpu")

    def __init__(self, windows, num_pages):
        self.groups = [SimpleNamespace(window=window) for window in windows]
        self.ids = torch.full((len(windows), num_pages, SIZE), 10**6)
        self.hashes = torch.full((SLOTS,), 10**6)

    def copy_page(self, group, source, target):
        self.ids[group, target] = self.ids[group, source]

    def copy_slot(self, source, target):
        self.hashes[target] = 0 if source < 0 else self.hashes[source]

    def page_bytes(self, group):
        return 8 * SIZE

    def read_page(self, group, page):
        return memoryview(self.ids[group, page].clone().numpy()).cast("B")

    def write_page(self, group, page, data):
        self.ids[group, page] = torch.frombuffer(data, dtype=torch.long)

    def slot_bytes(self):
        return 8

    def read_slot(self, slot):
        return memoryview(self.hashes[slot : slot + 1].clone().numpy()).cast("B")

    def write_slot(self, slot, data):
        self.hashes[slot] = torch.frombuffer(data, dtype=torch.long)[0]


class Model:
    facts = SimpleNamespace(pooling="")

    def __init__(self):
        self.computed = 0

    def forward(self, batch, cache):
        rows, at = [], 0
        for group, inputs in enumerate(batch.groups):
            cache.ids[group].view(-1)[inputs.slot_mapping] = batch.token_ids
        for index, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            for end in range(length - query + 1, length + 1):
                value = 7
                for group, spec in enumerate(cache.groups):
                    table = batch.groups[group].block_table[index].tolist()
                    for key in range(0 if spec.window is None else max(0, end - spec.window), end):
                        value = (value * 31 + int(cache.ids[group, table[key // SIZE], key % SIZE]) + 1) % 1_000_003
                if batch.slots is not None:
                    slot = int(batch.slots[index])
                    cache.hashes[slot] = (int(cache.hashes[slot]) * 31 + int(batch.token_ids[at]) + 1) % 1_000_003
                    value += int(cache.hashes[slot])
                rows.append(value)
                at += 1
        self.computed += len(rows)
        return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)[batch.logits_indices]

    def logits(self, hidden):
        return (torch.sin(hidden * torch.arange(1, VOCAB + 1, dtype=torch.float64)) * 4).float()

    def step(self, batch, cache, finds_best=False):
        hidden = self.forward(batch, cache)
        return hidden, self.logits(hidden), None


@pytest.fixture
def make(tmp_path):
    """An engine that runs, of a new process as far as its cache goes."""
    made = []

    def make(kind="full", num_pages=200, limit=1 << 20, identity=b"i" * 16):
        windows, stateful = KINDS[kind]
        limits = SchedulerLimits(max_parallel=3, prefill_budget=64, num_slots=SLOTS if stateful else 0)
        runner = Runner(Model(), Cache(windows, num_pages), VOCAB)
        engine = Engine(runner, [num_pages] * len(windows), 600, limits, check_invariants=True)
        if limit:
            engine.keep_on_disk(PageFiles(tmp_path / "kv", identity, limit))
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
        assert not engine.is_dead


def prompt(seed, length=90):
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


def asked(tokens, count=12, **more):
    return Request(list(tokens), SamplingParams(temperature=0, max_tokens=count), **more)


def answer(engine, tokens, **more):
    """(the ids, how many tokens of the prompt were not computed)"""
    events = list(engine.submit(asked(tokens, **more)))
    assert events[-1].error is None
    return [t for event in events for t in event.token_ids], events[-1].usage.cached_tokens


def files_of(folder, kind=PAGE):
    return sorted(folder.rglob(f"*.{kind}"))


@pytest.mark.parametrize("kind", ["full", "states", pytest.param("window", marks=pytest.mark.slow)])
def test_a_conversation_goes_on_after_a_restart_without_being_read_again(kind, make, tmp_path):
    plain = make(kind, limit=0)
    first, cached = answer(engine := make(kind), prompt(1))
    assert cached == 0 and first == answer(plain, prompt(1))[0]
    engine.close()
    assert {p.stat().st_mode & 0o777 for p in files_of(tmp_path)} == {0o600}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700

    again = make(kind)
    turn = [*prompt(1), *first, *prompt(2, 9)]
    found, cached = answer(again, turn)
    assert found == answer(plain, turn)[0]
    assert 90 + 12 - (SIZE if kind != "states" else ANSWER_EVERY) <= cached < len(turn)
    assert again.runner.model.computed == len(turn) - cached + 11
    assert again.stats().kv_store_read_tokens == cached


@pytest.mark.slow
def test_other_salts_models_and_requests_that_do_not_share_find_nothing(make, tmp_path):
    engine = make()
    answer(engine, prompt(1), cache_salt="mine")
    answer(engine, prompt(2), use_prefix_cache=False)
    engine.close()
    assert answer(make(), prompt(1))[1] == answer(make(), prompt(2))[1] == 0
    assert answer(make(identity=b"j" * 16), prompt(1), cache_salt="mine")[1] == 0
    assert answer(make(), prompt(1), cache_salt="mine")[1] == 88


def damage(path, how):
    data = path.read_bytes()
    other = {
        "flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        "cut": data[:-1],
        "longer": data + b"x",
        "empty": b"",
        "foreign": b"GIF89a" + data[6:],
        "older": data[:8] + b"\0\0\0\0" + data[12:],
        "of another model": data[:16] + bytes(16) + data[32:],
    }
    path.write_bytes(other[how])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PAGE, STATE])
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "empty", "foreign", "older", "of another model"])
def test_a_damaged_cut_foreign_or_older_file_is_dropped_and_said_once(how, kind, make, tmp_path, caplog):
    wanted = answer(engine := make("states"), prompt(1))[0]
    engine.close()
    bad = files_of(tmp_path, kind)
    for path in bad:
        damage(path, how)
    assert answer(again := make("states"), prompt(1)) == (wanted, 0)
    answer(again, prompt(1)[:50])
    again.close()
    assert len([r for r in caplog.records if "a stored page is" in r.message]) == 1
    assert answer(make("states"), prompt(1)) == (wanted, 88), "it was written again"


@pytest.mark.parametrize("error", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_costs_no_answer_and_is_said_once(error, make, monkeypatch, caplog):
    def full(*args, **more):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(page_files, "replace_file", full)
    engine = make()
    assert answer(engine, prompt(1, 40))[0] == answer(make(limit=0), prompt(1, 40))[0]
    answer(engine, prompt(2, 9))
    engine.close()
    assert len([r for r in caplog.records if "cannot be stored" in r.message]) == 1
    assert engine.stats().kv_store_dropped > 10 and engine.stats().kv_store_written_tokens == 0


@pytest.mark.slow
def test_others_run_while_pages_are_read_and_a_request_that_waits_for_them_can_be_aborted(make, monkeypatch):
    answer(engine := make(), prompt(1))
    engine.close()
    gate, read = threading.Event(), PageFiles.read
    monkeypatch.setattr(PageFiles, "read", lambda *given: gate.wait(20) and read(*given))
    again = make()
    try:
        waits, aborted = again.submit(asked(prompt(1))), again.submit(asked(prompt(1)))
        assert answer(again, prompt(2))[1] == 0
        aborted.abort()
        assert list(aborted)[-1].finish_reason is FinishReason.ABORT
        assert waits.get(timeout=0) is None
    finally:
        gate.set()
    assert list(waits)[-1].usage.cached_tokens == 88


@pytest.mark.slow
def test_an_engine_that_ends_while_pages_are_read_does_not_wait_for_them(make, monkeypatch):
    answer(engine := make(), prompt(1, 400))
    engine.close()
    reads, read = threading.Event(), PageFiles.read

    def slow(*given):
        reads.set()
        return read(*given)

    monkeypatch.setattr(PageFiles, "read", slow)
    again = make()
    stream = again.submit(asked(prompt(1, 400)))
    assert reads.wait(20)
    again.close()
    assert list(stream)[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)


@pytest.mark.slow
def test_no_request_waits_for_a_disk_that_is_behind(make, monkeypatch):
    """What leaves the tree before its turn is not kept, and counted."""
    gate, write = threading.Event(), PageFiles.write
    monkeypatch.setattr(PageFiles, "write", lambda *given: gate.wait(20) and write(*given))
    monkeypatch.setattr("localllm.engine.kv_store.QUEUED_BYTES", 3 * 8 * SIZE)
    engine = make(num_pages=40)
    plain = make(limit=0)
    for seed in range(4):
        assert answer(engine, prompt(seed))[0] == answer(plain, prompt(seed))[0]
    assert not gate.is_set() and engine.store._queued_bytes <= 3 * 8 * SIZE
    dropped = engine.stats().kv_store_dropped
    assert dropped > 20
    gate.set()
    engine.close()
    assert engine.stats().kv_store_written_tokens > 0


@pytest.mark.slow
def test_a_cache_with_little_room_takes_what_it_can(make):
    answer(engine := make(), prompt(1, 150))
    engine.close()
    plain, small = make(limit=0), make(num_pages=45)
    streams = [small.submit(asked(prompt(seed, 150))) for seed in (1, 2, 1, 3)]
    found = [[t for event in stream for t in event.token_ids] for stream in streams]
    assert found == [answer(plain, prompt(seed, 150))[0] for seed in (1, 2, 1, 3)]


# --- files -----------------------------------------------------------------------------------------------------------


def name(*path):
    """Of the last page of a chain; each page is an integer."""
    whole = [bytes([n]) * 16 for n in path]
    return Name(whole[-2], whole[-1])


def aged(files, *path, seconds):
    at = files.path(name(*path), PAGE)
    os.utime(at, (at.stat().st_atime, at.stat().st_mtime - seconds))


def test_the_longest_unused_go_first_and_the_end_of_a_conversation_before_its_start(tmp_path):
    files = PageFiles(tmp_path, b"i" * 16, 6 * 1100)
    for path in ((0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 5), (0, 5, 6)):
        assert files.write(name(*path), PAGE, [bytes(1000)])
    for path, seconds in (((0, 1), 90), ((0, 1, 2), 80), ((0, 1, 2, 3), 10), ((0, 5), 50), ((0, 5, 6), 40)):
        aged(files, *path, seconds=seconds)
    order = page_files._longest_unused(list(page_files._scan(tmp_path)))
    assert [bytes.fromhex(file.place[1])[0] for file in order] == [6, 5, 3, 2, 1]
    for new in range(100, 103):
        assert files.write(name(0, new), PAGE, [bytes(1000)])
    assert files.has(name(0, 102)) and files.has(name(0, 1)) and not files.has(name(0, 5, 6))
    assert sum(p.stat().st_size for p in files_of(tmp_path)) <= files.limit


@pytest.mark.slow
def test_processes_share_a_folder_its_bound_and_what_they_find(tmp_path):
    one, other = (PageFiles(tmp_path, b"i" * 16, 40_000) for _ in range(2))
    model = PageFiles(tmp_path, b"j" * 16, 40_000)
    failed = []

    def work(files, base):
        for number in range(60):
            if not files.write(name(0, base + number % 50), PAGE, [bytes([number % 50]) * 2000]):
                failed.append(number)
            found = files.read(name(0, 1 + number % 50), PAGE, [2000])
            if found is not None and found.parts[0] != bytes([found.parts[0][0]]) * 2000:
                failed.append(found)

    threads = [threading.Thread(target=work, args=given) for given in ((one, 1), (other, 1), (model, 101))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not one.note and not other.note
    one.count()
    assert 0 < one.num_bytes <= 40_000 + 3 * 2100
    assert not list(tmp_path.rglob("*.part"))


def test_clocks_that_differ_change_neither_what_is_found_nor_the_bound(tmp_path):
    """A home that two machines share: one's clock is a day ahead, the other's a year behind."""
    ahead, behind = (PageFiles(tmp_path, b"i" * 16, 6 * 1100) for _ in range(2))
    for number in range(1, 40):
        files, seconds = ((ahead, -86_400), (behind, 365 * 86_400))[number % 2]
        assert files.write(name(0, number), PAGE, [bytes([number]) * 1000])
        aged(files, 0, number, seconds=seconds)
        assert behind.read(name(0, number), PAGE, [1000]).parts[0] == bytes([number]) * 1000
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= ahead.limit
    assert not ahead.note and not behind.note


def test_what_a_killed_process_was_writing_is_cleared_away(tmp_path):
    files = PageFiles(tmp_path, b"i" * 16, 40_000)
    files.write(name(0, 1), PAGE, [bytes(10)])
    left, fresh = (files.folder / f".{kind}.page.0.part" for kind in ("old", "new"))
    for path in (left, fresh):
        path.write_bytes(b"x")
    os.utime(left, (0, 0))
    files.count()
    assert not left.exists() and fresh.exists()


def test_the_pages_of_a_cache_come_back_in_every_format():
    from localllm.models.kv_cache import CacheGroup, KVCache, StateGroup

    group = CacheGroup("full", None, (0, 2), 2, 8, 4)
    for kv_format in ("f32", "bf16", "fp16", "int8", "fp8"):
        cache = KVCache([group], [3], 4, kv_format, states=[StateGroup((1,), (6, 3), (2, 5))], num_slots=2)
        data = bytearray(os.urandom(cache.page_bytes(0)))
        cache.write_page(0, 1, data)
        assert bytes(cache.read_page(0, 1)) == bytes(data)
        assert not any(cache.read_page(0, 0)) and not any(cache.read_page(0, 2))
        state = bytearray(os.urandom(cache.slot_bytes()))
        cache.write_slot(1, state)
        assert bytes(cache.read_slot(1)) == bytes(state) and not any(cache.read_slot(0))
