"""Asks a server for its health every 20 ms on one connection, from a process of its own: a thread beside a benchmark's others would
wait for the interpreter, too, while they start programs or write large requests.

health.py PORT: each line of its output is one answer's milliseconds, until its standard input ends.
"""
import http.client
import select
import subprocess
import sys
import time


class Health:
    """`with Health(port) as health`: asked all along; afterwards health.times are the answers' times in ms, in order."""

    def __init__(self, port):
        self.port, self.times = port, []

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline():  # the first answer, with the start of it all before it
            raise RuntimeError("the server does not answer /health")
        return self

    def __exit__(self, *exc):
        out, _ = self.process.communicate()
        self.times = [float(line) for line in out.split()]


def main():
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        start = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        print(1000 * (time.monotonic() - start), flush=True)


if __name__ == "__main__":
    main()
