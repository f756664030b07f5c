"""The whole application in a Ray cluster, over HTTP: two CPU shards, cold experts, staging."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
import ray
from ray import serve
from ray.util import list_named_actors

from actors.config import ShardConfig
from actors.messages import EngineStats
from actors.names import CONTROL_GROUP, EXPERT_CACHE
from deployment.app import build
from deployment.config import ApiConfig, EngineConfig, SchedulerConfig
from placement.profile import Profile, check

pytestmark = pytest.mark.ray

MODEL = "tiny"
DEADLINE_S = 90.0


def wait_until(is_true: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)  # between polls of a condition


@pytest.fixture(scope="module")
def base_url(checkpoint_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The application, served on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = EngineConfig(
            checkpoint=checkpoint_directory,
            shard=ShardConfig(world_size=2, device="cpu", max_resident_pages=20, num_staging_slots=4),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_waiting_requests=4),
            api=ApiConfig(model_name=MODEL, thinks_by_default=False),
        )
        serve.run(build(config), name="hotset")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S)


def engine_stats() -> EngineStats:
    return serve.get_deployment_handle("engine", "hotset").stats.remote().result(timeout_s=30)


def wait_until_idle() -> None:
    wait_until(lambda: engine_stats().num_running + engine_stats().num_waiting == 0, "no request is open")


def complete(client: openai.OpenAI, prompt: str) -> list[str]:
    """Eight greedy tokens."""
    reply = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=8, logprobs=0, extra_body={"ignore_eos": True}
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 8
    return logprobs.tokens


def test_the_official_client_gets_the_same_text_streamed_and_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.system_fingerprint == chunks[0].system_fingerprint
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 12
    assert [m.id for m in client.models.list()] == [MODEL]


def test_the_official_client_gets_the_same_response_streamed_and_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 12,
        "extra_body": {"seed": 3},
    }
    whole = client.responses.create(**options)
    *events, last = client.responses.create(**options, stream=True)
    assert last.type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == last.response.output_text == "".join(deltas) != ""


def test_requests_together_give_the_tokens_they_give_alone(client: openai.OpenAI) -> None:
    prompts = ["The cat", "sat on the mat, and a longer prompt is cut into several chunks", "x", "on"]
    alone = [complete(client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt), prompts)) == alone
    traffic = engine_stats().traffic
    assert traffic.num_cold > 0
    assert traffic.num_hot > 0
    assert traffic.staged_bytes > 0


def test_a_client_that_leaves_frees_what_its_request_held(base_url: str) -> None:
    body = {"model": MODEL, "prompt": "go on", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
        next(response.iter_lines())
        assert engine_stats().num_running == 1
    wait_until_idle()
    stats = engine_stats()
    assert stats.num_free_blocks == stats.num_blocks - 1  # but for the null block


def test_too_many_requests_are_told_to_come_back(base_url: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 24, "ignore_eos": True}

    def post(_: int) -> httpx.Response:
        return httpx.post(f"{base_url}/v1/completions", json=body, timeout=DEADLINE_S)

    with ThreadPoolExecutor(14) as pool:
        responses = list(pool.map(post, range(14)))
    refused = [r for r in responses if r.status_code == 429]
    assert sorted({r.status_code for r in responses}) == [200, 429]
    assert len(refused) <= 14 - 8  # four run, four wait
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert all(r.json()["error"]["type"] == "rate_limit_exceeded" for r in refused)


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ("chat/completions", {"messages": "hello"}, 400, "messages"),
        ("completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("completions", {"prompt": [5] * 3000}, 400, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "temperature": float("nan")}, 400, "temperature"),
        ("completions", b'{"model": "tiny", "prompt": "\xff"}', 400, "body"),
        ("completions", b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413, "body"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_refused_by_name_and_the_engine_lives_on(
    path: str, body: dict[str, Any] | bytes, status: int, field: str, base_url: str, client: openai.OpenAI
) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{base_url}/v1/{path}", content=content, headers=headers, timeout=DEADLINE_S)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].startswith(field)
    assert complete(client, "still there")


def test_a_lost_shard_ends_streams_with_an_error_and_the_engine_comes_back(
    base_url: str, client: openai.OpenAI
) -> None:
    before = complete(client, "The cat")
    body = {"model": MODEL, "prompt": "go on", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(shard_pid(), signal.SIGKILL)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert "error" in json.loads(events[-2])
    refusals = [refusal_while_down(base_url) for _ in range(2)]
    assert [r.json()["error"]["code"] for r in refusals] == ["engine_dead"] * 2
    assert all(int(r.headers["retry-after"]) >= 1 for r in refusals)
    assert all(r.elapsed.total_seconds() < 8 for r in refusals)
    wait_until(lambda: is_healthy(base_url) and is_answering(client), "it is back")
    assert complete(client, "The cat") == before


def test_the_placement_of_every_rank_can_be_read(base_url: str) -> None:
    placement = httpx.get(f"{base_url}/v1/placement", timeout=30).raise_for_status().json()
    assert placement["arm"] is None
    assert [rank["rank"] for rank in placement["ranks"]] == [0, 1]
    for rank in placement["ranks"]:
        assert sum(rank["num_hot_pages"]) == 20
        assert rank["adaptation"] is None
    paused = httpx.post(f"{base_url}/v1/placement/pause", timeout=30).raise_for_status().json()
    assert paused == placement, "there is nothing to pause"


def test_the_profile_counts_every_routed_token(base_url: str, client: openai.OpenAI) -> None:
    def profile() -> Profile:
        response = httpx.get(f"{base_url}/v1/placement/profile", params={"label": "test"}, timeout=30)
        return msgspec.json.decode(response.raise_for_status().content, type=Profile)

    wait_until_idle()
    before = profile()
    complete(client, "A prompt of some length.")
    wait_until_idle()
    after = profile()
    check(after)
    num_prefill = after.prefill.num_tokens - before.prefill.num_tokens
    num_decode = after.decode.num_tokens - before.decode.num_tokens
    assert num_prefill == len("A prompt of some length.") + 1  # and the token that begins every prompt
    assert num_decode == 7  # the eighth token is sampled, not computed
    new = sum(after.decode.counts[0]) - sum(before.decode.counts[0])
    assert new == num_decode * 3  # experts a token of the tiny model


def test_a_lost_expert_cache_changes_no_token_and_a_new_one_takes_its_pool(client: openai.OpenAI) -> None:
    before = complete(client, "The cat")
    [namespace] = {actor["namespace"] for actor in list_named_actors(all_namespaces=True) if is_cache(actor)}
    cache = ray.get_actor(EXPERT_CACHE, namespace)
    owner = ray.get(cache.load.remote([]))[0].segment.pid
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, client, "The cat")
        os.kill(owner, signal.SIGKILL)
        assert running.result() == before
    assert complete(client, "The cat") == before

    def is_adopted() -> bool:
        try:
            stats = ray.get(cache.stats.options(concurrency_group=CONTROL_GROUP).remote(), timeout=10)
        except ray.exceptions.RayError:  # not yet there again
            return False
        return bool(stats.is_loaded)

    wait_until(is_adopted, "a new cache has the pool")
    assert ray.get(cache.load.remote([]))[0].segment.pid != owner
    assert complete(client, "The cat") == before


def is_cache(actor: dict[str, str]) -> bool:
    return actor["name"] == EXPERT_CACHE


def refusal_while_down(base_url: str) -> httpx.Response:
    response = httpx.post(f"{base_url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=30)
    assert response.status_code == 503, response.text
    assert not is_healthy(base_url)
    assert httpx.get(f"{base_url}/health/live", timeout=10).status_code == 200
    return response


def shard_pid() -> int:
    """Process of a shard of this cluster, by the title that Ray gives it."""
    family = psutil.Process().children(recursive=True)
    # "ray::GPUShard", with the name of the method that was called last.
    return next(p.pid for p in family if "".join(p.cmdline()[:1]).startswith("ray::GPUShard"))


def is_healthy(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def is_answering(client: openai.OpenAI) -> bool:
    try:
        return bool(complete(client, "x"))
    except openai.APIError:
        return False
