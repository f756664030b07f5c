import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.stop_strings import StopStrings

# Two letters, so that stop strings overlap with themselves and each other.
TEXT = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def feed(stops: list[str], pieces: list[str]) -> list[str]:
    """What each piece releases, and what the end does."""
    stop_strings = StopStrings(stops)
    return [*map(stop_strings.push, pieces), stop_strings.flush()]


def cut(text: str, stops: list[str]) -> str:
    """What is left of `text`: the definition."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(map(len, completed))]
    return text


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, data=st.data())
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(feed(stops, pieces)) == cut(text, stops)


@settings(deadline=None)
@given(text=TEXT, stops=STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]):
    stop_strings = StopStrings(stops)
    released = stop_strings.push(text)
    if not stop_strings.is_found:
        held = text[len(released) :]
        ends = [text[begin:] for begin in range(len(text) + 1)]
        assert held == next(end for end in ends if not end or any(stop.startswith(end) for stop in stops))


def test_a_stop_string_may_span_pieces():
    assert feed(["cde"], ["abc", "d", "ef", "g"]) == ["ab", "", "", "", ""]


def test_what_turns_out_not_to_be_a_stop_string_is_released():
    assert feed(["cde"], ["abc", "d", "x"]) == ["ab", "", "cdx", ""]


def test_what_is_held_back_is_released_at_the_end():
    assert feed(["cde"], ["abcd"]) == ["ab", "cd"]


def test_the_prefix_of_another_stop_string_wins():
    assert feed(["abc", "ab"], ["xabc"]) == ["x", ""]


def test_the_longest_of_those_that_end_together_wins():
    assert feed(["d", "cd"], ["abcd"]) == ["ab", ""]


def test_a_stop_string_that_overlaps_itself_is_found():
    assert feed(["aab"], list("aaab")) == ["", "", "a", "", ""]


@pytest.mark.parametrize("stops", [[], ["z"]])
def test_text_without_a_beginning_of_a_stop_string_is_released_at_once(stops: list[str]):
    assert feed(stops, ["a", "b"]) == ["a", "b", ""]


def test_a_long_stop_string_costs_no_more_than_the_text():
    text = "a" * 20_000
    assert "".join(feed(["a" * 10_000 + "b"], [text])) == text
