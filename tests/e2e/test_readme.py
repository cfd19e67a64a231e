"""What README.md and CONTRIBUTING.md name exists: files, make targets, flags, folders."""
import os
import re
import subprocess

import pytest

from conftest import BUILD, ROOT

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "nginx-module/README.md", "gpu-worker/README.md", "redis-schemas/README.md"]


def text(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#\s]+)", text(name)):
        if "://" not in target:
            assert os.path.exists(os.path.join(ROOT, os.path.dirname(name), target)), f"{name}: {target}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_named_in_code_spans_exist(name):
    top = {entry for entry in os.listdir(ROOT) if os.path.isdir(os.path.join(ROOT, entry))} - {"build"}
    for span in re.findall(r"`([\w./*-]+/[\w./*-]*)`", text(name)):
        if span.split("/")[0] in top:
            found = subprocess.run(["bash", "-c", f"compgen -G '{span.rstrip('/')}'"], cwd=ROOT, capture_output=True, check=False)
            assert found.returncode == 0, f"{name}: {span}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name):
    targets = {word for names in re.findall(r"^([a-z][a-z -]*):", text("Makefile"), re.M) for word in names.split()}
    for words in re.findall(r"(?:^ {4}|`)make ((?:[a-z][a-z-]*(?![\w/=-]) ?)+)", text(name), re.M):
        for word in words.split():
            assert word in targets or word.endswith("-") and any(t.startswith(word) for t in targets), f"{name}: make {word}"


def test_make_help_names_every_target():
    names = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", text("Makefile"), re.M).group(1).replace("\\\n", " ")
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first = {name for column in re.findall(r"^  (\S.*?)(?:  |$)", listed, re.M) for name in column.split(", ")}
    for name in re.sub(r"\$\([^)]*\)", "", names).split():
        assert name in first, f"make help: no {name}"


@pytest.mark.parametrize("name", ["README.md", "gpu-worker/README.md", "conf/worker.env", "docker-compose.yml"])
def test_worker_flags_exist(name):
    known = "".join(subprocess.run([os.path.join(BUILD, program), "--help"], capture_output=True, text=True, check=True).stdout
                    for program in ("kvgate-worker", "kvgate-eval", "kvgate-score", "kvgate-quantize"))
    lines = [line for line in text(name).splitlines() if not re.search(r"redis-|kvgate-prompt|docker|protected-mode", line)]
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)):
        assert flag == "--help" or re.search(rf"(?<![\w-]){flag}(?![\w-])", known), f"{name}: no program has {flag}"


def table(name, heading):
    """The first cells of the table under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", text(name), re.M | re.S).group(1)
    return re.findall(r"^\| `([^`]+)`", section, re.M)


def module_source():
    folder = os.path.join(ROOT, "nginx-module")
    return "".join(text(os.path.join("nginx-module", name)) for name in sorted(os.listdir(folder)) if name.endswith(".c"))


def test_the_modules_readme_lists_its_directives_variables_and_reasons():
    source = module_source()
    commands = re.search(r"ngx_http_kvgate_commands\[\] = \{(.*?)^\};", source, re.M | re.S).group(1)
    assert sorted(cell.split()[0] for cell in table("nginx-module/README.md", "Directives")) == sorted(re.findall(r'ngx_string\("(\w+)"\)', commands))
    variables = re.search(r"ngx_http_kvgate_variables\[\] = \{(.*?)^\};", source, re.M | re.S).group(1)
    assert table("nginx-module/README.md", "Variables") == ["$" + name for name in re.findall(r'ngx_string\("(\w+)"\)', variables)]
    reasons = re.search(r"ngx_http_kvgate_reasons\[\w+\] = \{(.*?)^\};", source, re.M | re.S).group(1)
    assert sorted(table("nginx-module/README.md", "Reasons")) == sorted(re.findall(r'ngx_string\("(\w+)"\)', reasons))


FLAGS = """--model --served-model-name --host --port --max-model-len --max-num-seqs --max-num-batched-tokens --block-size
--enable-prefix-caching --enable-chunked-prefill --gpu-memory-utilization --scheduling-policy --api-key --kv-cache-memory --threads
--device --redis --worker-id --gateway-listen --num-kv-blocks --cpu-isa --version""".split()


def test_help_names_every_flag_with_its_default():
    done = subprocess.run([os.path.join(BUILD, "kvgate-worker"), "--help"], capture_output=True, text=True, check=True)
    described = dict(re.findall(r"^  (--[a-z-]+)[^\n]*\n((?: {8}[^\n]*\n)+)", done.stdout, re.M))
    assert set(FLAGS) <= set(described)
    for flag in FLAGS[:-1]:
        assert re.search(r"default|required|instead of", described[flag]), (flag, described[flag])


@pytest.mark.parametrize("program", ["kvgate-worker", "kvgate-prompt"])
def test_help_works(program):
    done = subprocess.run([os.path.join(BUILD, program), "--help"], capture_output=True, text=True, check=True)
    assert program in done.stdout and max(map(len, done.stdout.splitlines())) <= 132
