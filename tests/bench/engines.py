"""The engines that benchmarks compare, behind one face: kvgate's worker, llama.cpp's server and llama-bench, vLLM on the CPU.

    engine = Llama(MODELS["smol"], sequences=32, context=512)
    with engine:
        result, details = engine.load([engine.body(ids, 64)], connections=1)

A peer that is not installed (`make peers`) says so by missing(). vLLM needs minutes to start: hold() leaves one running for further
runs, release() ends it.
"""
import ctypes
import dataclasses
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))
sys.path.insert(0, os.path.join(HERE, ".."))
from conftest import BUILD, MODELS as FOLDER, ROOT  # noqa: E402
from stack import Process, free_port  # noqa: E402

PEERS = os.environ.get("PEERS_DIR", os.path.join(ROOT, "build", "peers"))
THREADS = int(os.environ.get("THREADS", "2"))
LOAD = os.path.join(BUILD, "tests/tools/load")


@dataclasses.dataclass(frozen=True)
class Model:
    key: str
    label: str
    file: str
    context: int  # longest prompt and answer that the benchmarks use

    @property
    def path(self):
        return os.path.join(FOLDER, self.file)


MODELS = {m.key: m for m in (
    Model("smol", "SmolLM2-135M", "SmolLM2-135M-Instruct.Q4_1.gguf", 8192),
    Model("qwen05", "Qwen-0.5B", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", 8448),
    Model("qwen15", "Qwen-1.5B", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", 8448))}


class Missing(Exception):
    """A peer that is not installed or does not start."""


class Prompts:
    """Token ids of prose that no engine has seen: each take() goes on where the last ended, from a random place on."""

    def __init__(self, model, text=None, seed=None):
        with open(text or os.path.join(FOLDER, "shakespeare.txt"), "rb") as f:
            text = f.read(3 << 20)
        done = subprocess.run([os.path.join(BUILD, "tests/tools/encode"), model.path], input=struct.pack("<II", 0, len(text)) + text,
                              capture_output=True, check=True)
        n = struct.unpack_from("<I", done.stdout)[0]
        self.ids = struct.unpack_from(f"<{n}I", done.stdout, 4)
        self.at = random.Random(seed).randrange(n)

    def take(self, n):
        if self.at + n > len(self.ids):
            self.at = 0
        self.at += n
        return list(self.ids[self.at - n:self.at])


def tree(pid):
    """pid and all its descendants."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f:
                    parents.setdefault(int(f.read().rsplit(")", 1)[1].split()[1]), []).append(int(name))
            except OSError:
                pass
    out, todo = [], [pid]
    while todo:
        out.append(todo.pop())
        todo += parents.get(out[-1], [])
    return out


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def signal_tree(pid, number):
    """Signals pid and its descendants, the latter first; returns them, none when pid is gone."""
    members = tree(pid) if os.path.exists(f"/proc/{pid}") else []
    signal_all(reversed(members), number)
    return members


def die_with_parent():
    """In a child before exec: the kernel kills it when the benchmark ends in whatever way."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Engine(Process):
    """A server of completions. Subclasses give command(); `settings` is what the table says of it."""

    name, label, settings, health, model_name = "engine", "", "", "/health", "bench"
    env, cwd, start_limit = {}, ROOT, 60

    def __init__(self, model):
        super().__init__()
        self.model, self.port, self.ready, self.held = model, free_port(), None, False

    def missing(self):
        """Why this engine cannot run here; None when it can."""
        return None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def answers(self):
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def start(self, timeout=None, outlive=False):
        """Starts the server and waits until it serves; `ready` is how many seconds that took. outlive: it may run on after this process."""
        if why := self.missing():
            raise Missing(why)
        start = time.monotonic()
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=self.cwd, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, start_new_session=True, preexec_fn=None if outlive else die_with_parent)
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > start + (timeout or self.start_limit):
                text = self.log()[-3000:]
                self.close()
                raise Missing(f"{self.label} does not start: {text}")
            time.sleep(0.005)
        self.ready = time.monotonic() - start
        return self

    @property
    def pid(self):
        return self.process.pid

    def cpu_seconds(self):
        total = 0
        for pid in tree(self.pid):
            try:
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                    fields = f.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
            except OSError:
                pass
        return total / os.sysconf("SC_CLK_TCK")

    def resident(self):
        """Bytes of memory of all its processes; pages that several share count once."""
        total = 0
        for pid in tree(self.pid):
            try:
                with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as f:
                    total += sum(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))
            except OSError:
                pass
        return total

    def body(self, ids, n):
        """A streaming greedy completion of n tokens behind the token ids."""
        return json.dumps({"model": self.model_name, "prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True}})

    def load_command(self, connections, *more):
        return [LOAD, "--url", self.url + "/v1/completions", "--requests", "-", "--connections", str(connections), *more]

    def load(self, bodies, connections):
        """What tests/tools/load prints, and its line for each request."""
        details = os.path.join(self.dir, "details")
        done = subprocess.run(self.load_command(connections, "--details", details), input="\n".join(bodies), capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise RuntimeError(f"load: {done.stderr}")
        result = json.loads(done.stdout)
        if result["failed"]:
            raise RuntimeError(f"{self.label}: {result['failed']} of {result['requests']} requests failed: {result['errors']}")
        with open(details, encoding="utf-8") as f:
            return result, [json.loads(line) for line in f]


class Kvgate(Engine):
    name, label, health = "kvgate", "kvgate", "/ready"
    KV = "1G"

    def __init__(self, model, *flags):
        super().__init__(model)
        self.flags = flags
        self.settings = " ".join([f"--threads {THREADS}", *flags]) + ", else defaults"

    def command(self):
        return [os.path.join(BUILD, "kvgate-worker"), "--model", self.model.path, "--served-model-name", self.model_name, "--host", "127.0.0.1",
                "--port", str(self.port), "--threads", str(THREADS), "--max-model-len", str(self.model.context), "--kv-cache-memory", self.KV,
                *self.flags]


class Llama(Engine):
    """llama.cpp's server. Its context is shared out among its sequences at start, so that their number is its best for the row at hand.

    flash: its attention; "on" is faster in long prompts, "off" in decoding behind them. LLAMA_BIN names another build's folder.
    """

    name, label = "llama", "llama-server"
    bin = os.environ.get("LLAMA_BIN", os.path.join(PEERS, "llama.cpp", "bin"))

    def __init__(self, model, sequences, context, flash="off"):
        super().__init__(model)
        self.sequences, self.context, self.flash = sequences, context, flash
        self.env = {"LD_LIBRARY_PATH": self.bin}
        self.settings = f"-t {THREADS} -np {sequences} -c {sequences * context} -fa {flash}, else defaults"

    def missing(self):
        return None if os.path.exists(os.path.join(self.bin, "llama-server")) else "llama-server is not installed (make peers)"

    def command(self):
        return [os.path.join(self.bin, "llama-server"), "-m", self.model.path, "--alias", self.model_name, "--host", "127.0.0.1", "--port",
                str(self.port), "-t", str(THREADS), "-np", str(self.sequences), "-c", str(self.sequences * self.context), "-fa", self.flash]


class Choices:
    """What was found best for a peer, by name, kept beside it so that later runs need not try again."""

    def __init__(self, path=None):
        self.path = path or os.path.join(PEERS, "run", "choices.json")

    def all(self):
        try:
            with open(self.path, encoding="utf-8") as f:
                return json.load(f)
        except (OSError, ValueError):
            return {}

    def get(self, name):
        return self.all().get(name)

    def put(self, name, value):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        choices = {**self.all(), name: value}
        with open(self.path, "w", encoding="utf-8") as f:
            json.dump(choices, f, indent=1)


def llama_bench(model, n_prompt, n_new, choices):
    """Tokens a second by llama.cpp's own benchmark, without a server, with the better of its two kinds of attention."""
    program = os.path.join(Llama.bin, "llama-bench")
    if not os.path.exists(program):
        raise Missing("llama-bench is not installed (make peers)")
    name = f"llama-bench {model.key}, {'prompts' if n_prompt else 'decode'}"
    flash = choices.get(name)
    done = subprocess.run([program, "-m", model.path, "-t", str(THREADS), "-fa", flash or "0,1", "-p", str(n_prompt), "-n", str(n_new), "-r", "1", "-o",
                           "json"], capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": Llama.bin})
    if done.returncode:
        raise RuntimeError(f"llama-bench: {done.stderr[-2000:]}")
    best = max(json.loads(done.stdout), key=lambda result: result["avg_ts"])
    if not flash:
        choices.put(name, str(int(best["flash_attn"])))
    return best["avg_ts"]


class Vllm(Engine):
    """vLLM on the CPU with the same weights in BF16 (tests/tools/gguf_to_hf.py), from a folder of its own."""

    name, label, start_limit, cwd = "vllm", "vLLM-CPU", 1800, "/"
    KV_GB = 2
    guard = None  # ends the whole process group when the benchmark dies in whatever way
    settings = f"BF16 weights dequantized from the same file, {THREADS} threads bound, KV {KV_GB} GB, prefix caching, 32 sequences"
    python = os.path.join(PEERS, "vllm", "bin", "python")

    def __init__(self, model):
        super().__init__(model)
        self.state = os.path.join(PEERS, "run", f"vllm-{model.key}.json")
        preload = [p for p in (os.path.join(PEERS, "vllm", "lib", "libiomp5.so"), "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
                   if os.path.exists(p)]
        self.env = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": str(self.KV_GB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(n) for n in range(THREADS)), "VLLM_CACHE_ROOT": os.path.join(PEERS, "cache"),
                    "TORCHINDUCTOR_CACHE_DIR": os.path.join(PEERS, "cache", "inductor")}
        if preload:
            self.env["LD_PRELOAD"] = ":".join(preload)

    def missing(self):
        return None if os.path.exists(os.path.join(PEERS, ".vllm")) else "vllm-cpu is not installed (make peers)"

    def weights(self):
        """The folder with the BF16 weights, written at the first use."""
        folder = os.path.join(PEERS, "hf", self.model.key)
        if not os.path.exists(os.path.join(folder, "model.safetensors")):
            done = subprocess.run([self.python, os.path.join(ROOT, "tests", "tools", "gguf_to_hf.py"), self.model.path, folder, "--tokenizer"],
                                  capture_output=True, text=True, check=False)
            if done.returncode:
                raise Missing(f"vLLM-CPU has no weights: {done.stderr[-1000:]}")
        return folder

    def command(self):
        return [self.python, "-m", "vllm.entrypoints.cli.main", "serve", self.weights(), "--served-model-name", self.model_name, "--host", "127.0.0.1",
                "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", str(min(self.model.context, 8192)), "--max-num-seqs", "32",
                "--enable-prefix-caching"]

    def start(self, timeout=None, outlive=False):
        """Takes the one that hold() left stopped, if there is one; never starts a second beside it."""
        if self.take_held():
            return self
        super().start(timeout, outlive)
        if not outlive:
            self.guard = subprocess.Popen(["sh", "-c", 'read -r _; kill -KILL -- "-$1"', "sh", str(self.pid)], stdin=subprocess.PIPE,
                                          start_new_session=True)
        return self

    def take_held(self, limit=60):
        try:
            with open(self.state, encoding="utf-8") as f:
                held = json.load(f)
        except FileNotFoundError:
            return False
        members = signal_tree(held["pid"], signal.SIGCONT)
        if not members:
            os.unlink(self.state)
            return False
        self.port, end = held["port"], time.monotonic() + limit
        while not self.answers():
            if time.monotonic() > end:
                raise Missing(f"the held vLLM (pid {held['pid']}) does not answer within {limit} s: release it")
            time.sleep(0.1)
        self.held, self.held_pid, self.ready = True, held["pid"], held["ready"]
        return True

    @property
    def pid(self):
        return self.held_pid if self.held else self.process.pid

    def hold(self):
        """Leaves one behind that takes no processor time until the next start()."""
        self.start(outlive=True)
        if not self.held:
            os.makedirs(os.path.dirname(self.state), exist_ok=True)
            with open(self.state, "w", encoding="utf-8") as f:
                json.dump({"pid": self.pid, "port": self.port, "ready": self.ready}, f)
        signal_tree(self.pid, signal.SIGSTOP)

    def release(self):
        if not os.path.exists(self.state):
            return
        with open(self.state, encoding="utf-8") as f:
            pid = json.load(f)["pid"]
        os.unlink(self.state)
        signal_tree(pid, signal.SIGKILL)

    def stop(self, timeout=20.0):
        if self.held:
            signal_tree(self.pid, signal.SIGSTOP)
        elif self.process is not None:
            members = tree(self.pid)
            super().stop(timeout)
            signal_all(members[1:], signal.SIGKILL)  # the engine core, should it outlive its parent
            if self.guard:
                self.guard.kill()
                self.guard.wait()
                self.guard = None
