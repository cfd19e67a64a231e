"""A kvgate-worker of our own for --model, on a free loopback port, ended when the run is."""
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from client import Endpoint, Unanswered

START_S = 600


class NotStarted(Exception):
    """The worker ended or did not become ready; the message has the end of its log."""


def find_program(name, given=None):
    """The given path, the program beside kvgate-eval, or one in PATH."""
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), name)
    path = given or (beside if os.path.exists(beside) else shutil.which(name))
    if not path or not os.path.exists(path):
        raise NotStarted(f"{name} is neither beside kvgate-eval nor in PATH")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """with Worker(...) as endpoint: ..."""

    def __init__(self, model, concurrency, program=None, flags=()):
        self.port = free_port()
        self.log = tempfile.TemporaryFile("w+")
        self.command = [find_program("kvgate-worker", program), "--model", model, "--port", str(self.port), "--served-model-name", "model",
                        "--max-num-seqs", str(max(2, concurrency)), *flags]
        self.process = None

    def _log_end(self):
        self.log.seek(0)
        return self.log.read()[-1000:]

    def _end_because(self, why):
        text = self._log_end()
        self.__exit__()
        raise NotStarted(f"{' '.join(self.command)} {why}:\n{text}")

    def __enter__(self):
        env = {name: value for name, value in os.environ.items() if name != "KVGATE_API_KEY"}  # that one is for other endpoints
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=env)
        endpoint, end = Endpoint(f"http://127.0.0.1:{self.port}", model="model"), time.monotonic() + START_S
        endpoint.ended = lambda: self.process.poll() is not None
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    pass
                endpoint.call("GET", "/models")
                return endpoint
            except OSError:
                pass
            except Unanswered as error:
                if error.status == 401:
                    self._end_because("wants an API key (it answers 401); one started here must not be given any")
            if self.process.poll() is not None or time.monotonic() > end:
                self._end_because("did not start")
            time.sleep(0.1)

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
