"""Several models within one memory, with models that only count: who is loaded, unloaded, waited for."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from localllm.device.fake import fake_machine
from localllm.errors import ConfigError, DoesNotFit, InternalError, ModelNotFound
from localllm.server import pool as module
from localllm.server.pool import ModelPool
from localllm.server.served_model import PoolOptions, ServedModel, State

GIB = 1 << 30
NAMES = ("a", "b", "c")


class Model:
    """A model of one GiB that never computes."""

    def __init__(self, name):
        self.name = name
        self.plan = SimpleNamespace(device="cpu", weight_bytes=GIB, kv_bytes=0)
        self.is_dead = False
        self.is_awake = True
        self.why_dead = ""
        self.log = []

    @property
    def engine(self):
        if not self.is_awake:
            raise ConfigError("asleep")
        return SimpleNamespace(is_dead=self.is_dead)

    def stats(self):
        return SimpleNamespace(pages_free=0, pages_total=1)

    def sleep(self):
        self.is_awake = False
        self.log.append("sleep")

    def wake(self):
        self.is_awake, self.is_dead = True, False
        self.log.append("wake")

    def close(self):
        self.log.append("close")
        World.loaded.remove(self.name)


class World:
    """A machine with room for `room` models."""

    loaded: list[str] = []

    def __init__(self, room=2):
        World.loaded = []
        self.room = room
        self.loads = []
        self.planned = []
        self.fail = ""
        self.gate = threading.Event()
        self.gate.set()

    def machine(self):
        free = (self.room - len(World.loaded)) * GIB
        return replace(fake_machine("cpu"), ram_available_bytes=free, ram_total_bytes=self.room * GIB)

    def plan(self, model, machine):
        self.planned.append(model.name)
        fits = machine.ram_available_bytes >= GIB
        return SimpleNamespace(fits=fits, ctx=100, error=lambda name: DoesNotFit(f"{name} does not fit"))

    def load(self, model, machine, on_progress, cancel):
        self.loads.append(model.name)
        assert self.gate.wait(5)
        if model.name == self.fail:
            raise RuntimeError("the file is odd")
        World.loaded.append(model.name)
        return Model(model.name)


@pytest.fixture
def make():
    made = []

    def pool(world, **options):
        models = [ServedModel(name, name, (f"{name}-alias",)) for name in NAMES]
        made.append(ModelPool(lambda: models, world, world.machine, PoolOptions(**options)))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def lease(pool, name, seconds=5):
    return pool.acquire(pool.find(name)).result(seconds)


def eventually(check, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_names_and_aliases(make):
    pool = make(World())
    assert pool.find("a").name == pool.find("a-alias").name == pool.find("a:latest").name == "a"
    with pytest.raises(ModelNotFound, match="not served here; available: a, a-alias, b, b-alias, c, c-alias$"):
        pool.find("../../etc/passwd")


def test_a_model_is_loaded_once_however_many_ask(make):
    world = World()
    world.gate.clear()
    pool = make(world)
    futures = [pool.acquire(pool.find("a")) for _ in range(10)]
    eventually(lambda: pool.is_loading)
    world.gate.set()
    leases = [f.result(5) for f in futures]
    assert world.loads == ["a"] and len({id(one.llm) for one in leases}) == 1
    assert pool.loaded()[0].users == 10


def test_the_least_recently_used_goes(make):
    world = World(room=2)
    pool = make(world)
    for name in ("a", "b", "a", "c"):
        lease(pool, name).release()
    assert world.loads == ["a", "b", "c"] and sorted(World.loaded) == ["a", "c"]


def test_a_pinned_model_stays(make):
    world = World(room=2)
    pool = make(world, pinned=("a",))
    for name in ("a", "b", "c"):
        lease(pool, name).release()
    assert sorted(World.loaded) == ["a", "c"]


def test_a_running_model_is_never_broken(make, monkeypatch):
    """One that waits for room gets it when the running request has ended, not before."""
    world = World(room=1)
    pool = make(world)
    running = lease(pool, "a")
    waits = pool.acquire(pool.find("b"))
    eventually(lambda: "b" in world.planned)
    assert not waits.done() and World.loaded == ["a"]
    running.release()
    waits.result(5)
    assert World.loaded == ["b"]


def test_a_busy_model_makes_room_in_the_end(make, monkeypatch):
    """However many requests it has: after a while new ones wait behind the model that waits."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    world = World(room=1)
    pool = make(world)
    running = lease(pool, "a")
    waits = pool.acquire(pool.find("b"))
    while (late := pool.acquire(pool.find("a"))).done():  # until the other has waited for long enough
        late.result().release()
        time.sleep(0.005)
    running.release()
    other = waits.result(5)
    assert not late.done()
    other.release()
    late.result(5).release()
    assert world.loads == ["a", "b", "a"]


def test_what_can_never_fit_is_refused(make):
    world = World(room=1)
    pool = make(world, pinned=("a",))
    lease(pool, "a")
    with pytest.raises(DoesNotFit):
        lease(pool, "b")


