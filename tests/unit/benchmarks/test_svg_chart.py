from xml.etree import ElementTree

import pytest

from benchmarks.svg_chart import Line, chart


def create_chart(points, name="static") -> ElementTree.Element:
    return ElementTree.fromstring(chart("title", "x", "y", [Line(name, points)]))


def polyline(svg: ElementTree.Element) -> list[tuple[float, float]]:
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    return [tuple(map(float, point.split(","))) for point in line.get("points").split()]


def test_points_keep_their_order_and_stay_inside():
    points = polyline(create_chart([(-5.0, 0.0), (1.0, 10.0), (7.0, 2.5)]))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[1][1] < points[2][1] < points[0][1]
    assert all(0 <= x <= 640 and 0 <= y <= 400 for x, y in points)


@pytest.mark.parametrize(
    "points", [[(0.0, 5.0), (1.0, 5.0)], [(3.0, 0.0), (4.0, 0.0)], [(0.0, 1e6), (1e3, 2e6)]]
)
def test_flat_and_large_values_can_be_drawn(points):
    assert len(polyline(create_chart(points))) == 2


def test_names_are_escaped():
    svg = create_chart([(0.0, 1.0), (1.0, 2.0)], name="a < b & c")
    assert "a < b & c" in svg.itertext()
