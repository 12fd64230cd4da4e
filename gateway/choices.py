"""From token ids to what clients read: one `Choice` per generation of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageferry.gateway.detokenize import TextStream
from pageferry.gateway.requests import Generation
from pageferry.kvtransfer.wire import TokenLogprob


@dataclass(slots=True)
class Piece:
    """What a choice has gained since the last look. Never changed once made."""

    index: int
    text: str
    token_ids: list[int]
    """The tokens consumed for it; those beyond a stop string are left out."""
    logprobs: list[TokenLogprob]
    """One per token id, or empty."""
    finish: str | None
    """"stop" or "length" on the last piece."""
    first: bool


@dataclass(slots=True)
class Choice:
    index: int
    prompt_index: int
    generation: Generation
    text_stream: TextStream
    include_stop: bool = False
    """Show the stop string or stop token that ended the text."""
    prefix: str = ""
    """Echoed prompt; goes out with the first piece."""
    finish: str | None = None
    consumed: int = 0
    started: bool = False
    pieces: list[Piece] = field(default_factory=list)
    """Everything so far, kept for answers that are not streamed."""

    def take(self) -> Piece | None:
        """Turn the new tokens into text; None when there is nothing to show yet.

        Sets `finish` when the choice is complete, by the worker's word or by a stop string.
        """
        generation = self.generation
        if self.finish is not None:
            return None
        new = generation.tokens[self.consumed :]
        if not new and generation.finish is None:
            return None
        shown = new
        if generation.finish == "stop" and not self.include_stop:
            shown = new[:-1]  # The stop token counts as output, but is not part of the text.
        stream = self.text_stream
        text = stream.feed(shown)
        used = new
        if stream.stopped is not None:
            self.finish = "stop"
            used = new[: stream.stop_token_count - self.consumed]
        elif generation.finish is not None:
            text += stream.finish()
            self.finish = generation.finish
        logprobs = generation.logprobs[self.consumed : self.consumed + len(used)]
        self.consumed += len(new)
        generation.delivered += len(used)
        if not (text or self.prefix or logprobs or self.finish):
            return None
        text, self.prefix = self.prefix + text, ""
        piece = Piece(self.index, text, used, logprobs, self.finish, not self.started)
        self.started = True
        return piece
