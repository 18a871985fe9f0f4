"""The floor of small replies: a bare ROUTER socket that sends the tasks, decodes the replies'
headers, adds their vectors in float64, and writes each reply to a log and its row to a book, in
batches. It checks nothing, loses whoever is late, and keeps no state of a round.

    python -m tests.bench.router JOB.json

JOB.json: clients, rounds, body (its bytes, hexadecimal), form (of its fields), entries (of its
vector). Prints its port, and at the end the processor seconds and the time at each round's begin.
Whoever started it ends it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq

from fednet.wire import frames
from fednet.wire import messages as m

BATCH = 512  # messages that are read before their lines are written


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    clients = job["clients"]
    rounds = job["rounds"]
    body = bytes.fromhex(job["body"])
    form = [m.Field(*field) for field in job["form"]]
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.BACKLOG, 1024)
    socket.setsockopt(zmq.SNDHWM, 0)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    first = msgspec.msgpack.Decoder()  # of what comes before the first task
    decode = msgspec.msgpack.Decoder(m.Reply).decode
    rows = msgspec.json.Encoder().encode_lines
    connections = dict[int, bytes]()
    total = np.zeros(job["entries"])
    begins = list[tuple[float, float]]()

    def say(client: int, message: m.Message, body: bytes = b"") -> None:
        parts = [connections[client], frames.encode(message)]
        socket.send_multipart([*parts, body] if body else parts)

    def begin(round: int) -> None:
        begins.append((time.process_time(), time.monotonic()))
        if round > rounds:
            return
        for client in range(clients):
            key = m.Key(round, 0, 0, client)
            say(client, m.Task(run="floor", inc=1, key=key, form=form, size=len(body)), body)

    round = 0
    ready = 0
    replied = 0
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as book:
        while round <= rounds:
            socket.poll()
            kept = list[bytes]()
            booked = list[dict[str, object]]()
            for _ in range(BATCH):
                try:
                    connection, header, *rest = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not rest:
                    said = first.decode(header)
                    if said["t"] == "join":
                        client = said["ids"][0]
                        client = client[0] if isinstance(client, list) else client
                        connections[client] = connection
                        names = {"run": "floor", "session": "floor", "name": "floor"}
                        say(client, m.Welcome(**names, config="", ids=[client], beat_s=100.0))
                    ready += said["t"] == "ready"
                    if ready == clients and not round:
                        round = 1
                        begin(round)
                    continue
                reply = decode(header)
                np.add(total, np.frombuffer(rest[0], np.float32, len(total)), out=total)
                kept += [header, rest[0]]
                row = {"round": round, "client": reply.key.client, "useful": True}
                crossed = len(header) + len(rest[0])
                booked.append({**row, "direction": "down", "bytes": crossed})
                booked.append({**row, "direction": "up", "bytes": crossed})
                replied += 1
                if replied == clients:
                    replied = 0
                    round = round + 1
                    total[:] = 0.0
                    begin(round)
            log.write(b"".join(kept))
            book.write(rows(booked))
    print(json.dumps(begins), flush=True)
    for client in connections:
        say(client, m.End())
    socket.close(10_000)


if __name__ == "__main__":
    main(sys.argv[1])