def test_a_load_that_fails_fails_its_requests_only(make):
    world = World()
    world.fail = "b"
    phases = []
    pool = make(world, on_progress=lambda name, phase: phases.append((name, phase.name)))
    good = lease(pool, "a")
    assert phases == []
    with pytest.raises(InternalError, match="loading failed"):
        lease(pool, "b")
    assert phases == [("b", "failed")]
    world.fail = ""
    lease(pool, "b").release()
    assert good.llm.is_awake


def test_an_idle_model_is_unloaded_after_its_time(make):
    pool = make(World(), ttl_s=0.05)
    held = lease(pool, "a")
    lease(pool, "b").release()
    eventually(lambda: "b" not in World.loaded)
    assert World.loaded == ["a"]
    held.release()
    eventually(lambda: World.loaded == [] and pool.loaded() == [])


def test_a_model_that_was_asked_for_is_not_unloaded_before_it_has_answered(make):
    """Its time is over when it is there: the request that waits for it comes first."""
    world = World()
    pool = make(world, ttl_s=0.0)
    held = lease(pool, "a")
    assert held.llm.log == [] and world.loads == ["a"]
    held.release()
    eventually(lambda: World.loaded == [])


def fail(*_):
    raise RuntimeError("the driver is odd")


def test_a_model_that_does_not_close_is_gone_and_can_be_loaded_again(make, monkeypatch):
    world = World()
    pool = make(world)
    lease(pool, "a").release()
    monkeypatch.setattr(Model, "close", fail)
    assert pool.unload("a").result(5) is True
    World.loaded.remove("a")
    monkeypatch.undo()
    assert pool.loaded() == [] and pool.unload("a").result(5) is False
    lease(pool, "a").release()
    assert world.loads == ["a", "a"]


def test_a_model_that_does_not_fall_asleep_says_so_once_and_is_loaded_again(make, monkeypatch):
    world = World()
    pool = make(world)
    lease(pool, "a").release()
    monkeypatch.setattr(Model, "sleep", fail)
    with pytest.raises(InternalError, match="putting to sleep failed: RuntimeError"):
        pool.sleep("a").result(5)
    assert World.loaded == []
    lease(pool, "a").release()
    assert world.loads == ["a", "a"]


def test_a_model_that_does_not_wake_fails_its_requests_and_is_loaded_again(make, monkeypatch):
    world = World()
    pool = make(world)
    lease(pool, "a").release()
    assert pool.sleep("a").result(5) is True
    monkeypatch.setattr(Model, "wake", fail)
    with pytest.raises(InternalError, match="waking failed: RuntimeError"):
        lease(pool, "a")
    lease(pool, "a").release()
    assert world.loads == ["a", "a"]


def test_a_command_given_while_a_model_loads_ends_when_the_load_fails(make):
    world = World()
    world.fail = "a"
    world.gate.clear()
    pool = make(world)
    waits = pool.acquire(pool.find("a"))
    eventually(lambda: pool.is_loading)
    gone = pool.unload("a")
    world.gate.set()
    with pytest.raises(InternalError):
        waits.result(5)
    assert gone.result(5) is False


def test_a_command_whose_caller_left_stops_nothing(make):
    pool = make(World())
    held, kept = lease(pool, "a"), lease(pool, "b")
    assert pool.sleep("a").cancel()
    held.release()
    eventually(lambda: pool.loaded()[-1].state is State.ASLEEP or pool.loaded()[0].state is State.ASLEEP)
    lease(pool, "a").release()
    assert pool.sleep("b").cancel()
    assert pool.close(5)
    assert World.loaded == []
    kept.release()


def test_times_to_live_can_be_set_per_model(make):
    pool = make(World(), ttl_s=None)
    lease(pool, "a").release()
    lease(pool, "b").release()
    pool.keep("a", 0)
    eventually(lambda: World.loaded == ["b"])
    assert pool.loaded()[0].expires_in_s is None


@pytest.mark.parametrize("ttl_s", [1e10, 1e300, float("inf")])
def test_a_time_beyond_all_clocks_has_no_end(make, ttl_s):
    """The thread that loads waits for what is due next, and no clock takes such a time."""
    pool = make(World(room=2), ttl_s=ttl_s)
    lease(pool, "a").release()
    lease(pool, "b").release()
    pool.keep("a", 0)
    eventually(lambda: [row.name for row in pool.loaded()] == ["b"])
    pool.keep("b", ttl_s)
    assert pool.loaded()[0].expires_in_s is None
    assert pool.unload("b").result(5) is True


def test_the_thread_that_loads_outlives_its_errors(make, monkeypatch):
    pool = make(World())
    pause, failed = pool._pause, []

    def failing():
        if not failed:
            failed.append(True)
            raise OverflowError("timeout value is too large")
        return pause()

    monkeypatch.setattr(pool, "_pause", failing)
    for name in ("a", "b"):
        lease(pool, name).release()
    assert failed


