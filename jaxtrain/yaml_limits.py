"""Limit the size of YAML before it is loaded: a few lines with aliases can expand to billions of nodes."""

import yaml

MOST_BYTES = 1 << 20
MOST_VALUES = 50_000  # counted with every alias expanded
DEEPEST = 64  # sections within sections
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class TooLarge(ValueError):
    """YAML beyond the limits; the message says which one."""


def check(text: str) -> None:
    """Raise TooLarge for a text beyond the limits, and YAMLError for one that is not YAML."""
    if len(text) > MOST_BYTES:
        raise TooLarge(f"{len(text):,} characters, wanted at most {MOST_BYTES:,}")
    sizes: dict[str, int] = {}  # anchor -> number of values in its node
    open_parts: list[tuple[str | None, int]] = []  # per open collection: its anchor, values before it
    values = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in open_parts):
                raise TooLarge(f"*{event.anchor} stands within itself")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_parts.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
        if len(open_parts) > DEEPEST:
            raise TooLarge(f"nested more than {DEEPEST} deep")
        if values > MOST_VALUES:
            raise TooLarge(f"more than {MOST_VALUES:,} values, counting what its aliases stand for")
