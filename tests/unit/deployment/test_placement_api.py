from pathlib import Path

from placement.profile import load
from tests.unit.deployment.fake_engine import FakeEngine, create_app, create_http_client


async def test_the_profile_is_a_file_that_the_tools_read(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with create_http_client(create_app(engine)) as client:
        response = await client.get("/v1/placement/profile", params={"label": "code"})
    assert response.status_code == 200
    path = tmp_path / "profile.json"
    path.write_bytes(response.content)
    assert load(path) == await engine.profile("code")


async def test_without_an_engine_there_is_no_profile() -> None:
    engine = FakeEngine()
    engine.is_alive = False
    async with create_http_client(create_app(engine)) as client:
        response = await client.get("/v1/placement/profile")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
