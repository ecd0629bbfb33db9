"""Cache events over ZMQ, read as vLLM's example of a subscriber reads them."""

import socket
import sys
from typing import Any

import msgspec
import pytest
import zmq

from localllm.errors import ConfigError, ServerError
from localllm.server.kv_publisher import END, KEPT, KVPublisher, read_endpoint


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.fixture
def published():
    """A publisher at two free ports that lie side by side."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        try:
            publisher = KVPublisher(f"tcp://localhost:{port}")
        except ServerError:
            continue
        with zmq.Context() as context:
            yield publisher, port, context
            context.destroy(0)
        publisher.close()
        return


def asked_again(context, port, first):
    """What is kept from this number on."""
    messages = []
    with context.socket(zmq.DEALER) as replay:
        replay.connect(f"tcp://127.0.0.1:{port + 1}")
        replay.send_multipart([b"", first.to_bytes(8, "big")])
        while replay.poll(10_000):
            _, number, message = replay.recv_multipart()
            if number == END:
                assert not message
                return messages
            messages.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(message, type=Batch)))
    raise AssertionError("no end")


def test_a_subscriber_of_vllm_reads_what_the_cache_gains_and_loses(published, tiny_llm):
    publisher, port, context = published
    publisher.attach("tiny", tiny_llm)
    prompt = [9 + index % 40 for index in range(80)]
    tiny_llm.generate(prompt)
    tiny_llm.engine.clear_prefix_cache()
    with context.socket(zmq.SUB) as sub:
        sub.connect(f"tcp://127.0.0.1:{port}")
        sub.setsockopt_string(zmq.SUBSCRIBE, "tiny")
        for turn in range(100):  # until the subscription has come through
            tiny_llm.generate([11 + turn, *prompt])
            if sub.poll(20):
                break
        topic, number, message = sub.recv_multipart(zmq.NOBLOCK)
    assert topic == b"tiny"
    kept = asked_again(context, port, 0)
    assert [number for number, _ in kept] == list(range(len(kept)))
    assert (int.from_bytes(number, "big"), msgspec.msgpack.decode(message, type=Batch)) in kept
    stored = [event for _, batch in kept for event in batch.events if isinstance(event, BlockStored)]
    assert any(event.parent_block_hash is None and event.token_ids[:16] == prompt[:16] for event in stored)
    assert all(event.medium == "CPU" and event.lora_name is None for event in stored)
    assert any(isinstance(event, BlockRemoved | AllBlocksCleared) for _, batch in kept for event in batch.events)
    assert [number for number, _ in asked_again(context, port, 2)] == list(range(2, len(kept)))
    for _ in range(KEPT + 5):
        publisher._publish(b"tiny", {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}]})
    assert len(asked_again(context, port, 0)) == KEPT


def test_addresses_that_strangers_reach_are_refused():
    assert read_endpoint("tcp://127.0.0.1:5557") == ("127.0.0.1", 5557)
    assert read_endpoint("tcp://*:5557", insecure=True) == ("*", 5557)
    for text, said in {
        "tcp://*:5557": "tokens of prompts", "tcp://192.0.2.1:5557": "tokens of prompts", "ipc://x": "not an address",
        "5557": "not an address", "tcp://127.0.0.1:65535": "not an address", "tcp://127.0.0.1:x": "not an address",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=said) as found:
            read_endpoint(text)
        assert found.value.hint


def test_a_taken_port_and_a_missing_package_are_named(published):
    with pytest.raises(ServerError, match=f"port {published[1]}"):
        KVPublisher(f"tcp://127.0.0.1:{published[1]}")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="needs the package") as found:
        patch.setitem(sys.modules, "zmq", None)
        KVPublisher("tcp://127.0.0.1:5557")
    assert f"{sys.executable} -m pip install 'pyzmq>=" in found.value.hint and "msgspec" in found.value.hint
