"""What a gateway does without Redis, as nginx-module/ngx_http_kvgate_recent.c and _lookup.c have it: for replaying traces.

It remembers who was sent blocks 1, 2, 4, … and the last of each prompt, in a table of buckets of four, and counts its own requests. A
prompt that continues a remembered one beyond the block that rendezvous order looks at goes to the same worker, unless so many more of
this gateway's requests run there that computing elsewhere costs less; all others follow rendezvous order.
"""
import hashlib

WAYS, BUCKETS = 4, 4096  # of kvgate_zone kvgate:1m
ALPHA = 8


class Gateway:
    def __init__(self, workers, block, block_hash):
        self.workers, self.block, self.block_hash = workers, block, block_hash
        self.table = {}
        self.requests, self.tokens = 0, 0
        self.running = {number: [] for number in range(workers)}
        self.backlogs = {number: 0 for number in range(workers)}  # as last heard

    def place(self, name, worker, now):
        digest = self.block_hash(name)
        bucket = self.table.setdefault(int(digest[:16], 16) % BUCKETS, [])
        entry = next((e for e in bucket if e[0] == name), None)
        if entry is None and len(bucket) == WAYS:
            bucket.remove(min(bucket, key=lambda e: e[2]))
        if entry is not None:
            bucket.remove(entry)
        bucket.append((name, worker, int(now)))

    def placed(self, blocks):
        """(worker, blocks) of the longest beginning that is remembered, or (None, 0)."""
        for n in range(len(blocks), 0, -1):
            for name, worker, _ in self.table.get(int(self.block_hash(blocks[n - 1])[:16], 16) % BUCKETS, ()):
                if name == blocks[n - 1]:
                    return worker, n
        return None, 0

    def sent(self, request, worker, now):
        """Whoever chose: what the gateway remembers of it."""
        n, at = len(request["blocks"]), 1
        while at < n:
            self.place(request["blocks"][at - 1], worker, now)
            at *= 2
        if n:
            self.place(request["blocks"][-1], worker, now)
        self.requests += 1
        self.tokens += request["input"]
        self.running[worker].append(request)

    def flight(self, worker, now):
        self.running[worker] = [r for r in self.running[worker] if r.get("end", now + 1) > now]
        return len(self.running[worker])

    def choose(self, request, now):
        blocks = request["blocks"]
        if not blocks:
            return min(self.backlogs, key=lambda w: (self.backlogs[w], (w + request["id"]) % self.workers))
        head = max(1, 1024 // self.block)
        turn = self.block_hash(blocks[min(len(blocks), head) - 1])
        first = max(range(self.workers), key=lambda w: hashlib.sha1(f"{turn}w{w}".encode()).digest()[:4])
        worker, held = self.placed(blocks)
        if worker is None or held <= head < len(blocks):
            return first
        more = (self.flight(worker, now) - self.flight(first, now)) * self.tokens / (self.requests + 1)
        return first if more > ALPHA * held * self.block else worker
