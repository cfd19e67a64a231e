"""A prompt's block chain in Python, from the formula in libprompt/block_chain.h and the xxhash package alone."""
import struct

import xxhash

SCHEMA_VERSION = 1


def seed(model, fingerprint, block_size=32, salt=b""):
    fields = [struct.pack("<I", SCHEMA_VERSION), model.encode(), bytes.fromhex(fingerprint), struct.pack("<I", block_size), salt]
    return xxhash.xxh3_128_digest(b"".join(struct.pack("<I", len(f)) + f for f in fields))


def chain(ids, model, fingerprint, block_size=32, salt=b""):
    """Hashes of the whole blocks, in hex."""
    previous, hashes = seed(model, fingerprint, block_size, salt), []
    for at in range(0, len(ids) - block_size + 1, block_size):
        previous = xxhash.xxh3_128_digest(previous + struct.pack(f"<{block_size}I", *ids[at:at + block_size]))
        hashes.append(previous.hex())
    return hashes
