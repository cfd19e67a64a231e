#!/usr/bin/env python3
"""Writes chain.json: vectors of the block chain, computed with the xxhash package alone (see libprompt/block_chain.h).

usage: make_chain.py > chain.json
"""
import json
import random
import struct
import sys

import xxhash

SCHEMA_VERSION = 1


def field(data):
    return struct.pack("<I", len(data)) + data


def seed(model, fingerprint, block_size, salt):
    fields = (struct.pack("<I", SCHEMA_VERSION), model, fingerprint, struct.pack("<I", block_size), salt)
    return xxhash.xxh3_128_digest(b"".join(field(f) for f in fields))


def chain(model, fingerprint, block_size, salt, ids):
    previous = seed(model, fingerprint, block_size, salt)
    for i in range(0, len(ids) - block_size + 1, block_size):
        previous = xxhash.xxh3_128_digest(previous + struct.pack(f"<{block_size}I", *ids[i:i + block_size]))
        yield previous


def vector(model, fingerprint, block_size, salt, ids):
    args = (model.encode(), fingerprint, block_size, salt.encode())
    return {"model": model, "fingerprint": fingerprint.hex(), "block_size": block_size, "salt": salt, "ids": ids,
            "seed": seed(*args).hex(), "hashes": [h.hex() for h in chain(*args, ids)]}


def main():
    rng = random.Random(20)
    fingerprint = bytes(range(16))
    other = bytes(rng.randrange(256) for _ in range(16))
    counting = list(range(1, 65))
    vectors = [vector("smollm2", fingerprint, size, "", counting) for size in (16, 32, 64)]
    vectors += [vector("smollm2", other, 16, "", counting), vector("qwen/coder-0.5b", fingerprint, 16, "", counting),
                vector("smollm2", fingerprint, 16, "tenant-a", counting), vector("smollm2", fingerprint, 32, "", counting[:31]),
                vector("smollm2", fingerprint, 32, "", []), vector("m", other, 16, "größe", [0, 0xffffffff] * 24),
                vector("m", other, 512, "x" * 300, [rng.randrange(1 << 32) for _ in range(1100)])]
    json.dump(vectors, sys.stdout, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
