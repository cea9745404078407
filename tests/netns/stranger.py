"""A program that connects to a hub by itself: `python -m tests.netns.stranger ENDPOINT RUN_ID [KEYS]`.

It says hello as a new peer and prints, as JSON, how far it got: which events its socket had, and how many messages
came back. With KEYS, a file, it uses the keys that are in it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from zbgrpo.transport import messages as m
from zbgrpo.transport.wire import Sender, encode

NAME = "producer:77"
DECIDED = ("HANDSHAKE_SUCCEEDED", "HANDSHAKE_FAILED_NO_DETAIL", "HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_AUTH")
_EVENTS = {int(event): event.name.removeprefix("EVENT_") for event in zmq.Event if event.name}
_HANDSHAKE_SECONDS = 10.0
_ANSWER_SECONDS = 1.5


def main(endpoint: str, run_id: str, keys: Path | None) -> dict[str, object]:
    """Connect, say hello, listen."""
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, NAME.encode())
    dealer.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        found = json.loads(keys.read_text())
        dealer.curve_serverkey = found["server_public"].encode()
        dealer.curve_publickey = found["client_public"].encode()
        dealer.curve_secretkey = found["client_secret"].encode()
    monitor = dealer.get_monitor_socket()
    dealer.connect(endpoint)
    dealer.send_multipart(encode(Sender(run_id, NAME), 1, 0, [m.Hello(rank=77)]))
    events: list[str] = []
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    while not set(DECIDED) & set(events) and monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        events.append(_EVENTS[recv_monitor_message(monitor)["event"]])
    num_received = 0
    deadline = time.monotonic() + _ANSWER_SECONDS
    while dealer.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        dealer.recv_multipart()
        num_received += 1
    return {"events": events, "num_received": num_received}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)))
