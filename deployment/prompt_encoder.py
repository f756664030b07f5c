"""PromptEncoder: prompts to token ids beside the event loop, since that takes as long as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import anyio

from deployment.chat import ChatPrompt, ChatRenderer
from deployment.completions import encode_prompt
from deployment.config import ApiConfig
from deployment.openai_completions import CompletionRequest
from deployment.openai_conversation import ChatPromptRequest
from deployment.tokenizer import Tokenizer

_T = TypeVar("_T")


class PromptEncoder:
    """The work on prompts of any length, in `num_tokenizer_threads` threads."""

    def __init__(self, tokenizer: Tokenizer, config: ApiConfig) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, thinks_by_default=config.thinks_by_default)
        self._limiter = anyio.CapacityLimiter(config.num_tokenizer_threads)

    async def encode_chat(self, request: ChatPromptRequest, stop_strings: Sequence[str] = ()) -> ChatPrompt:
        """See `ChatRenderer.render`."""
        return await self._run(partial(self._renderer.render, request, stop_strings))

    async def encode_completion(self, request: CompletionRequest) -> list[int]:
        """See `completions.encode_prompt`."""
        return await self._run(partial(encode_prompt, self._tokenizer, request))

    async def encode_text(self, text: str, *, add_bos: bool) -> list[int]:
        """See `Tokenizer.encode_text`."""
        return await self._run(partial(self._tokenizer.encode_text, text, add_bos=add_bos))

    async def spell(self, token_ids: Iterable[int]) -> str:
        """See `Tokenizer.spell`."""
        return await self._run(partial(self._tokenizer.spell, token_ids))

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)
