"""GET /openapi.json describes every route, and nothing else."""

from collections.abc import Iterator
from typing import Any

from starlette.routing import Route

from deployment.version import VERSION
from tests.unit.deployment.fake_engine import FakeEngine, create_app, create_http_client


async def document() -> dict[str, Any]:
    async with create_http_client(create_app(FakeEngine())) as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


async def test_every_route_is_described_and_no_other():
    routes = set()
    for route in create_app(FakeEngine()).routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        routes |= {(path, method.lower()) for method in (route.methods or set()) - {"HEAD"}}
    paths = (await document())["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == routes
    assert {"/tokenize", "/detokenize", "/version", "/health/live", "/health/ready"} <= set(paths)


async def test_every_operation_says_what_it_is_and_what_it_answers():
    operations = [op for methods in (await document())["paths"].values() for op in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for operation in operations:
        assert operation["summary"]
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert operation["responses"]["default"]["content"]["application/json"]["schema"]


async def test_the_document_stands_alone():
    whole = await document()
    assert whole["openapi"].startswith("3.1")
    assert whole["info"] == {"title": "hotset", "version": VERSION}
    names = set(references(whole))
    assert "#/components/schemas/ChatMessage" in names
    assert {name.rsplit("/", 1)[-1] for name in names} <= set(whole["components"]["schemas"])
    assert all(name.startswith("#/components/schemas/") for name in names)


async def test_a_stream_and_parameters_of_paths_and_queries_are_described():
    paths = (await document())["paths"]
    content = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    [model] = paths["/v1/models/{model}"]["get"]["parameters"]
    assert (model["name"], model["in"], model["required"]) == ("model", "path", True)
    [label] = paths["/v1/placement/profile"]["get"]["parameters"]
    assert (label["name"], label["in"], label["required"]) == ("label", "query", False)
