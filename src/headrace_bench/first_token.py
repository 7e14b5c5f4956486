"""The bars of the first token, each measured side by side in one run.

    start     seconds until a Headrace is ready: with a file that it never saw here, and with one that it knows
    decode    tokens per second of one stream against a bare `llama_decode` loop on the same file
    peers     scenarios of a neutral load client against llama-server and Headrace, in turn
    overhead  what the server adds around the engine with a long prompt: receive + route + tokenize + deliver
    streams   many open streams on a scripted engine: tokens lost, gaps, memory, idle CPU

Rules: both sides take turns, so that a noisy machine is noisy for both; a ratio is taken within a round and the median
over rounds is the figure; every round stays in the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace_bench import first_start
from headrace_bench.figures.stats import median, percentile
from headrace_bench.lab import Lab, words
from headrace_bench.server import Server
from headrace_bench.wire import Answer, chat

LIMIT_S = 900.0
"""Longest time for one child; the load client gives up on a silent stream after 300 s by itself."""

BARE = """
import json, sys, time
import llama_cpp.llama_cpp as C
path, prompt, n, threads = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
log = C.llama_log_callback(lambda *_: None)
C.llama_log_set(log, None)
C.llama_backend_init()
model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
params = C.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch, params.flash_attn_type = 4096, threads, threads, 1
context = C.llama_init_from_model(model, params)
vocab = C.llama_model_get_vocab(model)
ids = (C.llama_token * 4096)()
count = C.llama_tokenize(vocab, prompt, len(prompt), ids, 4096, False, True)
chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
for attempt in range(2):  # the first one warms up
    C.llama_memory_clear(C.llama_get_memory(context), True)
    assert C.llama_decode(context, C.llama_batch_get_one(ids, count)) == 0
    token = (C.llama_token * 1)(C.llama_sampler_sample(chain, context, -1))
    start = time.perf_counter()
    for _ in range(n):
        assert C.llama_decode(context, C.llama_batch_get_one(token, 1)) == 0
        token[0] = C.llama_sampler_sample(chain, context, -1)
    seconds = time.perf_counter() - start
print(json.dumps(n / seconds))
"""


def start(lab: Lab) -> dict[str, Any]:
    """Bars: the first start, which measures the machine, <= 25 s; later ones <= 2.5 s. Raises Fault: it failed."""
    with first_start.cache() as place:
        own = replace(lab, cache=place)
        first = first_start.until_ready(own.headrace())
        known = [first_start.until_ready(own.headrace()) for _ in range(lab.rounds)]
    return {"first_s": first, "known_s": median(known), "rounds": known}


def decode(lab: Lab) -> dict[str, Any]:
    """Bar: >= 0.95. The peer's ratio stands beside it: both pay for the client, which shares the cores."""
    question = "Write a long story about a river."
    body = {
        "model": lab.model.stem,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 300,
        "stream_options": {"include_usage": True},
    }
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    rounds: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(lab.headrace())]
        if lab.programs.llama_server is not None:
            servers.append(stack.enter_context(lab.llama_server()))
        # Greedy: every answer of a server is the same.
        tokens = [asyncio.run(chat(server.url, body)).tokens or 0 for server in servers]
        for i in range(lab.rounds):
            bare = subprocess.run(
                [sys.executable, "-c", BARE, str(lab.model), prompt, str(tokens[0] - 1), str(lab.threads)],
                capture_output=True,
                check=True,
                text=True,
                timeout=LIMIT_S,
            )
            found = {"bare_tok_s": float(json.loads(bare.stdout))}
            for server in servers if i % 2 else servers[::-1]:
                found[f"{server.name}_tok_s"] = _rate(asyncio.run(chat(server.url, body)))
            rounds.append(found)
    ratios = {
        "ratio" if server is servers[0] else "peer_ratio": median(
            [r[f"{server.name}_tok_s"] / r["bare_tok_s"] for r in rounds]
        )
        for server in servers
    }
    return {**ratios, "rounds": rounds}


def _rate(answer: Answer) -> float:
    assert answer.tokens is not None
    assert answer.tokens > 150, "too short an answer to time"
    return answer.rate


def peers(lab: Lab, only: Sequence[str]) -> dict[str, Any]:
    """Bars: single p50 <= 1.08, shared cold p95 <= 0.5, leave after <= 1.3 of alone."""
    assert lab.peerload is not None
    rounds: list[dict[str, Any]] = []
    with lab.headrace() as ours, lab.llama_server() as theirs:
        for i in range(lab.rounds):
            pair = {}
            order = (ours, theirs) if i % 2 else (theirs, ours)
            for server in order:
                pair[server.name] = _peerload(lab, server, only, seed=i + 1)
            rounds.append(pair)
            print(json.dumps(_figures([pair])), file=sys.stderr, flush=True)
    return {**_figures(rounds), "rounds": rounds}


