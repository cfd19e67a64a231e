"""Results on disk, a JSON line each as it comes: what a restarted run need not do again.

The first line names what was run. A folder of another run is refused; a torn last line (the machine went down) is dropped.
"""
import json
import os
import threading


class OtherRun(Exception):
    """The file holds results of something else."""


class Store:
    def __init__(self, path, header, fresh=False):
        self.path, self.lock, self.lines = path, threading.Lock(), []
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if fresh and os.path.exists(path):
            os.remove(path)
        kept = self._read(header) if os.path.exists(path) else 0
        self.file = open(path, "r+b" if kept else "wb")
        self.file.truncate(kept)
        self.file.seek(kept)
        if not kept:
            self._append(header)

    def _read(self, header):
        """Bytes of whole lines; fills self.lines."""
        with open(self.path, "rb") as file:
            whole = file.read()
        whole = whole[:whole.rfind(b"\n") + 1]
        if not whole:
            return 0
        found, *lines = (json.loads(line) for line in whole.splitlines())
        if found != header:
            differs = sorted(k for k in {*found, *header} if found.get(k) != header.get(k))
            raise OtherRun(f"{self.path} is of another run ({', '.join(f'{k}: {found.get(k)} / {header.get(k)}' for k in differs)}): "
                           "give --out another folder, or --fresh to drop it")
        self.lines = lines
        return len(whole)

    def _append(self, value):
        self.file.write(json.dumps(value).encode() + b"\n")
        self.file.flush()

    def add(self, value):
        with self.lock:
            self._append(value)
            self.lines.append(value)

    def close(self):
        self.file.close()
