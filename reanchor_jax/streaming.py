"""Token ids to text, piece by piece as they come: unfinished characters wait, stop strings end a row.

In: a tokenizer, a prompt's ids, the tokens of each round.
Out: text; how many of a round's tokens belong to it.
Source: stop strings as `transformers` has them: the ids end with the token that completes one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


class Follower:
    """The text of one row. `text`: what its tokens say so far, without unfinished characters; of a stopped row, what precedes the stop."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop_strings: Sequence[str] = ()):
        self.text, self.is_stopped = "", False
        self._tokenizer, self._stop_strings, self._num_taken = tokenizer, tuple(stop_strings), 0
        # decoded together with the text before it: a decoder strips the space in front of the first token it sees
        self._before, self._waiting = list(prompt), []
        self._shown = _decode(tokenizer, self._before)

    def add(self, tokens: Sequence[int]) -> int:
        """Append a round's tokens; return how many of them belong to the row: all, or those up to a completed stop string."""
        earlier, self._waiting = self._waiting, [*self._waiting, *tokens]
        text = self._pending(self._waiting)
        if self._first_stop(text) is not None:
            for count in range(1, len(tokens) + 1):
                found = self._first_stop(self._pending([*earlier, *tokens[:count]]))
                if found is not None:
                    self.text, self.is_stopped, self._waiting = found, True, []
                    return count
        if text and not text.endswith(_UNFINISHED):
            self.text += text
            self._before, self._waiting = self._waiting, []
            self._shown = _decode(self._tokenizer, self._before)
        return len(tokens)

    def take(self) -> str:
        """Text that was not taken before and that no token to come can turn into a stop string's beginning."""
        safe = len(self.text)
        if not self.is_stopped:
            longest = max(map(len, self._stop_strings), default=0) - 1
            for start in range(max(len(self.text) - longest, 0), len(self.text)):
                if any(stop.startswith(self.text[start:]) for stop in self._stop_strings):
                    safe = start
                    break
        piece, self._num_taken = self.text[self._num_taken : safe], max(safe, self._num_taken)
        return piece

    def close(self) -> str:
        """End the row: `text` then holds what was unfinished too. Return what was not taken before."""
        self.text += self._pending(self._waiting)
        self._waiting = []
        piece, self._num_taken = self.text[self._num_taken :], len(self.text)
        return piece

    def _pending(self, waiting: Sequence[int]) -> str:
        """What waiting tokens add to the text."""
        return _decode(self._tokenizer, [*self._before, *waiting])[len(self._shown) :] if waiting else ""

    def _first_stop(self, pending: str) -> str | None:
        """The text before the first stop string that pending text completes."""
        if not self._stop_strings:
            return None
        whole = self.text + pending
        first = max(len(self.text) - max(map(len, self._stop_strings)), 0)
        found = [place for stop in self._stop_strings if (place := whole.find(stop, first)) >= 0]
        return whole[: min(found)] if found else None


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """Text of the tokens that follow a prompt, its leading space kept; special tokens are left out. None without a tokenizer."""
    return None if tokenizer is None else "".join(stream_text(tokenizer, prompt, [tokens]))


def stream_text(tokenizer: Any, prompt: Sequence[int], chunks: Iterable[Sequence[int]]) -> Iterator[str]:
    """Yield the text each chunk of tokens adds behind a prompt; bytes of an unfinished character wait for the rest of it.

    The pieces joined are the text of all tokens. A chunk that adds nothing readable yields nothing.
    """
    follower = Follower(tokenizer, prompt)
    for chunk in chunks:
        follower.add(chunk)
        if piece := follower.take():
            yield piece
    if rest := follower.close():
        yield rest


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False) if len(ids) else ""
