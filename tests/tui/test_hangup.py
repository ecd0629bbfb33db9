"""A terminal that goes away without SIGHUP ends the interface: it must not spin on a dead file descriptor."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

COMMAND = [sys.executable, "-P", "-c", "from localllm.cli import main; main()", "chat", "fake"]


def test_the_interface_ends_with_its_terminal():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 34, 118, 0, 0))
    env = os.environ | {"LOCALLLM_ENGINE": "fake", "TERM": "xterm-256color"}
    process = subprocess.Popen(COMMAND, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    seen = b""
    end = time.monotonic() + 60
    while b"send" not in seen and time.monotonic() < end:
        seen += os.read(master, 65536)
    assert b"send" in seen, "the first screen did not appear"
    os.close(master)
    try:
        process.wait(60)
    finally:
        process.kill()
        process.wait()
