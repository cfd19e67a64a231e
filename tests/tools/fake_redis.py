"""A server on Redis' port that answers nonsense: `answer` to every command that it is sent.

    with FakeRedis(b"*-7\\r\\n") as redis:
        Gateway(redis)
"""
import socket
import threading


class FakeRedis:
    def __init__(self, answer):
        self.answer = answer
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        try:
            while (part := connection.recv(65536)):
                commands = part.count(b"\r\nEVALSHA\r\n") + part.count(b"\r\nEVAL\r\n") + part.count(b"\r\nSETNAME\r\n")
                connection.sendall(self.answer * max(1, commands))
        except OSError:
            pass
        connection.close()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
