"""Results on disk, a JSON line each as it comes: what a restarted run need not do again.

The first line names what was run. A folder of another run is refused; a torn last line (the machine went down) is dropped.
"""
import fcntl
import json
import os
import threading


class OtherRun(Exception):
    """The file holds results of something else."""


class Store:
    def __init__(self, path, header, fresh=False):
        self.path, self.lock, self.lines = path, threading.Lock(), []
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            self._claim()
            kept = 0 if fresh else self._read(header)
            self.file.truncate(kept)
            self.file.seek(kept)
            if not kept:
                self._append(header)
        except BaseException:
            self.file.close()
            raise

    def _claim(self):
        """Until the file is closed, by whatever end."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OtherRun(f"another kvgate-eval writes {self.path}: wait for it, or give --out another folder") from None

    def _read(self, header):
        """Bytes of whole lines; fills self.lines."""
        whole = self.file.read()
        whole = whole[:whole.rfind(b"\n") + 1]
        if not whole:
            return 0
        try:
            found, *lines = (json.loads(line) for line in whole.split(b"\n")[:-1])
        except (ValueError, RecursionError):
            raise self.damaged() from None
        if not all(isinstance(value, dict) for value in (found, *lines)):
            raise self.damaged()
        if found != header:
            differs = sorted(k for k in {*found, *header} if found.get(k) != header.get(k))
            raise OtherRun(f"{self.path} is of another run ({', '.join(f'{k}: {found.get(k)} / {header.get(k)}' for k in differs)}): "
                           "give --out another folder, or --fresh to drop it")
        self.lines = lines
        return len(whole)

    def damaged(self):
        return OtherRun(f"{self.path} does not hold results of such a run, or is damaged: give --out another folder, or --fresh to drop it")

    def _append(self, value):
        self.file.write(json.dumps(value).encode() + b"\n")
        self.file.flush()

    def add(self, value):
        with self.lock:
            self._append(value)
            self.lines.append(value)

    def close(self):
        self.file.close()
