"""Text of a growing output: whole characters only, stop strings never shown."""

from __future__ import annotations

from swiftapex.model.tokenizer import IncrementalDetokenizer, Tokenizer


class TextStream:
    """Turns tokens into text as they come and looks for stop strings in it.

    `take()` gives text that is final: what could still become the beginning of a stop string is
    held back until it is known not to be one, or until the output ends.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._taken = 0
        self._ended = False
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Adds a token; True once the text ends in front of a stop string."""
        return self._add(self._detokenizer.push(token_id))

    def end(self) -> None:
        """No more tokens will come: nothing is held back any longer."""
        if not self._ended:
            self._add(self._detokenizer.flush())
            self._ended = True

    def take(self) -> str:
        """The final text since the last call."""
        end = len(self.text) if self._ended else len(self.text) - self._held_back()
        taken = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return taken

    def _add(self, new: str) -> bool:
        search_from = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        found = [at for s in self._stop if (at := self.text.find(s, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._ended = True
        return bool(found)

    def _held_back(self) -> int:
        """Length of the longest suffix with which a stop string begins."""
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-size:]) for s in self._stop):
                return size
        return 0