def _peerload(lab: Lab, server: Server, only: Sequence[str], seed: int) -> Any:
    out = lab.folder / f"peerload-{server.name}-{seed}.json"
    command = [sys.executable, str(lab.peerload), "--url", server.url, "--model", lab.model.stem]
    subprocess.run(
        [*command, "--only", ",".join(only), "--seed", str(seed), "--out", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )
    return json.loads(out.read_text())


def _figures(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds of the ratios within each."""

    def ratio(*path: str) -> float:
        values = []
        for pair in rounds:
            ours, theirs = pair["headrace"], pair["llama-server"]
            for key in path:
                ours, theirs = ours[key], theirs[key]
            values.append(ours / theirs)
        return round(median(values), 3)

    found: dict[str, float] = {}
    first = rounds[0]["headrace"]
    if "single" in first:
        found["single_ttft_p50"] = ratio("single", "ttft", "p50")
        found["single_gap_p50"] = ratio("single", "gap", "p50")
        found["single_gap_p99"] = ratio("single", "gap", "p99")
    if "shared" in first:
        found["shared_cold_p95"] = ratio("shared", "cold", "p95")
        found["shared_warm_p95"] = ratio("shared", "warm", "p95")
    if "leave" in first:
        ours = [pair["headrace"]["leave"] for pair in rounds]
        found["leave"] = round(median([leave["ttft_after_hang_up"] / leave["ttft_alone"] for leave in ours]), 3)
    return found


def overhead(lab: Lab, requests: int = 100) -> dict[str, Any]:
    """Bar: p95 <= 5 ms with a prompt of 1,000 tokens.

    The system prompt repeats, as a product's does; the question does not.
    """
    rng = random.Random(7)
    system = words(rng, 950)
    added: list[float] = []
    fresh: list[float] = []
    with lab.headrace() as server:
        for i in range(requests):
            text = system if i % 2 else words(rng, 950)
            answer = asyncio.run(chat(server.url, _long(lab, text, rng)))
            t = answer.timeline
            assert t is not None
            if t["ttft"] is None:
                continue  # the model ended at once: there was no first text to time
            ms = t["receive"] + t["route"] + t["tokenize"] + t["deliver"]
            (added if i % 2 else fresh).append(ms)
    both = added + fresh
    return {
        "p50_ms": percentile(both, 50),
        "p95_ms": percentile(both, 95),
        "max_ms": max(both),
        "p95_ms_new_text": percentile(fresh, 95),
        "p95_ms_repeated_system_prompt": percentile(added, 95),
        "requests": len(both),
    }


def _long(lab: Lab, system: str, rng: random.Random) -> dict[str, Any]:
    return {
        "model": lab.model.stem,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": words(rng, 40)}],
        "temperature": 0,
        "max_tokens": 4,
        "headrace": {"timings": True},
    }


def streams(lab: Lab, n: int = 256, rate: float = 30.0, tokens: int = 300, idle_s: float = 10.0) -> dict[str, Any]:
    """Bars: no token lost or reordered, gap p99 <= 1.5 of the script's, server RSS < 200 MB, idle CPU < 1 %."""
    flags = [f"engine.{k}={v}" for k, v in {"slots": 256, "max_running": 256, "cells": 1 << 18}.items()]
    settings = [part for flag in flags for part in ("--set", flag)]
    with lab.headrace(*settings, model=f"scripted:{rate:g}") as server:
        start = server.cpu()
        time.sleep(idle_s)
        idle = (server.cpu() - start) / idle_s
        answers, rss = asyncio.run(_together(server, n, tokens))
    whole = "".join(f"{i} " for i in range(1, tokens + 1))
    gaps = [g * 1e3 for answer in answers for g in answer.gaps]
    return {
        "streams": n,
        "wrong": sum("".join(a.texts) != whole for a in answers),
        "scripted_gap_ms": 1e3 / rate,
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps),
        "gap_p99_ratio": (percentile(gaps, 99) or 0) * rate / 1e3,
        "server_rss_mb": rss / 1e6,
        "idle_cpu_percent": idle * 100,
    }


async def _together(server: Server, n: int, tokens: int) -> tuple[list[Answer], int]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "count"}], "max_tokens": tokens}
    calls = [asyncio.ensure_future(chat(server.url, body)) for _ in range(n)]
    most = 0
    while any(not call.done() for call in calls):
        await asyncio.wait(calls, timeout=1.0)
        most = max(most, server.rss())
    return [call.result() for call in calls], most
