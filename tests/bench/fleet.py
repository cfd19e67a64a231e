"""Simulated workers for replaying traces: a KV cache with leaf-first LRU, one prefill at a time, decode at a fixed pace.

Time is the caller's: Fleet.run(until) plays every event before it. A request is a dict with
    id, blocks (names of its whole blocks, first first: equal names mean equal prefixes), input, output (tokens)
and gets `hit` (tokens found in the cache), `start`, `first` (first token) and `end`, in seconds.
"""
import heapq
import itertools
from collections import deque
from dataclasses import dataclass


@dataclass
class Rates:
    """What a worker is made of."""
    block: int = 512              # tokens a block
    blocks: int = 2048            # blocks in its pool
    prefill: float = 0.15e-3      # seconds a computed prompt token
    step: float = 12e-3           # seconds a decode step, whatever the number of sequences
    sequences: int = 64           # at a time, in prefill or decode


class Node:
    __slots__ = ("name", "parent", "children", "locks", "used")

    def __init__(self, name, parent):
        self.name, self.parent, self.children, self.locks, self.used = name, parent, 0, 0, 0


class Cache:
    """Blocks in a tree; the least recently used leaf goes first. A block's name stands for its whole prefix."""

    def __init__(self, total):
        self.nodes = {}
        self.free = total
        self.locked = 0
        self.turn = itertools.count(1)
        self.leaves = []  # heap of (used, name): every unlocked leaf is in it; entries whose node has changed are stale

    def match(self, blocks):
        """How many leading blocks are cached; touches and locks them."""
        now = next(self.turn)
        depth = 0
        for name in blocks:
            node = self.nodes.get(name)
            if node is None:
                break
            node.used = now
            self.locked += node.locks == 0
            node.locks += 1
            depth += 1
        return depth

    def depth(self, blocks):
        """As match(), without touching anything."""
        return next((i for i, name in enumerate(blocks) if name not in self.nodes), len(blocks))

    def unlock(self, blocks):
        for name in blocks:
            node = self.nodes[name]
            node.locks -= 1
            self.locked -= node.locks == 0
            self.offer(node)

    def offer(self, node):
        if node.locks == 0 and node.children == 0:
            heapq.heappush(self.leaves, (node.used, node.name))

    def take(self, n):
        """Takes n blocks out of the pool, evicting leaves where it is empty: the evicted names, leaf first, or None when too
        few can go (nothing is evicted then)."""
        evicted = []
        if n > self.free and n - self.free > len(self.nodes) - self.locked:
            return None
        while self.free < n:
            used, name = heapq.heappop(self.leaves)
            node = self.nodes.get(name)
            if node is None or node.used != used or node.locks or node.children:
                continue
            del self.nodes[name]
            evicted.append(name)
            self.free += 1
            if node.parent is not None:
                node.parent.children -= 1
                self.offer(node.parent)
        self.free -= n
        return evicted

    def insert(self, blocks, depth):
        """Blocks depth… of a prompt enter the tree, locked; their memory was taken before."""
        parent = self.nodes[blocks[depth - 1]] if depth else None
        now = next(self.turn)
        for name in blocks[depth:]:
            node = self.nodes[name] = Node(name, parent)
            node.locks, node.used = 1, now
            if parent is not None:
                parent.children += 1
            parent = node
        self.locked += len(blocks) - depth


class SimWorker:
    """on_events(worker, stored, evicted) hears of every change of the cache, when it happens."""

    def __init__(self, number, rates, on_events=None):
        self.number, self.rates, self.on_events = number, rates, on_events
        self.cache = Cache(rates.blocks)
        self.queue = deque()
        self.queued_tokens = 0
        self.prefilling = None
        self.decoding = 0
        self.computed = 0
        self.requests = 0

    def backlog(self, now):
        """What a worker says in its heartbeat: prompt tokens not yet computed, and 16 for each running decode."""
        current = self.prefilling
        rest = max(0.0, current["first"] - now) / self.rates.prefill if current else 0.0
        return self.queued_tokens + rest + 16 * self.decoding

    def submit(self, request):
        self.queue.append(request)
        self.queued_tokens += request["input"]
        self.requests += 1

    def start(self, now):
        """Begins the next prefill if it can: the time of its end, or None."""
        if self.prefilling or not self.queue or self.decoding >= self.rates.sequences:
            return None
        request = self.queue[0]
        blocks, size = request["blocks"], self.rates.block
        depth = self.cache.match(blocks)
        evicted = self.cache.take(-(-(request["input"] + request["output"]) // size) - depth)
        if evicted is None:
            self.cache.unlock(blocks[:depth])
            if not self.decoding:
                raise ValueError(f"request {request['id']} does not fit a worker's {self.rates.blocks} blocks")
            return None
        self.queue.popleft()
        self.queued_tokens -= request["input"]
        computed = max(1, request["input"] - depth * size)  # the last token is always computed
        request.update(worker=self.number, depth=depth, hit=request["input"] - computed, start=now,
                       first=now + computed * self.rates.prefill)
        request["end"] = request["first"] + (request["output"] - 1) * self.rates.step
        self.computed += computed
        self.prefilling = request
        if evicted and self.on_events:
            self.on_events(self, [], evicted)
        return request["first"]

    def prefilled(self):
        request, self.prefilling = self.prefilling, None
        self.cache.insert(request["blocks"], request["depth"])
        self.decoding += 1
        if self.on_events and len(request["blocks"]) > request["depth"]:
            self.on_events(self, request["blocks"][request["depth"]:], [])
        return request

    def finished(self, request):
        self.decoding -= 1
        self.cache.unlock(request["blocks"])
        self.cache.free += -(-(request["input"] + request["output"]) // self.rates.block) - len(request["blocks"])


class Fleet:
    """All workers on one clock. on_beat(worker, now), once a second for each, spread over it."""

    def __init__(self, n, rates, on_events=None, on_beat=None):
        self.workers = [SimWorker(i, rates, on_events) for i in range(n)]
        self.on_beat = on_beat
        self.events = []
        self.order = itertools.count()
        self.now = 0.0
        self.unfinished = 0
        if on_beat:
            for worker in self.workers:
                self.at(worker.number / n, self.beat, worker)

    def at(self, when, what, *args):
        heapq.heappush(self.events, (when, next(self.order), what, args))

    def beat(self, worker):
        self.on_beat(worker, self.now)
        self.at(self.now + 1, self.beat, worker)

    def begin(self, worker):
        end = worker.start(self.now)
        if end is not None:
            self.at(end, self.prefilled, worker)

    def prefilled(self, worker):
        request = worker.prefilled()
        if request["end"] > self.now:
            self.at(request["end"], self.finished, worker, request)
            self.begin(worker)
        else:
            self.finished(worker, request)

    def finished(self, worker, request):
        worker.finished(request)
        self.unfinished -= 1
        self.begin(worker)

    def submit(self, request, number):
        self.unfinished += 1
        self.workers[number].submit(request)
        self.begin(self.workers[number])

    def run(self, until):
        """Plays the events up to `until`, inclusive."""
        while self.events and self.events[0][0] <= until:
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
        self.now = max(self.now, until)

    def drain(self):
        """Plays on until every request has ended."""
        while self.unfinished:
            self.run(self.events[0][0])
