"""Mask passwords and tokens in text that is written or shown."""

import re
from typing import Any

MASK = "***"
_SECRET = "token(?!i[sz])|key(?!word|board|frame|point)|secret|passw|signature|credential"  # in a parameter's name
_PATTERNS = [
    # user:password@ of an address; `host:8080/path@v1` holds no password
    (re.compile(r"(://[^/@\s:'\"]*):(?!\d{1,5}(?:[/?#'\"\s]|$))[^\s'\"]*@"), rf"\1:{MASK}@"),
    (re.compile(r"(://)[^/@\s:'\"]{16,}@"), rf"\1{MASK}@"),  # a token in the user's place
    (re.compile(rf"([?&;](?:[\w.\-]*(?:{_SECRET})[\w.\-]*)=)[^&\s'\"]+", re.I), rf"\1{MASK}"),
    (re.compile(r"\b(hf_|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA)[A-Za-z0-9_\-]{16,}\b"), rf"\1{MASK}"),
    # optional words, as in sk-proj-..., then 16 random characters; `sk-learn-baseline` is no token
    (re.compile(r"\b(sk-)(?=[A-Za-z0-9_\-]*[A-Za-z0-9]{16})[A-Za-z0-9_\-]+"), rf"\1{MASK}"),
]


def mask(text: str) -> str:
    """Return the text with passwords and tokens masked: in URLs, in URL queries, and by the issuers' prefixes."""
    for pattern, masked in _PATTERNS:
        text = pattern.sub(masked, text)
    return text


def masked(value: Any) -> Any:
    """Mask every text in a nested value."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner) for inner in value]
    return value
