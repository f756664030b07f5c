"""Log-probabilities beside the text they belong to, in the shapes of both completion endpoints."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from actors.messages import SampledToken
from deployment.openai_chat import ChatTokenLogprob, TopLogprob
from deployment.openai_completions import CompletionLogprobs
from deployment.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

MASK = "\ud800"
"""Stands for each character of a dropped marker: no text has it, since UTF-8 does not."""
DROPPED = re.compile(f"[\n{MASK}]*")


@dataclass(frozen=True, slots=True)
class AlignedToken:
    """A token and where its text begins, in characters of all text pushed."""

    token: SampledToken
    offset: int


class TokenAligner:
    """Finds the tokens of released text, while other text is held back, cut off or dropped on its way.

    Dropped are a marker, wherever it is, and newlines.

        | taken or dropped | dropped now | released now | to be released |
        0                  _start                                        end

    Invariant: `_pending` is the text between `_start` and the end, and `_tokens` are the tokens that begin in
    it. A token is taken with the first released character of its text, or of the character it is a part of.
    """

    def __init__(self, marker: str = "") -> None:
        self._marker = marker
        self._tokens: deque[AlignedToken] = deque()
        self._pending = ""
        self._start = 0

    def push(self, text: str, token: SampledToken | None) -> None:
        """Add a token and the characters that it completed, or what came of the unfinished ones before."""
        if token is not None:
            self._tokens.append(AlignedToken(token, self._start + len(self._pending)))
        self._pending += text
        if self._marker:
            self._pending = self._pending.replace(self._marker, MASK * len(self._marker))

    def take(self, released: str) -> list[AlignedToken]:
        """The tokens of text that is released now; those of what was dropped before it are forgotten.

        NOTE: after the marker has been masked, only newlines look alike, dropped or not.
        """
        begin = self._pending.find(released)
        while begin > 0 and not DROPPED.fullmatch(self._pending, 0, begin):
            begin = self._pending.find(released, begin + 1)
        if begin < 0:
            return self._take_around_a_marker(released)
        self._forget_before(self._start + begin)
        taken = self._pop_before(self._start + begin + len(released))
        self._pending = self._pending[begin + len(released) :]
        self._start += begin + len(released)
        return taken

    def _take_around_a_marker(self, released: str) -> list[AlignedToken]:
        """Take text whose beginning was held back until a marker after it had been dropped."""
        end = next((n for n in range(len(released) - 1, 0, -1) if released[:n] in self._pending), 0)
        assert end > 0, f"{released=} is not in {self._pending=}"
        return [*self.take(released[:end]), *self.take(released[end:])]

    def take_rest(self) -> list[AlignedToken]:
        """All tokens not taken yet: those that added no text at the end of a reply."""
        return self._pop_before(self._start + len(self._pending) + 1)

    def _forget_before(self, begin: int) -> None:
        """Forget the tokens that end before `begin`; one that goes on after it is not dropped whole."""
        while self._tokens and self._tokens[0].offset < begin:
            end_of_text = self._start + len(self._pending)
            end = self._tokens[1].offset if len(self._tokens) > 1 else end_of_text
            if end > begin:
                return
            self._tokens.popleft()

    def _pop_before(self, end: int) -> list[AlignedToken]:
        popped = []
        while self._tokens and self._tokens[0].offset < end:
            popped.append(self._tokens.popleft())
        return popped


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[AlignedToken]) -> list[ChatTokenLogprob]:
    """Entries of a chat choice's `logprobs`."""
    return [_chat_token_logprob(tokenizer, aligned.token) for aligned in tokens]


def completion_logprobs(tokenizer: Tokenizer, tokens: list[AlignedToken]) -> CompletionLogprobs:
    """A completion choice's `logprobs`. The chosen token is always among its `top_logprobs`."""
    return CompletionLogprobs(
        tokens=[_completion_text(tokenizer, aligned.token.token_id) for aligned in tokens],
        token_logprobs=[_finite(aligned.token.logprob) for aligned in tokens],
        top_logprobs=[_completion_top_logprobs(tokenizer, aligned.token) for aligned in tokens],
        text_offset=[aligned.offset for aligned in tokens],
    )


def _chat_token_logprob(tokenizer: Tokenizer, token: SampledToken) -> ChatTokenLogprob:
    chosen = _top_logprob(tokenizer, token.token_id, token.logprob)
    return ChatTokenLogprob(
        token=chosen.token,
        logprob=chosen.logprob,
        bytes=chosen.bytes,
        top_logprobs=[_top_logprob(tokenizer, top.token_id, top.logprob) for top in token.top_logprobs],
    )


def _completion_top_logprobs(tokenizer: Tokenizer, token: SampledToken) -> dict[str, float]:
    ranked = [(top.token_id, top.logprob) for top in token.top_logprobs] + [(token.token_id, token.logprob)]
    return {_completion_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in ranked}


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(token=_escaped(data), logprob=_finite(logprob), bytes=list(data))


def _completion_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; with OpenAI's prefix `bytes:` if it is not text by itself."""
    data = tokenizer.token_bytes(token_id)
    escaped = _escaped(data)
    return escaped if escaped.encode() == data else f"bytes:{escaped}"


def _escaped(data: bytes) -> str:
    r"""Text of a token; bytes that are not text by themselves as `\xNN`."""
    return data.decode("utf-8", errors="backslashreplace")


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "the engine was asked for log-probabilities"
    return max(logprob, MIN_LOGPROB)
