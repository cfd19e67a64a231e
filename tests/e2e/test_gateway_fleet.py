"""Several gateways before one fleet: what they share is in Redis."""
import concurrent.futures
import threading

import requests

from gateway import Gateway, chat
from stack import Redis, Worker, wait_until

LONG = "A rule that everybody in this house has to know by heart. " * 60


def test_16_cold_prompts_at_once_over_four_gateways_are_computed_by_at_most_two_workers():
    """The first choice reserves the prompt's blocks, so that whoever asks next, at whichever gateway, follows it."""
    with Redis() as redis:
        workers = [Worker(redis=redis, worker_id=f"w{i}", kv_cache_memory="64M").start() for i in range(4)]
        gateways = [Gateway(redis, servers=[w.gateway_addr for w in workers]).start() for _ in range(4)]
        try:
            for gateway in gateways:
                wait_until(lambda: len(gateway.workers()) == 4, 20, "all workers seen")
            for turn in range(3):
                before = [w.metric("kvgate_computed_prompt_tokens_total") for w in workers]
                together = threading.Barrier(16)

                def ask(i):
                    together.wait()
                    body = {**chat(f"turn {turn}. {LONG}"), "max_tokens": 1, "temperature": 0}
                    return requests.post(gateways[i % 4].url + "/v1/chat/completions", json=body, timeout=120)
                with concurrent.futures.ThreadPoolExecutor(16) as pool:
                    replies = list(pool.map(ask, range(16)))
                assert [r.status_code for r in replies] == [200] * 16
                used = {r.headers["X-Kvgate-Worker"] for r in replies}
                after = [w.metric("kvgate_computed_prompt_tokens_total") for w in workers]
                assert len(used) <= 2 and sum(b > a for a, b in zip(before, after)) <= 2, (used, before, after)
        finally:
            for gateway in gateways:
                gateway.close()
            for worker in workers:
                worker.close()
