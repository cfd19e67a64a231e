"""A bar with the time left on stderr: redrawn on a terminal, elsewhere a line each ten seconds."""
import sys
import threading
import time


def duration(seconds):
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Bar:
    """done counts from `done`, which an earlier run had finished: that part tells nothing about speed."""

    def __init__(self, title, total, done=0, out=sys.stderr):
        self.title, self.total, self.done, self.out = title, total, done, out
        self.first, self.began, self.last = done, time.monotonic(), 0.0
        self.terminal, self.lock = out.isatty(), threading.Lock()
        self.show(force=True)

    def text(self, now):
        new, share = self.done - self.first, self.done / self.total if self.total else 1.0
        left = f", {duration((now - self.began) / new * (self.total - self.done))} left" if new and self.done < self.total else ""
        filled = int(share * 30)
        return f"{self.title} [{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}, {duration(now - self.began)}{left}"

    def show(self, force=False):
        now = time.monotonic()
        if not force and now - self.last < (0.2 if self.terminal else 10):
            return
        self.last = now
        self.out.write("\r\x1b[K" + self.text(now) if self.terminal else self.text(now) + "\n")
        self.out.flush()

    def advance(self):
        with self.lock:
            self.done += 1
            self.show()

    def close(self):
        self.show(force=True)
        if self.terminal:
            self.out.write("\n")
