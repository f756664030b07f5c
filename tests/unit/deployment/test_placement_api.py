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


async def test_where_pages_are_and_what_adaptation_does_can_be_read() -> None:
    async with create_http_client(create_app(FakeEngine())) as client:
        placement = (await client.get("/v1/placement")).json()
    assert placement["arm"] == "adaptive"
    [rank] = placement["ranks"]
    assert rank["num_hot_pages"] == [2, 1]
    assert rank["adaptation"]["num_swaps"] == 3
    assert rank["adaptation"]["is_paused"] is False


async def test_adaptation_can_be_paused_and_resumed() -> None:
    engine = FakeEngine()
    async with create_http_client(create_app(engine)) as client:
        for verb, is_paused in (("pause", True), ("pause", True), ("resume", False)):
            response = await client.post(f"/v1/placement/{verb}")
            assert response.status_code == 200
            assert response.json()["ranks"][0]["adaptation"]["is_paused"] is is_paused
        assert (await client.get("/v1/placement/pause")).status_code == 405


async def test_without_an_engine_there_is_no_placement() -> None:
    engine = FakeEngine()
    engine.is_alive = False
    async with create_http_client(create_app(engine)) as client:
        assert (await client.get("/v1/placement")).status_code == 503
        assert (await client.post("/v1/placement/pause")).status_code == 503
