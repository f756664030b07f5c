"""Who may ask, how often, from which pages, and how much at once."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette

from deployment.config import ApiConfig
from tests.unit.deployment.fake_engine import MODEL, FakeEngine, create_app, create_http_client, end_of_turn
from tests.unit.deployment.tokenizers_for_tests import byte_ids

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "hi"}
PROTECTED = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/placement"),
    ("POST", "/v1/placement/pause"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
]
OPEN = ["/health", "/health/live", "/health/ready"]


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("key-one\nkey-two\n")
    return path


def app_with(**config: object) -> Starlette:
    return create_app(FakeEngine(end_of_turn(byte_ids(b"ok"))), **config)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- keys ---


@pytest.mark.parametrize(("method", "path"), PROTECTED)
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(""), {"authorization": "key-one"}, {"authorization": "Basic key-one"}],
)
async def test_without_a_key_nothing_is_answered(
    key_file: Path, method: str, path: str, headers: dict[str, str]
):
    engine = FakeEngine()
    async with create_http_client(create_app(engine, api_keys_file=key_file)) as client:
        response = await client.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert (error_of(response)["type"], error_of(response)["code"]) == (
        "invalid_request_error",
        "invalid_api_key",
    )
    assert not engine.requests
    assert not engine.is_paused


@pytest.mark.parametrize("authorization", ["Bearer key-one", "bearer key-two", "Bearer  key-one "])
async def test_any_of_the_keys_opens(key_file: Path, authorization: str):
    async with create_http_client(app_with(api_keys_file=key_file)) as client:
        response = await client.post(COMPLETIONS, json=BODY, headers={"authorization": authorization})
    assert response.status_code == 200


@pytest.mark.parametrize("path", OPEN)
async def test_probes_need_no_key(key_file: Path, path: str):
    async with create_http_client(app_with(api_keys_file=key_file)) as client:
        assert (await client.get(path)).status_code == 200


async def test_without_keys_any_key_does():
    async with create_http_client(app_with()) as client:
        assert (await client.post(COMPLETIONS, json=BODY, headers=bearer("anything"))).status_code == 200


async def test_a_body_is_not_read_for_a_stranger(key_file: Path):
    async def parts() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    async with create_http_client(app_with(api_keys_file=key_file)) as client:
        response = await client.post(
            COMPLETIONS, content=parts(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 401


async def test_the_official_client_knows_the_refusal(key_file: Path):
    transport = httpx.ASGITransport(app_with(api_keys_file=key_file))
    async with httpx.AsyncClient(transport=transport) as http_client:
        options: dict[str, Any] = {"base_url": "http://test/v1", "http_client": http_client, "max_retries": 0}
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(api_key="wrong", **options).models.list()
        assert (await openai.AsyncOpenAI(api_key="key-two", **options).models.list()).data


async def test_the_description_says_where_a_key_is_needed(key_file: Path):
    async with create_http_client(app_with(api_keys_file=key_file)) as client:
        document = (await client.get("/openapi.json", headers=bearer("key-one"))).json()
    [name] = document["components"]["securitySchemes"]
    assert document["paths"][COMPLETIONS]["post"]["security"] == [{name: []}]
    assert "security" not in document["paths"]["/health/live"]["get"]


# --- how often ---


async def test_each_key_has_its_own_limit(key_file: Path):
    clock = Clock()
    app = create_app(FakeEngine(), monotonic=clock, api_keys_file=key_file, max_requests_per_minute=2)
    async with create_http_client(app) as client:

        async def ask(key: str) -> httpx.Response:
            return await client.get("/v1/models", headers=bearer(key))

        assert [(await ask("key-one")).status_code for _ in range(3)] == [200, 200, 429]
        assert (await ask("key-two")).status_code == 200
        refused = await ask("key-one")
        assert refused.headers["retry-after"] == "30"
        assert (error_of(refused)["type"], error_of(refused)["code"]) == ("rate_limit_exceeded",) * 2
        clock.now_s += 29
        assert (await ask("key-one")).headers["retry-after"] == "1"
        clock.now_s += 1
        assert [(await ask("key-one")).status_code for _ in range(2)] == [200, 429]


async def test_probes_and_strangers_use_up_nothing(key_file: Path):
    app = create_app(FakeEngine(), monotonic=Clock(), api_keys_file=key_file, max_requests_per_minute=1)
    async with create_http_client(app) as client:
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models", headers=bearer("wrong"))).status_code == 401
        assert (await client.get("/v1/models", headers=bearer("key-one"))).status_code == 200


def test_a_limit_per_key_needs_keys():
    with pytest.raises(ValidationError, match="max_requests_per_minute.*api_keys"):
        ApiConfig(max_requests_per_minute=5)


# --- from which pages ---

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def cors_headers(response: httpx.Response) -> Iterator[str]:
    return (name for name in response.headers if name.startswith("access-control"))


async def test_pages_of_other_origins_are_not_let_in_by_default():
    async with create_http_client(app_with()) as client:
        assert not [*cors_headers(await client.get("/v1/models", headers={"origin": PAGE}))]
        preflight = await client.options(COMPLETIONS, headers=PREFLIGHT)
    assert preflight.status_code == 405
    assert error_of(preflight)["code"] == "method_not_allowed"
    assert not [*cors_headers(preflight)]


async def test_pages_of_listed_origins_are_let_in(key_file: Path):
    async with create_http_client(app_with(cors_origins=[PAGE], api_keys_file=key_file)) as client:
        preflight = await client.options(COMPLETIONS, headers=PREFLIGHT)
        answers = [
            await client.post(COMPLETIONS, json=BODY, headers={"origin": PAGE} | bearer("key-one")),
            await client.post(COMPLETIONS, json=BODY, headers={"origin": PAGE}),
        ]
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    assert [answer.status_code for answer in answers] == [200, 401]
    for response in (preflight, *answers):
        assert response.headers["access-control-allow-origin"] == PAGE


async def test_pages_of_other_origins_than_the_listed_are_refused():
    async with create_http_client(app_with(cors_origins=[PAGE])) as client:
        response = await client.options(COMPLETIONS, headers=PREFLIGHT | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in response.headers
        assert response.status_code == 400
        assert error_of(response)["message"]


# --- how much at once ---


@pytest.mark.parametrize("route", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_ten_megabytes_are_too_large(route: str, is_announced: bool):
    part = b" " * 100_000
    num_read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield part

    headers = {"content-type": "application/json"} | ({"content-length": "10000000"} if is_announced else {})
    async with create_http_client(app_with()) as client:
        response = await client.post(route, content=parts(), headers=headers)
    assert response.status_code == 413
    assert (error_of(response)["param"], error_of(response)["code"]) == ("body", "body_too_large")
    limit = ApiConfig().max_body_bytes
    assert num_read == (0 if is_announced else limit // len(part) + 1)
