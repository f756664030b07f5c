"""Where keys come from, and which ones are accepted."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.api_keys import ApiKeys, load_api_keys
from deployment.config import ApiConfig
from deployment.errors import SettingsError

KEY = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",#"), min_size=1, max_size=20
)


def load(environment: dict[str, str] | None = None, **config: object) -> ApiKeys | None:
    return load_api_keys(ApiConfig.model_validate(config), environment or {})


def test_without_a_setting_there_are_none():
    assert load() is None


@pytest.mark.parametrize("text", ["a1 b2", "a1,b2", "a1, b2\n", "\na1\n\nb2\n"])
def test_a_variable_may_hold_several_keys(text: str):
    keys = load({"KEYS": text}, api_keys_env="KEYS")
    assert keys is not None
    assert [keys.index("a1"), keys.index("b2")] == [0, 1]
    assert keys.index("a1 b2") is None


def test_a_file_has_a_key_on_each_line(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# of the web page\na1\n\nb2  # of the batch jobs\n")
    keys = load(api_keys_file=path)
    assert keys is not None
    assert [keys.index(key) for key in ("a1", "b2", "#", "")] == [0, 1, None, None]


def test_both_places_together_count(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("b2")
    keys = load({"KEYS": "a1 b2"}, api_keys_env="KEYS", api_keys_file=path)
    assert keys is not None
    assert len(keys) == 2


@given(st.lists(KEY, min_size=1, max_size=5, unique=True), KEY)
def test_a_key_is_accepted_if_it_is_one_of_them(keys: list[str], candidate: str):
    expected = keys.index(candidate) if candidate in keys else None
    assert ApiKeys(keys).index(candidate) == expected
    assert [ApiKeys(keys).index(key) for key in keys] == list(range(len(keys)))
    assert ApiKeys(keys).index(candidate + "x") == (
        keys.index(candidate + "x") if candidate + "x" in keys else None
    )


@pytest.mark.parametrize("candidate", ["", "é", "\ud800", "a" * 100_000, "\x00"])
def test_any_text_may_be_asked_for(candidate: str):
    assert ApiKeys(["a1"]).index(candidate) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "api_keys_env.*KEYS.*not set"),
        ({"KEYS": " ,\n"}, "api_keys_env.*KEYS.*no key"),
        ({"KEYS": "gehe\u00edm"}, "api_keys_env.*KEYS.*ASCII"),
    ],
)
def test_a_variable_without_usable_keys_ends_the_start(environment: dict[str, str], message: str):
    with pytest.raises(SettingsError, match=message) as caught:
        load(environment, api_keys_env="KEYS")
    assert "gehe" not in str(caught.value)


def test_a_file_without_keys_ends_the_start(tmp_path: Path):
    with pytest.raises(SettingsError, match="api_keys_file.*missing"):
        load(api_keys_file=tmp_path / "missing")
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(SettingsError, match="api_keys_file.*no key"):
        load(api_keys_file=tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="api_keys_file"):
        load(api_keys_file=tmp_path / "binary")


def test_keys_are_not_shown():
    assert "a1" not in repr(ApiKeys(["a1"])) + repr(vars(ApiKeys(["a1"])))
