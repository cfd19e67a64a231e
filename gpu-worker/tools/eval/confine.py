"""Runs generated Python in a confined child.

    kvgate-eval --- supervisor (confined, does not run the program; pid 1 of its namespace) --- the program

What holds, where the kernel allows it: namespaces of its own for user, network (no interface, not even loopback), mounts, processes
and IPC; every file system read-only, with a small memory file system over /tmp and /dev/shm; a system call filter that refuses sockets, ptrace,
mounts, keys, and what would multiply the limit on memory: further processes (threads are allowed), memory files, shared segments; no new
privileges; limits on CPU time, memory, file size, open files; an empty environment; nobody's uid where the caller is root. Where namespaces are refused the limits and the filter remain. `protections()` says which are on; at least one of
"network" and "filter" has to be, or nothing is run.

A program has passed when its last line was reached: exit(0) before that is no pass.
"""
import dataclasses
import functools
import json
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import time

MEMORY, FILE_SIZE, OUTPUT = 1 << 30, 8 << 20, 1 << 16
NEEDED = ("network", "filter")


class NotConfined(Exception):
    """The child cannot be confined here."""


@dataclasses.dataclass
class Result:
    passed: bool
    why: str           # "" | "timeout" | the last line of the error
    protections: tuple  # words: see protections()


# Runs in a fresh interpreter: argv = [options as JSON]; the program on stdin; writes lines of JSON to descriptor 3.
CHILD = r'''
import ctypes, json, os, resource, signal, struct, sys
options = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
program = sys.stdin.buffer.read()
on = []

def call(name, *args):
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def give_up_root():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is ours again
    on.append("unprivileged")

def namespaces():
    uid, gid = os.getuid(), os.getgid()
    NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
    call("unshare", NEWUSER | NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{gid} {gid} 1")
    on.extend(["network", "processes"])

def read_only():
    MS_REC, MS_PRIVATE = 0x4000, 1 << 18
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    # mount_setattr(AT_FDCWD, "/", AT_RECURSIVE, {MOUNT_ATTR_RDONLY}): recursive, unlike a remount
    attr = struct.pack("QQQQ", 1, 0, 0, 0)
    if libc.syscall(442, -100, b"/", 0x8000, attr, len(attr)) != 0:
        raise OSError(ctypes.get_errno(), "mount_setattr")
    for place in (b"/tmp", b"/dev/shm"):
        if os.path.isdir(place):
            call("mount", b"tmpfs", place, b"tmpfs", 2 | 4 | 8, b"size=16m,mode=0777")  # nosuid, nodev, noexec
    on.append("files")

# Architecture, clone, and what is refused: also fork, vfork, memfd_create and shmget. clone3's flags lie in memory, where a filter
# cannot look: to the C library it is not there, which then takes clone.
FILTERED = {"x86_64": (0xc000003e, 56, [29, 57, 58, 319, 41, 42, 43, 49, 50, 53, 101, 155, 165, 166, 246, 248, 249, 250, 272, 288, 298, 304, 308, 310, 311, 313, 321, 323, 425, 428, 429, 430, 431, 432, 442]),
            "aarch64": (0xc00000b7, 220, [194, 279, 198, 199, 200, 201, 202, 203, 242, 117, 39, 40, 41, 97, 104, 105, 217, 218, 219, 241, 265, 268, 270, 271, 273, 280, 282, 425, 428, 429, 430, 431, 432, 442])}

def system_calls():
    machine = os.uname().machine
    arch, clone, numbers = FILTERED[machine]
    op = lambda code, jt, jf, k: struct.pack("HBBI", code, jt, jf, k)
    LD, JEQ, JGE, JSET, RET, EPERM, ENOSYS, KILL, ALLOW = 0x20, 0x15, 0x35, 0x45, 0x06, 0x00050001, 0x00050026, 0x80000000, 0x7fff0000
    code = [op(LD, 0, 0, 4), op(JEQ, 1, 0, arch), op(RET, 0, 0, KILL), op(LD, 0, 0, 0)]
    if machine == "x86_64":
        code += [op(JGE, 0, 1, 0x40000000), op(RET, 0, 0, KILL)]  # the x32 numbers of the same calls
    for number in numbers:
        code += [op(JEQ, 0, 1, number), op(RET, 0, 0, EPERM)]
    code += [op(JEQ, 0, 1, 435), op(RET, 0, 0, ENOSYS)]  # clone3
    code += [op(JEQ, 0, 3, clone), op(LD, 0, 0, 16), op(JSET, 1, 0, 0x10000), op(RET, 0, 0, EPERM)]  # unless CLONE_THREAD
    code.append(op(RET, 0, 0, ALLOW))
    raw = ctypes.create_string_buffer(b"".join(code))
    prog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(raw)))
    if libc.prctl(22, 2, prog, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    on.append("filter")

def limits():
    for name, value in (("RLIMIT_CPU", options["seconds"] + 1), ("RLIMIT_AS", options["memory"]), ("RLIMIT_FSIZE", options["file_size"]),
                        ("RLIMIT_NOFILE", 64), ("RLIMIT_NPROC", 64), ("RLIMIT_CORE", 0), ("RLIMIT_STACK", 64 << 20)):
        resource.setrlimit(getattr(resource, name), (value, value))
    on.extend(["time", "memory"])

def attempt(step):
    try:
        step()
    except (OSError, KeyError, AttributeError):
        pass

def say(**what):
    os.write(3, (json.dumps(what) + "\n").encode())

if options["give_up_root"]:
    attempt(give_up_root)
attempt(namespaces)
if "network" in on:
    attempt(read_only)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
worker = os.fork()  # the first in the new process namespace: it ends, all of it ends
if worker == 0:
    signal.alarm(options["seconds"] + 5)
    inner = os.fork()
    if inner:
        # One that is no ancestor of a namespace's first process cannot be waited for: the supervisor alone waits here.
        while True:
            pid, status = os.wait()
            if pid == inner:
                os._exit(0 if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 else 1)
    os.chdir("/tmp" if "files" in on else "/")
    limits()
    attempt(system_calls)
    say(protections=on)
    if not set(options["needed"]) & set(on):
        os._exit(1)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        say(token=options["token"])
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}"[:300])
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(worker, 0)
os._exit(0 if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 else 1)
'''


