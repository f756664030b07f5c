"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a text before the first stop string in it.

    The text ends at the first character that completes a stop string; where several are complete, before the
    longest. That depends on the text alone, never on how it is cut into pieces.

    Invariant: what was released and what is held back, joined, is the text so far. Held back is its longest
    end that may still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_found = False
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""

    def push(self, piece: str) -> str:
        """Add text; return what can no longer be part of a stop string. Nothing comes after a stop string."""
        if self.is_found:
            return ""
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            if longest := self._longest_completed_by(character):
                self.is_found = True
                self._held = ""
                return text[: end - longest]
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _longest_completed_by(self, character: str) -> int:
        """Advance all matchers; return the length of the longest stop string now complete, 0 if none is."""
        completed = 0
        for matcher in self._matchers:
            if matcher.push(character):
                completed = max(completed, matcher.length)
        return completed


class _Matcher:
    """Knuth-Morris-Pratt: how much of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.num_matched = 0
        self._stop = stop
        self._borders = _borders(stop)

    def push(self, character: str) -> bool:
        """Add a character; return whether the stop string is complete."""
        while self.num_matched and self._stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self._stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == self.length


def _borders(text: str) -> list[int]:
    """For each prefix of `text`: the length of its longest proper prefix that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders
