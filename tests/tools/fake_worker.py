"""A worker made of Python that misbehaves on request: it records what it is sent, and answers, delays, drops or dies.

    with FakeWorker("w1") as worker:
        worker.mode = "503"
        ...
        assert len(worker.requests) == 1

Modes:
    ok             200 with a JSON reply that names this worker
    500, 503, …    that status with a JSON error in OpenAI's shape
    sse            `events` chunks `interval` seconds apart, then [DONE]
    early          `events` whole SSE events, then the connection ends without [DONE] or a last chunk
    early_middle   the same, but the last event is cut in the middle
    reset          reads the whole request, then resets the connection (counts as an execution)
    silent         reads the whole request and never answers
    close          answers with Connection: close, and closes
    pieces         200 with a JSON reply made of `pieces`, one write and one chunk each
idle_timeout: seconds after which an idle kept connection is closed; None = never.

register() makes it a live worker in Redis, with heartbeats, as publish.c does; it holds the blocks of `chain`.
"""
import json
import os
import socket
import struct
import threading
import time

import schemas


class Request:
    def __init__(self, line, headers, body, connection):
        self.method, self.path = line.split(" ")[:2]
        self.headers = headers  # [(lower-case name, value)]
        self.body = body
        self.connection = connection
        self.answered = None  # the mode that it was answered by

    def header(self, name):
        """All values of a header, joined; None when absent."""
        values = [v for n, v in self.headers if n == name.lower()]
        return ", ".join(values) if values else None

    def json(self):
        return json.loads(self.body)


class FakeWorker:
    def __init__(self, name, path=None, port=0, mode="ok"):
        self.name, self.mode, self.path, self.port = name, mode, path, port
        self.events, self.interval, self.idle_timeout, self.delay = 5, 0.01, None, 0.0
        self.pieces = [b"{}"]
        self.requests = []
        self.connections = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.listener = None
        self.open = set()
        self.beating = None
        self.registration = None

    @property
    def addr(self):
        return f"unix:{self.path}" if self.path else f"127.0.0.1:{self.port}"

    # ---- life ----

    def start(self):
        if self.path:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.path)
            os.chmod(self.path, 0o666)
        else:
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listener.bind(("127.0.0.1", self.port))
            self.port = self.listener.getsockname()[1]
        self.listener.listen(256)
        self.stopping.clear()
        threading.Thread(target=self.accept, args=(self.listener,), daemon=True).start()
        return self

    def stop(self):
        """Refuses connections from now on and drops those it has; it goes on beating in Redis if it did."""
        self.stopping.set()
        if self.listener:
            self.listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves a blocked accept() working
            self.listener.close()
            self.listener = None
            if self.path:
                os.unlink(self.path)
        with self.lock:
            for connection in list(self.open):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self):
        self.unregister()
        self.stop()

    def __enter__(self):
        return self if self.listener else self.start()

    def __exit__(self, *_):
        self.close()

    # ---- Redis ----

    def register(self, redis, fingerprint, model="smollm2", chain=(), backlog=0, block=32, addr=None, interval=0.5):
        """A live worker from here on; beats in a thread, and registers again when it is told to."""
        client = redis.client()
        self.registration = schemas.FakeWorker(schemas.Schemas(client, model), self.name, backlog, addr or self.addr)
        ended = threading.Event()

        def up(turn):
            assert self.registration.register(turn, block=block, fingerprint=fingerprint)[0] == "ok"
            assert self.registration.publish(stored=list(chain), live=True) == ["ok"]
            assert self.registration.beat() == ["ok"]

        def beat():
            while not ended.wait(interval):
                try:
                    if self.registration.beat()[0] != "ok":
                        up("again")
                except Exception:  # Redis is away: as a worker does, try again at the next beat
                    pass

        up("first")
        self.beating = ended
        threading.Thread(target=beat, daemon=True).start()
        return self

    def unregister(self):
        """Stops beating: the lease ends after its 3 seconds, as after a crash."""
        if self.beating:
            self.beating.set()
            self.beating = None

    # ---- HTTP ----

    def accept(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self.lock:
                self.connections += 1
                number = self.connections
                self.open.add(connection)
            threading.Thread(target=self.serve, args=(connection, number), daemon=True).start()

    def serve(self, connection, number):
        try:
            if connection.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held = b""
            while True:
                connection.settimeout(self.idle_timeout)
                request, held = self.read(connection, held, number)
                if request is None:
                    break
                connection.settimeout(None)
                with self.lock:
                    self.requests.append(request)
                if not self.answer(connection, request):
                    break
        except (OSError, ValueError):
            pass
        finally:
            with self.lock:
                self.open.discard(connection)
            connection.close()

    def read(self, connection, held, number):
        while b"\r\n\r\n" not in held:
            part = connection.recv(65536)
            if not part:
                return None, b""
            held += part
        head, _, rest = held.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines[1:])]
        length = int(dict(headers).get("content-length", 0))
        while len(rest) < length:
            part = connection.recv(1 << 20)
            if not part:
                return None, b""
            rest += part
        return Request(lines[0], headers, rest[:length], number), rest[length:]

    def answer(self, connection, request):
        """False where the connection is to be closed."""
        mode = request.answered = self.mode
        if self.delay:
            time.sleep(self.delay)
        if mode == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if mode == "silent":
            self.stopping.wait(60)
            return False
        if mode in ("sse", "early", "early_middle"):
            return self.stream(connection, mode)
        if mode == "pieces":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in self.pieces:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            connection.sendall(b"0\r\n\r\n")
            return True
        if mode.isdigit():
            body = {"error": {"message": f"{self.name} says {mode}", "type": "server_error", "param": None, "code": None}}
            self.reply(connection, int(mode), body)
            return True
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "smollm2", "worker": self.name,
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        self.reply(connection, 200, body, mode == "close")
        return mode != "close"

    @staticmethod
    def reply(connection, status, body, close=False):
        text = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        connection.sendall((head + ("Connection: close\r\n" if close else "") + "\r\n").encode() + text)

    def stream(self, connection, mode):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(self.events):
            event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "smollm2",
                     "choices": [{"index": 0, "delta": {"content": f"t{i} "}, "finish_reason": None}]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            if mode == "early_middle" and i == self.events - 1:
                data = data[:20]
            connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
            if self.stopping.wait(self.interval):
                return False
        if mode != "sse":
            return False
        connection.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True
