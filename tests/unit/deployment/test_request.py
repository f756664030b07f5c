import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.request import MOVES, Request, RequestStatus
from tests.unit.deployment.builders import EOS, create_request

WAITING, RUNNING, ABORTING, FINISHED = RequestStatus


def create(prompt: int | list[int] = 3, *, max_model_len: int = 64, **changes: object) -> Request:
    return Request(
        create_request(prompt, **changes),
        eos_token_id=EOS,
        max_model_len=max_model_len,
        number=0,
        arrival_s=0.0,
    )


def test_a_new_request_waits_with_nothing_computed():
    request = create([5, 6, 7])
    assert request.status is WAITING
    assert request.num_computed_tokens == 0
    assert (request.prompt_token_ids, request.output_token_ids) == ([5, 6, 7], [])
    request.check_integrity()


def test_sampled_tokens_extend_the_output_and_leave_the_message_alone():
    message = create_request([5, 6])
    request = Request(message, eos_token_id=EOS, max_model_len=64, number=0, arrival_s=0.0)
    assert request.append(9) is None
    assert request.append(8) is None
    assert (request.prompt_token_ids, request.output_token_ids) == ([5, 6], [9, 8])
    assert message.prompt_token_ids == [5, 6]


def test_the_end_of_text_stops_a_request():
    assert create(ignore_eos=False).append(EOS) == "stop"


def test_the_end_of_text_is_an_ordinary_token_when_ignored():
    assert create(ignore_eos=True).append(EOS) is None


def test_the_end_of_text_stops_a_request_that_names_it_even_if_ignored():
    assert create(ignore_eos=True, stop_token_ids=[EOS]).append(EOS) == "stop"


def test_a_stop_token_stops_a_request():
    request = create(stop_token_ids=[11, 12])
    assert request.append(10) is None
    assert request.append(12) == "stop"


def test_a_request_ends_after_max_tokens():
    request = create(max_tokens=2)
    assert [request.append(9), request.append(9)] == [None, "length"]


def test_a_request_ends_where_the_context_does():
    request = create(3, max_tokens=100, max_model_len=5)
    assert [request.append(9), request.append(9)] == [None, "length"]


def test_a_stop_token_at_the_last_place_is_a_stop():
    assert create(max_tokens=1, ignore_eos=False).append(EOS) == "stop"


def test_preemption_forgets_what_was_computed_and_keeps_the_tokens():
    request = create([5, 6])
    request.move_to(RUNNING)
    request.append(9)
    request.num_computed_tokens = 2
    request.move_to(WAITING)
    assert request.num_computed_tokens == 0
    assert request.token_ids == [5, 6, 9]
    request.check_integrity()


@pytest.mark.parametrize("old", RequestStatus)
@pytest.mark.parametrize("new", RequestStatus)
def test_a_request_moves_only_as_the_table_says(old: RequestStatus, new: RequestStatus):
    request = create()
    request.status = old
    if new in MOVES[old]:
        request.move_to(new)
        assert request.status is new
    else:
        with pytest.raises(AssertionError, match="cannot move"):
            request.move_to(new)


def test_a_finished_request_moves_nowhere():
    assert MOVES[FINISHED] == frozenset()
    assert MOVES[ABORTING] == {FINISHED}


@given(
    prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 20),
    room=st.integers(1, 20),
    sampled=st.lists(st.integers(0, 12), min_size=20, max_size=20),
)
def test_a_request_keeps_its_invariants_until_it_ends_and_never_outgrows_its_limits(
    prompt: int, max_tokens: int, room: int, sampled: list[int]
):
    request = create(prompt, max_tokens=max_tokens, max_model_len=prompt + room, ignore_eos=False)
    request.move_to(RUNNING)
    for token in sampled:
        request.check_integrity()
        request.num_computed_tokens = request.num_tokens
        reason = request.append(token)
        if reason is not None:
            break
    num_output_tokens = len(request.output_token_ids)
    assert num_output_tokens <= min(max_tokens, room)
    assert reason == ("stop" if request.output_token_ids[-1] == EOS else "length")
