"""Which process answers, whether its engine does, and which version it is."""

import tomllib
from pathlib import Path

import pytest

from deployment.version import VERSION
from tests.unit.deployment.fake_engine import FakeEngine, create_app, create_http_client

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_readiness_is_the_engines(path: str):
    engine = FakeEngine()
    async with create_http_client(create_app(engine)) as client:
        assert (await client.get(path)).json() == {"status": "ok", "warnings": []}
        engine.warnings = ["the pool is slow"]
        assert (await client.get(path)).json()["warnings"] == ["the pool is slow"]
        engine.is_alive = False
        response = await client.get(path)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "engine_dead"


async def test_a_process_without_an_engine_lives():
    engine = FakeEngine()
    engine.is_alive = False
    async with create_http_client(create_app(engine)) as client:
        response = await client.get("/health/live")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_the_version_is_the_packages():
    async with create_http_client(create_app(FakeEngine())) as client:
        assert (await client.get("/version")).json() == {"version": VERSION}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "deployment.version.VERSION"}
