"""Chat templates: a user's message to the text that a chat model was trained to answer."""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swiftapex.core.errors import ModelLoadError, RequestError


class ChatTemplate:
    """A checkpoint's Jinja template, in a sandbox, with the helpers that templates expect:
    `raise_exception`, `strftime_now`, `tojson`, loop controls, whitespace trimmed around blocks.

    special_tokens: texts of bos_token and eos_token. Raises ModelLoadError on a syntax error.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template is not valid: {error}") from error

    def render(self, message: str) -> str:
        """The prompt for one user message, up to where the answer begins. Raises RequestError."""
        messages = [{"role": "user", "content": message}]
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses the message: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
