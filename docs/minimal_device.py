"""A device in plain Python, from protocol.md alone: joins a run and answers every request with a delta of zeros.

python minimal_device.py tcp://127.0.0.1:5577 [SERVER.key MACHINE.key_secret]
"""

import hashlib
import json
import math
import sys
import time

import msgpack
import numpy as np
import zmq
import zmq.auth

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
socket = zmq.Context().socket(zmq.DEALER)
if len(sys.argv) > 2:  # files of `fedemu keys`: the coordinator's public key, and the keys of this machine
    socket.curve_serverkey, _ = zmq.auth.load_certificate(sys.argv[2])
    socket.curve_publickey, socket.curve_secretkey = zmq.auth.load_certificate(sys.argv[3])
socket.connect(sys.argv[1])
beat, patience = 2.0, 30  # until the coordinator says what it wants
sent = heard = time.monotonic()
put_aside = []


def send(type, frames=(), **fields):
    global sent
    socket.send_multipart([msgpack.packb({"v": 1, "t": type, **fields}), *frames])
    sent = time.monotonic()


def receive(wanted=None, request=("heartbeat", {})):
    """The next message as (fields, frames). With ``wanted``: send the request, again and again, until that comes."""
    global heard
    if wanted is None and put_aside:
        return put_aside.pop(0)
    if wanted is not None:
        send(request[0], **request[1])
    while True:
        if time.monotonic() - sent > beat:
            send(request[0], **request[1])
        if time.monotonic() - heard > beat * patience:
            sys.exit(f"the coordinator at {sys.argv[1]} is silent")
        if not socket.poll(200):
            continue
        heard = time.monotonic()
        header, *frames = socket.recv_multipart()
        message = msgpack.unpackb(header)
        if message["t"] == "refused":
            sys.exit(message["detail"])
        if message["t"] == "stop":
            send("bye")
            socket.close(linger=1000)
            sys.exit()
        if wanted in (None, message["t"]):
            return message, frames
        put_aside.append((message, frames))


def fetch(blob):
    """Arrays by name of a blob, which is a file in the safetensors format."""
    data = b""
    while len(data) < blob["size"]:
        need = {"digest": blob["digest"], "offset": len(data), "length": min(2**20, blob["size"] - len(data))}
        chunk, frames = receive("blob", ("need", need))
        if (chunk["digest"], chunk["offset"]) == (blob["digest"], len(data)):
            data += frames[0]
    assert hashlib.sha256(data).hexdigest() == blob["digest"]
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in json.loads(data[8:start]).items():
        first, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[start + first : start + end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def answer(work):
    """Where a real device would train: the payload is its variables minus the global ones."""
    [model] = [fetch(blob) for blob in work["shared"] if blob["key"] == "model"]
    began = time.monotonic()
    zeros = {f"delta/{name}": np.zeros_like(array) for name, array in model.items()}
    tensors = [{"name": name, "dtype": str(array.dtype), "shape": array.shape} for name, array in zeros.items()]
    frames = [array.tobytes() for array in zeros.values()]
    told = {"examples": examples, "steps": 0, "metrics": {}, "seconds": time.monotonic() - began}
    send("result", frames, ask=work["ask"], epoch=work["epoch"], tensors=tensors, **told)


granted, _ = receive("granted", ("enroll", {"count": 1}))
[[device, _]] = granted["ranges"]
offsets = fetch(granted["partition"])["offsets"]  # of a static stream: all samples are there from the beginning
examples = int(offsets[device + 1] - offsets[device])
welcome, _ = receive("welcome", ("hello", {"device": device, "incarnation": 0, "lease": granted["lease"]}))
beat, patience = welcome["heartbeat_seconds"], welcome["patience"]
virtual = welcome["clock"] == "virtual"
if virtual:
    send("presence", until=math.inf, intervals=[(0.0, math.inf)])
works = {}
while True:
    message, _ = receive()
    if message["t"] == "work" and virtual:
        works[message["ask"]] = message
        send("scheduled", ask=message["ask"], epoch=message["epoch"], event="finish", at=message["start"] + 1.0)
    elif message["t"] == "work":
        answer(message)
    elif message["t"] == "proceed" and message["ask"] in works:
        answer(works[message["ask"]])
