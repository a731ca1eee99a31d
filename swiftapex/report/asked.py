"""Which requests a run really asked for: their lengths, after what is too long for the engine was
cut or refused. Equal settings do not make them equal: a smaller `max_model_len` cuts more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from swiftapex.workloads.replay import RequestOutcome

DEFINITIONS: Mapping[str, str] = {
    "requests_sha256": "SHA-256 over the tokens of prompt and output that each request asked for, "
    "after over_length was applied: equal hashes (and settings) mean equal requests",
    "asked": "sums of these tokens, and requests that over_length refused",
}
_REJECTED = "(over_length: reject)"  # ends the error of such a request


def asked(outcomes: Iterable[RequestOutcome]) -> dict[str, Any]:
    """The fields of `DEFINITIONS`."""
    digest, prompts, outputs, refused = hashlib.sha256(), 0, 0, 0
    for outcome in outcomes:
        if (outcome.error or "").endswith(_REJECTED):
            refused += 1
            digest.update(b"refused\n")
            continue
        output = outcome.max_tokens or 0
        prompts, outputs = prompts + outcome.prompt_len, outputs + output
        digest.update(f"{outcome.prompt_len} {output}\n".encode())
    sums = {"prompt_tokens": prompts, "output_tokens": outputs, "refused": refused}
    return {"requests_sha256": digest.hexdigest(), "asked": sums}
