"""A rank on the wire of yscv's TcpTransport, written from its documentation. Prints the result of one allreduce_sum.

peer.py worker ADDRESS RANK VALUE...                dials the coordinator
peer.py coordinator ADDRESS WORLD_SIZE VALUE...     listens, and prints its port first
"""

import socket
import struct
import sys


def read(stream, size):
    data = b""
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            sys.exit("the connection was closed")
        data += part
    return data


def send(stream, values):
    stream.sendall(struct.pack(f"<I{len(values)}f", len(values), *values))


def receive(stream):
    (count,) = struct.unpack("<I", read(stream, 4))
    return struct.unpack(f"<{count}f", read(stream, 4 * count))


role, address, number, *values = sys.argv[1:]
host, port = address.rsplit(":", 1)
values = [float(value) for value in values]
if role == "worker":
    with socket.create_connection((host, int(port)), timeout=60) as stream:
        stream.sendall(struct.pack("<I", int(number)))
        send(stream, values)
        sums = receive(stream)
else:
    workers = {}
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(60)
        print(listener.getsockname()[1], flush=True)
        while len(workers) < int(number) - 1:
            stream, _ = listener.accept()
            stream.settimeout(60)
            workers[struct.unpack("<I", read(stream, 4))[0]] = stream
    sums = values
    for rank in sorted(workers):
        sums = [a + b for a, b in zip(sums, receive(workers[rank]))]
    for stream in workers.values():
        send(stream, sums)
print(*sums)
