"""What does capturing cost? A transfer of small messages over loopback, with and without, in turns.

    .venv/bin/python benchmarks/capturing.py [THOUSANDS] [RUNS]        needs root

This is a hard case, because loopback shows each packet twice, going out and coming in. A pair of
hosts that sends at 10 Gbps hands down only some 20,000 packets a second.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from fullwire._native import PacketCapture
from fullwire.packets.pcap import read_captures

MESSAGE = bytes(1000)


def transferred_s(messages: int) -> float:
    """Send `messages` messages, each a packet, and return how long that took."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began_s = time.monotonic()
    with ours, theirs:
        receiving = threading.Thread(target=receive, args=(theirs, messages * len(MESSAGE)))
        receiving.start()
        for _ in range(messages):
            ours.sendall(MESSAGE)
        receiving.join()
    return time.monotonic() - began_s


def receive(peer: socket.socket, size: int) -> None:
    while size:
        size -= len(peer.recv(min(size, 1 << 20)))


def captured(messages: int, path: str) -> tuple[float, float]:
    """Send them beside a capture; return the capture's processor time as well."""
    ready, tell = os.pipe()
    job = os.getpid()
    child = os.fork()
    if child == 0:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        capture = PacketCapture(file, [("lo", own.fileno())])
        os.write(tell, b"1")
        capture.run(job)
        os._exit(0)
    os.read(ready, 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_s = transferred_s(messages)
    os.kill(child, 15)
    os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure in turns, and print medians."""
    messages = 1000 * (int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    ratios, each_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.pcapng")
        for _ in range(runs):
            plain_s = transferred_s(messages)
            beside_s, cpu_s = captured(messages, path)
            facts = read_captures([Path(path)]).facts
            packets = facts.captured_packets or 0
            ratios.append(beside_s / plain_s)
            each_us.append(cpu_s / packets * 1e6)
    print(
        f"{packets:,} packets of {messages:,} messages, {facts.dropped_packets} dropped; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"transfer with over without {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(f"the capture's own processor time {statistics.median(each_us):.2f} us a packet")


if __name__ == "__main__":
    main()
