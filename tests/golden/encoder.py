"""The C tokenizer as a Python object, by way of build/tests/tools/encode."""
import os
import struct
import subprocess

from conftest import BUILD

TEMPLATE, SPECIAL, DECODE = 1, 2, 4


class Encoder:
    def __init__(self, path):
        self.process = subprocess.Popen([os.path.join(BUILD, "tests/tools/encode"), path], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ask(self, data, flags, size):
        try:
            self.process.stdin.write(struct.pack("<II", flags, len(data)) + data)
            self.process.stdin.flush()
            count, = struct.unpack("<I", self.process.stdout.read(4))
            return self.process.stdout.read(count * size)
        except (BrokenPipeError, struct.error):
            raise RuntimeError(self.process.stderr.read().decode(errors="replace")) from None

    def encode(self, text, flags=0):
        data = self.ask(text.encode() if isinstance(text, str) else text, flags, 4)
        return list(struct.unpack(f"<{len(data) // 4}I", data))

    def decode(self, ids):
        return self.ask(struct.pack(f"<{len(ids)}I", *ids), DECODE, 1)

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # it refused its file and has ended
            pass
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.process.stderr.close()