def test_unloading_waits_for_the_running_and_a_request_wakes_what_sleeps(make):
    told = []
    pool = make(World(), on_loaded=lambda model, llm: told.append((model.name, llm.is_awake)))
    held = lease(pool, "a")
    gone = pool.unload("a")
    lease(pool, "c").release()  # the thread had time for other work
    assert not gone.done()
    held.release()
    assert gone.result(5) is True and World.loaded == ["c"]
    assert pool.unload("a").result(5) is False
    sleeper = lease(pool, "b")
    sleeper.release()
    assert pool.sleep("b").result(5) is True
    assert pool.loaded()[0].state is State.ASLEEP and not sleeper.llm.is_awake
    again = lease(pool, "b")
    assert again.llm is sleeper.llm and again.llm.log == ["sleep", "wake"]
    assert told == [("a", True), ("c", True), ("b", True), ("b", True)]


def test_a_dead_engine_is_restarted_once(make, monkeypatch):
    """The next request finds a living engine; one that dies again at once is given up."""
    told = []
    pool = make(World(), on_loaded=lambda model, llm: told.append(llm.is_dead))
    first = lease(pool, "a")
    first.llm.is_dead = True
    first.release()
    second = lease(pool, "a")
    assert second.llm.log == ["sleep", "wake"] and not second.llm.is_dead
    assert told == [False, False]
    second.llm.is_dead = True
    second.release()
    eventually(lambda: lease(pool, "a") and pool.broken)
    assert "a stopped" in pool.broken


def test_an_engine_that_lost_its_card_is_given_up_with_the_cause(make):
    pool = make(World())
    first = lease(pool, "a")
    first.llm.plan.device, first.llm.why_dead = "cuda:0", "the GPU failed; the GPU has fallen off the bus"
    first.llm.is_dead = True
    first.release()
    eventually(lambda: lease(pool, "a") and pool.broken)
    assert pool.broken == "the engine of a stopped: the GPU failed; the GPU has fallen off the bus"


def test_an_engine_that_dies_while_idle_is_given_up_too(make):
    pool = make(World())
    held = lease(pool, "a")
    held.release()
    time.sleep(0.2)  # the thread waits again
    held.llm.plan.device, held.llm.why_dead = "cuda:0", "the GPU failed"
    held.llm.is_dead = True
    pool.restart_dead()
    eventually(lambda: pool.broken)
    assert pool.broken == "the engine of a stopped: the GPU failed"


def test_a_model_that_falls_asleep_is_not_dead(make):
    """The server looks for dead engines all the time, also while weights are copied to the host."""
    pool = make(World())
    held = lease(pool, "a")
    held.release()
    begun, go_on, sleep = threading.Event(), threading.Event(), held.llm.sleep

    def slowly():
        sleep()
        begun.set()
        assert go_on.wait(20)

    held.llm.sleep = slowly
    done = pool.sleep("a")
    assert begun.wait(20)
    pool.restart_dead()
    go_on.set()
    assert done.result(5) is True and not pool.broken


def test_an_abandoned_wait_holds_nothing(make):
    world = World()
    world.gate.clear()
    pool = make(world)
    future = pool.acquire(pool.find("a"))
    eventually(lambda: pool.is_loading)
    assert future.cancel()
    world.gate.set()
    eventually(lambda: World.loaded == ["a"])
    assert pool.loaded()[0].users == 0
    assert pool.unload("a").result(5) is True


def test_what_waits_for_a_model_can_be_refused(make):
    world = World(room=1)
    world.gate.clear()
    pool = make(world)
    waiting = [pool.acquire(pool.find(name)) for name in ("a", "a", "b")]
    pool.refuse_waiting()
    assert [future.exception(1).api_code for future in waiting] == ["shutting_down"] * 3
    world.gate.set()
    lease(pool, "b").release()  # nothing is in its way


def test_closing_ends_what_waits_and_frees_what_is_loaded():
    world = World()
    models = [ServedModel(name, name) for name in NAMES]
    pool = ModelPool(lambda: models, world, world.machine)
    lease(pool, "a")
    world.gate.clear()
    waits = pool.acquire(pool.find("b"))
    eventually(lambda: pool.is_loading)
    threading.Timer(0.05, world.gate.set).start()
    pool.close()
    assert World.loaded == []
    assert waits.done()


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_keep_the_rules(make, seed, monkeypatch):
    """Many threads, three models, room for two: each request has its model, and never more than two are loaded."""
    import random

    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    world = World(room=2)
    pool = make(world, ttl_s=0.05)
    draw = random.Random(seed)
    plans = [[draw.choice(NAMES) for _ in range(15)] for _ in range(8)]
    wrong = []

    def work(names):
        for name in names:
            held = lease(pool, name, 20)
            if held.llm.name != name or "close" in held.llm.log or len(World.loaded) > 2:
                wrong.append(name)
            time.sleep(0.001)
            if "close" in held.llm.log:
                wrong.append(f"{name} was closed while it ran")
            held.release()

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
