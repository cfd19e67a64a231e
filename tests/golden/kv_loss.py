"""What keeping keys and values as bf16 or int8 loses: KL of the logits against --kv-cache-dtype f16, on the goldens' texts.

    B=build build/venv/bin/python tests/golden/kv_loss.py [isa]

Beside it the distance of each to the unquantized reference, which f16 has as well."""
import os
import subprocess
import sys
import tempfile

import numpy as np

from kl import Golden, distance

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get("B", "build")
MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "qwen05": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"}


def run(model, golden, isa, dtype, folder):
    files = [os.path.join(folder, name) for name in ("ids", "picks", "out")]
    length = golden.first + golden.n_positions
    np.ascontiguousarray(golden.ids[:, :length], "<u4").tofile(files[0])
    np.ascontiguousarray(golden.top_ids, "<u4").tofile(files[1])
    subprocess.run([f"{BUILD}/tests/tools/logits", os.path.join("build/models", model), *files, str(length), str(golden.first), isa, "0",
                    "64", dtype], check=True)
    out = np.fromfile(files[2], "<f4").reshape(-1, 66).astype(np.float64)
    return out[:, :64], out[:, 64].astype(np.int64)


def measure(name, isa, sequences, positions, folder):
    golden = Golden(os.path.join(HERE, f"logits_{name}.npz"))
    golden.limit(sequences, positions)
    f16, best = run(MODELS[name], golden, isa, "f16", folder)
    against = Golden(os.path.join(HERE, f"logits_{name}.npz"))
    against.limit(sequences, positions)
    against.top_logprobs = f16
    for dtype in ("f16", "bf16", "int8"):
        logprobs, top = run(MODELS[name], golden, isa, dtype, folder)
        kl, _ = distance(against, logprobs, top)
        to_reference, _ = distance(golden, logprobs, top)
        print(f"{name:8} {isa:6} {dtype:5} KL against f16: mean {kl.mean():.6f}, 99% {np.quantile(kl, .99):.5f}; same best token "
              f"{(top == best).mean():.4f}; KL against the reference {to_reference.mean():.5f}; {len(kl)} positions")


def main():
    isa = sys.argv[1] if len(sys.argv) > 1 else "auto"
    with tempfile.TemporaryDirectory() as folder:
        for name, sequences, positions in (("smollm2", 1, 500), ("qwen05", 1, 500)):
            measure(name, isa, sequences, positions, folder)


if __name__ == "__main__":
    main()
