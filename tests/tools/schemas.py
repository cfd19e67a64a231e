"""The scripts of redis-schemas/ called from Python, a worker that speaks them, and the routing rule as a plain model."""
import hashlib
import os
import random

from conftest import ROOT

SCHEMA = "1"
FINGERPRINT = "0123456789abcdef0123456789abcdef"
BLOCK = 32


# Every field of some buckets: hash digits, leases, ...
ALL_FIELDS = """
local found = {}
for bucket = tonumber(ARGV[2]), tonumber(ARGV[3]) do
    local hex = string.format('%04x', bucket)
    local fields = redis.call('HGETALL', ARGV[1] .. 'own:' .. hex)
    for i = 1, #fields, 2 do
        found[#found + 1] = hex .. fields[i]
        found[#found + 1] = fields[i + 1]
    end
end
return found
"""


def source(name):
    with open(os.path.join(ROOT, "redis-schemas", name + ".lua"), encoding="utf-8") as f:
        return f.read()


def random_chain(n, rng=random):
    return ["%032x" % rng.getrandbits(128) for _ in range(n)]


class Schemas:
    """One model's keys in one Redis."""

    def __init__(self, client, model="m", prefix="kvgate:"):
        self.client = client
        self.base = f"{prefix}{{{model}}}:"
        self.sources = {}

    def call(self, name, *args):
        if name not in self.sources:
            self.sources[name] = source(name)
        return text(self.client.eval(self.sources[name], 1, self.base + "meta", *args))

    def route(self, chain, prompt_tokens="", explain="", alpha="", block=BLOCK, fingerprint=FINGERPRINT, schema=SCHEMA, now="", grid=False):
        """grid: as the gateway sends long chains."""
        sent = [chain[p - 1] for p in grid_of(len(chain))] if grid else chain
        return self.call("route", "".join(sent), prompt_tokens, explain, alpha, block, fingerprint, schema, now, len(chain) if grid else "")

    def claims(self, lease):
        """Every block that this lease claims, by its first 20 hex digits; reads each bucket."""
        found = set()
        for start in range(0, 65536, 4096):
            rows = text(self.client.eval(ALL_FIELDS, 0, self.base, start, start + 4095))
            found |= {rows[i] for i in range(0, len(rows), 2) if str(lease) in rows[i + 1].split(",")}
        return found


def grid_of(n):
    """The blocks of a chain of n that the gateway sends: each to 512, then 128 between every two powers of two, and the last."""
    blocks, start = list(range(1, min(n, 512) + 1)), 512
    while start < n:
        blocks += range(start + start // 128, min(2 * start, n) + 1, start // 128)
        start *= 2
    return blocks if not blocks or blocks[-1] == n else blocks + [n]


def text(reply):
    if isinstance(reply, bytes):
        return reply.decode()
    if isinstance(reply, list):
        return [text(item) for item in reply]
    return reply


class FakeWorker:
    """What publish.c does, one call at a time."""

    def __init__(self, schemas, name, backlog=0, addr="127.0.0.1:9000", state="ready", nonce=None):
        self.schemas, self.name, self.backlog, self.addr, self.state = schemas, name, backlog, addr, state
        self.nonce = nonce or "%016x" % random.getrandbits(64)
        self.lease, self.seq = None, 0

    def register(self, turn="first", block=BLOCK, fingerprint=FINGERPRINT, schema=SCHEMA, now=""):
        reply = self.schemas.call("register", self.name, self.nonce, turn, block, fingerprint, schema, self.addr, "0.1.0", now)
        if reply[0] == "ok":
            self.lease, self.seq = reply[1], 0
        return reply

    def publish(self, stored=(), evicted=(), live=False, events=None, seq=None):
        if events is None:
            events = [("+", h) for h in stored] + [("-", h) for h in evicted]
        if seq is None:
            self.seq += 1
            seq = self.seq
        packed = "".join(op + h[:20] for op, h in events)
        return self.schemas.call("publish", self.name, self.nonce, self.lease, seq, "live" if live else "", packed)

    def beat(self, now=""):
        return self.schemas.call("heartbeat", self.name, self.nonce, self.lease, self.state, 1, 2, 30, 100, self.backlog, now)

    def up(self, chain=(), now=""):
        """Registers, holds the chain, beats: a live worker."""
        assert self.register(now=now)[0] == "ok"
        assert self.publish(stored=chain, live=True) == ["ok"]
        assert self.beat(now) == ["ok"]
        return self


def rendezvous(block_hash, worker):
    return int(hashlib.sha1((block_hash + worker).encode()).hexdigest()[:8], 16)


def route_model(workers, chain, prompt_tokens, alpha=8.0, mean=1024.0, block=BLOCK):
    """workers: {id: (depth, backlog)} of those that take work, fewer than 17 owners. The choices of route.lua, best first."""
    by_load = sorted(workers, key=lambda w: workers[w][1])[:8]
    candidates = [w for w in workers if workers[w][0] > 0 or w in by_load]
    cost = {w: alpha * max(prompt_tokens - workers[w][0] * block, min(prompt_tokens, 1)) + workers[w][1] for w in candidates}
    near = min(cost.values()) + mean / 4
    turn = chain[min(len(chain), 1024 // block) - 1]
    return sorted(candidates, key=lambda w: (cost[w] > near, cost[w] if cost[w] > near else 0, -rendezvous(turn, w)))[:3], cost
