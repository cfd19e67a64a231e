"""Asks a server for its health every 20 ms on one connection, from a process of its own: a thread beside a benchmark's others would
wait for the interpreter, too, while they start programs or write large requests.

health.py PORT: each line of its output is one answer's milliseconds and how much too long the sleep before it was, which says
what the machine itself does to a process that wants nothing, until its standard input ends.
"""
import http.client
import select
import subprocess
import sys
import time

EVERY = 0.02  # seconds


class Health:
    """`with Health(port) as health`: asked all along; afterwards the answers' times and the lateness of timers in ms, in order."""

    def __init__(self, port):
        self.port, self.times, self.late = port, [], []

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline():  # the first answer, with the start of it all before it
            raise RuntimeError("the server does not answer /health")
        return self

    def __exit__(self, *exc):
        out, _ = self.process.communicate()
        for line in out.splitlines():
            answer, late = line.split()
            self.times.append(float(answer))
            self.late.append(float(late))


def main():
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    asleep = time.monotonic()
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        start = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        end = time.monotonic()
        print(1000 * (end - start), 1000 * (start - asleep - EVERY), flush=True)
        asleep = time.monotonic()


if __name__ == "__main__":
    main()
