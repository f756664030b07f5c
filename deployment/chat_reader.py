"""ChatReader: the engine's outputs in, parts of a chat reply out: reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import replace

import deepseek_recipe as recipe

from actors.messages import RequestOutput
from deployment.generation import OutputReader, Piece
from deployment.logprobs import TokenAligner
from deployment.reply_parser import Parsed, ParsedText, ReplyParser
from deployment.tokenizer import Detokenizer, Tokenizer

DROPPED_MARKER: str = recipe.SpecialToken.ThinkingEnd.default_str()
"""What the vendor's parser leaves out of a reply, besides some newlines."""


class ChatReader:
    """Reads a chat reply, in whatever shape it is sent then.

    Args:
        conversation: as the prompt was rendered from.
        tokenizer: the checkpoint's.
        max_calls: tool calls that the reply may have; None: any number.
        wants_logprobs: whether parts come with their tokens.
    """

    def __init__(
        self,
        conversation: recipe.ConversationRequest,
        tokenizer: Tokenizer,
        *,
        max_calls: int | None,
        wants_logprobs: bool,
    ) -> None:
        self.is_thinking: bool = conversation.conversation.thinking_mode
        self.num_reasoning_tokens = 0
        """Tokens up to the last one that gave reasoning."""
        self._tokenizer = tokenizer
        self._reader = OutputReader(Detokenizer(tokenizer, show_markers=True))
        self._parser = ReplyParser(conversation, max_calls=max_calls)
        self._aligner = TokenAligner(DROPPED_MARKER) if wants_logprobs else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply so far, the stop token included."""
        return self._reader.num_tokens

    @property
    def finish_reason(self) -> str | None:
        """Set when the reply ended, at a stop string or with the engine's last output."""
        return self._parser.finish_reason

    def push(self, output: RequestOutput) -> list[Parsed]:
        """Add an engine output."""
        parts: list[Parsed] = []
        for piece in self._reader.read(output):
            parts += self._parse(piece)
            if self._parser.is_finished:
                break
        if output.finish_reason is not None and not self._parser.is_finished:
            parts += self._with_tokens(self._parser.finish(output.finish_reason))
        return parts

    def _parse(self, piece: Piece) -> list[Parsed]:
        if self._aligner and not self._parser.has_calls:
            self._aligner.push(piece.text, piece.token if self._is_shown(piece) else None)
        parts = self._parser.push(piece.text) if piece.text else []
        if any(isinstance(part, ParsedText) and part.channel == "reasoning_content" for part in parts):
            self.num_reasoning_tokens = self._reader.num_tokens
        return self._with_tokens(parts)

    def _is_shown(self, piece: Piece) -> bool:
        """Whether the piece's token is part of any text; control tokens are not."""
        token = piece.token
        return token is not None and bool(self._tokenizer.text_bytes(token.token_id, show_markers=True))

    def _with_tokens(self, parts: list[Parsed]) -> list[Parsed]:
        if self._aligner is None:
            return parts
        aligner = self._aligner
        return [
            replace(part, tokens=aligner.take(part.text)) if isinstance(part, ParsedText) else part
            for part in parts
        ]
