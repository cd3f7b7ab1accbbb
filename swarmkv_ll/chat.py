"""Documents and prompts as turns of a model's chat template.

Only the template's own parts may hold control tokens; ``<|…|>`` in a text is plain text.
"""

from __future__ import annotations

import numpy as np

from .errors import TokenizeError
from .model import Model, Tokens

_MARK = "\x1fdocument\x1fprompt\x1f"


class Chat:
    """A model's template, cut where texts go in.

    A document opens a user's turn, a prompt ends it. What goes on from an answer is the user's next turn.

    Raises
    ------
    TokenizeError
        The model has no template, or none that the engine can render.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        opening, closing = self._render("user").split(_MARK)
        self._head = model.tokenize(opening, add_special=True, parse_special=True)
        self._tail = model.tokenize(closing, add_special=False, parse_special=True)

    def _render(self, *roles: str) -> str:
        return self._model.apply_chat_template([{"role": role, "content": _MARK} for role in roles])

    def document(self, text: str) -> Tokens:
        """A conversation's beginning, up to where a prompt goes on."""
        return np.concatenate([self._head, self._plain(text.rstrip() + "\n\n")])

    def prompt(self, text: str) -> Tokens:
        """What goes on from a document, up to where the answer begins."""
        return np.concatenate([self._plain(text.strip()), self._tail])

    def reply(self, text: str) -> Tokens:
        """What goes on from an answer (without a token that ends it), up to where the next answer begins."""
        parts = self._render("user", "assistant", "user").split(_MARK)
        if len(parts) != 4:
            raise TokenizeError("this model's chat template has no second turn")
        between = self._model.tokenize(parts[2], add_special=False, parse_special=True)
        return np.concatenate([between, self._plain(text.strip()), self._tail])

    def _plain(self, text: str) -> Tokens:
        return self._model.tokenize(text, add_special=False, parse_special=False)