def _read_lines(pipe, end):
    """What the child says until it closes the pipe or time is up; None = time is up."""
    data = b""
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while len(data) < OUTPUT:
            if not ready.select(max(0, end - time.monotonic())):
                return None
            piece = os.read(pipe, 65536)
            if not piece:
                break
            data += piece
    return data.decode(errors="replace").splitlines()


def _parse(lines):
    """What the lines say. The program can write lines as well, but only after the first: that alone is believed of protections."""
    said = {}
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict):
            continue
        if number == 0 and "protections" in value:
            said["protections"] = tuple(value["protections"])
        said.update({key: value[key] for key in ("token", "error") if isinstance(value.get(key), str)})
    return said


def _readable_by_all(path):
    """Whether nobody can read the path: each folder above it lets others pass."""
    while path != "/":
        if not os.stat(path).st_mode & (stat.S_IROTH if os.path.isfile(path) else stat.S_IXOTH):
            return False
        path = os.path.dirname(path)
    return True


@functools.lru_cache(1)
def _interpreter():
    """(program, whether the child may give up root): nobody must be able to read the interpreter and its library."""
    if os.geteuid() != 0 or _readable_by_all(os.path.realpath(os.__file__)) and _readable_by_all(os.path.realpath(sys.executable)):
        return sys.executable, True
    system = "/usr/bin/python3"
    return (system, True) if os.path.exists(system) else (sys.executable, False)


def run(program, seconds=10, memory=MEMORY):
    """Runs the program for at most `seconds`. Raises NotConfined where neither network namespace nor system call filter holds."""
    token = secrets.token_hex(16)
    python, give_up_root = _interpreter()
    options = {"give_up_root": give_up_root, "seconds": int(seconds), "memory": memory, "file_size": FILE_SIZE, "needed": NEEDED, "token": token}
    reader, writer = os.pipe()
    launch = [python, "-I", "-S", "-c", f"import os; os.dup2({writer}, 3); os.closerange(4, 256)\n" + CHILD, json.dumps(options)]
    start = time.monotonic()
    child = subprocess.Popen(launch, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[writer],
                             start_new_session=True, env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, cwd="/")
    os.close(writer)
    try:
        try:
            child.stdin.write(program.encode(errors="surrogatepass"))  # what is no text is no program either: the child says so
            child.stdin.close()
        except BrokenPipeError:
            pass
        lines = _read_lines(reader, start + seconds + 2)
    finally:
        os.close(reader)
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    if lines is None:
        return Result(False, "timeout", ())
    late = time.monotonic() - start >= seconds  # the limit of processor time may end it first
    said = _parse(lines)
    on = said.get("protections", ())
    if "protections" in said and not set(NEEDED) & set(on):
        raise NotConfined("neither a network namespace nor a system call filter can be had here: generated code is not run")
    passed = said.get("token") == token
    return Result(passed, "" if passed else said.get("error", "timeout" if late else "ended early"), on)


@functools.lru_cache(1)
def protections():
    """The words of what is on here: unprivileged, network, processes, files, filter, time, memory."""
    result = run("pass", 10)
    if not result.passed:
        raise NotConfined(f"a confined child does not run here: {result.why}")
    return result.protections
